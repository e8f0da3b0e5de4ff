"""Searching orders of hosts: all of them (`kernels.rank_orders`), dynamic programming for rings, exchanges, annealing.

What is permuted are hosts; the endpoints of a host stay together. Their own order is changed last, by exchanges (`inside`). Every search starts from
the identity and never returns anything worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from ....kernels.effort import NEVER, Deadline, count_work
from ....kernels.rank_orders import best_order
from .cost import Model, Objective

__all__ = ["MAX_EXACT_HOSTS", "MAX_EXACT_RING_HOSTS", "Search", "ring_tour"]

F64 = NDArray[np.float64]
MAX_EXACT_RING_HOSTS = 14  # hosts up to which rings are solved by dynamic programming: 2^13 subsets times hosts squared
MAX_EXACT_HOSTS = 12  # hosts that may move, up to which it is tried to look at every order or rule it out
MAX_EXACT_STARTS = 12_000_000  # beginnings of orders looked at for that: enough for any 10 hosts, which have 9.9 million
# Counted work (`kernels.effort`) of judging an order, per rank, and of a round of exchanges, per host, in seconds of a quiet core.
WORK_PER_RANK_S = 5e-6
WORK_PER_HOST_EXCHANGED_S = 3e-5


def ring_tour(d: F64, *, bottleneck: bool) -> list[int]:
    """The cheapest ring through all items by dynamic programming over subsets (Held and Karp): least sum, or least largest step.

    Cost: O(2^n n²) for n items.
    """
    n = len(d)
    if n < 3:
        return list(range(n))
    # best[subset, last]: cheapest path from item 0 through the subset, ending at `last`. A ring may start anywhere, so item 0 is fixed.
    full = 1 << (n - 1)  # subsets of items 1 .. n-1
    best = np.full((full, n - 1), np.inf)
    came = np.full((full, n - 1), -1, np.int8)
    for j in range(n - 1):
        best[1 << j, j] = d[0, j + 1]
    inner = d[1:, 1:]
    members = [np.flatnonzero([(m >> j) & 1 for j in range(n - 1)]) for m in range(full)]
    for mask in range(1, full):
        # Subsets in numerical order: without one of its members a subset is smaller, so it is done already.
        if mask & (mask - 1) == 0:
            continue
        for last in members[mask].tolist():
            before = mask ^ (1 << last)
            rest = members[before]
            step = inner[rest, last]
            reach = np.maximum(best[before, rest], step) if bottleneck else best[before, rest] + step
            k = int(reach.argmin())
            best[mask, last], came[mask, last] = reach[k], rest[k]
    back = d[1:, 0]
    close = np.maximum(best[full - 1], back) if bottleneck else best[full - 1] + back
    j, mask, tour = int(close.argmin()), full - 1, []
    while j >= 0:
        tour.append(j + 1)
        j, mask = int(came[mask, j]), mask ^ (1 << j)
    return [0, *reversed(tour)]


@dataclass
class Search:
    """One search for one model. `first`: the endpoint that stays rank 0 (None: free; rings start with endpoint 0).

    budget: orders evaluated at most.
    """

    model: Model
    rng: np.random.Generator
    budget: int = 4000
    restarts: int = 3
    first: int | None = None
    deadline: Deadline = NEVER
    evaluated: int = 0
    proof: str = ""  # "exact" when nothing better exists in this model
    best: Objective = field(init=False)
    order: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        matrix = self.model.matrix
        hosts: dict[int, list[int]] = {}
        for endpoint, host in enumerate(matrix.host):
            hosts.setdefault(host, []).append(endpoint)
        if self.first is not None:
            own = hosts[matrix.host[self.first]]
            own.remove(self.first)
            own.insert(0, self.first)
        self.hosts = list(hosts.values())
        if self.first is not None:
            self.hosts.sort(key=lambda members: members[0] != self.first)
        self.identity = tuple(range(len(matrix)))
        self.before = self.model(self.identity)
        self.order, self.best = self.identity, self.before
        if self.first:  # an identity that breaks the constraint is no answer
            self.order = self.expand(range(len(self.hosts)))
            self.best = self.model(self.order)

    def expand(self, items: Sequence[int]) -> tuple[int, ...]:
        return tuple(endpoint for h in items for endpoint in self.hosts[h])

    def left(self) -> bool:
        return self.evaluated < self.budget and not self.deadline.past

    def try_(self, items: Sequence[int]) -> Objective:
        """Evaluate an order of hosts and keep it if it is the best so far."""
        order = self.expand(items)
        found = self.model(order)
        self.evaluated += 1
        count_work(WORK_PER_RANK_S * len(order))
        if found < self.best:
            self.best, self.order = found, order
        return found

    def alike(self) -> bool:
        """Whether any two hosts may be exchanged without a cost changing: then all orders cost the same.

        Exchanges of neighbours generate all permutations, so those are what is tried.
        """
        matrix = self.model.matrix
        if len({len(members) for members in self.hosts}) > 1:
            return False
        group, capacity = np.array(matrix.group), matrix.capacity_Bps
        same_group = group[:, None] == group[None, :]
        for a, b in pairwise(self.hosts):
            # A symmetry must keep every cost, the groups and the rates of their uplinks.
            swap = np.arange(len(matrix))
            swap[a], swap[b] = b, a
            square = np.ix_(swap, swap)
            if not all((x == x[square]).all() for x in (matrix.alpha_s, matrix.beta_s_per_byte, same_group)):
                return False
            if (capacity[group] != capacity[group[swap]]).any():
                return False
        return True

    def run(self) -> None:
        if self.order == self.identity and self.identity == self.expand(range(len(self.hosts))) and self.alike():
            self.proof = "exact"
            return
        pinned = self.first is not None or self.model.rotates
        seeds = self._seeds()
        for seed in seeds:
            self.try_(seed)
        if len(self.hosts) - pinned <= MAX_EXACT_HOSTS:
            self._all(pinned)
            if self.proof:
                return
        if self.model.algorithm == "ring":
            self._ring(seeds)
        if not self.proof:
            for turn in range(self.restarts):
                if self.left():
                    start = min(seeds, key=lambda s: self.model(self.expand(s))) if turn == 0 else self._shuffled()
                    self._anneal(start, self.budget // self.restarts)
        self._turn()

    def inside(self) -> None:
        """Exchanges of two endpoints of a host, until none helps. What was proved for orders of whole hosts is proved no more if one does."""
        improved = True
        while improved and self.left():
            improved = False
            for a, b in self._unlike_pairs():
                if not self.left():
                    return
                trial = list(self.order)
                trial[a], trial[b] = trial[b], trial[a]
                found = self.model(trial)
                self.evaluated += 1
                count_work(WORK_PER_RANK_S * len(trial))
                if found < self.best:
                    self.best, self.order, self.proof, improved = found, tuple(trial), "", True

    def _unlike_pairs(self) -> list[tuple[int, int]]:
        """Positions of endpoints of one host whose exchange changes some cost; a rank that is pinned is in none."""
        matrix = self.model.matrix
        at = {endpoint: place for place, endpoint in enumerate(self.order)}
        found = []
        for members in self.hosts:
            for a, b in combinations([m for m in members if m != self.first], 2):
                swap = np.arange(len(matrix))
                swap[[a, b]] = b, a
                # An exchange that changes nothing leaves the rows and the columns of both as they are; the rest of the matrix it does not touch.
                if any((x[a] != x[b, swap]).any() or (x[:, a] != x[swap, b]).any() for x in (matrix.alpha_s, matrix.beta_s_per_byte)):
                    found.append((at[a], at[b]))
        return found

    def _all(self, pinned: bool) -> None:
        matrix = self.model.matrix
        order, whole, seen = best_order(
            self.hosts, int(pinned), self.model.passes, matrix.alpha_s, matrix.beta_s_per_byte, np.asarray(matrix.group, np.int64),
            matrix.capacity_Bps, self.order, most=MAX_EXACT_STARTS,
        )  # fmt: skip
        self.evaluated += seen
        found = self.model(order)
        if found < self.best:
            self.best, self.order = found, order
        self.proof = "exact" if whole else ""

    def _shuffled(self) -> list[int]:
        tail = self.rng.permutation(np.arange(1, len(self.hosts))).tolist()
        return [0, *tail]

    # ---- seeds ------------------------------------------------------------------------------------------------------
    def _seeds(self) -> list[list[int]]:
        """Identity, and hosts by locality group: groups nearest first, or largest first (aligned to powers of two), from the first host on."""
        groups: dict[int, list[int]] = {}
        for h, members in enumerate(self.hosts):
            groups.setdefault(self.model.matrix.group[members[0]], []).append(h)
        d = self._between()
        listed = list(groups.values())
        chain, left = [listed[0]], listed[1:]
        while left:
            near = min(left, key=lambda g: (float(d[np.ix_(chain[-1], g)].mean()), g[0]))
            chain.append(near)
            left.remove(near)
        large = [listed[0], *sorted(listed[1:], key=lambda g: (-len(g), g[0]))]
        free = self.first is None and not self.model.rotates
        seeds = [list(range(len(self.hosts))), [h for g in chain for h in g], [h for g in large for h in g]]
        return seeds + ([[h for g in sorted(listed, key=lambda g: (-len(g), g[0])) for h in g]] if free else [])

    def _between(self) -> F64:
        """Cost of the model's typical message from the last endpoint of a host to the first of another."""
        matrix = self.model.matrix
        sizes = [float(s.size_bytes.mean()) for s in self.model.stages] or [t.piece_bytes for t in self.model.trees]
        cost = matrix.message_s(float(np.mean(sizes)))
        d: F64 = cost[np.ix_([m[-1] for m in self.hosts], [m[0] for m in self.hosts])]
        return d

    # ---- rings ------------------------------------------------------------------------------------------------------
    def _ring(self, seeds: Sequence[Sequence[int]]) -> None:
        """Least largest step, then fewest crossings between groups, then least sum."""
        d = self._between()
        group = np.array([self.model.matrix.group[m[0]] for m in self.hosts])
        crossing = (group[:, None] != group[None, :]).astype(np.float64)
        # One crossing weighs more than all steps together: least sum of weights is fewest crossings first, then least sum.
        weight = crossing * (2 * float(d.sum()) + 1e-30) + d
        if len(self.hosts) <= MAX_EXACT_RING_HOSTS:
            tour = ring_tour(d, bottleneck=True)
            limit = max(float(d[a, b]) for a, b in zip(tour, [*tour[1:], tour[0]], strict=True))
            # Steps above the least largest one are priced out of reach, so the second search keeps the first aim.
            exact = ring_tour(np.where(d <= limit, weight, 1e6 * (float(weight.max()) + 1)), bottleneck=False)
            self.try_(tour)
            found = self.try_(exact)
            if not np.isfinite(self.model.matrix.capacity_Bps).any() and found == self.best:
                self.proof = "exact"
            return
        for seed in seeds:
            if self.left():
                self.try_(self._exchanged(list(seed), np.maximum(weight, weight.T)))

    def _exchanged(self, tour: list[int], w: F64) -> list[int]:
        """2-opt and or-opt until nothing helps, on symmetric weights, with the gain of every exchange in O(1)."""
        n, improved = len(tour), True
        while improved and not self.deadline.past:
            improved = False
            count_work(WORK_PER_HOST_EXCHANGED_S * n)
            for i in range(n - 1):
                t = np.array(tour)
                js = np.arange(i + 2, n if i else n - 1)
                if len(js):
                    a, b, c, e = t[i], t[i + 1], t[js], t[(js + 1) % n]
                    # Reversing what lies between replaces only these two edges, as weights are alike both ways.
                    gain = w[a, b] + w[c, e] - w[a, c] - w[b, e]
                    k = int(gain.argmax())
                    if gain[k] > 1e-12 * w.max():
                        tour[i + 1 : js[k] + 1] = tour[i + 1 : js[k] + 1][::-1]
                        improved = True
            for length in (1, 2, 3):
                improved |= self._moved(tour, w, length)
        start = tour.index(0)
        return tour[start:] + tour[:start]

    def _moved(self, tour: list[int], w: F64, length: int) -> bool:
        """Or-opt: a stretch of `length` goes where it is cheapest."""
        n, moved = len(tour), False
        if n <= length + 2:
            return False
        for _ in range(n):
            stretch, rest = tour[1 : 1 + length], np.array([tour[0], *tour[1 + length :]])
            after = np.roll(rest, -1)
            out = w[tour[0], stretch[0]] + w[stretch[-1], after[0]] - w[tour[0], after[0]]
            into = w[rest, stretch[0]] + w[stretch[-1], after] - w[rest, after]
            k = int(into.argmin())
            if k and out - into[k] > 1e-12 * w.max():
                tour[:] = [*rest[: k + 1].tolist(), *stretch, *rest[k + 1 :].tolist()]
                moved = True
            tour[:] = [*tour[1:], tour[0]]
        return moved

    # ---- anything ---------------------------------------------------------------------------------------------------
    def _anneal(self, items: Sequence[int], budget: int) -> None:
        """Exchanges of two hosts; T0 is the spread of 100 random exchanges, cooled by 0.995 every few steps."""
        # A rank that is pinned stays where it is; so does host 0 where only the ring matters.
        now, m = list(items), len(self.hosts)
        lowest = 1 if self.first is not None or self.model.rotates else 0
        # The sum of all messages counts a thousandth: it leads over plateaus, where one slow message decides the time.
        scale = self.before.time_s / self.before.sum_s / 1000 if self.before.sum_s > 0 else 0.0

        def value(found: Objective) -> float:
            return found.time_s + scale * found.sum_s

        def swapped() -> list[int]:
            i, j = self.rng.choice(np.arange(lowest, m), 2, replace=False)
            trial = list(now)
            trial[i], trial[j] = trial[j], trial[i]
            return trial

        here = value(self.try_(now))
        sample = [value(self.try_(swapped())) for _ in range(min(100, budget // 4))]
        heat, end = float(np.std(sample)) if sample else 0.0, self.evaluated + budget
        steps = max(1, budget // 1400)
        while self.evaluated < end and self.left():
            for _ in range(steps):
                trial = swapped()
                there = value(self.try_(trial))
                if there <= here or (heat > 0 and self.rng.random() < np.exp((here - there) / heat)):
                    now, here = trial, there
            heat *= 0.995

    def _turn(self) -> None:
        """Where only the ring matters, let it start with endpoint 0's host, so that equal rings are equal orders."""
        if self.model.rotates and self.first is None and self.order != self.identity:
            start = self.order.index(self.hosts[0][0])
            turned = self.order[start:] + self.order[:start]
            if self.model(turned) <= self.best:
                self.order = turned
