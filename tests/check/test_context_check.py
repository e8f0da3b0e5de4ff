"""Plans whose exchange of positions is wrong: another block sent, or put elsewhere, a gradient stored where it had to be added, other layouts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from tensor_rig import lowered_calls

from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.decide.layout.data_sharding import PLAIN
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.decide.layout.unlike_devices import EVEN
from meshwright.plan.context import layout_exchanges
from meshwright.plan.plan import ContextExchange, TrainingLayout
from meshwright.program.calls import inline
from meshwright.program.program import Part, Program

MODELS = "tests/run/context_models.py:"
change = msgspec.structs.replace


@pytest.fixture(
    scope="module", params=[("three", 3, "ring"), ("three", 3, "ring-again"), ("interleaved", 2, "ulysses")], ids=["ring", "again", "ulysses"]
)  # fmt: skip
def right(request: Any) -> tuple[TrainingLayout, Program]:
    name, parts, exchange = request.param
    layout, program, callees = lowered_calls(
        MODELS + name, (1, 1, 1), 2, 2, "cross-entropy", TensorOptions(), None, "none", PLAIN, None, EVEN, None, None, "fp32", (parts, exchange)
    )
    flat = inline(program, callees).program
    assert check_training(flat, layout) == [] and check_layout(layout, parts) == []
    return layout, flat


def messages(program: Program, layout: TrainingLayout) -> list[str]:
    return [f.message for f in check_training(program, layout) if f.status == "wrong"]


def exchanges(program: Program) -> list[int]:
    """Steps that send or receive on a channel of a context group."""
    tagged = np.array([n.startswith("context") for n in program.comms.name] + [False])
    s = program.steps
    channel = np.where(s.chan_in >= 0, s.chan_in, s.chan_out)
    return [i for i in np.flatnonzero(channel >= 0).tolist() if tagged[program.channels.tag[channel[i]]]]


def test_every_message_matters(right: tuple[TrainingLayout, Program]) -> None:
    """What is sent, and where it is put: another buffer of its size on its rank, or another block of it."""
    layout, program = right
    s, b, seen = program.steps, program.buffers, 0
    assert exchanges(program)
    for i in exchanges(program):
        sends = bool(s.parts[i] & Part.SEND)
        column = "src_buffer" if sends else "dst_buffer"
        mine = int(getattr(s, column)[i])
        alike = [
            x for x in range(len(b))
            if x != mine and b.actor[x] == b.actor[mine] and b.name[x].split(":")[0] == b.name[mine].split(":")[0]
            and (b.chunks[x], b.chunk_bytes[x]) == (b.chunks[mine], b.chunk_bytes[mine])
        ]  # fmt: skip
        for other in alike[:1]:
            changed = getattr(s, column).copy()
            changed[i] = other
            assert messages(replace(program, steps=replace(s, **{column: changed})), layout), program.describe(i)
            seen += 1
        if int(b.chunks[mine]) > 1:
            chunks = "src_chunk" if sends else "dst_chunk"
            changed = getattr(s, chunks).copy()
            changed[i] = (changed[i] + 1) % int(b.chunks[mine])
            assert messages(replace(program, steps=replace(s, **{chunks: changed})), layout), program.describe(i)
            seen += 1
    assert seen


def test_gradients_that_come_back_are_added(right: tuple[TrainingLayout, Program]) -> None:
    layout, program = right
    s = program.steps
    adding = [i for i in exchanges(program) if s.parts[i] & Part.ADD]
    assert bool(adding) == (layout_exchanges(layout)[0].kind == "shift")
    for i in adding:
        parts = s.parts.copy()
        parts[i] = int(Part.RECV | Part.STORE)
        src = s.src_buffer.copy()
        src[i] = -1
        assert messages(replace(program, steps=replace(s, parts=parts, src_buffer=src)), layout), program.describe(i)


def test_layouts_that_say_other(right: tuple[TrainingLayout, Program]) -> None:
    """Another neighbour, another kind, values that are not there: the program is not the one that the layout says, or the layout is none."""
    layout, program = right
    first, *others = layout_exchanges(layout)
    kind = "all-to-all" if first.kind == "shift" else "shift"
    for exchange, faulty in (
        (ContextExchange(kind=kind, source=first.source, target=first.target), False),
        (ContextExchange(kind="twice", source=first.source, target=first.target), True),
        (ContextExchange(kind=first.kind, source="nobody", target=first.target), True),
        (ContextExchange(kind=first.kind, source=first.source, target=first.source), True),
    ):
        wrong = change(layout, exchanges=(exchange, *others))
        assert check_layout(wrong, layout.ranks) or (not faulty and messages(program, wrong)), exchange
    assert check_layout(change(layout, exchanges=msgspec.UNSET), layout.ranks)
    assert check_layout(change(layout, context=1), layout.ranks)
    (a, _), (c, _) = ((x, None) for x in (layout_exchanges(layout)[0], layout_exchanges(layout)[-1]))
    swapped = [ContextExchange(kind=x.kind, source=x.source, target=y.target) for x, y in ((a, c), (c, a))]
    if first.kind == "shift" and len(layout_exchanges(layout)) == 2:
        wrong = change(layout, exchanges=(swapped[0], ContextExchange(kind="shift", source=c.target, target=a.target)))
        assert check_layout(wrong, layout.ranks) or messages(program, wrong)
