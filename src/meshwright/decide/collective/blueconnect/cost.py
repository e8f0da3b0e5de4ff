"""The cost table: how long every stage of a grid plan takes, and which plans are worth simulating.

Source: BlueConnect (MLSys 2019), the cost of a stage: steps · alpha + bytes / (b / s), with s the groups that share one port. Here s is not
a parameter but counted: every stage's messages are laid over the fabric's routes, and the busiest link, with all groups at once, gives the
time; `Level.stage_s` is the closed form for a hierarchy stated by its numbers.
Slices: sum of the stages for the first, and the busiest link or the slowest stage for each further one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from math import log2, prod

import numpy as np
from numpy.typing import NDArray

from ....cost import Transport
from ..memo import remember
from ..problem import CollectiveProblem
from .flow import LANES_PER_MESSAGE
from .grid import GridPlan, in_rank_order
from .levels import Hierarchy
from .stages import PRIMITIVES, halves

__all__ = ["CostTable", "Level", "factorisations", "ranked_plans"]

MAX_FACTORS = 6  # stages of a plan that is priced
HALVES = {"all-reduce": 2, "broadcast": 2, "reduce": 2}


@dataclass(frozen=True)
class Level:
    """One level stated by its numbers: latency of a step, rate per participant, groups sharing a port."""

    alpha_s: float
    rate_Bps: float
    share: int = 1

    def stage_s(self, primitive: str, k: int, size_bytes: float, overhead_s: float = 0.0) -> float:
        """Seconds of one reduce-scatter or all-gather of `size_bytes` in groups of k."""
        moved_s = (1 - 1 / k) * size_bytes / (self.rate_Bps / self.share)
        if primitive == "ring":
            return (k - 1) * self.alpha_s + moved_s
        if primitive == "halving-doubling":
            return log2(k) * self.alpha_s + moved_s
        return self.alpha_s + (k - 1) * overhead_s + moved_s


def factorisations(size: int) -> list[tuple[int, ...]]:
    """All ordered factorisations into factors of at least 2; (1,) has none: [()]."""
    if size == 1:
        return [()]
    return [(k, *rest) for k in range(2, size + 1) if size % k == 0 for rest in factorisations(size // k)]


@dataclass(frozen=True)
class _Stage:
    """Latency part and seconds per byte of a stage's range, and the same per link."""

    latency_s: float
    per_byte: NDArray[np.float64]


_Route = tuple[NDArray[np.int64], float]
_Caches = tuple[dict[tuple[object, ...], _Stage], dict[tuple[object, ...], list[int]], dict[tuple[int, int], _Route]]


class CostTable:
    """Costs of the stages of one problem; kept by (grid, stride, size, primitive)."""

    def __init__(self, problem: CollectiveProblem) -> None:
        self.problem, self.fabric = problem, problem.fabric
        self.actor = [self.fabric.actor_of[name] for name in problem.ranks]
        self.rate = np.array([x.rate_Bps for x in self.fabric.links], np.float64)
        transport = problem.transport or Transport()
        self.message_s = 2 * (transport.per_message_s + transport.per_step_s)
        self.byte_s = 2 * transport.per_byte_s
        key = "blueconnect costs", problem.ranks, transport, problem.op == "all-to-all"
        caches: _Caches = remember(self.fabric, key, lambda: ({}, {}, {}))  # nothing in them depends on the size
        self._stages, self._stretches, self._routes = caches

    def _route(self, a: int, b: int) -> _Route:
        found = self._routes.get((a, b))
        if found is None:
            links = self.fabric.route(self.actor[a], self.actor[b])
            library = max((self.fabric.links[x].library_latency_s for x in links), default=0.0)
            found = np.array(links, np.int64), sum(self.fabric.links[x].latency_s for x in links) + library
            self._routes[a, b] = found
        return found

    def stage(self, plan: GridPlan, i: int, *, exchange: bool = False) -> _Stage:
        """Stage i: one direction of it (a reduce-scatter, or an all-gather), per byte that a member's range has before it."""
        j = plan.order[i]
        k, primitive = plan.factors[j], "direct" if exchange else plan.primitives[i]
        key = (plan.grid, plan.strides[j], k, primitive)
        if key not in self._stages:
            self._stages[key] = self._counted(plan, j, k, primitive)
        return self._stages[key]

    def _counted(self, plan: GridPlan, j: int, k: int, primitive: str) -> _Stage:
        rounds: list[tuple[float, list[int]]]  # (share of the range per message, turn to the partner's digit)
        if primitive == "ring" and k > 2:
            # All k - 1 rounds of a ring take the same links: one round with their bytes together, and k - 1 times its latency below.
            rounds = [((k - 1) / k, [1])]
        elif primitive == "halving-doubling" and halves(k):
            rounds = [((1 << bit) / k, [1 << bit]) for bit in range(k.bit_length() - 1)]
        else:
            rounds = [(1 / k, list(range(1, k)))]
        flips = primitive == "halving-doubling" and halves(k)
        total, alpha = np.zeros(len(self.rate)), 0.0
        for share, turns in rounds:
            routes = [
                self._route(plan.grid[group[m]], plan.grid[group[m ^ turn if flips else (m + turn) % k]])
                for group in plan.groups(j) for m in range(k) for turn in turns
            ]  # fmt: skip
            slowest = max(latency for _, latency in routes)
            # Every group at once: what they share of a link adds up here, instead of a sharing factor per level.
            total += np.bincount(np.concatenate([links for links, _ in routes]), minlength=len(self.rate)) * share / self.rate
            alpha += slowest + self.message_s * len(turns)
        if primitive == "ring" and k > 2:
            alpha *= k - 1
        return _Stage(alpha, total)

    def time_s(self, plan: GridPlan, slices: int = 1) -> float:
        """Predicted seconds. Operations that scatter and gather back pay each stage twice."""
        return _pipelined(*self._profile(plan), slices)

    def _profile(self, plan: GridPlan) -> tuple[list[float], list[float], float, int]:
        """(latency of every stage, seconds its bytes take, seconds of the busiest link in all, times each stage is passed)."""
        problem, op = self.problem, self.problem.op
        size, ways = float(problem.size_bytes), HALVES.get(op, 1)
        busy, latencies, moving = np.zeros(len(self.rate)), [], []
        runs = self._runs(plan) if in_rank_order(op) else [1] * len(plan.order)
        for i, stretch in enumerate(runs):
            stage = self.stage(plan, i, exchange=op == "all-to-all")
            # Each stage scatters what is left by its factor, so later stages move less; an all-to-all moves everything in every stage.
            length = size if op == "all-to-all" else size / prod(plan.factors[x] for x in plan.order[:i])
            k = plan.factors[plan.order[i]]
            # A piece that lies in several stretches is so many messages; beyond LANES_PER_MESSAGE they also wait for each other's latency.
            extra = (stretch - 1) * self.message_s * (1 if plan.primitives[i] == "halving-doubling" else k - 1)
            extra += (stretch - 1) // LANES_PER_MESSAGE * stage.latency_s
            latencies.append(stage.latency_s + extra)
            moving.append(length * float(stage.per_byte.max()) + length * (1 - 1 / k) * self.byte_s)
            # Stages of different slices overlap, so over all slices a link carries what all stages put on it, both ways.
            busy += ways * length * stage.per_byte
        return latencies, moving, float(busy.max()), ways

    def best(self, plan: GridPlan, most: int = 32) -> tuple[int, float]:
        """(slices, seconds) that the table likes best among powers of two up to `most`."""
        profile = self._profile(plan)
        # More slices overlap more, and each further one costs at least a stage's latency.
        options = [1 << i for i in range(most.bit_length())]
        return min(((slices, _pipelined(*profile, slices)) for slices in options), key=lambda pair: (pair[1], pair[0]))

    def _runs(self, plan: GridPlan) -> list[int]:
        """Stretches per message of every stage, where blocks lie in rank order: counted on one message."""
        key = (plan.grid, plan.factors, plan.order)
        if key not in self._stretches:
            out = []
            for i, j in enumerate(plan.order):
                # Blocks of a message: those that agree in this stage's digit and all earlier ones, all values of the later digits.
                rest = [x for x in range(len(plan.factors)) if x not in plan.order[: i + 1]]
                if self.problem.op == "all-to-all":
                    rest = [x for x in range(len(plan.factors)) if x != j]
                free = product(*(range(plan.factors[x]) for x in rest))
                blocks = sorted(plan.grid[sum(d * plan.strides[x] for d, x in zip(digits, rest, strict=True))] for digits in free)
                out.append(1 + sum(1 for a, b in pairwise(blocks) if b != a + 1))
            self._stretches[key] = out
        return self._stretches[key]


def _pipelined(latencies: Sequence[float], moving: Sequence[float], busiest_s: float, ways: int, slices: int) -> float:
    """The first slice passes all stages; every further one is held up by the busiest link or by the slowest stage."""
    first = ways * (sum(latencies) + sum(moving) / slices)
    slowest = max(a + m / slices for a, m in zip(latencies, moving, strict=True))
    return first + (slices - 1) * max(busiest_s / slices, slowest)


# ---- plans ------------------------------------------------------------------------------------------------------------------
def _digit_sets(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Factorisations of levels, and of levels joined with their neighbours, fastest digit first."""
    found: dict[tuple[int, ...], None] = {}
    for cuts in product((False, True), repeat=len(sizes) - 1):
        joined = [sizes[0]]
        for size, cut in zip(sizes[1:], cuts, strict=True):
            if cut:
                joined.append(size)
            else:
                joined[-1] *= size
        for parts in product(*(factorisations(size) for size in joined)):
            factors = tuple(k for part in parts for k in part)
            if len(factors) <= MAX_FACTORS:
                found[factors] = None
    return list(found)


def _orders(count: int) -> list[tuple[int, ...]]:
    # All orders of up to four stages; of more only outwards, inwards, and outwards from another stage on, going round.
    if count <= 4:
        return list(permutations(range(count)))
    forward = tuple(range(count))
    return [forward, forward[::-1]] + [forward[i:] + forward[:i] for i in range(1, count)]


def _useful(k: int) -> tuple[str, ...]:
    if k == 2:
        return ("direct",)
    return PRIMITIVES if halves(k) else ("direct", "ring")


def ranked_plans(table: CostTable, hierarchies: Sequence[Hierarchy], most: int) -> list[tuple[GridPlan, float]]:
    """The cheapest plans by the table, each in its best number of slices, cheapest first; per factorisation and order every stage's best primitive.

    The best plan of every number of stages is kept, so that the table's error does not decide between few and many stages.
    """
    priced: dict[GridPlan, float] = {}
    for hierarchy in hierarchies:
        for factors in _digit_sets(hierarchy.sizes):
            for order in _orders(len(factors)):
                for plan in _with_primitives(table, hierarchy.grid, factors, order):
                    priced[plan] = table.best(plan)[1]
    ranked = sorted(priced.items(), key=lambda item: (item[1], len(item[0].factors), item[0].order))
    chosen = ranked[:most]
    for count in sorted({len(plan.factors) for plan, _ in ranked}):
        # The table errs most between plans of unlike numbers of stages, whose latencies it adds up: the simulator sees one of each.
        best = next(item for item in ranked if len(item[0].factors) == count)
        if best not in chosen and best[1] < 2 * ranked[0][1]:
            chosen.append(best)
    return chosen


def _with_primitives(table: CostTable, grid: tuple[int, ...], factors: tuple[int, ...], order: tuple[int, ...]) -> list[GridPlan]:
    """Every stage by its cheapest primitive; and all stages direct, all rings."""
    op, size = table.problem.op, float(table.problem.size_bytes)
    if op == "all-to-all":
        return [GridPlan(grid, factors, order, ("direct",) * len(order))]
    best: list[str] = []
    for i, j in enumerate(order):
        length = size / prod(factors[x] for x in order[:i])

        def price(name: str, i: int = i, length: float = length) -> float:
            names = tuple("direct" if x != i else name for x in range(len(order)))
            stage = table.stage(GridPlan(grid, factors, order, names), i)
            return stage.latency_s + length * float(stage.per_byte.max())

        best.append(min(_useful(factors[j]), key=price))
    options = [tuple(best)] + [tuple(name if name in _useful(factors[j]) else "direct" for j in order) for name in ("direct", "ring")]
    return [GridPlan(grid, factors, order, names) for names in dict.fromkeys(options)]
