"""Hypothesis strategies for programs: every table filled, every index in range, not necessarily a program that makes sense.

For tests of whatever reads, writes or walks programs. Whether a drawn program would deadlock or race is left to chance; what a right
program is, is the business of `meshwright.check`. Needs the `test` extra.

    from hypothesis import given
    from meshwright.testing.programs import programs

    @given(programs())
    def test_round_trip(program): assert program_hash(program_from_bytes(program_bytes(program))) == program_hash(program)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from ..errors import MissingExtra
from ..program.builder import LaneBuilder, ProgramBuilder, StepRef
from ..program.program import BUFFER_ROLES, Contract, Fold, FoldAxis, Program, Role, Space, Unit
from ..program.validate import validate

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import DrawFn
except ImportError as error:
    raise MissingExtra("hypothesis", extra="test", needed_for="meshwright.testing.programs") from error

__all__ = ["programs"]

_NAMES = st.sampled_from(["", "act:block", "act:block:0", "act:block:01", "grad:x:17", "é\"\\\n", "99999999999", "0", "日本"]) | st.text(
    st.characters(codec="utf-8"), max_size=8
)
_HASH = "0123456789abcdef" * 4


@st.composite
def programs(draw: DrawFn, *, max_ranks: int = 4, max_steps: int = 12) -> Program:
    """A program that passes `validate()`: repeats, lags, channel sets, routes, symbolic sizes, calls, folds and contracts included."""
    ranks = draw(st.integers(1, max_ranks))
    switches = draw(st.integers(0, 1))
    b = ProgramBuilder(ranks=ranks, switches=switches, name=draw(_NAMES))
    actors = st.integers(0, ranks + switches - 1)
    sizes = [b.size(f"s{i}", lower=i, expected=10 + i, upper=draw(st.integers(100, 1 << 40))) for i in range(draw(st.integers(0, 2)))]
    buffers = _buffers(draw, b, actors, sizes)
    comms = [b.comm(draw(_NAMES), sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1)))) for _ in range(draw(st.integers(0, 2)))]
    channels = _channels(draw, b, ranks + switches, len(comms))
    lanes = [
        b.lane(
            draw(actors), unit=draw(st.sampled_from(Unit)), repeat=draw(st.sampled_from([1, 1, 2, 5, 1 << 20])), role=draw(st.sampled_from(Role))
        )
        for _ in range(draw(st.integers(0, 4)))
    ]  # fmt: skip
    refs: list[StepRef] = []
    for _ in range(draw(st.integers(0, max_steps)) if lanes else 0):
        refs.append(_step(draw, b, draw(st.sampled_from(lanes)), buffers, channels, comms, sizes, refs))
    for buffer, _ in buffers:
        if refs and _coin(draw):
            b.dies_after(buffer, draw(st.sampled_from(refs)))
    if buffers and _coin(draw):
        ranges = tuple(draw(_ranges(buffers)) for _ in range(ranks))
        op = draw(st.sampled_from(["all-reduce", "broadcast"]))
        b.contract = Contract(op=op, inputs=ranges, outputs=ranges, root=draw(st.integers(-1, ranks - 1)))
    program = b.build()
    if draw(st.booleans()):
        program = replace(program, fold=_fold(draw, ranks, len(buffers)))
    if buffers and _coin(draw):
        chunk_bytes = program.buffers.chunk_bytes
        program = replace(program, buffers=replace(program.buffers, arena_offset=np.cumsum(chunk_bytes) - chunk_bytes))
    validate(program)
    return program


def _coin(draw: DrawFn) -> bool:
    return draw(st.booleans())


def _buffers(draw: DrawFn, b: ProgramBuilder, actors: st.SearchStrategy[int], sizes: list[int]) -> list[tuple[int, int]]:
    """(buffer, chunks) of each."""
    named = draw(st.booleans())
    out: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 5))):
        chunks = draw(st.integers(1, 6))
        out.append((b.buffer(
            draw(actors), chunks=chunks, chunk_bytes=draw(st.integers(0, 1 << 45)), role=draw(st.sampled_from(BUFFER_ROLES)),
            space=draw(st.sampled_from(Space)), size=draw(st.sampled_from([-1, *sizes])), window=draw(st.integers(0, 3)),
            alias_of=draw(st.sampled_from([-1, *(x for x, _ in out)])), alias_offset_bytes=draw(st.integers(0, 1 << 40)),
            persistent=draw(st.booleans()), name=draw(_NAMES) if named else "",
        ), chunks))  # fmt: skip
    return out


def _channels(draw: DrawFn, b: ProgramBuilder, actors: int, comms: int) -> list[int]:
    if actors < 2:
        return []
    ends = st.permutations(range(actors)).map(lambda order: (order[0], order[1]))
    channels = []
    for _ in range(draw(st.integers(0, 4))):
        src, dst = draw(ends)
        route = draw(st.none() | st.lists(_NAMES, max_size=3))
        channels.append(b.channel(src, dst, depth=draw(st.integers(1, 300)), tag=draw(st.integers(-1, comms - 1)), route=route))
    if channels and _coin(draw):
        b.channel_set(sorted(draw(st.sets(st.sampled_from(channels), min_size=1))))
    return channels


def _ranges(buffers: list[tuple[int, int]]) -> st.SearchStrategy[tuple[int, int, int]]:
    @st.composite
    def one(draw: DrawFn) -> tuple[int, int, int]:
        buffer, chunks = draw(st.sampled_from(buffers))
        first = draw(st.integers(0, chunks - 1))
        return buffer, first, draw(st.integers(0, chunks - first))

    return one()


def _step(
    draw: DrawFn, b: ProgramBuilder, lane: LaneBuilder, buffers: list[tuple[int, int]], channels: list[int], comms: list[int], sizes: list[int],
    refs: list[StepRef],
) -> StepRef:  # fmt: skip
    after = [(ref, draw(st.integers(0, 3))) for ref in draw(st.lists(st.sampled_from(refs), max_size=2))] if refs else []
    kind = draw(st.sampled_from(["compute", "transfer", "transfer", "call", "nop"]))
    if kind == "compute":
        ranges = st.lists(_ranges(buffers), max_size=2) if buffers else st.just([])
        op = b.op(
            draw(st.sampled_from(["F", "B", "optimizer"])), graph=draw(_NAMES), module=draw(_NAMES), stage=draw(st.integers(-1, 3)),
            microbatch=draw(st.integers(-1, 99)), parts=2, accumulate=draw(st.booleans()), workspace_bytes=draw(st.integers(0, 1 << 45)),
            reads=draw(ranges), writes=draw(ranges),
        )  # fmt: skip
        return lane.compute(op, after=after)
    if kind == "call" and comms:
        binds = [(0, *draw(_ranges(buffers))[:2])] if buffers else []
        return lane.call(b.call(draw(st.sampled_from(comms)), draw(st.sampled_from([_HASH, _HASH[::-1]])), binds), after=after)
    if kind == "transfer" and buffers:
        src, dst = draw(_ranges(buffers)), draw(_ranges(buffers))
        channel = st.sampled_from([-1, *channels])
        return lane.transfer(
            recv=draw(channel), send=draw(channel), src=src[:2], dst=dst[:2], count=min(src[2], dst[2]), add=draw(st.booleans()),
            store=draw(st.booleans()), size=draw(st.sampled_from([-1, *sizes])), after=after,
        )  # fmt: skip
    return lane.nop(after=after)


def _fold(draw: DrawFn, ranks: int, buffers: int) -> Fold:
    kinds: list[Literal["shift", "xor", "plain"]] = ["shift", "plain"] if ranks & (ranks - 1) else ["shift", "xor", "plain"]
    kind = draw(st.sampled_from(kinds))
    axes = (FoldAxis("data", ranks, 1, kind), FoldAxis("one", 1, max(1, ranks), "shift"))
    folded = sum(axis.kind != "plain" for axis in axes)
    shift = draw(st.lists(st.integers(-3, 3), min_size=folded * buffers, max_size=folded * buffers))
    return Fold(axes=axes, buffer_shift=np.array(shift, np.int32).reshape(folded, buffers))
