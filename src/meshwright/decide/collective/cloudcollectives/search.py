"""Searching orders of hosts: all of them, dynamic programming for rings, exchanges, annealing.

What is permuted are hosts; the endpoints of a host stay together, in their own order. Every search starts from the identity and never returns
anything worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from ....kernels.effort import NEVER, Deadline, count_work
from .cost import CostMatrix, Model, Objective

__all__ = ["MAX_EXACT_RING_HOSTS", "MAX_EXACT_ORDERS", "Search", "infer_groups", "ring_tour"]

F64 = NDArray[np.float64]
MAX_EXACT_RING_HOSTS = 14  # hosts up to which rings are solved by dynamic programming: 2^13 subsets times hosts squared
MAX_EXACT_ORDERS = 5040  # orders up to which all are tried: 7!
# Counted work (`kernels.effort`) of judging an order, per rank, and of a round of exchanges, per host, in seconds of a quiet core.
WORK_PER_RANK_S = 5e-6
WORK_PER_HOST_EXCHANGED_S = 3e-5


def infer_groups(cost: F64, *, gap: float = 1.5) -> tuple[int, ...]:
    """Locality groups by average linkage: clusters are joined nearest first, and the joining stops before the largest jump in distance.

    A jump by less than `gap` times means one group. Groups are numbered in order of their first endpoint.
    """
    n = len(cost)
    distance = np.maximum(cost, cost.T).astype(np.float64)
    np.fill_diagonal(distance, np.inf)
    label, size, alive = np.arange(n), np.ones(n), np.ones(n, bool)
    heights: list[float] = []
    states = [label.copy()]
    for _ in range(n - 1):
        a, b = divmod(int(distance.argmin()), n)
        heights.append(float(distance[a, b]))
        merged = (distance[a] * size[a] + distance[b] * size[b]) / (size[a] + size[b])
        merged[[a, b]] = np.inf
        distance[a], distance[:, a] = merged, merged
        distance[b], distance[:, b] = np.inf, np.inf
        distance[:, ~alive] = np.inf
        size[a] += size[b]
        alive[b] = False
        label = np.where(label == b, a, label)
        states.append(label.copy())
    # Joining distances never fall with average linkage; the largest jump lies between distances inside groups and between them.
    jumps = [high / low if low > 0 else np.inf if high > 0 else 1.0 for low, high in pairwise(heights)]
    if not jumps or max(jumps) < gap:
        return (0,) * n
    chosen = states[int(np.argmax(jumps)) + 1]
    number: dict[int, int] = {}
    return tuple(number.setdefault(int(x), len(number)) for x in chosen)


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
        count = len(self.hosts)
        pinned = self.first is not None or self.model.rotates
        orders = 1
        # Counted up to the limit only: factorials grow too fast to be formed first.
        for k in range(2, count if pinned else count + 1):
            orders *= k
            if orders > MAX_EXACT_ORDERS:
                break
        if orders <= MAX_EXACT_ORDERS:
            self._all(pinned)
            return
        seeds = self._seeds()
        for seed in seeds:
            self.try_(seed)
        if self.model.algorithm == "ring":
            self._ring(seeds)
        if not self.proof:
            for turn in range(self.restarts):
                if self.left():
                    start = min(seeds, key=lambda s: self.model(self.expand(s))) if turn == 0 else self._shuffled()
                    self._anneal(start, self.budget // self.restarts)
        self._turn()

    def _all(self, pinned: bool) -> None:
        rest = range(1 if pinned else 0, len(self.hosts))
        self.budget = max(self.budget, 2 * MAX_EXACT_ORDERS)
        complete = True
        for tail in permutations(rest):
            if not self.left():
                complete = False
                break
            self.try_((0, *tail) if pinned else tail)
        self.proof = "exact" if complete else ""

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
        cost = matrix.alpha_s + float(np.mean(sizes)) * matrix.beta_s_per_byte
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




def groups_of(matrix: CostMatrix, size_bytes: float = 0.0) -> tuple[int, ...]:
    """Locality groups inferred from the costs of a message."""
    return infer_groups(matrix.alpha_s + size_bytes * matrix.beta_s_per_byte)
