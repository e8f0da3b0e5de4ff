"""Which worker owns which node: METIS where pymetis is installed, else our own multilevel partitioner.

Cite: Karypis and Kumar, A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs, SIAM J. Sci. Comput. 20(1), 1998.
Left open by the paper: our own one is the plain form of it. Heavy-edge matching until the graph is small or stops shrinking, a breadth-first order
cut into equal pieces, then moves of boundary nodes on the way back up (no hill climbing). Several starts on the smallest graph, the best one goes
on.
Invariant: every node has a worker; no worker has more than (1 + `imbalance`) of its share, rounded up. Equal seeds give equal parts.
Cost: O(edges · log(nodes)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ....errors import MissingExtra, UsageError
from ....graph.nodes import I64, NodeGraph
from ....kernels.effort import time_is_up
from ....kernels.partition import breadth_order, matched, refined

__all__ = ["Parts", "partition"]

SMALL = 25  # nodes per worker at which coarsening ends
SHRINKS = 0.95  # a level must have at most so many of the nodes of the one above: power-law graphs match badly
STARTS = 16
PASSES = 8

Method = Literal["auto", "pymetis", "own"]


@dataclass(frozen=True, eq=False)
class Parts:
    """`of` [nodes]: the worker of each node. `cut`: edges between workers, each direction counted once. `method`: who made it."""

    of: I64
    workers: int
    cut: int
    method: str

    @property
    def sizes(self) -> list[int]:
        return [int(x) for x in np.bincount(self.of, minlength=self.workers)]


@dataclass(frozen=True, eq=False)
class _Level:
    ptr: I64
    idx: I64
    weight: I64
    mass: I64


def partition(graph: NodeGraph, workers: int, *, method: Method = "auto", seed: int = 0, imbalance: float = 0.03) -> Parts:
    """Parts of about equal numbers of nodes with few edges between them. auto: pymetis where it is installed.

    An interrupt ends our own search early: the nodes are divided, but more edges are cut.
    Raises: UsageError for fewer nodes than workers; MissingExtra.
    """
    if not 1 <= workers <= graph.nodes:
        raise UsageError(f"{graph.nodes} nodes on {workers} workers", where="workers", hint=f"at most {graph.nodes} workers: one without nodes idles")
    if method == "own" or workers == 1:
        of, used = _multilevel(graph.symmetric, workers, np.random.default_rng(seed), imbalance), "own"
    else:
        try:
            of, used = _metis(graph.symmetric, workers, seed), "pymetis"
        except ImportError:
            if method == "pymetis":
                raise MissingExtra("pymetis", extra="graphs", needed_for="partitioning by METIS") from None
            of, used = _multilevel(graph.symmetric, workers, np.random.default_rng(seed), imbalance), "own"
    s = graph.symmetric
    return Parts(of, workers, int((of[s.rows] != of[s.indices]).sum()) // 2, used)


def _metis(graph: NodeGraph, workers: int, seed: int) -> I64:
    import pymetis

    options = pymetis.Options(seed=seed)
    _, found = pymetis.part_graph(workers, pymetis.CSRAdjacency(graph.indptr, graph.indices), options=options)
    return np.asarray(found, np.int64)


def _multilevel(graph: NodeGraph, workers: int, rng: np.random.Generator, imbalance: float) -> I64:
    if workers == 1:
        return np.zeros(graph.nodes, np.int64)
    cap = int(np.ceil(graph.nodes / workers * (1 + imbalance)))
    levels = [_Level(graph.indptr, graph.indices, np.ones(graph.edges, np.int64), np.ones(graph.nodes, np.int64))]
    ups: list[I64] = []
    while len(levels[-1].mass) > SMALL * workers and not time_is_up():
        found = _coarser(levels[-1], rng, max(1, cap // 20))
        if len(found[0].mass) > SHRINKS * len(levels[-1].mass):
            break
        levels.append(found[0])
        ups.append(found[1])
    part = _first(levels[-1], workers, rng, cap)
    for level, up in zip(reversed(levels[:-1]), reversed(ups), strict=True):
        part = part[up]
        if not time_is_up():
            _refine(level, part, workers, rng, cap)
    return part


def _coarser(level: _Level, rng: np.random.Generator, heaviest: int) -> tuple[_Level, I64]:
    n = len(level.mass)
    mate = np.empty(n, np.int64)
    matched(level.ptr, level.idx, level.weight, level.mass, rng.permutation(n), heaviest, mate)
    first = np.minimum(mate, np.arange(n))
    kept, up = np.unique(first, return_inverse=True)
    m = len(kept)
    rows = up[np.repeat(np.arange(n), np.diff(level.ptr))]
    columns = up[level.idx]
    other = rows != columns
    keys, place = np.unique(rows[other] * m + columns[other], return_inverse=True)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(keys // m, minlength=m))]).astype(np.int64)
    weight = np.bincount(place, weights=level.weight[other], minlength=len(keys)).astype(np.int64)
    return _Level(ptr, keys % m, weight, np.bincount(up, weights=level.mass, minlength=m).astype(np.int64)), up


def _first(level: _Level, workers: int, rng: np.random.Generator, cap: int) -> I64:
    """The best of several breadth-first orders cut into equal pieces, each refined."""
    best: tuple[float, I64] | None = None
    for _ in range(STARTS):
        n = len(level.mass)
        order = np.empty(n, np.int64)
        breadth_order(level.ptr, level.idx, rng.permutation(n), np.zeros(n, bool), order)
        part = np.empty(n, np.int64)
        before = np.cumsum(level.mass[order]) - level.mass[order]
        part[order] = np.minimum(before * workers // int(level.mass.sum()), workers - 1)
        cut = _refine(level, part, workers, rng, cap)
        if best is None or cut < best[0]:
            best = cut, part
        if time_is_up():
            break
    assert best is not None
    return best[1]


def _refine(level: _Level, part: I64, workers: int, rng: np.random.Generator, cap: int) -> float:
    """Changes `part`. Returns the weight that is cut; infinite where a worker is over its cap."""
    load = np.bincount(part, weights=level.mass, minlength=workers).astype(np.int64)
    refined(level.ptr, level.idx, level.weight, level.mass, rng.permutation(len(part)), cap, part, load, np.zeros(workers, np.int64), PASSES)
    rows: NDArray[np.int64] = np.repeat(np.arange(len(part)), np.diff(level.ptr))
    cut = level.weight[part[rows] != part[level.idx]].sum()
    return float(cut) if load.max() <= cap else float("inf")
