"""Experts over data replicas on real ranks equal the owner's own loop: losses, weights and optimizer state after 20 steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import msgspec
import numpy as np
import pytest
import torch
from expert_loops import CLIP, STEPS, batch_of, loss_of, model_of, plain, plan_for, trained

import meshwright as mw
from meshwright.check.issued import check_issued
from meshwright.check.training.layout import check_layout
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.drive.plans import check_plan, read_plan, write_plan
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import CheckFailed, FormatError, Infeasible, UsageError
from meshwright.io.plan.plan import plan_bytes
from meshwright.plan.plan import ParamShard
from meshwright.program.calls import inline
from meshwright.program.program import Kind
from meshwright.report.plan_text import plan_text
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.rounds import compile_rounds, issued_orders


@pytest.fixture(autouse=True)
def patience(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout_s", 500.0)


pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

LAYOUTS = {
    "ep2": {"expert": 2, "fabric": "laptop:2"}, "r0": {"zero": 3, "fabric": "laptop:2"},  # degree 0 of `experts plan`: weights travel, tokens stay
    "ep2xdp2": {"expert": 2, "data": 4, "fabric": "laptop:4", "microbatch": 1}, "ep2xpp2": {"expert": 2, "pipeline": 2, "fabric": "laptop:4"},
    "ep4": {"expert": 4, "data": 4, "fabric": "laptop:4", "microbatch": 1},
    "ep2z1": {"expert": 2, "fabric": "laptop:2", "zero": 1}, "ep2z3": {"expert": 2, "fabric": "laptop:2", "zero": 3},
    "ep2xdp2z2": {"expert": 2, "data": 4, "fabric": "laptop:4", "microbatch": 1, "zero": 2},
    "ep2xdp2z3": {"expert": 2, "data": 4, "fabric": "laptop:4", "microbatch": 1, "zero": 3},
    "ep2 clipped": {"expert": 2, "fabric": "laptop:2", "recipe": mw.Recipe(clip_norm=CLIP)},
    "ep2xdp2z1 clipped": {"expert": 2, "data": 4, "fabric": "laptop:4", "microbatch": 1, "zero": 1, "recipe": mw.Recipe(clip_norm=CLIP)},
    "ep2xpp2z1 clipped": {"expert": 2, "pipeline": 2, "fabric": "laptop:4", "zero": 1, "recipe": mw.Recipe(clip_norm=CLIP)},
    # experts over the ranks of a sequence; over two sequences' ranks; with pipelines and divided state
    "ep4xcp2xdp2": {"expert": 4, "context": 2, "data": 2, "fabric": "laptop:4"},
    "ep2xcp2": {"expert": 2, "context": 2, "data": 1, "fabric": "laptop:2"},
    "ep2xcp2xdp2z1 clipped": {"expert": 2, "context": 2, "data": 2, "fabric": "laptop:4", "zero": 1, "recipe": mw.Recipe(clip_norm=CLIP)},
    "ep2xcp2xpp2": {"expert": 2, "context": 2, "data": 1, "pipeline": 2, "fabric": "laptop:4"},
    # tensor ranks divide what a replica has: of neighbours' parts, with and without exchanges, folded degrees, divided state and sequences
    "ep2xtp2 clipped": {"expert": 2, "tensor": 2, "fabric": "laptop:4", "recipe": mw.Recipe(clip_norm=CLIP)},
    "ep2 over tp2": {"expert": 2, "data": 1, "tensor": 2, "fabric": "laptop:2"},
    "ep4 over dp2xtp2 z1": {"expert": 4, "tensor": 2, "zero": 1, "fabric": "laptop:4"},
    "tp2xdp2z3 clipped": {"tensor": 2, "fabric": "laptop:4", "zero": 3, "recipe": mw.Recipe(clip_norm=CLIP)},
    "ep4 over dp2xtp2 along sequences": {"expert": 4, "tensor": 2, "fabric": "laptop:4", "sequence": True},
    # layers run forward again before their backward, exchanges of rows among it
    "ep2 again": {"expert": 2, "fabric": "laptop:2", "recompute": "layers"},
    "ep2z3 again": {"expert": 2, "fabric": "laptop:2", "zero": 3, "recompute": "layers"},
    "ep2xpp2 again": {"expert": 2, "pipeline": 2, "fabric": "laptop:4", "recompute": "layers"},
    "ep4 over dp2xtp2 along sequences again": {"expert": 4, "tensor": 2, "fabric": "laptop:4", "sequence": True, "recompute": "layers"},
    # forwards beside backwards, in rows of compute steps between which both exchange
    "ep2xpp2 pairs": {"expert": 2, "pipeline": 2, "fabric": "laptop:4", "microbatch": 1, "schedule": "dualpipe-v"},
    "ep2xpp2z1 pairs clipped": {
        "expert": 2, "pipeline": 2, "fabric": "laptop:4", "microbatch": 1, "zero": 1, "schedule": "dualpipe-v", "recipe": mw.Recipe(clip_norm=CLIP),
    },
    "ep2xpp2 pairs again": {"expert": 2, "pipeline": 2, "fabric": "laptop:4", "microbatch": 1, "schedule": "dualpipe-v", "recompute": "layers"},
}  # fmt: skip


def plan_of(layout, dtype="float64"):
    return plan_for(dtype, tuple(sorted(LAYOUTS[layout].items())))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "dtype", "tolerance"), [*((x, "float64", 1e-9) for x in LAYOUTS if "cp" in x), ("ep2xcp2", "float32", 1e-5)]
)
def test_experts_over_ranks_that_divide_positions(layout, dtype, tolerance, pool, tmp_path):
    as_the_owners(layout, dtype, tolerance, pool, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if "tp" in x and "again" not in x])
def test_tensor_ranks_divide_what_a_replica_has(layout, pool, tmp_path):
    as_the_owners(layout, "float64", 1e-9, pool, tmp_path)
    plan = plan_of(layout)
    if "ep" in layout:
        assert plan.decisions["experts"]["options"]["tensor"] == 2 and f"experts over {plan.layout.expert} x 2 tensor ranks" in plan_text(plan)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "dtype", "tolerance"),
    [*((x, "float64", 1e-9) for x in LAYOUTS if not any(part in x for part in ("cp", "tp", "again", "pairs"))), ("ep2", "float32", 1e-5)],
)
def test_losses_and_weights_after_20_steps_are_the_owners(layout, dtype, tolerance, pool, tmp_path):
    as_the_owners(layout, dtype, tolerance, pool, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if "pairs" in x])
def test_forwards_beside_backwards(layout, pool, tmp_path):
    as_the_owners(layout, "float64", 1e-9, pool, tmp_path)
    assert plan_of(layout).layout.schedule == "dualpipe-v" and plan_of(layout).decisions["pipeline"]["options"]["pairs"]


def as_the_owners(layout, dtype, tolerance, pool, tmp_path):
    plan = plan_of(layout, dtype)
    losses, state, optimizer = plain(dtype, clip=CLIP if "clipped" in layout else 0.0, attentive="cp" in layout)
    want, moments = plan.layout.expert * plan.layout.tensor, optimizer["state"]
    for found in pool.run(trained, plan.layout.ranks, plan.layout.ranks, str(tmp_path / "store"), plan, dtype):
        assert found["losses"] == pytest.approx(losses, rel=tolerance, abs=0)
        for name, x in state.items():
            assert torch.allclose(found["state"][name], x, rtol=tolerance, atol=tolerance * float(x.abs().max())), name
        for number, kept in found["optimizer"]["state"].items():
            assert torch.allclose(kept["exp_avg"], moments[number]["exp_avg"], rtol=1e-4 if dtype == "float32" else 1e-8, atol=1e-6)
        assert plan.layout.zero_level == 3 or all(shape[0] == 4 // want for shape in found["held"].values())


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.endswith("again")])
def test_rows_that_are_exchanged_twice_change_no_bit(layout, pool, tmp_path):
    """Two steps beside those of the same layout that keeps everything; rows of the second exchange are not counted as tokens of the router."""
    plan, kept = plan_of(layout), plan_of(layout.removesuffix(" again"))
    assert plan.layout.forward_again and "R" in plan.main.ops.name and plan.decisions["recompute"]["strategy"] == "layers"
    ranks = plan.layout.ranks
    found, first = (pool.run(trained, ranks, ranks, str(tmp_path / n), p, "float64", None, 2) for n, p in (("a", plan), ("b", kept)))
    assert [x["losses"] for x in found] == [x["losses"] for x in first]
    for a, b in zip(found, first, strict=True):
        assert all(torch.equal(x, b["state"][name]) for name, x in a["state"].items()) and a["evaluated"] == b["evaluated"]


def test_pairs_are_woven_proved_and_issued_in_one_order(tmp_path):
    """Steps of one half stand between those of the other; the plan comes back from its file, and ends by NCCL's rules in the order of issue."""
    plan = plan_of("ep2xpp2 pairs")
    flat = inline(plan.main, plan.programs).program
    passes = [work for work, _ in groupby((name, key.partition(".")[0], mb) for name, key, mb in row_of(flat, 0))]
    assert len(passes) > len({*passes}) and plan.decisions["pipeline"]["options"]["pairs"] == 6
    assert [row_of(flat, r) for r in (0, 2)] == [row_of(flat, r) for r in (1, 3)], "members of a group exchange in one order"
    write_plan(tmp_path / "plan.json", plan)
    assert plan_bytes(again := read_plan(tmp_path / "plan.json")) == plan_bytes(plan) and check_plan(again).ok
    verdict = check_issued(issued_orders(flat, compile_rounds(flat, fuse_lanes(flat), sends_ahead=0)), in_issue_order=True)
    assert verdict.ok, verdict.findings


def row_of(flat, rank):
    """What a rank computes, in order: (pass, segment, micro-batch)."""
    actor = np.repeat(flat.lanes.actor, flat.lanes.end - flat.lanes.start)
    ops = flat.steps.op[(flat.steps.kind == Kind.COMPUTE) & (actor == rank)].tolist()
    return [(flat.ops.name[o], flat.ops.graph[o], int(flat.ops.microbatch[o])) for o in ops]


def test_a_state_goes_on_under_another_expert_degree(pool, tmp_path):
    two, four = plan_of("ep2"), plan_of("ep4")
    half = pool.run(trained, 2, 2, str(tmp_path / "a"), two, "float64", None, 10)
    rest = pool.run(trained, 4, 4, str(tmp_path / "b"), four, "float64", half[0], STEPS - 10)
    losses, state, _ = plain("float64")
    assert half[0]["losses"] + rest[0]["losses"] == pytest.approx(losses, rel=1e-9)
    assert all(torch.allclose(rest[3]["state"][n], x, rtol=1e-9, atol=1e-10) for n, x in state.items())
    assert len({one["evaluated"] for one in rest}) == 1


def test_the_plan_says_who_divides_what_and_is_proved(tmp_path):
    plan = plan_of("ep2xdp2")
    layout = plan.layout
    assert layout.expert == 2 and {x.kind for x in layout.exchanges} == {"all-to-all"}
    assert {s.param for s in layout.expert_shards} == {f"blocks.{i}.experts.{n}" for i in (0, 1) for n in ("gate_up_proj", "down_proj")}
    said = plan.decisions["experts"]["options"]
    assert said.items() >= {"degree": 2, "wanted": "2", "routing": "uniform"}.items() and said["range_s"][0] <= plan.prediction.time_s
    assert "experts over 2" in plan_text(plan)
    names = set(plan.main.comms.name)
    assert {"experts:0.0.0", "experts:0.1.0", "dp:0.0e0", "dp:0.0e1"} <= names
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json").layout == layout
    with pytest.raises(FormatError, match="must divide the 4 replicas"):
        write_plan(tmp_path / "bad.json", replace(plan, layout=msgspec.structs.replace(layout, expert=3)))
        read_plan(tmp_path / "bad.json")
    shards = (msgspec.structs.replace(layout.expert_shards[0], axis=1), *layout.expert_shards[1:])
    with pytest.raises(FormatError, match="equal parts along the first dimension"):
        write_plan(tmp_path / "bad.json", replace(plan, layout=msgspec.structs.replace(layout, expert_shards=shards)))
        read_plan(tmp_path / "bad.json")


def test_experts_summed_over_all_replicas_are_found():
    """As if a planner thought that all replicas had the same experts, and one that none had."""
    plan = plan_of("ep2xdp2")
    lines = [
        (msgspec.structs.replace(plan.layout, expert=4), "lacks|has another|holds another|blocks"),
        (msgspec.structs.replace(plan.layout, expert=1), "do not belong together"),
    ]
    for layout, told in lines:
        with pytest.raises(CheckFailed, match=told):
            check_plan(replace(plan, layout=layout))


@pytest.mark.parametrize(("change", "told"), [
    ({"expert": 3}, "does not divide 4 replicas"), ({"context": 2}, "do not belong together"),
    ({"replica_microbatches": (2, 1, 1, 1)}, "equal replicas"),
    ({"expert_shards": ()}, "nothing of theirs is"),
    ({"expert": 1}, "the expert degree is 1"), ({"exchanges": ()}, "do not belong together"),
    ({"shards": (ParamShard(param="blocks.0.experts.down_proj", axis=2),)}, "first dimension, in equal parts, or hold all of them alike"),
])  # fmt: skip
def test_layouts_that_do_not_fit_are_found(change, told):
    layout = msgspec.structs.replace(plan_of("ep2xdp2").layout, **change)
    assert any(told in f.message for f in check_layout(layout, None))


def test_degrees_that_cannot_be_are_refused_with_the_nearest():
    model, batch = model_of(torch.float64, converted=True), batch_of(0)
    with pytest.raises(UsageError, match="expert degree 3 does not divide the 2 devices") as refused:
        mw.plan(model, batch, loss=loss_of, fabric="laptop:2", expert=3)
    assert refused.value.hint == "e.g. expert=2"
    with pytest.raises(UsageError, match="does not divide the data x context degree 2, nor that times 2 tensor ranks") as refused:
        mw.plan(model, batch, loss=loss_of, fabric="laptop:4", wishes=[LayoutWanted(data=1, tensor=2, context=2, expert=3)])
    assert refused.value.hint == "e.g. expert=2"
    with pytest.raises(Infeasible, match="expert degree 8: 4 experts, or parts of tables, do not divide by it"):
        wish = LayoutWanted(data=1, tensor=8, pipeline=1, expert=8, tensor_options=TensorOptions(vocabulary_rows=1))
        mw.plan(model, batch, loss=loss_of, fabric="laptop:8", wishes=[wish])
    dropping = model_of(torch.float64, converted=True, attentive=True, factor=1.0)
    with pytest.raises(Infeasible, match=r"buffers of 4 rows for 8 tokens drop some \(capacity_factor=0 drops none\)"):
        mw.plan(dropping, batch, loss=loss_of, fabric="laptop:2", wishes=[LayoutWanted(data=1, tensor=1, microbatch=2, context=2, expert=2)])
    with pytest.raises(Infeasible, match="no expert layers that could be divided"):
        mw.plan(model_of(torch.float64, converted=False).head, (torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)), fabric="laptop:2", expert=2)


def test_auto_looks_at_every_degree():
    plan = mw.plan(model_of(torch.float32, converted=True), batch_of(0), loss=loss_of, fabric="laptop:4", data=4, tensor=1, pipeline=1, microbatch=1,
                   zero=0, expert=None)  # fmt: skip
    said = plan.decisions["experts"]
    assert said["options"]["wanted"] == "auto" and all(f"degree {n}" in said["why"] for n in {1, 2, 4} - {plan.layout.expert})
