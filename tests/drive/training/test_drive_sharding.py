"""What the decision on sharding levels refuses, and what it chooses where memory is short."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest

from captured import captured
from meshwright.cli import main
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.problem import Degrees
from meshwright.drive.plans import read_fabric
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import FormatError, Infeasible, Unsupported, UsageError
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training
from meshwright.plan.plan import ContextExchange
from meshwright.plan.regions import divided_bytes

MODEL = "tests/run/tensor_models.py:even"


@cache
def graph():
    return captured(MODEL)


def planned(*wishes, devices=2, memory_bytes=0, optimizer="adamw", **fixed):
    fabric = read_fabric(f"laptop:{devices}")
    if memory_bytes:
        fabric = replace(fabric, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in fabric.devices))
    job = Training(model=MODEL, global_batch=4, optimizer=optimizer)
    return plan_training(job, fabric, graph=graph(), wishes=(LayoutWanted(microbatch=1, **fixed), CollectivesWanted("ring"), *wishes))


@cache
def replicated(level: int, overlap: bool):
    return planned(ShardingWanted(level=level, overlap=overlap), data=2)


def test_wrong_levels_buckets_and_degrees_are_refused():
    for make in (DataSharding, lambda level: ShardingWanted(level=level)):
        with pytest.raises(UsageError, match="must be 0, 1, 2 or 3, got 4"):
            make(4)
    with pytest.raises(UsageError, match="at least 1 byte, got -1"):
        ShardingWanted(bucket_bytes=-1)
    with pytest.raises(Unsupported, match="expert degree 2 does not divide 1 data x context ranks"):
        Degrees(1, 1, 1, 1, expert=2)


def test_a_level_needs_replicas():
    with pytest.raises(Infeasible, match="no layout has any"):
        planned(ShardingWanted(level=1), data=1)


def test_parameters_stay_whole_for_optimizers_that_look_at_them_whole():
    for optimizer, whole in (("adamw", False), ("adafactor", True), ("own.py:made", True)):
        plan = planned(ShardingWanted(level=2), data=2, optimizer=optimizer)
        layout, held, size_of = plan.layout, divided_bytes(plan.main, plan.layout)[0], {p.name: p.size_bytes for p in graph().parameters}
        assert bool(layout.whole_parameters) == whole
        sizes = {f"@{i}": sum(size_of[p] for p in b.params) for i, b in enumerate(layout.buckets_of(0))}
        largest = {f"@{i}": max(size_of[p] for p in b.params) for i, b in enumerate(layout.buckets_of(0))}
        assert held.keys() == sizes.keys()
        for group, size in held.items():  # a part has room for the largest, and there is a part of padding at most beyond that
            assert size >= sizes[group] and (not whole or 2 * largest[group] <= size <= sizes[group] + 2 * largest[group])
    assert planned(ShardingWanted(level=0), data=2, optimizer="adafactor").layout.whole_parameters is msgspec.UNSET


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_asked_for_is_planned_and_said(level, overlap):
    plan = replicated(level, overlap)
    assert (plan.layout.zero_level, plan.layout.overlap) == (level, overlap)
    said = plan.decisions["sharding"]
    assert said["strategy"] == f"zero-{level}" and said["options"]["wanted_level"] == str(level)


def test_nothing_is_divided_where_memory_is_not_short_and_something_where_it_is():
    plain = planned(RecomputeWanted("none"), data=2)
    assert plain.layout.zero_level == 0
    need = [max(replicated(level, True).prediction.memory_peak_bytes) for level in (0, 1)]
    assert need[1] < need[0]
    short = planned(RecomputeWanted("none"), data=2, memory_bytes=(need[0] + need[1]) // 2)
    assert short.layout.zero_level >= 1 and max(short.prediction.memory_peak_bytes) < need[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 3}, "must divide the"),
        ({"exchanges": (ContextExchange(kind="twice", source="a", target="b"),)}, "must be one of shift, all-to-all"),
        ({"exchanges": (ContextExchange(kind="shift", source="a", target="b"),)}, "names the value 'a'"),
        ({"expert": 3}, "must divide the 2 replicas, got 3"), ({"zero_level": 4}, "must be 0 to 3, got 4"),
        ({"bucket_bytes": -1}, "must be >= 0, got -1"),
    ],
)  # fmt: skip
def test_plan_files_with_wrong_levels_are_refused(changes, message):
    plan = replicated(1, True)
    with pytest.raises(FormatError, match=message):
        plan_from_bytes(plan_bytes(replace(plan, layout=msgspec.structs.replace(plan.layout, **changes))), where="plan.json")


def test_a_bucket_of_no_stage_is_refused():
    plan = replicated(1, True)
    buckets = tuple(msgspec.structs.replace(b, stage=7) for b in plan.layout.buckets)
    with pytest.raises(FormatError, match="must be 0 to 0, got 7"):
        plan_from_bytes(plan_bytes(replace(plan, layout=msgspec.structs.replace(plan.layout, buckets=buckets))), where="plan.json")


@pytest.mark.parametrize(("size", "message"), [("much", "'much'"), ("0B", "at least 1 byte"), ("-5MB", "'-5MB'")])
def test_bucket_sizes_that_are_none_are_refused(size, message, capsys, tmp_path):
    words = ["train", "plan", "--model", MODEL, "--fabric", "laptop:2", "--global-batch", "4", f"--bucket={size}", "--out", str(tmp_path / "p.json")]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and "--bucket" in err and "25MB" in err


def test_a_run_refuses_to_give_pieces_to_an_optimizer_that_looks_at_the_whole():
    """A plan file may say otherwise than the planner would; an optimizer of one's own that looks at one element at a time may have pieces."""
    from meshwright.program.calls import inline
    from meshwright.run.launch.outcome import forward_graph
    from meshwright.run.launch.rank import _Maker

    plan = replicated(1, True)

    def maker(optimizer):
        job = Training(model=MODEL, global_batch=4, optimizer=optimizer)
        return _Maker(plan, job, plan.layout, forward_graph(plan, plan.layout), inline(plan.main, plan.programs).program, 0, "cpu")

    with pytest.raises(Unsupported, match="looks beyond one element"):
        maker("tests/run/gate_models.py:lars").module()
    assert maker("tests/run/gate_models.py:elementwise").module()[0].groups


def test_tensor_parts_of_unequal_sizes_sum_their_common_gradients_by_one_schedule():
    """Five heads over two ranks: buckets differ from part to part, what both sum together is cut alike, or nobody would finish."""
    job = Training(model="tests/run/tensor_models.py:odd_tied", global_batch=4)
    odd = captured(job.model)
    for level in (1, 3):
        wanted = ShardingWanted(level=level, overlap=True, bucket_bytes=2048)
        fixed = {"data": 2, "tensor": 2, "pipeline": 1, "microbatch": 1}
        plan = plan_training(
            job, read_fabric("laptop:4"), graph=odd, wishes=(LayoutWanted(**fixed), CollectivesWanted("ring"), wanted, RecomputeWanted("none")),
        )  # fmt: skip
        assert len(plan.layout.buckets) > 1
        assert any(s.shares and len(set(s.shares)) > 1 for s in plan.layout.shards), "else the case shows nothing"
