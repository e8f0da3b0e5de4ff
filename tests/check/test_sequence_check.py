"""Plans whose sequence split is wrong: what a region gathers, what is scattered, whose gradients are added up. Each is told from the right one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from rig import graph_of
from tensor_rig import MODELS, lowered_step, recomputed

from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.lower.sequence import SequenceParts
from meshwright.program.program import Kind, Part
from meshwright.program.tables import Csr

change = msgspec.structs.replace
NAME, DEGREES = "pooled", (1, 3, 1)


def step(**options):
    return lowered_step(NAME, DEGREES, options=TensorOptions(sequence=True), **options)


@pytest.fixture(scope="module")
def right():
    layout, program = step()
    assert check_training(program, layout) == [] and check_layout(layout, 3) == []
    return layout, program


def found(program, layout):
    return [f.message for f in check_training(program, layout) if f.status == "wrong"]


def test_every_copy_between_part_and_slot_matters(right):
    """A rank's part put into another's slot, or another's slot taken for its own."""
    layout, program = right
    s, names = program.steps, program.buffers.name
    local = (s.kind == Kind.TRANSFER) & ((s.parts & (Part.RECV | Part.SEND)) == 0)
    copies = [i for i in local.nonzero()[0].tolist() if any(names[b].startswith(("act", "grad")) for b in (s.src_buffer[i], s.dst_buffer[i]))]
    seen = 0
    for i in copies:
        for column, buffers in (("src_chunk", s.src_buffer), ("dst_chunk", s.dst_buffer)):
            chunks, count = int(program.buffers.chunks[buffers[i]]), int(s.count[i])
            if chunks == count:
                continue  # the part itself
            wrong = getattr(s, column).copy()
            wrong[i] = (wrong[i] + count) % chunks
            assert found(replace(program, steps=replace(s, **{column: wrong})), layout), program.describe(i)
            seen += 1
    assert seen >= 3 * 8


MESSAGES = {
    "no gather": ("gather", lambda real: lambda self, rank, lane, part, parts, value, after: lane.copy((part, 0), (parts, 0), 1, after=after)),
    "not summed": ("scatter", lambda real: lambda self, *a, add, summed=True: real(self, *a, add=add, summed=False)),
    "all summed": ("scatter", lambda real: lambda self, *a, add, summed=True: real(self, *a, add=add, summed=True)),
    "stored over": ("scatter", lambda real: lambda self, *a, add, summed=True: real(self, *a, add=False, summed=summed)),
}


@pytest.mark.parametrize("mutant", MESSAGES)
def test_a_message_too_few_or_too_many(right, monkeypatch, mutant):
    """Gradients of what whole operators read must not be added up over ranks, those of what regions read must; others' contributions stay."""
    layout, _ = right
    method, wrong = MESSAGES[mutant]
    monkeypatch.setattr(SequenceParts, method, wrong(getattr(SequenceParts, method)))
    again, program = step()
    assert again == layout
    assert found(program, layout)


def test_a_parameter_whose_gradient_nothing_adds_up(right):
    """Its buffer is summed over the replicas, and over the tensor-parallel ranks not at all."""
    layout, _ = right
    names = [p.param for p in layout.partial_gradients]
    assert len(names) >= 4
    for name in names:
        broken = change(layout, partial_gradients=tuple(p for p in layout.partial_gradients if p.param != name))
        _, program = step(layout=broken)
        assert any(f"gradient of {name}, which each rank has for its part" in m for m in found(program, broken))


def test_a_region_that_reads_its_part_alone(right):
    layout, _ = right
    for s in layout.segments:
        if s.gathers:
            broken = change(layout, segments=tuple(change(x, gathers=(), sum_grads=()) if x.key == s.key else x for x in layout.segments))
            _, program = step(layout=broken)
            assert any("does not read actall:" in m for m in found(program, layout))


def test_a_layout_that_contradicts_itself(right):
    layout, _ = right
    along = next(s for s in layout.segments if s.sequence)
    gathering = next(s for s in layout.segments if s.gathers)

    def told(key, **changes):
        broken = change(layout, segments=tuple(change(s, **changes) if s.key == key else s for s in layout.segments))
        return [f.message for f in check_layout(broken, 3)]

    assert any("gathers values that it does not read or that are whole" in m for m in told(gathering.key, gathers=("nothing",)))
    assert any("reads or writes no such value" in m for m in told(along.key, split=False))
    nothing = [f.message for f in check_layout(change(layout, sequence=False), 3)]
    assert any("the layout says nothing is" in m for m in nothing)


def test_what_runs_again_reads_what_is_gathered_again():
    """A layer that runs again on a value that the ranks hold in parts: backward must read all parts of it, gathered once more."""
    name, degrees, along = "even", (1, 2, 1), TensorOptions(sequence=True)
    layout = recomputed(graph_of(MODELS + name, 2), lowered_step(name, degrees, options=along)[0], "full")
    _, program = lowered_step(name, degrees, options=along, layout=layout)
    assert check_training(program, layout) == []
    gathered = {(s.key, v) for s in layout.segments for x in s.recompute for v in x.reads if v in s.gathers}
    assert len({v for _, v in gathered}) == 4  # what the first linears of two layers' attentions and feed-forwards read
    o, names = program.ops, program.buffers.name
    for i in range(len(o.name)):
        triples = o.reads[i].reshape(-1, 3)
        mine = [v for key, v in gathered if o.name[i] == "B" and o.graph[i] == key]
        for value in mine:
            kept = [x for x in triples.tolist() if not names[x[0]].startswith(f"actagain:{value}:")]
            assert len(kept) < len(triples)
            rows = [o.reads[k].tolist() for k in range(len(o.name))]
            less = Csr.of([*rows[:i], [n for x in kept for n in x], *rows[i + 1 :]])
            messages = found(replace(program, ops=replace(o, reads=less)), layout)
            assert any(f"does not read actagain:{value}:{o.graph[i]}" in m for m in messages)
