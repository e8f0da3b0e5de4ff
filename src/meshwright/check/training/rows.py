"""Messages of experts' filled rows: both ends know their number before, buffers have room for the worst routing, sizes are what the layout expects.

How many rows are filled is data. So a message's size is a symbol from nothing to a whole block, and memory is counted for whole blocks (`memory`,
`staging`). The rank that packs rows, and the one that puts them in their places, read how many there are of each expert from the value that the
layout names (`counts`): every step that writes it there must come before, and it may not be dead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

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
    names, actor = p.buffers.name, p.lanes.actor[p.lane_of_step()].tolist()
    buffer_of = {(int(p.buffers.actor[b]), name): b for b, name in enumerate(names)}
    limits = list(zip(p.sizes.lower.tolist(), p.sizes.expected.tolist(), p.sizes.upper.tolist(), strict=True))
    told = cache(lambda b: _told(rows, buffer_of, int(p.buffers.actor[b]), names[b]))
    expected_of = cache(lambda value, rank, chunk: _expected(rows[value].of, layout, rank, chunk, value, alike=moved is not None))
    found: list[tuple[int, Finding]] = []  # with the number of the move
    asked: list[tuple[int, int, int, str]] = []  # (number of a move, its step, buffer of its numbers of rows or -1, that buffer's name)

    def wrong(number: int, step: int, text: str) -> None:
        found.append((number, Finding(check="values", message=f"{p.describe(step)} {text}", witness=witness(p, step))))

    for number, (step, b, chunk, symbol) in enumerate(chain(_moves(p), moved or ())):
        value, counts, called = told(b)
        if len(found) >= MAX_FINDINGS_OF_A_KIND:
            break
        if (not value) != (symbol < 0):
            wrong(number, step, f"moves {names[b]} in {'whole blocks, and' if value else 'a size of its own, and'} the layout says otherwise")
        if not value or symbol < 0:
            continue
        block = int(p.buffers.chunk_bytes[b])
        expected = min(expected_of(value, actor[step], chunk), block)
        if limits[symbol] != (0, expected, block):
            wrong(number, step, f"has a size of {limits[symbol]}; any number of rows up to {block} bytes may be filled, {expected} are expected")
        asked.append((number, step, counts, called))
    for k, dead in _unknown(p, order, asked)[:MAX_FINDINGS_OF_A_KIND]:
        number, step, counts, called = asked[k]
        what = f"{p.buffer_name(counts)} holds, which is dead by then" if dead else f"{called} holds, which rank {actor[step]} does not know then"
        wrong(number, step, f"needs the filled rows that {what}")
    return [f for _, f in sorted(found, key=lambda x: x[0])][:MAX_FINDINGS_OF_A_KIND]


def _told(rows: Mapping[str, _Rows], buffer_of: Mapping[tuple[int, str], int], rank: int, name: str) -> tuple[str, int, str]:
    """Of a buffer's name: the value whose rows it holds, or nothing; that rank's buffer that says how many there are, or -1, and its name."""
    kind, _, rest = name.partition(":")
    value, _, mb = rest.rpartition(":")
    if value not in rows or kind not in ("act", "remade", "grad"):
        return "", -1, ""
    called = f"act:{rows[value].counts}:{mb}"
    return value, buffer_of.get((rank, called), -1), called


def _moves(p: Program) -> Iterator[Move]:
    s = p.steps
    step = np.flatnonzero((s.kind == Kind.TRANSFER) & ((s.parts & (Part.RECV | Part.SEND)) != 0))
    into = (s.parts[step] & Part.RECV) != 0
    columns = np.where(into, s.dst_buffer[step], s.src_buffer[step]), np.where(into, s.dst_chunk[step], s.src_chunk[step]), s.size[step]
    return map(Move, step.tolist(), *(x.tolist() for x in columns))


def _unknown(p: Program, order: Order, asked: Sequence[tuple[int, int, int, str]]) -> list[tuple[int, bool]]:
    """Which of what is asked has no answer then, in order, and whether it is dead: every step that writes the numbers comes before, and they may not
    be dead. All pairs of steps are looked up at once."""
    writers = _writers(p, {counts for _, _, counts, _ in asked})
    # Of a lane's steps the latest: it comes after the others.
    latest = cache(lambda counts: _latest(order, writers[counts]))
    uses = cache(lambda counts: _latest(order, p.buffers.last[counts].tolist()))
    late, dead = set[int](), set[int]()
    pairs: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # (which, step, later step); True: writers, False: last uses
    for k, (_, step, counts, _) in enumerate(asked):
        if counts < 0 or not writers[counts]:
            late.add(k)
            continue
        pairs[True] += ((k, w, step) for w in latest(counts))
        last = uses(counts)
        if last and step not in last:
            pairs[False] += ((k, step, x) for x in last)
            dead.add(k)
    for of_writers, found in pairs.items():
        which, first, then = np.array(found, np.int64).reshape(-1, 3).T
        turns = np.zeros(len(which), np.int64)
        before = order.before(order.node(first, turns), order.node(then, turns))
        if of_writers:
            late |= {*which[~before].tolist()}
        else:
            dead -= {*which[before].tolist()}
    return [(k, k not in late) for k in sorted(late | dead)]


def _latest(order: Order, steps: Sequence[int]) -> list[int]:
    return [*{int(order.lane_of_step[step]): step for step in sorted(steps)}.values()]


def _writers(p: Program, buffers: Collection[int]) -> dict[int, list[int]]:
    """Steps that write each of these buffers."""
    s, found = p.steps, {b: list[int]() for b in buffers}
    stores = np.flatnonzero((s.kind == Kind.TRANSFER) & ((s.parts & Part.STORE) != 0) & np.isin(s.dst_buffer, [*buffers]))
    for step, b in zip(stores.tolist(), s.dst_buffer[stores].tolist(), strict=True):
        found[b].append(step)
    for step in np.flatnonzero(s.kind == Kind.COMPUTE).tolist():
        for b in {*p.ops.writes[int(s.op[step])].reshape(-1, 3)[:, 0].tolist()} & found.keys():
            found[b].append(step)
    return found


def _expected(x: ContextExchange, layout: TrainingLayout, rank: int, block: int, value: str, *, alike: bool) -> int:
    """Bytes that the layout expects of a message, by the member whose experts the rows are for: on a rank with experts itself, else the block's.
    `alike`: the most that any member gets."""
    assert x.expected_bytes is not UNSET
    back = x.target.rpartition("/")[2] == "back"
    experts = layout.coordinates(rank)[1] % layout.expert if (value == x.source) == back else block
    among = layout.tensor if any(v.name == value and v.split is not None for v in layout.values) else 1  # who divide a member's experts alike
    return (max(x.expected_bytes) if alike else x.expected_bytes[experts]) // among
