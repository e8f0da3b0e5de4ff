"""Messages of experts' filled rows: what is wrong with their sizes, their numbers and the room for them is found."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from expert_loops import plan_for

from meshwright.check.program.memory import worst_order_memory
from meshwright.check.program.order import Order
from meshwright.check.training.layout import check_layout
from meshwright.check.training.rows import check_rows
from meshwright.program.calls import inline
from meshwright.program.program import Kind, Part
from meshwright.program.tables import Csr

LAYOUT = (("expert", 2), ("fabric", "laptop:2"))


@pytest.fixture(scope="module")
def plan():
    return plan_for("float64", LAYOUT)


@pytest.fixture(scope="module")
def program(plan):
    return inline(plan.main, plan.programs).program


def told(program, layout):
    return " ".join(f.message for f in check_rows(program, layout, Order(program)))


def test_a_plan_sends_filled_rows_and_has_room_for_all(plan, program):
    assert told(program, plan.layout) == ""
    layers = [x for x in plan.layout.exchanges if x.counts is not msgspec.UNSET]
    block = {v.name: v.size_bytes // 2 for v in plan.layout.values}
    assert len(layers) == 4 and set(program.sizes.name) == {f"filled:{x.target}:{j}" for x in layers for j in (0, 1)}
    # 2 samples of 4 tokens choose 2 of 4 experts each: 16 rows of 8 float64 numbers, half of them for either rank; a buffer has room for 8 an expert.
    assert {n for x in layers for n in x.expected_bytes} == {16 * 8 * 8 // 2} and {block[x.source] for x in layers} == {2 * 8 * 8 * 8}
    assert program.sizes.upper.tolist() == [2 * 8 * 8 * 8] * 8 and not program.sizes.lower.any()


def test_memory_is_that_of_the_worst_routing(program):
    """Halving what is expected changes no byte of memory; halving what is possible does."""
    before = worst_order_memory(program, Order(program)).needed_bytes
    less = replace(program, sizes=replace(program.sizes, expected=program.sizes.expected // 2))
    assert worst_order_memory(less, Order(less)).needed_bytes == before
    packed = replace(program, sizes=replace(program.sizes, upper=program.sizes.upper // 2))
    assert max(worst_order_memory(packed, Order(packed)).needed_bytes) < max(before)


@pytest.mark.parametrize(("column", "value", "text"), [
    ("upper", 64, "any number of rows up to"), ("lower", 8, "any number of rows up to"), ("expected", 8, "are expected"),
])  # fmt: skip
def test_sizes_that_are_not_the_layouts_are_found(column, value, text, plan, program):
    changed = getattr(program.sizes, column).copy()
    changed[0] = value
    assert text in told(replace(program, sizes=replace(program.sizes, **{column: changed})), plan.layout)


def test_whole_blocks_are_found(plan, program):
    steps = replace(program.steps, size=np.full_like(program.steps.size, -1))
    assert "in whole blocks, and the layout says otherwise" in told(replace(program, steps=steps), plan.layout)


def test_rows_that_travel_before_their_numbers_are_found(plan, program):
    """Every message that brings numbers is taken from the receivers' lists of steps: nobody waits for it."""
    counts = {x.target for x in plan.layout.exchanges if x.target.endswith("/counts")}
    s = program.steps
    kind = s.kind.copy()
    for step in np.flatnonzero((s.kind == Kind.TRANSFER) & ((s.parts & Part.STORE) != 0)).tolist():
        if program.buffers.name[int(s.dst_buffer[step])].partition(":")[2].rpartition(":")[0] in counts:
            kind[step] = Kind.NOP
    mutant = replace(program, steps=replace(s, kind=kind))
    found = check_rows(mutant, plan.layout, Order(program))
    assert any("does not know then" in f.message for f in found)


def test_numbers_that_are_dead_are_found(plan, program):
    last = [program.buffers.last[b] for b in range(len(program.buffers))]
    for b, name in enumerate(program.buffers.name):
        if name.startswith("act:") and name.split(":")[1].endswith("/counts"):
            last[b] = np.flatnonzero(program.steps.kind == Kind.COMPUTE)[:1].astype(np.int32)
    mutant = replace(program, buffers=replace(program.buffers, last=Csr.of(last)))
    assert "is dead by then" in " ".join(f.message for f in check_rows(mutant, plan.layout, Order(program)))


@pytest.mark.parametrize(("change", "text"), [
    ({"counts": "nothing"}, "no exchanged value of a number"), ({"expected_bytes": (1,)}, "is expected to fill"),
    ({"expected_bytes": (1, 1 << 40)}, "is expected to fill"),
])  # fmt: skip
def test_layouts_whose_rows_are_not_numbered_are_found(change, text, plan):
    exchanges = tuple(msgspec.structs.replace(x, **change) if x.counts is not msgspec.UNSET else x for x in plan.layout.exchanges)
    assert any(text in f.message for f in check_layout(msgspec.structs.replace(plan.layout, exchanges=exchanges), None))


def test_packed_rows_come_to_their_places():
    """`pack` and `unpack` against slices."""
    from meshwright.plan.shards import local_values
    from meshwright.run.executor.memory import RankMemory

    made = plan_for("float64", LAYOUT)
    program = inline(made.main, made.programs).program
    memory = RankMemory(program, 0, torch.device("cpu"), local_values(made.layout, 0), {}, torch.float64, layout=made.layout)
    b = next(b for b in memory.counts if program.buffers.name[b].endswith("/rows:0") and program.buffers.name[b].startswith("act:"))
    memory.put(memory.counts[b], torch.tensor([3, 0, 8, 5]))
    rows = torch.randn(4, 8, 8, dtype=torch.float64)
    memory.put(b, rows.clone())
    packed = memory.pack(b, 1)
    assert torch.equal(packed, torch.cat([rows[2, :8], rows[3, :5]]).flatten())
    memory.unpack(b, 1, packed, add=True)
    assert torch.equal(memory.values[b][2], 2 * rows[2]) and torch.equal(memory.values[b][3, :5], 2 * rows[3, :5])
    assert torch.equal(memory.values[b][3, 5:], rows[3, 5:]) and torch.equal(memory.values[b][:2], rows[:2])
