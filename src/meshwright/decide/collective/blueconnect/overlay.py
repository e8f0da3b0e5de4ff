"""Servers of different sizes: every server splits the message among its own ranks, and the splits are overlaid.

Server h with a_h ranks reduces inside, each rank ending with an interval of the message. The borders of all servers together cut it into at
most sum a_h - (H - 1) elementary intervals; for each there is one owner per server, and the owners all-reduce it. Then every server gathers
inside. Each server still moves 2 (H - 1) / H of the message in and out, as with equal servers. Intervals may follow the ranks' share of the
server's ports. (Not in the paper, which needs equal groups.)

Reduce-scatter and all-gather: a rank of each server stands in for every rank elsewhere (in turn), so inside a server each rank first ends with
the sums for itself and those it stands in for, and sends them on; all-gather is the mirror.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

from ....program.program import Contract, Program
from ..problem import CollectiveProblem
from .flow import Flow
from .stages import all_gather, reduce_scatter

__all__ = ["OverlayPlan", "elementary_intervals", "overlay_program"]

MAX_GRAINS = 1024  # chunks that the message is cut into; finer borders are rounded to this grid


@dataclass(frozen=True)
class OverlayPlan:
    """`servers`: ranks by server; `shares[h][i]`: part of the message that rank i of server h owns; primitives inside and across."""

    servers: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[Fraction, ...], ...]
    inside: str
    across: str


def elementary_intervals(plan: OverlayPlan) -> tuple[int, list[tuple[int, int, tuple[int, ...]]]]:
    """(grains, [(first grain, end, owner in every server)]): the overlay of all servers' borders.

    Every interval is a multiple of the number of servers, so that its owners can share it equally.
    """
    servers = len(plan.servers)
    unit = lcm(*(s.denominator for row in plan.shares for s in row))
    # Rounded borders are still borders: shares shift by less than a grain, and every byte keeps one owner per server.
    unit = min(unit, MAX_GRAINS // servers)
    borders = []
    for row in plan.shares:
        ends, total = [], Fraction(0)
        for share in row:
            total += share
            ends.append(round(total * unit))
        borders.append(ends)
    out = []
    first = 0
    # Between two neighbouring borders of any server every server has exactly one owner.
    for end in sorted({e for ends in borders for e in ends if e > 0}):
        owners = tuple(members[next(i for i, e in enumerate(ends) if e >= end)] for members, ends in zip(plan.servers, borders, strict=True))
        out.append((first * servers, end * servers, owners))
        first = end
    return unit * servers, out


def overlay_program(problem: CollectiveProblem, plan: OverlayPlan, *, slices: int, unroll: bool, reverse: bool) -> Program:
    """All-reduce, reduce-scatter or all-gather over servers of any sizes."""
    n, op = len(problem.ranks), problem.op
    spans, repeat = (slices, 1) if unroll else (1, slices)
    grains, intervals = elementary_intervals(plan) if op == "all-reduce" else (n, [])
    elements = -(-problem.size_bytes // problem.element_bytes)
    chunk_bytes = ceil(Fraction(elements, grains * slices)) * problem.element_bytes
    role = "output" if op == "all-gather" else "input"
    flow = Flow(ranks=n, chunks=grains * spans, chunk_bytes=chunk_bytes, role=role, name=f"blueconnect {op}", repeat=repeat, depth=min(2, slices))
    for t in range(spans):
        if op == "all-reduce":
            _all_reduce(flow, plan, intervals, t * grains, reverse)
        else:
            _sharded(flow, plan, [[b * spans + t] for b in range(n)], op, reverse)
    whole = tuple((b, 0, grains * spans) for b in flow.buffers)
    block = tuple((b, r * spans, spans) for r, b in enumerate(flow.buffers))
    inputs, outputs = (block if op == "all-gather" else whole), (block if op == "reduce-scatter" else whole)
    return flow.build(Contract(op=op, inputs=inputs, outputs=outputs))


def _all_reduce(flow: Flow, plan: OverlayPlan, intervals: Sequence[tuple[int, int, tuple[int, ...]]], base: int, reverse: bool) -> None:
    owned: list[list[list[int]]] = [[[] for _ in members] for members in plan.servers]
    for first, end, owners in intervals:
        for h, owner in enumerate(owners):
            # What a rank must end with after reducing inside its server: all intervals that it owns.
            owned[h][plan.servers[h].index(owner)] += range(base + first, base + end)
    for members, pieces in zip(plan.servers, owned, strict=True):
        reduce_scatter(flow, members, pieces, plan.inside, ("rs",))
    for number, (first, end, owners) in enumerate(intervals):
        step = (end - first) // len(owners)
        pieces = [list(range(base + first + i * step, base + first + (i + 1) * step)) for i in range(len(owners))]
        # Another owner begins with every interval, so that rings of many intervals do not all start at the same link.
        turned = owners[number % len(owners) :] + owners[: number % len(owners)]
        reduce_scatter(flow, turned, pieces, plan.across, ("rs across", number))
        all_gather(flow, turned, pieces, plan.across, ("ag across", number), reverse=reverse)
    for members, pieces in zip(plan.servers, owned, strict=True):
        all_gather(flow, members, pieces, plan.inside, ("ag",), reverse=reverse)


def _sharded(flow: Flow, plan: OverlayPlan, blocks: Sequence[list[int]], op: str, reverse: bool) -> None:
    """Reduce-scatter or all-gather; `blocks[r]`: chunks of rank r's part."""
    everyone = [r for members in plan.servers for r in members]
    stands_in: list[dict[int, int]] = []
    for members in plan.servers:
        others = [r for r in everyone if r not in members]
        stands_in.append({r: r for r in members} | {r: members[i % len(members)] for i, r in enumerate(others)})
    pieces = [
        [sorted(c for r in everyone if stand[r] == member for c in blocks[r]) for member in members]
        for members, stand in zip(plan.servers, stands_in, strict=True)
    ]
    if op == "reduce-scatter":
        for members, piece in zip(plan.servers, pieces, strict=True):
            reduce_scatter(flow, members, piece, plan.inside, ("rs",))
    for h, members in enumerate(plan.servers):
        for turn in range(1, len(plan.servers)):
            other = stands_in[(h + turn) % len(plan.servers)]
            for r in members:  # one of the other servers' ranks has r's part of the sum, or wants r's part
                src, dst = (other[r], r) if op == "reduce-scatter" else (r, other[r])
                flow.message(src, dst, blocks[r], blocks[r], stage=("across",), peers=True, add=op == "reduce-scatter")
    if op == "all-gather":
        for members, piece in zip(plan.servers, pieces, strict=True):
            all_gather(flow, members, piece, plan.inside, ("ag",), reverse=reverse)
