"""A layout whose recomputation cannot work is refused: every entry that is taken away or moved is missed."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import pytest

from captured import captured
from meshwright.check import check_plan
from meshwright.check.training.recompute import check_recompute, operands_of
from meshwright.check.training.step import check_training
from meshwright.drive import plans as drive
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.job import Training
from meshwright.plan.plan import Plan, Recompute, TrainingLayout
from meshwright.program.calls import inline

MODEL = str(Path(__file__).parent.parent.parent / "examples" / "gpt.py:tiny")
replace = msgspec.structs.replace


@functools.cache
def plan(tensor: int = 1) -> Plan:
    job = Training(model=MODEL, global_batch=8)
    degrees = {"data": 1, "tensor": tensor, "pipeline": 2 // tensor, "microbatch": 2}
    return plan_training(job, drive.read_fabric("laptop:2"), graph=captured(MODEL), wishes=(LayoutWanted(**degrees), RecomputeWanted("full")))


def layout_of(tensor: int = 1) -> TrainingLayout:
    layout = plan(tensor).layout
    assert layout is not None
    return layout


def changed(layout: TrainingLayout, **fields: object) -> TrainingLayout:
    """The first record of the first segment that recomputes, with other fields."""
    segments = list(layout.segments)
    i = next(i for i, s in enumerate(segments) if s.recompute)
    records = (replace(segments[i].recompute[0], **fields), *segments[i].recompute[1:])
    segments[i] = replace(segments[i], recompute=records)
    return replace(layout, segments=tuple(segments))


def record(layout: TrainingLayout) -> Recompute:
    return next(s for s in layout.segments if s.recompute).recompute[0]


def messages(layout: TrainingLayout, tensor: int = 1) -> list[str]:
    return [f.message for f in check_recompute(layout, operands_of(plan(tensor).job["graph_outline"])) if f.status == "wrong"]


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_right_plan_is_ok(tensor: int) -> None:
    assert check_plan(plan(tensor)).status == "ok"
    assert any(s.recompute for s in layout_of(tensor).segments)


@pytest.mark.parametrize("tensor", [1, 2])
def test_whatever_is_dropped_is_missed(tensor: int) -> None:
    """Each call that runs again, each kept result and each border value that is read, taken out on its own."""
    layout = layout_of(tensor)
    assert not messages(layout, tensor)
    r = record(layout)
    segment = next(s for s in layout.segments if s.recompute)
    taken = operands_of(plan(tensor).job["graph_outline"])
    used = {*r.needed, *(k for k in r.again for n in r.again if segment.nodes[r.starts[0] + k] in taken[segment.nodes[r.starts[0] + n]])}
    for k in r.again:
        found = messages(changed(layout, again=tuple(x for x in r.again if x != k)), tensor)
        assert bool(found) == (k in used), k
        assert not found or "neither kept nor made again" in found[0]
    for k in r.kept:
        assert messages(changed(layout, kept=tuple(x for x in r.kept if x != k)), tensor), k
    for v in r.reads:
        assert any(v in m for m in messages(changed(layout, reads=tuple(x for x in r.reads if x != v)), tensor))


def test_nonsense_is_refused() -> None:
    layout = layout_of()
    r = record(layout)
    cases = {
        "of 1 calls|position": {"starts": (10**6,)}, "not in order": {"again": r.again[::-1]}, "a record has no region": {"starts": ()},
        "in two regions": {"starts": (*r.starts, r.starts[0] + r.again[1] - r.again[0]), "needed": (), "kept": ()},
        "is said to be kept, and runs again": {"kept": (*r.kept, r.again[0])}, "does not cross its border": {"reads": ("nothing",)},
    }  # fmt: skip
    for message, fields in cases.items():
        assert any(part in m for m in messages(changed(layout, **fields)) for part in message.split("|")), message
    operands = {k: v for k, v in operands_of(plan().job["graph_outline"]).items() if k != layout.segments[0].nodes[r.starts[0] + r.again[0]]}
    assert "is no call of the model" in check_recompute(layout, operands)[0].message
    assert [f.status for f in check_recompute(layout, None)] == ["unknown"]
    assert operands_of(["parameter w: float32[3]", "a = aten.t.default()", "b = aten.add.Tensor(a, input:0)"]) == {"a": (), "b": ("a", "input:0")}


def test_the_program_must_carry_it() -> None:
    """Backward reads what it recomputes from, and the buffers hold what is kept."""
    made = plan(2)
    flat = inline(made.main, made.programs).program
    layout = layout_of(2)
    assert not check_training(flat, layout)
    wider = replace(layout, segments=tuple(replace(s, saved_bytes=s.saved_bytes + 1) if s.recompute else s for s in layout.segments))
    assert "that its segment keeps" in check_training(flat, wider)[0].message
    segment = next(s for s in layout.segments if s.recompute)
    value = next(v for s in layout.segments for v in s.writes if v not in segment.reads and s.stage == segment.stage)
    found = check_training(flat, changed(layout, reads=(*record(layout).reads, value)))
    assert found and f"does not read act:{value}" in found[0].message
