"""Training planned again after a loss: prices, reuse, break-even, provenance and refusals; on real plans of a small GPT."""

from __future__ import annotations

import hashlib
from functools import cache

import msgspec
import pytest

from captured import captured
from meshwright.drive.plans import check_plan, fabric_of, read_fabric
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.pipeline import PipelineWanted
from meshwright.drive.training.replan import OldShards, old_shards, replan_training
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Disconnected, Infeasible, UnknownName, UsageError
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training
from meshwright.plan.regions import elements, holdings, training_tensors

MODEL = "examples/gpt.py:tiny"


@cache
def graph():
    return captured(MODEL)


@cache
def old(fabric="laptop:4", data=None, tensor=None, pipeline=None, optimizer="adamw", schedule="1f1b"):
    job = Training(model=MODEL, global_batch=4, optimizer=optimizer)
    wanted = PipelineWanted(name=schedule)
    return plan_training(
        job, read_fabric(fabric), graph=graph(),
        wishes=(LayoutWanted(data=data, tensor=tensor, pipeline=pipeline), CollectivesWanted("ring"), wanted),
    )  # fmt: skip


def test_replicas_leave_nothing_to_move():
    """Two of four replicas hold everything that two need."""
    before = old(data=4)
    lost = before.placement[3]
    found = replan_training(before, lost=[lost], graph=graph(), keep=("tp", "pp"))
    assert lost not in found.plan.placement
    assert found.plan.layout.data == 2 and found.plan.layout.global_batch == 4
    assert found.chosen.transfers.moved_bytes == 0 and found.chosen.restart.time_s == 0
    assert sum(found.chosen.transfers.reused_bytes) == sum(found.chosen.transfers.needed_bytes) > 0
    check_plan(found.plan)


def test_a_pipeline_moves_what_its_ranks_lack():
    before = old(pipeline=4)
    shards = old_shards(before, training_tensors(graph(), "adamw"))
    everything = OldShards(tensors=shards.tensors, files=shards.files, stored=frozenset(shards.files), step=7)
    found = replan_training(before, lost=[before.placement[1]], graph=graph(), shards=everything)
    t, layout = found.chosen.transfers, found.plan.layout
    for rank in range(layout.ranks):
        held = holdings(layout, rank, shards.tensors)
        assert t.needed_bytes[rank] == sum(elements(r) * shards.tensors[n].item_bytes for n, r in held.items())
    gone = {n for n in shards.files["rank-001.safetensors"] if all(n not in shards.files[f"rank-{r:03d}.safetensors"] for r in (0, 2, 3))}
    assert sum(t.stored_bytes) >= sum(elements(shards.files["rank-001.safetensors"][n]) * shards.tensors[n].item_bytes for n in gone) > 0
    assert found.chosen.restart.time_s >= float(found.chosen.restart.bound_s) > 0
    decision = found.plan.decisions["restart"]
    assert decision["options"]["replanned_from"] == hashlib.sha256(plan_bytes(before)).hexdigest()
    assert decision["options"]["checkpoint_step"] == 7
    assert decision["needed_bytes"] == list(t.needed_bytes)
    assert plan_from_bytes(plan_bytes(found.plan)).decisions == found.plan.decisions


def test_the_best_placement_keeps_no_less_than_any_that_was_judged():
    before = old(pipeline=4)
    shards = old_shards(before, training_tensors(graph(), "adamw"))
    everything = OldShards(tensors=shards.tensors, files=shards.files, stored=frozenset(shards.files))
    found = replan_training(before, lost=[before.placement[0]], graph=graph(), shards=everything)
    by_layout = {}
    for c in found.candidates:
        by_layout.setdefault(c.evaluated.candidate.degrees, []).append(c)
    for same in by_layout.values():
        devices = {frozenset(c.evaluated.placement) for c in same}
        best = [c for c in same if c.evaluated.placement_name == "most bytes in place"]
        if best and len(devices) == 1:
            assert sum(best[0].transfers.reused_bytes) == max(sum(c.transfers.reused_bytes) for c in same)


def test_steps_left_decide_by_total_time():
    before = old(pipeline=4)
    shards = old_shards(before, training_tensors(graph(), "adamw"))
    stored = OldShards(tensors=shards.tensors, files=shards.files, stored=frozenset(shards.files))
    kwargs = {"lost": [before.placement[1]], "graph": graph(), "shards": stored, "storage_Bps": 10_000}
    one, many = replan_training(before, steps_left=1, **kwargs), replan_training(before, steps_left=10**9, **kwargs)
    for found, steps in ((one, 1), (many, 10**9)):
        assert found.chosen.total_s(steps) <= min(c.total_s(steps) for c in found.candidates) * (1 + 1e-9)
    assert many.chosen.step_s <= one.chosen.step_s
    slow, fast = one.quickest, min(many.candidates, key=lambda c: c.step_s)
    even = fast.breaks_even_after(slow)
    if even is not None and fast.step_s < slow.step_s:
        assert fast.total_s(even) <= slow.total_s(even) * (1 + 1e-9)
        assert even == 0 or fast.total_s(even - 1) >= slow.total_s(even - 1) * (1 - 1e-9)
    assert slow.breaks_even_after(slow) is None


def test_what_only_the_lost_device_held_is_named():
    before = old(pipeline=4)
    with pytest.raises(Infeasible, match="tensors are lost") as caught:
        replan_training(before, lost=[before.placement[1]], graph=graph())
    assert caught.value.data["replicas"] == [f"rank 1 ({before.placement[1]})"]
    shards = old_shards(before, training_tensors(graph(), "adamw"))
    lost = {row["tensor"] for row in caught.value.data["lost"]}
    others = {n for r in (0, 2, 3) for n in shards.files[f"rank-{r:03d}.safetensors"]}
    assert lost == set(shards.files["rank-001.safetensors"]) - others


def test_a_device_more():
    before = old(data=2, fabric="laptop:2")
    found = replan_training(before, added=[before.placement[0]], graph=graph(), keep=("microbatch",))
    assert len(fabric_of(found.plan).devices) <= 3
    replaced = replan_training(before, added=[before.placement[1]], lost=[before.placement[1]], graph=graph(), keep=("dp",))
    assert replaced.plan.layout.data == 2
    assert set(replaced.plan.placement) == {before.placement[0], f"{before.placement[1]}.1"}
    assert sum(replaced.chosen.transfers.received_bytes) == sum(replaced.chosen.transfers.reused_bytes) > 0


def stored_shards(before):
    shards = old_shards(before, training_tensors(graph(), "adamw"))
    return OldShards(tensors=shards.tensors, files=shards.files, stored=frozenset(shards.files), step=7)


def test_the_schedule_asked_for_stays():
    before = old(pipeline=4, schedule="zb1p")
    found = replan_training(before, lost=[before.placement[1]], graph=graph(), shards=stored_shards(before))
    assert found.plan.decisions["pipeline"]["strategy"] == "zb1p"
    assert found.plan.layout.pipeline > 1 and found.plan.layout.split_backward
    assert all("zb1p" in c.name for c in found.candidates)
    again = replan_training(
        before, lost=[before.placement[1]], graph=graph(), shards=stored_shards(before), schedule=PipelineWanted(name="gpipe")
    )
    assert again.plan.decisions["pipeline"]["strategy"] == "gpipe"


def test_where_the_old_schedule_exists_for_nothing_1f1b_takes_its_place_and_an_asked_one_is_refused():
    before = old("laptop:2", pipeline=2, schedule="chimera")
    lost = [before.placement[1]]
    found = replan_training(before, lost=lost, graph=graph(), shards=stored_shards(before))
    assert found.plan.layout.pipeline == 1 and found.plan.decisions["pipeline"]["options"]["asked"] == "1f1b"
    with pytest.raises(Infeasible, match="chimera orders the stages of a pipeline"):
        replan_training(before, lost=lost, graph=graph(), shards=stored_shards(before), schedule=PipelineWanted(name="chimera"))


def test_refusals():
    before = old(data=4)
    with pytest.raises(UsageError, match="no device is lost"):
        replan_training(before, graph=graph())
    with pytest.raises(UnknownName, match="no device"):
        replan_training(before, lost=["gpu99"], graph=graph())
    with pytest.raises(UsageError, match="no device 'gpu99'"):
        replan_training(before, added=["gpu99"], graph=graph())
    with pytest.raises(UsageError, match="cannot be kept"):
        replan_training(before, lost=[before.placement[0]], graph=graph(), keep=("zero",))
    with pytest.raises(UsageError, match="at least 1"):
        replan_training(before, lost=[before.placement[0]], graph=graph(), steps_left=0)
    with pytest.raises(UsageError, match="does not divide"):
        replan_training(before, lost=[before.placement[0]], graph=graph(), keep=("dp",))
    with pytest.raises(Infeasible, match="no device"):
        replan_training(before, lost=list(before.placement), graph=graph())
    with pytest.raises(UsageError, match="not the one that was planned"):
        replan_training(before, lost=[before.placement[0]], graph=captured("examples/gpt.py:tiny_tied"))
    with pytest.raises(UsageError, match="is not known before it has run"):
        training_tensors(graph(), "file.py:mine")
    with pytest.raises(UsageError, match="sharding level 2 follows from the plan's program"):
        holdings(msgspec.structs.replace(before.layout, zero_level=2), 0, {})
    islands = old(fabric="two-islands:2", data=4)
    trunk = [x.dst for x in fabric_of(islands).links if x.dst in {s.name for s in fabric_of(islands).switches}]
    if trunk:
        with pytest.raises((Disconnected, UsageError)):
            replan_training(islands, lost=sorted(set(trunk)), graph=graph())
