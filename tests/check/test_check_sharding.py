"""Steps of replicas that divide training state: whatever is left out or moved is refused, and so are levels and buckets that cannot be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import msgspec
import pytest

from captured import captured
from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.drive import plans as drive
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.job import Training
from meshwright.plan.plan import GradientBucket, TrainingLayout
from meshwright.program.calls import inline
from meshwright.program.program import Program
from meshwright.program.tables import Csr

MODEL = "tests/run/tensor_models.py:even"
LEVELS = (1, 2, 3)
replace = msgspec.structs.replace


@functools.cache
def step(level: int) -> tuple[TrainingLayout, Program]:
    plan = plan_training(
        Training(model=MODEL, global_batch=4), drive.read_fabric("laptop:2"), graph=captured(MODEL),
        wishes=(LayoutWanted(data=2, microbatch=1), CollectivesWanted("ring"), ShardingWanted(level=level, overlap=True, bucket_bytes=1500)),
    )  # fmt: skip
    assert plan.layout is not None
    return plan.layout, inline(plan.main, plan.programs).program


def messages(level: int, program: Program) -> list[str]:
    return [f.message for f in check_training(program, step(level)[0])]


def op_of(p: Program, name: str, kind: str, reads: bool) -> int:
    """The first op of a name that reads (or writes) a buffer whose name starts with `kind`."""
    lists = p.ops.reads if reads else p.ops.writes
    return next(k for k in range(len(p.ops.name)) if p.ops.name[k] == name and any(p.buffers.name[b].startswith(kind) for b in lists[k][::3]))


def with_rows(p: Program, op: int, reads: bool, change: Callable[[str, list[int]], list[int] | None]) -> Program:
    """An op whose (buffer, first chunk, count) rows are changed by `change(buffer name, row)`; None: without it."""
    lists = p.ops.reads if reads else p.ops.writes
    rows = [new for row in lists[op].reshape(-1, 3).tolist() if (new := change(p.buffers.name[row[0]], row)) is not None]
    values = [[v for row in rows for v in row] if i == op else lists[i].tolist() for i in range(len(lists))]
    return dataclasses.replace(p, ops=dataclasses.replace(p.ops, **{"reads" if reads else "writes": Csr.of(values)}))


def renamed(p: Program, old: str, new: str) -> Program:
    assert old in p.buffers.name
    return dataclasses.replace(p, buffers=dataclasses.replace(p.buffers, name=tuple(new if n == old else n for n in p.buffers.name)))


@pytest.mark.parametrize("level", LEVELS)
def test_right_steps_are_right(level: int) -> None:
    layout, program = step(level)
    assert layout.zero_level == level and not messages(level, program) and not check_layout(layout, layout.ranks)


@pytest.mark.parametrize("level", LEVELS)
def test_segments_use_the_whole_of_their_groups(level: int) -> None:
    _, p = step(level)
    weights, gradients = "weights@" if level < 3 else "gathered:", "gradients@" if level == 1 else "gradfull:"
    for name, kind, reads in (("F", weights, True), ("B", weights, True), ("B", gradients, False)):
        op = op_of(p, name, kind, reads)
        left_out = messages(level, with_rows(p, op, reads, lambda n, row, kind=kind: None if n.startswith(kind) else row))
        assert any("the whole of" in m for m in left_out), (name, kind)
        shorter = messages(level, with_rows(p, op, reads, lambda n, row, kind=kind: [*row[:2], row[2] - 1] if n.startswith(kind) else row))
        assert any("the whole of" in m for m in shorter), (name, kind)


@pytest.mark.parametrize("level", [2, 3])
def test_gradients_are_of_their_micro_batch(level: int) -> None:
    _, p = step(level)
    name = next(n for n in p.buffers.name if n.startswith("gradfull:0@"))
    assert any("which is not of micro-batch 0" in m for m in messages(level, renamed(p, name, name.replace(":0@", ":1@"))))


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_hold_their_parts(level: int) -> None:
    _, p = step(level)
    for kind in ("gradients" if level == 1 else "gradshard", "weights" if level < 3 else "shard"):
        found = messages(level, renamed(p, f"{kind}@0", f"{kind}@99"))
        assert any(f"a rank without {kind}@0" in m or "the whole of" in m or "which holds another value" in m for m in found), kind


@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_updated_everywhere(level: int) -> None:
    """The optimizer leaves its part of a group as it was: nobody has the new weights."""
    _, p = step(level)
    kind = "weights@0" if level < 3 else "shard@0"
    found = messages(level, with_rows(p, op_of(p, "optimizer", kind, False), False, lambda n, row: None if n == kind else row))
    assert any("is not the updated one" in m for m in found), found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 3}, "context degree 3 does not divide 2 replicas"), ({"expert": 2}, "expert degree 2"),
        ({"server_replicas": 3}, "3 replicas of a server do not divide 2"), ({"server_replicas": -1}, "-1 replicas of a server"),
        ({"zero_level": 5}, "the sharding level is 5"), ({"data": 1}, "there is one"),
        ({"buckets": ()}, "there are none"), ({"buckets": (GradientBucket(stage=0, params=("nobody",)),)}, "'nobody', which stage 0 does not hold"),
    ],
)  # fmt: skip
def test_levels_and_buckets_that_cannot_be(changes: dict[str, object], message: str) -> None:
    layout = replace(step(1)[0], **changes)
    assert any(message in f.message for f in check_layout(layout, None))


def test_a_parameter_is_in_one_bucket_and_shared_ones_in_none() -> None:
    layout = step(1)[0]
    twice = replace(layout, buckets=(*layout.buckets, layout.buckets[0]))
    assert any("holds in another bucket" in f.message for f in check_layout(twice, None))
    other = replace(layout.stages[0], index=1)
    shared = replace(layout, stages=(*layout.stages, other), pipeline=2)
    assert any("which several stages use" in f.message for f in check_layout(shared, None))
