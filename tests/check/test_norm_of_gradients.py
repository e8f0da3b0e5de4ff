"""The norm of gradients: every rank counted once, whatever is divided; steps left out, moved or counted twice are refused."""

from __future__ import annotations

import dataclasses
import functools

import msgspec
import pytest

from captured import captured
from meshwright.check.training.norm import axes_of
from meshwright.check.training.step import check_training
from meshwright.check.whole import check_plan
from meshwright.drive import plans as drive
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.job import Recipe, Training
from meshwright.lower.norm import norm_axes
from meshwright.plan.plan import Plan
from meshwright.program.calls import inline
from meshwright.program.program import Program
from meshwright.program.tables import Csr

MODEL = "tests/run/tensor_models.py:even"
CASES = {"replicas": (2, 1, 1, 0), "tensor": (1, 2, 1, 0), "stages": (2, 1, 2, 0), "divided": (2, 1, 1, 2), "all": (2, 2, 2, 1)}


@functools.cache
def planned(case: str) -> Plan:
    data, tensor, pipeline, level = CASES[case]
    return plan_training(
        Training(model=MODEL, global_batch=4, recipe=Recipe(clip_norm=1.0)), drive.read_fabric(f"laptop:{data * tensor * pipeline}"),
        graph=captured(MODEL), wishes=(
            LayoutWanted(data=data, tensor=tensor, pipeline=pipeline, microbatch=1), CollectivesWanted("ring"),
            ShardingWanted(level=level, overlap=level > 0, bucket_bytes=1500 if level else 0),
        ),
    )  # fmt: skip


def program_of(case: str) -> Program:
    plan = planned(case)
    return inline(plan.main, plan.programs).program


def messages(case: str, program: Program) -> list[str]:
    layout = planned(case).layout
    assert layout is not None
    return [f.message for f in check_training(program, layout)]


def with_ranges(p: Program, op: int, name: str, rows: list[list[int]]) -> Program:
    lists = getattr(p.ops, name)
    values = [[v for row in rows for v in row] if i == op else lists[i].tolist() for i in range(len(lists))]
    return dataclasses.replace(p, ops=dataclasses.replace(p.ops, **{name: Csr.of(values)}))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_plans_are_right_and_say_what_they_ask(case: str) -> None:
    plan = planned(case)
    assert plan.layout is not None and plan.layout.step_end.norm and check_plan(plan).ok
    assert not messages(case, program_of(case))
    tiny = [key for key in plan.decisions if key == "collective:norm"]
    assert bool(tiny) == (case != "replicas"), "replicas that hold everything need no message"
    assert plan.prediction is not None and plan.prediction.time_s > 0
    for rank in range(plan.layout.ranks):
        own = [(name, len(ranks)) for name, ranks in norm_axes(plan.layout, rank)]
        assert own == [(axis.name, len(axis.slots)) for axis in axes_of(plan.layout, rank)]


@pytest.mark.parametrize("case", CASES)
def test_what_the_optimizer_reads_is_complete(case: str) -> None:
    p = program_of(case)
    for op in [i for i, n in enumerate(p.ops.name) if n == "optimizer"][:1]:
        rows = p.ops.reads[op].reshape(-1, 3).tolist()
        kept = [row for row in rows if not p.buffers.name[row[0]].startswith("norm:")]
        assert any("does not read the whole of norm:" in m for m in messages(case, with_ranges(p, op, "reads", kept)))
    first = next(i for i, n in enumerate(p.ops.name) if n == "norm")
    rows = p.ops.reads[first].reshape(-1, 3).tolist()
    assert any("does not read chunk" in m for m in messages(case, with_ranges(p, first, "reads", rows[1:])))


def test_numbers_lie_in_their_slots() -> None:
    p = program_of("tensor")
    op = next(i for i, n in enumerate(p.ops.name) if n == "norm")
    ((buffer, first, count),) = p.ops.writes[op].reshape(-1, 3).tolist()
    for rows in ([[buffer, first + count, count]], [[buffer, 0, int(p.buffers.chunks[buffer])]]):
        assert any("must fill slot 0 of norm:tensor" in m for m in messages("tensor", with_ranges(p, op, "writes", rows)))


def test_a_step_that_is_missing_or_of_another_layout_is_refused() -> None:
    plan = planned("stages")
    layout, program = plan.layout, program_of("stages")
    assert layout is not None
    plain = msgspec.structs.replace(layout, end=msgspec.UNSET)
    assert any("norm" in f.message and "instead of 0" in f.message for f in check_training(program, plain))
    bare = plan_training(
        Training(model=MODEL, global_batch=4), drive.read_fabric("laptop:4"), graph=captured(MODEL),
        wishes=(LayoutWanted(data=2, tensor=1, pipeline=2, microbatch=1), CollectivesWanted("ring"), ShardingWanted(level=0, overlap=False)),
    )  # fmt: skip
    assert "end" not in msgspec.to_builtins(bare.layout) and "recipe" not in bare.job["training"]
    assert any("norm" in f.message and "0 times instead of 1" in f.message for f in check_training(inline(bare.main, bare.programs).program, layout))


def test_numbers_that_never_arrive_are_missed() -> None:
    """Without the messages of one axis its slots hold nothing."""
    p = program_of("tensor")
    tags = [i for i, name in enumerate(p.comms.name) if name.startswith("norm:")]
    channels = {c for c in range(len(p.channels)) if int(p.channels.tag[c]) in tags}
    s = p.steps
    gone = [i for i in range(len(s)) if int(s.chan_in[i]) in channels]
    assert gone
    buffer = int(s.dst_buffer[gone[0]])
    spare = next(b for b, name in enumerate(p.buffers.name) if name == "norm:tensor" and b != buffer)
    assert int(p.buffers.actor[spare]) != int(p.buffers.actor[buffer])
    dst = s.dst_chunk.copy()
    dst[gone] = 1 - dst[gone]  # into the slot that the receiver filled itself
    wrong = dataclasses.replace(p, steps=dataclasses.replace(s, dst_chunk=dst))
    assert messages("tensor", wrong)
