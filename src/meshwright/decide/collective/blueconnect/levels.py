"""The hierarchy of an allocation: which ranks are close, level by level, found from servers and routes.

Two ranks are the closer the fewer devices and links their route passes, and the wider it is. Joining all pairs closer than a threshold
gives parts; thresholds at which all parts hold equally many ranks, inside servers, of servers, and of groups of servers (racks, pods), are
the levels. Servers of different sizes are reported as they are: the plan for them overlays their shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from ....errors import UsageError
from ..problem import CollectiveProblem

__all__ = ["Hierarchy", "find_hierarchy", "given_hierarchy"]

MAX_COMPARED_RANKS = 96  # compared pair by pair inside one level; more make one flat level
Closeness = tuple[int, int, int]  # devices passed, links, -narrowest rate


@dataclass(frozen=True)
class Hierarchy:
    """`sizes`: ranks per part of each level over parts of the level below, innermost first; `grid[g]`: rank at position g.

    `servers`: ranks by server, in grid order. With servers of different sizes `sizes` is one flat level.
    """

    sizes: tuple[int, ...]
    grid: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]

    @property
    def uneven(self) -> bool:
        return len({len(s) for s in self.servers}) > 1


def given_hierarchy(problem: CollectiveProblem, sizes: Sequence[int], grid: Sequence[int] | None) -> Hierarchy:
    """Levels as the user states them. Raises: UsageError unless they multiply to the number of ranks and `grid` is an order of them."""
    n = len(problem.ranks)
    if any(s < 1 for s in sizes) or prod(sizes) != n:
        raise UsageError(f"levels {tuple(sizes)} multiply to {prod(sizes)}, there are {n} ranks", where="blueconnect")
    order = tuple(grid) if grid is not None else tuple(range(n))
    if sorted(order) != list(range(n)):
        raise UsageError(f"grid must hold every rank of 0..{n - 1} once, got {order}", where="blueconnect")
    return Hierarchy(tuple(s for s in sizes if s > 1) or (n,), order, _servers(problem, order))


def _servers(problem: CollectiveProblem, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    found: dict[str, list[int]] = {}
    for rank in order:
        found.setdefault(problem.fabric.device(problem.ranks[rank]).group, []).append(rank)
    return tuple(tuple(s) for s in found.values())


def find_hierarchy(problem: CollectiveProblem) -> Hierarchy:
    """The levels of the fabric. Raises: Disconnected when two ranks cannot reach each other."""
    n = len(problem.ranks)
    servers = _servers(problem, range(n))
    if len({len(s) for s in servers}) > 1:
        return Hierarchy((n,), tuple(rank for s in servers for rank in s), servers)
    sizes: list[int] = []
    rows = [list(s) for s in servers]
    if len(rows[0]) > 1:
        inner, _ = _nested(problem, rows[0])
        same = [_nested(problem, row) for row in rows]
        agreed = all(found == inner for found, _ in same)
        sizes += inner if agreed else [len(rows[0])]
        rows = [row for _, row in same] if agreed else rows
    if len(rows) > 1:
        # Servers are alike by now, so one rank of each stands for it in the levels above.
        heads = [row[0] for row in rows]
        outer, order = _nested(problem, heads)
        sizes += outer
        by_head = dict(zip(heads, rows, strict=True))
        rows = [by_head[h] for h in order]
    grid = tuple(rank for row in rows for rank in row)
    return Hierarchy(tuple(sizes), grid, tuple(tuple(row) for row in rows))


def _nested(problem: CollectiveProblem, members: Sequence[int]) -> tuple[list[int], list[int]]:
    """(sizes innermost first, members in nested order) of the levels between single ranks and all of them."""
    k = len(members)
    if k < 4 or k > MAX_COMPARED_RANKS:
        return [k], list(members)
    closeness = {pair: _closeness(problem, *pair) for pair in combinations(members, 2)}
    label = {m: m for m in members}
    sizes, order, width = [], [[m] for m in members], 1
    # Single linkage: joining all pairs up to a threshold. It is a level where all parts have the same size and are larger than the level below.
    for threshold in sorted(set(closeness.values())):
        for (a, b), close in closeness.items():
            if close == threshold and label[a] != label[b]:
                old, new = label[b], label[a]
                label = {m: new if x == old else x for m, x in label.items()}
        parts: dict[int, list[list[int]]] = {}
        for run in order:
            parts.setdefault(label[run[0]], []).append(run)
        counts = {sum(len(run) for run in runs) for runs in parts.values()}
        if len(counts) == 1 and (size := counts.pop()) > width:
            sizes.append(size // width)
            order = [[m for run in runs for m in run] for runs in parts.values()]
            width = size
    return sizes, [m for run in order for m in run]


def _closeness(problem: CollectiveProblem, a: int, b: int) -> Closeness:
    fabric = problem.fabric
    ends = [fabric.actor_of[problem.ranks[r]] for r in (a, b)]
    worst: Closeness = (0, 0, -(1 << 62))
    for src, dst in (ends, ends[::-1]):
        links = fabric.route(src, dst)
        passed = sum(1 for x in links[:-1] if fabric.link_ends[x][1] < len(fabric.devices))
        # Both ways: a stage exchanges in both, so a pair is as far apart as its worse route.
        worst = max(worst, (passed, len(links), -min(fabric.links[x].rate_Bps for x in links)))
    return worst
