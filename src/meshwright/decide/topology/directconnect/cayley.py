"""Wirings that look the same from every node: Cayley digraphs of cyclic groups and their semidirect products, searched at random.

Elements of Z_m x|_k Z_n are pairs (a, b) with (a, b)(c, e) = (a + k^b c, b + e) and k^n = 1 mod m; x is joined to x g for every generator g. One
breadth-first search from the unit element gives the cost of all nodes; the transposed wiring is that of the inverse generators. Circulants are n = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain, combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from ....kernels.effort import time_is_up
from .loads import busiest, subset_sums
from .table import shipped_graphs
from .wiring import Wiring

__all__ = ["MAX_GENERATORS", "Group", "best_sets", "cayley_cost", "groups", "search"]

MAX_TIES = 8  # equal wirings that a search keeps: their line graphs differ
MAX_GENERATORS = 8  # of a search: sets are counted in 2^d numbers for every candidate


@dataclass(frozen=True)
class Group:
    """Z_m x|_k Z_n; element (a, b) is number a · n + b, the unit is 0."""

    m: int
    n: int
    k: int

    @property
    def order(self) -> int:
        return self.m * self.n

    @cached_property
    def powers(self) -> NDArray[np.int64]:
        return np.array([pow(self.k, b, self.m) for b in range(self.n)], np.int64)

    def times(self, g: int) -> NDArray[np.int64]:
        """[x]: x g."""
        c, e = divmod(g, self.n)
        a, b = np.divmod(np.arange(self.order), self.n)
        return np.asarray((a + self.powers[b] * c) % self.m * self.n + (b + e) % self.n)

    def inverse(self, g: int) -> int:
        c, e = divmod(g, self.n)
        b = -e % self.n
        return int(-self.powers[b] * c % self.m) * self.n + b

    def label(self, generators: tuple[int, ...]) -> str:
        if self.n == 1:
            return f"C{self.m}[{','.join(map(str, generators))}]"
        return f"Z{self.m}:{self.k}:Z{self.n}[{','.join('{}.{}'.format(*divmod(g, self.n)) for g in generators)}]"

    def wiring(self, generators: tuple[int, ...]) -> Wiring:
        arcs = np.concatenate([np.stack([np.arange(self.order), self.times(g)], 1) for g in generators])
        return Wiring.of(self.label(generators), self.order, arcs.astype(np.int32), transitive=True)


def groups(order: int) -> list[Group]:
    """The cyclic group, and every semidirect product of two cyclic groups of that order, one per action up to what k says."""
    found = [Group(order, 1, 1)]
    for m in range(2, order):
        if order % m == 0:
            n = order // m
            found += [Group(m, n, k) for k in range(1, m) if pow(k, n, m) == 1 % m]
    return found


def cayley_cost(group: Group, generators: tuple[int, ...], *, most_steps: int) -> tuple[int, Fraction] | None:
    """(steps, load) of an all-gather; None where it does not reach all within `most_steps`."""
    d = len(generators)
    before = np.stack([group.times(group.inverse(g)) for g in generators])  # [i, y]: from where generator i leads to y
    sizes = subset_sums(np.array([1 if mask and not mask & (mask - 1) else 0 for mask in range(1 << d)], np.int64))
    front = np.zeros(group.order, bool)
    front[0] = True
    left, load, steps = ~front, Fraction(0), 0
    bits = (1 << np.arange(d))[:, None]
    count = group.order - 1
    while count:
        if steps == most_steps:
            return None
        masks = (front[before] * bits).sum(axis=0) * left
        counts = np.bincount(masks, minlength=1 << d)
        counts[0] = 0
        new = int(counts.sum())
        if not new:
            return None
        load += busiest(subset_sums(counts), sizes)[0]
        front = masks > 0
        left &= ~front
        count -= new
        steps += 1
    return steps, load


def _candidates(order: int, ports: int, paired: bool, evaluations: int, rng: np.random.Generator) -> Iterator[tuple[Group, tuple[int, ...]]]:
    """All generator sets of the cyclic group where they are few; then random sets of random groups."""
    known = groups(order)
    cyclic = known[0]
    if not paired and comb(order - 1, ports) <= evaluations // 4:
        yield from ((cyclic, some) for some in combinations(range(1, order), ports))
    elif paired and ports % 2 == 0 and comb((order - 1) // 2, ports // 2) <= evaluations // 4:
        for half in combinations(range(1, (order + 1) // 2), ports // 2):
            yield cyclic, tuple(sorted({x for g in half for x in (g, order - g)}))
    while True:
        group = known[int(rng.integers(len(known)))]
        chosen: list[int] = []
        for _ in range(8 * ports):  # tries to add a generator, or a pair of them
            g = int(rng.integers(1, order))
            added = {g, group.inverse(g)} if paired else {g}
            if len(chosen) + len(added) <= ports and not added & set(chosen):
                chosen += sorted(added)
            if len(chosen) == ports:
                yield group, tuple(sorted(chosen))
                break
        else:
            yield group, ()


def search(
    order: int, ports: int, *, paired: bool, evaluations: int, rng: np.random.Generator, most_steps: int, shipped: bool = True
) -> list[tuple[int, Fraction, Wiring]]:
    """The frontier of (steps, load) over both directions that so many evaluated candidates reach, and with `shipped` those of the shipped table.

    Up to `MAX_TIES` wirings at each point."""
    found = best_sets(order, ports, paired=paired, evaluations=evaluations, rng=rng, most_steps=most_steps, shipped=shipped)
    return [(t, load, group.wiring(generators)) for t, load, group, generators in found]


def best_sets(
    order: int, ports: int, *, paired: bool, evaluations: int, rng: np.random.Generator, most_steps: int, shipped: bool
) -> list[tuple[int, Fraction, Group, tuple[int, ...]]]:
    """As `search`, as groups and generators."""
    best: dict[int, tuple[Fraction, list[tuple[Group, tuple[int, ...]]]]] = {}
    if not 1 <= ports <= min(MAX_GENERATORS, order - 1):
        return []

    def beaten(steps: int, load: Fraction) -> bool:
        at = best.get(steps)
        full = at is not None and len(at[1]) == MAX_TIES and at[0] <= load
        return full or any(t <= steps and row[0] <= load and (t, row[0]) != (steps, load) for t, row in best.items())

    evaluations = min(evaluations, 2 * len(groups(order)) * comb(order - 1, ports))  # small groups have few sets
    drawn = (candidate for _, candidate in zip(range(evaluations), _candidates(order, ports, paired, evaluations, rng), strict=False))
    known = ((Group(x.m, x.n, x.k), x.generators) for x in (shipped_graphs().get((order, ports, paired), ()) if shipped else ()))
    for group, generators in chain(drawn, known):
        if time_is_up():
            break
        cost = cayley_cost(group, generators, most_steps=most_steps) if generators else None
        if cost is None or beaten(*cost):
            continue
        if not paired:
            back = cayley_cost(group, tuple(group.inverse(g) for g in generators), most_steps=most_steps)
            if back is None:
                continue
            cost = max(cost[0], back[0]), max(cost[1], back[1])
            if beaten(*cost):
                continue
        best = {t: row for t, row in best.items() if t <= cost[0] or row[0] < cost[1]}
        tied = best[cost[0]][1] if cost[0] in best and best[cost[0]][0] == cost[1] else []
        best[cost[0]] = cost[1], tied + [(group, generators)] * ((group, generators) not in tied)
    return [(t, load, group, generators) for t, (load, some) in sorted(best.items()) for group, generators in some]
