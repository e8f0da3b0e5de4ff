"""Packing trees into an allocation: multiplicative weights, then few trees of whole weight by an integer program.

Source: Blink (arXiv 1910.04940), sections on tree generation and tree minimisation. What is packed ("shape"):
    broadcast    out-trees of the root; an arc is used once per tree
    all-reduce   undirected trees, climbed and descended; an arc is used in both directions
    scatter      out-trees of the root; an arc is used by the share of ranks below it
    all-gather   out-trees of every rank, equally many
Reduce, gather and reduce-scatter are these on the reversed graph. A packing is found once per class of isomorphic allocations.
Deviations: weights stop the rounds early once they reach the optimum within a quarter of theta, where the optimum is known; if they do
not come within theta, trees are added by column generation; weights that no small unit fits become counts by largest remainder.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import Disconnected, Infeasible, MeshwrightError
from ....kernels.effort import remembered
from ....kernels.highs import row_duals, solve, solver, values
from ....kernels.strength import strength
from ....kernels.treesearch import ARBORESCENCE, SHORTEST, SPANNING, cheapest_trees, pack_by_weights
from .graph import Allocation, Paths, path_edges

__all__ = ["SHAPES", "Packing", "Rooted", "best_rate", "pack"]

SHAPES = {"broadcast": ARBORESCENCE, "all-reduce": SPANNING, "scatter": SHORTEST, "all-gather": ARBORESCENCE}
MAX_ROUNDS = 20_000  # of the multiplicative weights
MAX_ROUNDS_TIMES_ARCS = 200_000_000  # rounds times the arcs that one looks at
MAX_STORED_ENTRIES = 8_000_000  # rounds times the entries of its trees
MAX_PROGRAM_TREES = 160  # trees that the integer program chooses from, the heaviest of every root
MAX_UNITS_PER_LINK = 12  # the finest unit tried for whole trees: 1/12 of a link
MAX_UNITS_OF_WIDEST_LINK = 64  # where the rates' common divisor makes more units of the widest link, the narrowest link's rate is the unit
MAX_BRANCH_NODES = 50  # branch-and-bound nodes, a limit that does not depend on the machine; more find hardly fewer trees
MAX_MATRIX_ENTRIES = 16_000  # non-zeros of the integer program; larger ones take too long, weights are rounded instead
ROUNDED_UNIT_COUNTS = (4, 6, 8, 12, 16, 24, 32, 48)  # units per root that weights are rounded to when no unit of rate fits


@dataclass(frozen=True)
class Rooted:
    """A tree in canonical numbers: `down[v]` nodes of the path from v's parent to v, `up[v]` from v to its parent (all-reduce); root: ()."""

    root: int
    down: tuple[tuple[int, ...], ...]
    up: tuple[tuple[int, ...], ...]

    @property
    def parent(self) -> tuple[int, ...]:
        return tuple(path[0] if path else -1 for path in self.down)

    @property
    def depth(self) -> int:
        return max(_depths(self.parent))


@dataclass(frozen=True)
class Packing:
    """`units[i]` equal units of `trees[i]`. `rate`: message bytes per second in graph units when all links are shared as packed.

    `found` and `distinct`: rate and number of trees before they were made few; `optimum`: of the linear program, or exact.
    """

    trees: tuple[Rooted, ...]
    units: tuple[int, ...]
    rate: Fraction
    found: float
    distinct: int
    optimum: float
    method: str


def _depths(parent: tuple[int, ...]) -> list[int]:
    depth = []
    for v in range(len(parent)):
        d = 0
        while parent[v] >= 0:
            v, d = parent[v], d + 1
        depth.append(d)
    return depth


@dataclass
class _Column:
    group: int
    key: bytes
    edges: tuple[NDArray[np.int32], ...]  # down, and up for all-reduce
    usage: NDArray[np.float64]
    weight: float = 0.0


class _Job:
    """One packing: its paths, columns so far, and the linear program over them."""

    def __init__(self, allocation: Allocation, shape: str) -> None:
        self.allocation, self.shape, self.mode = allocation, shape, SHAPES[shape]
        self.paths: Paths = path_edges(allocation, undirected=shape == "all-reduce")
        roots = range(allocation.ranks) if shape == "all-gather" else [max(allocation.root, 0)]
        self.roots = np.array(list(roots), np.int32)
        self.capacity = self.paths.edges.capacity
        self.columns: dict[tuple[int, bytes], _Column] = {}

    def add(self, chosen: NDArray[np.int32], amount: float) -> None:
        groups = 1 if self.mode == SPANNING else len(self.roots)
        for g in range(groups):
            rows = tuple(chosen[i].copy() for i in ((0, 1) if self.mode == SPANNING else (g,)))
            key = self._key(rows)
            column = self.columns.get((g, key))
            if column is None:
                column = self.columns[g, key] = _Column(g, key, rows, self._usage(rows))
            column.weight += amount

    def _key(self, rows: tuple[NDArray[np.int32], ...]) -> bytes:
        if self.mode == SPANNING:  # the same undirected tree whatever it was grown from
            return np.sort(np.concatenate([row[row >= 0] for row in rows])).tobytes()
        return rows[0].tobytes()

    def _usage(self, rows: tuple[NDArray[np.int32], ...]) -> NDArray[np.float64]:
        e, usage = self.paths.edges, np.zeros(len(self.capacity))
        n, below = e.nodes, np.ones(e.nodes)
        if self.mode == SHORTEST:
            parent = tuple(int(e.src[x]) if x >= 0 else -1 for x in rows[0])
            below = np.zeros(n)
            for v in range(n):
                u = v
                while u >= 0:
                    below[u] += 1 / n
                    u = parent[u]
        for row in rows:
            for v, x in enumerate(row.tolist()):
                if x >= 0:
                    np.add.at(usage, e.arc[e.ptr[x] : e.ptr[x + 1]], below[v])
        return usage

    # ---- weights -------------------------------------------------------------------------------------------------------
    def by_weights(self, epsilon: float, target: float) -> float:
        """Fill the columns; returns the feasible rate of the weights."""
        e = self.paths.edges
        work = (e.ptr[-1] + e.nodes * e.nodes) * (len(self.roots) if self.mode == ARBORESCENCE else 1)
        most = max(50, min(MAX_ROUNDS, MAX_ROUNDS_TIMES_ARCS // int(work), MAX_STORED_ENTRIES // (e.nodes * len(self.roots))))
        done = pack_by_weights(e, self.mode, self.roots, epsilon=epsilon, most=most, target=target)
        if done is None:
            raise Disconnected("a root of the allocation does not reach every rank", hint="add links, or name a connected part of the devices")
        for chosen, amount in zip(*done, strict=True):
            self.add(chosen, float(amount))
        total = sum(c.weight for c in self.columns.values()) / self.groups
        load = np.sum([c.weight * c.usage for c in self.columns.values()], axis=0)
        scale = float(np.max(load / self.capacity))  # with the fullest arc just full, the weights are a feasible packing
        for c in self.columns.values():
            c.weight /= scale
        return total / scale

    @property
    def groups(self) -> int:
        return 1 if self.mode == SPANNING else len(self.roots)

    # ---- linear program ------------------------------------------------------------------------------------------------
    def linear(self, *, generate: bool, tolerance: float = 1e-7, rounds: int = 400) -> tuple[float, float]:
        """Best rate of the columns and an upper bound on any; `generate` adds columns until the two meet. Sets the columns' weights."""
        model, arcs = solver(), len(self.capacity)
        top = float(self.capacity.max())
        model.addVar(0.0, float("inf"))  # the rate
        model.changeColCost(0, -1.0)
        for a in range(arcs):
            model.addRow(-float("inf"), float(self.capacity[a]) / top, 0, np.empty(0, np.int32), np.empty(0))
        for _ in range(self.groups):
            model.addRow(0.0, float("inf"), 1, np.array([0], np.int32), np.array([-1.0]))
        for column in self.columns.values():
            _add_column(model, column, arcs)
        bound = float("inf")
        for _ in range(rounds):
            solve(model, what="tree packing")
            rate, duals = values(model)[0] * top, -np.array(row_duals(model)[:arcs])
            if not generate:
                break
            # With the duals as lengths, a tree cheaper than those in use is a column worth adding; and by duality any lengths bound every packing:
            # rate <= length · capacity / length of the cheapest trees, one per root. The tiny term breaks ties towards few arcs.
            length = np.maximum(duals, 0.0) + 1e-12 * max(float(duals.max()), 1e-30)
            found = cheapest_trees(self.paths.edges, self.mode, self.roots, length)
            assert found is not None  # the weights' trees exist
            bound = min(bound, float(length @ self.capacity / (length @ found[1])))
            if rate >= bound * (1 - tolerance):
                break
            before = len(self.columns)
            self.add(found[0], 0.0)
            if len(self.columns) == before:
                break
            for column in list(self.columns.values())[before:]:
                _add_column(model, column, arcs)
        for column, weight in zip(self.columns.values(), values(model)[1:], strict=True):
            column.weight = weight * top
        return rate, bound


def _add_column(model: Any, column: _Column, arcs: int) -> None:
    at = np.flatnonzero(column.usage)
    model.addCol(0.0, 0.0, float("inf"), len(at) + 1, np.append(at, arcs + column.group).astype(np.int32), np.append(column.usage[at], 1.0))


# ---- few trees -----------------------------------------------------------------------------------------------------------
def _kept(job: _Job) -> list[_Column]:
    """The columns an integer program chooses from: the heaviest of every group."""
    each = max(6, MAX_PROGRAM_TREES // job.groups)
    found: list[_Column] = []
    for g in range(job.groups):
        found += sorted((c for c in job.columns.values() if c.group == g), key=lambda c: (-c.weight, c.key))[:each]
    return found


def _few_trees(job: _Job, theta: float, optimum: float) -> tuple[list[tuple[_Column, int]], str]:
    """Whole counts of trees whose common rate comes within theta of the optimum, with the largest unit that does; else the best found."""
    kept = _kept(job)
    best: tuple[Fraction, list[tuple[_Column, int]], str] | None = None
    rates = [int(c) for c in job.capacity]
    common = int(np.gcd.reduce(np.array(rates, np.int64)))
    base = common if max(rates) // common <= MAX_UNITS_OF_WIDEST_LINK else min(rates)
    small = sum(int(np.count_nonzero(c.usage)) for c in kept) <= MAX_MATRIX_ENTRIES
    # Coarse units first: whole multiples of them give few trees. A unit whose best multiple is already short of theta cannot do.
    for divisor in range(1, MAX_UNITS_PER_LINK + 1 if small else 1):
        if floor(optimum * divisor / base + 1e-6) * base / divisor < (1 - theta) * optimum:
            continue
        counts = _whole_counts(job, kept, np.floor(job.capacity * divisor / base + 1e-9), floor(optimum * divisor / base + 1e-6))
        if not counts:
            continue
        rate = _rate(job, counts)
        if best is None or rate > best[0]:
            best = rate, counts, f"integer program, unit 1/{divisor} of a link" if divisor > 1 else "integer program, one unit per link"
        if float(rate) >= (1 - theta) * optimum:
            return best[1], best[2]
    for count in ROUNDED_UNIT_COUNTS:
        counts = _rounded(job, count)
        rate = _rate(job, counts)
        if best is None or float(rate) > float(best[0]) * (1 + theta / 10):
            best = rate, counts, f"weights rounded to {count} units"
        if float(best[0]) >= (1 - theta) * optimum:
            break
    assert best is not None
    return best[1], best[2]


def _whole_counts(job: _Job, kept: list[_Column], room: NDArray[np.float64], most: int) -> list[tuple[_Column, int]]:
    """Most units first, then fewest different trees, then least depth. Empty when no unit fits."""
    if most < 1:
        return []
    arcs, columns, inf = len(room), len(kept), float("inf")
    model = solver(mip_max_nodes=MAX_BRANCH_NODES, mip_rel_gap=0.0)
    for _ in kept:
        model.addVar(0.0, float(most))
    model.addVar(0.0, float(most))  # units per group
    model.changeColsIntegrality(columns + 1, np.arange(columns + 1, dtype=np.int32), np.ones(columns + 1, np.uint8))
    for a in range(arcs):
        if at := [i for i, c in enumerate(kept) if c.usage[a] > 0]:
            use = np.array([kept[i].usage[a] for i in at])
            model.addRow(-inf, float(room[a]), len(at), np.array(at, np.int32), use)
    for g in range(job.groups):
        at = [i for i, c in enumerate(kept) if c.group == g] + [columns]
        model.addRow(0.0, 0.0, len(at), np.array(at, np.int32), np.array([1.0] * (len(at) - 1) + [-1.0]))
    model.changeColCost(columns, -1.0)
    try:
        solve(model, what="tree minimisation")
        found = [round(x) for x in values(model)]
        if found[columns] < 1:
            return []
        found = _fewest(model, kept, found, most, job)
    except Infeasible:  # no unit fits
        return []
    except MeshwrightError as stopped:  # the node limit came before any solution
        if stopped.code != "time-limit":
            raise
        return []
    return [(c, x) for c, x in zip(kept, found, strict=False) if x > 0]


def _fewest(model: Any, kept: list[_Column], found: list[int], most: int, job: _Job) -> list[int]:
    """Keep the units; make the different trees few and shallow. `model` is the program just solved."""
    columns = len(kept)
    model.changeColBounds(columns, float(found[columns]), float(most))
    model.changeColCost(columns, 0.0)
    depth = [max(_depths(tuple(int(job.paths.edges.src[x]) if x >= 0 else -1 for x in c.edges[0]))) for c in kept]
    price = float(found[columns] * job.groups * (max(depth) + 1))  # one more different tree costs more than any depths can save
    for i in range(columns):
        model.addVar(0.0, 1.0)
        model.changeColIntegrality(columns + 1 + i, _integer())
        model.changeColCost(columns + 1 + i, price)
        model.changeColCost(i, float(depth[i]))
        model.addRow(-float("inf"), 0.0, 2, np.array([i, columns + 1 + i], np.int32), np.array([1.0, -float(most)]))
    start = [float(x) for x in found[: columns + 1]] + [float(x > 0) for x in found[:columns]]
    model.setSolution(len(start), np.arange(len(start), dtype=np.int32), np.array(start))
    try:
        solve(model, what="tree minimisation")
    except MeshwrightError as stopped:
        if stopped.code != "time-limit":
            raise
        return found
    return [round(x) for x in values(model)[: columns + 1]]


def _integer() -> Any:
    import highspy

    return highspy.HighsVarType.kInteger


def _rounded(job: _Job, count: int) -> list[tuple[_Column, int]]:
    """The linear weights as `count` units per group by largest remainder."""
    out: list[tuple[_Column, int]] = []
    for g in range(job.groups):
        group = sorted((c for c in job.columns.values() if c.group == g and c.weight > 0), key=lambda c: (-c.weight, c.key))
        total = sum(c.weight for c in group)
        shares = [c.weight * count / total for c in group]
        whole = [floor(s) for s in shares]
        for i in sorted(range(len(group)), key=lambda i: whole[i] - shares[i])[: count - sum(whole)]:
            whole[i] += 1
        out += [(c, w) for c, w in zip(group, whole, strict=True) if w]
    return out


def _rate(job: _Job, counts: list[tuple[_Column, int]]) -> Fraction:
    """Exact rate of whole counts: units per group over the largest load per capacity."""
    n = job.allocation.ranks
    scale = n if job.mode == SHORTEST else 1  # shortest-path trees use n-ths of the message, one per rank below: times n, loads are whole
    load = np.zeros(len(job.capacity), np.int64)
    for column, units in counts:
        load += units * np.rint(column.usage * scale).astype(np.int64)
    units = sum(x for c, x in counts if c.group == 0)
    busiest = max(Fraction(int(x), int(c)) for x, c in zip(load, job.capacity, strict=True))
    return Fraction(units * scale) / busiest


# ---- the whole ------------------------------------------------------------------------------------------------------------
def best_rate(allocation: Allocation, shape: str) -> float:
    """The linear program's optimum, by column generation: no packing of the shape's trees is faster."""
    job = _Job(allocation, shape)
    job.by_weights(0.1, float("inf"))
    return job.linear(generate=True)[0]


@remembered
def pack(allocation: Allocation, shape: str, *, epsilon: float, theta: float, optimum: Fraction | None = None) -> Packing:
    """Pack trees of `shape`, at most a share theta below the optimum where possible.

    `optimum`: exact optimum in graph units where it is known (minimum cut), else found by column generation.
    Raises: Disconnected.
    """
    job = _Job(allocation, shape)
    if optimum is None and shape == "all-reduce" and allocation.nodes == allocation.ranks:
        optimum = strength(allocation.ranks, two_way(allocation)).ratio
    goal = float("inf") if optimum is None else float(optimum)
    found = job.by_weights(epsilon, goal * (1 - theta / 4))
    distinct = len(job.columns)
    rate, bound = job.linear(generate=False)
    known = goal if optimum is not None else None
    if known is None or rate < (1 - theta / 2) * known:
        rate, bound = job.linear(generate=True, tolerance=theta / 10)
        known = rate if known is None else known
    counts, method = _few_trees(job, theta, max(rate, min(known, bound)))
    rooted = [(_rooted(job, c), units) for c, units in counts]
    rooted.sort(key=lambda pair: (pair[0].root, -pair[1], pair[0].down))
    trees, units = tuple(t for t, _ in rooted), tuple(u for _, u in rooted)
    return Packing(trees, units, _rate(job, counts), found, distinct, float(known), method)


def two_way(allocation: Allocation) -> dict[tuple[int, int], int]:
    """Undirected capacities: what a pair's narrower direction carries. Of direct allocations."""
    rate = {(u, v): r for u, v, r in allocation.arcs}
    found = {(u, v): min(r, rate.get((v, u), 0)) for (u, v), r in rate.items() if u < v}
    return {pair: r for pair, r in found.items() if r}


def _rooted(job: _Job, column: _Column) -> Rooted:
    """The column as a tree; undirected ones at the root that makes them lowest, or at the marked root."""
    nodes_of, n = job.paths.nodes_of, job.allocation.ranks
    if job.mode != SPANNING:
        down = tuple(nodes_of[x] if x >= 0 else () for x in column.edges[0].tolist())
        return Rooted(int(job.roots[column.group]), down, ())
    path = {(nodes_of[x][0], nodes_of[x][-1]): nodes_of[x] for row in column.edges for x in row.tolist() if x >= 0}
    near: list[list[int]] = [[] for _ in range(n)]
    for u, v in sorted(path):
        near[u].append(v)
    options = range(n) if job.allocation.root < 0 else [job.allocation.root]
    root, parent = min(((r, _parents(near, r)) for r in options), key=lambda pair: (max(_depths(pair[1])), pair[0]))
    down = tuple(path[p, v] if p >= 0 else () for v, p in enumerate(parent))
    up = tuple(path[v, p] if p >= 0 else () for v, p in enumerate(parent))
    return Rooted(root, down, up)


def _parents(near: list[list[int]], root: int) -> tuple[int, ...]:
    parent = [-1] * len(near)
    todo, seen = [root], {root}
    for u in todo:
        for v in near[u]:
            if v not in seen:
                seen.add(v)
                parent[v] = u
                todo.append(v)
    return tuple(parent)
