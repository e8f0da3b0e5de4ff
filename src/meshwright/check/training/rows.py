"""Messages of experts' filled rows: both ends know their number before, buffers have room for the worst routing, sizes are what the layout expects.

How many rows are filled is data. So a message's size is a symbol from nothing to a whole block, and memory is counted for whole blocks (`memory`,
`staging`). The rank that packs rows, and the one that puts them in their places, read how many there are of each expert from the value that the
layout names (`counts`): every step that writes it there must come before, and it may not be dead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from ...plan.plan import ContextExchange, TrainingLayout
from ...program.program import Kind, Part, Program
from ..program.order import Order
from ..program.wellformed import witness
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding

__all__ = ["Move", "check_rows"]


class _Rows(NamedTuple):
    counts: str
    of: ContextExchange


class Move(NamedTuple):
    """A step that sends from, or receives into, a chunk of a buffer, with its symbol for the size, or -1."""

    step: int
    buffer: int
    chunk: int
    size: int


def check_rows(p: Program, layout: TrainingLayout, order: Order, moved: Sequence[Move] | None = None) -> list[Finding]:
    """`moved`: of a folded program, messages to other members. Its size of rows is one for all: that of the rows for the fullest experts."""
    exchanges = () if layout.exchanges is UNSET else layout.exchanges
    other = {x.source: x.target for x in exchanges} | {x.target: x.source for x in exchanges}
    rows: dict[str, _Rows] = {}
    for x in exchanges:
        if x.counts is not UNSET:
            rows[x.source], rows[x.target] = _Rows(x.counts, x), _Rows(other.get(x.counts, ""), x)
    if not rows and not len(p.sizes):
        return []
    names, actor = p.buffers.name, p.lanes.actor[p.lane_of_step()]
    buffer_of = {(int(p.buffers.actor[b]), name): b for b, name in enumerate(names)}
    writers = _writers(p)
    found: list[Finding] = []

    def wrong(step: int, text: str) -> None:
        found.append(Finding(check="values", message=f"{p.describe(step)} {text}", witness=witness(p, step)))

    for step, b, chunk, symbol in chain(_moves(p), moved or ()):
        kind, _, rest = names[b].partition(":")
        value, _, mb = rest.rpartition(":")
        known = rows.get(value) if kind in ("act", "grad") else None
        if len(found) >= MAX_FINDINGS_OF_A_KIND:
            break
        if (known is None) != (symbol < 0):
            wrong(step, f"moves {names[b]} in {'whole blocks, and' if known else 'a size of its own, and'} the layout says otherwise")
        if known is None or symbol < 0:
            continue
        rank, block = int(actor[step]), int(p.buffers.chunk_bytes[b])
        limits = int(p.sizes.lower[symbol]), int(p.sizes.expected[symbol]), int(p.sizes.upper[symbol])
        expected = _expected(known.of, layout, rank, chunk, value, alike=moved is not None)
        if limits != (0, min(expected, block), block):
            wrong(step, f"has a size of {limits}; any number of rows up to {block} bytes may be filled, {min(expected, block)} are expected")
        counts = buffer_of.get((rank, f"act:{known.counts}:{mb}"), -1)
        if counts < 0 or not writers.get(counts) or not _before(order, writers[counts], [step]).all():
            wrong(step, f"needs the filled rows that act:{known.counts}:{mb} holds, which rank {rank} does not know then")
        elif len(last := p.buffers.last[counts].tolist()) and step not in last and not _before(order, [step], last).any():
            wrong(step, f"needs the filled rows that {p.buffer_name(counts)} holds, which is dead by then")
    return found


def _moves(p: Program) -> Iterator[Move]:
    s = p.steps
    for step in np.flatnonzero((s.kind == Kind.TRANSFER) & ((s.parts & (Part.RECV | Part.SEND)) != 0)).tolist():
        buffer, chunk = (s.dst_buffer, s.dst_chunk) if s.parts[step] & Part.RECV else (s.src_buffer, s.src_chunk)
        yield Move(step, int(buffer[step]), int(chunk[step]), int(s.size[step]))


def _before(order: Order, these: Sequence[int], those: Sequence[int]) -> NDArray[np.bool_]:
    """Of each pair, one of the lists having one step, whether the first comes before the second."""
    a, b = np.broadcast_arrays(np.array(these), np.array(those))
    turns = np.zeros(len(a), np.int64)
    return order.before(order.node(a, turns), order.node(b, turns))


def _writers(p: Program) -> dict[int, list[int]]:
    """Steps that write each buffer."""
    s, found = p.steps, dict[int, list[int]]()
    for step in np.flatnonzero((s.kind == Kind.TRANSFER) & ((s.parts & Part.STORE) != 0)).tolist():
        found.setdefault(int(s.dst_buffer[step]), []).append(step)
    for step in np.flatnonzero(s.kind == Kind.COMPUTE).tolist():
        for b in {int(x) for x in p.ops.writes[int(s.op[step])].reshape(-1, 3)[:, 0]}:
            found.setdefault(b, []).append(step)
    return found


def _expected(x: ContextExchange, layout: TrainingLayout, rank: int, block: int, value: str, *, alike: bool) -> int:
    """Bytes that the layout expects of a message, by the member whose experts the rows are for: on a rank with experts itself, else the block's.
    `alike`: the most that any member gets."""
    assert x.expected_bytes is not UNSET
    back = x.target.rpartition("/")[2] == "back"
    experts = layout.coordinates(rank)[1] % layout.expert if (value == x.source) == back else block
    among = layout.tensor if any(v.name == value and v.split is not None for v in layout.values) else 1  # who divide a member's experts alike
    return (max(x.expected_bytes) if alike else x.expected_bytes[experts]) // among
