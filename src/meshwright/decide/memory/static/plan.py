"""Offsets of storages in one arena: a portfolio of placements, a walk that lowers the best of them, an exact search where there is one stream.

Cite: CITE (safety from the partial order, contiguous groups, portfolio), MINIMALLOC (exact search).
Left open by SOMAS: how far from the best its arenas are. Our answer: the heaviest antichain as lower bound with the storages that prove it, and
a search that ends at it or says what is missing.
Invariant: a plan at its bound is optimal; every plan is safe in all interleavings, checked by `check.arena`, which shares nothing with this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ....arena import ArenaPlan, ArenaProblem, Rows
from ....cite import FOLKLORE, Cite
from ....errors import Infeasible, UsageError
from ....kernels.effort import Budget, stop_flag, time_is_up
from ..problem import ArenaStrategy
from .antichain import heaviest_antichain
from .improve import improve
from .intervals import FITS, MAX_SEARCHED_STORAGES, NEVER, mixed_order, preorders, search
from .order import Lifetimes, conflicts, lifetimes
from .place import Blocks, blocks_of, place

__all__ = ["CITE", "MINIMALLOC", "FirstFit", "StaticMemory"]

CITE = Cite(
    key="sheng2023somas", title="Safe Optimized Static Memory Allocation for Parallel Deep Learning", year=2023, venue="MLSys",
)  # fmt: skip
MINIMALLOC = Cite(
    key="moffitt2023minimalloc", title="MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", year=2023,
    venue="ASPLOS",
)  # fmt: skip

I64 = NDArray[np.int64]
# Conflicts that the walk looks at per unit of effort: some twenty seconds.
VISITS_PER_EFFORT = 500_000_000
# Nodes of the exact search per unit of effort at the capacity that is asked for, or the bound.
GOAL_NODES_PER_EFFORT = 1_000_000
# Nodes per unit of effort at the capacities between that and the best arena, all together.
BETWEEN_NODES_PER_EFFORT = 2_000_000
# Nodes per unit of effort at each of these capacities at first; they double where no capacity could be decided.
FIRST_NODES_PER_EFFORT = 32_000
# Nodes of one search under a random order: many short ones, since what is stuck under one order is not under most others.
MAX_RANDOM_ORDER_NODES = 32_000
# Blocks up to which every order is tried: 5,040 placements.
MAX_EXHAUSTIVE_BLOCKS = 7


@dataclass(frozen=True, kw_only=True)
class FirstFit(ArenaStrategy):
    """One placement. Options. by: size, area, span, load or product (size x conflicts), largest first; best_fit: tightest place, not lowest."""

    name: ClassVar[str] = "first-fit"
    cite: ClassVar[Cite] = FOLKLORE

    by: str = "size"
    best_fit: bool = False

    def plan(self, problem: ArenaProblem, *, rng: np.random.Generator) -> ArenaPlan:
        """Raises: UsageError for an unknown order or a problem that contradicts itself; Unsupported for too many pairs."""
        work = _Work.of(problem)
        if self.by not in work.orders():
            raise UsageError(f"there is no order {self.by!r}", where="by", hint=f"there are: {', '.join(work.orders())}")
        offset = np.full(len(problem.size_bytes), -1, np.int64)
        height = work.place(work.orders()[self.by], self.best_fit, offset)
        return work.plan(self.name, height, offset, ((_label(self.by, self.best_fit), height),))


@dataclass(frozen=True, kw_only=True)
class StaticMemory(ArenaStrategy):
    """Everything. Options. effort: how long to search where the bound is not reached, in units of some seconds; 0: no search. capacity_bytes: if > 0,
    the arena's size, and Infeasible when no placement is found under it (`data["proved"]`: there is none). seconds: if > 0, a net: an end
    to the search by the clock, which the plan's `cut` tells of."""

    name: ClassVar[str] = "static"
    cite: ClassVar[Cite] = CITE

    effort: int = 1
    capacity_bytes: int = 0
    seconds: float = 0.0

    def plan(self, problem: ArenaProblem, *, rng: np.random.Generator) -> ArenaPlan:
        """Raises: Infeasible for a capacity that is not met, TimeLimit where the clock cut that search; UsageError for a problem that contradicts
        itself; Unsupported for too many pairs."""
        if self.effort < 0 or self.capacity_bytes < 0 or self.seconds < 0:
            raise UsageError("options are not negative", where="effort, capacity_bytes, seconds")
        work = _Work.of(problem)
        goal = max(work.bound_bytes, self.capacity_bytes)
        tried: list[tuple[str, int]] = []
        best, best_offset, best_way = -1, np.zeros(0, np.int64), ("size", False)
        budget = Budget(2 * len(work.orders()) + 2, time_limit_s=self.seconds or float("inf"))
        for by, order in work.orders().items():
            for best_fit in (False, True):
                if 0 <= best <= goal or not budget.spend():
                    break
                offset = np.full(len(problem.size_bytes), -1, np.int64)
                height = work.place(order, best_fit, offset)
                tried.append((_label(by, best_fit), height))
                if best < 0 or height < best:
                    best, best_offset, best_way = height, offset, (by, best_fit)
        never, unit = 0, 1  # capacities up to `never` are proved too small; every arena worth having is a multiple of `unit`
        searched = bool(best > goal and self.effort and work.single and len(problem.size_bytes) <= MAX_SEARCHED_STORAGES and not problem.runs)
        if searched and budget.spend():
            with budget.net(), stop_flag() as stop:
                found, offset, never, unit = _search(work, best, goal, self.effort, rng, stop)
            tried.append(("search", found))
            if found < best:
                best, best_offset = found, offset
        elif not searched and best > goal and len(work.blocks.size_bytes) <= MAX_EXHAUSTIVE_BLOCKS:
            best, best_offset = work.every_order()
            tried.append(("every order", best))
            never = best - 1
        if best > goal and self.effort and not never and budget.spend():
            by, best_fit = best_way
            with budget.net():
                found, offset = improve(
                    work.orders()[by], best_fit, work.blocks, work.pairs, work.life.size_bytes, goal, self.effort * VISITS_PER_EFFORT, rng,
                    time_is_up,
                )  # fmt: skip
            tried.append(("walk", found))
            if found < best:
                best, best_offset = found, offset
        if 0 < self.capacity_bytes < best and budget.cut and not max(work.bound_bytes - 1, never) >= self.capacity_bytes:
            raise budget.cut.error(f"nothing was placed in {self.capacity_bytes} bytes so far, but in {best}")
        if 0 < self.capacity_bytes < best:
            _refuse(problem, work, best, self.capacity_bytes, never)
        plan = work.plan(self.name, max(best, 0), best_offset, tuple(tried))
        if budget.cut:
            plan = replace(plan, cut=(budget.cut.looked, budget.cut.of))
        return replace(plan, optimal=True) if never and best <= never + unit else plan


def _refuse(problem: ArenaProblem, work: _Work, best: int, capacity: int, never: int) -> None:
    clique = sorted(work.clique, key=lambda t: -int(work.life.size_bytes[t]))
    proved = capacity < work.bound_bytes or capacity <= never
    why = (
        f"{len(clique)} storages that may be in use together hold {work.bound_bytes}: {', '.join(problem.name(t) for t in clique[:3])}, ..."
        if capacity < work.bound_bytes else "no placement exists" if proved else f"the lowest arena found is {best} bytes"
    )  # fmt: skip
    raise Infeasible(
        f"does not fit into {capacity} bytes: {why}", where="capacity",
        hint=f"{max(best - capacity, 0)} bytes more" + ("" if proved else ", or more effort"),
        data={"capacity_bytes": capacity, "bound_bytes": work.bound_bytes, "found_bytes": best, "proved": proved, "clique": clique[:4096]},
    )  # fmt: skip


def _search(work: _Work, best: int, goal: int, effort: int, rng: np.random.Generator, stop: I64) -> tuple[int, I64, int, int]:
    """The goal, then capacities between it and the best arena: (height, offsets, largest capacity proved too small, what heights are multiples of).

    A search that is stopped says nothing of other capacities: some that are smaller are found sooner. So each round tries half the way down to the
    goal, a quarter, and so on to the next height below the best, with twice as many nodes as the round before; what is decided begins it again.
    """
    moments = np.unique(np.concatenate([work.life.opens[:, 0], work.life.closes[:, 0]]))
    lower, upper = np.searchsorted(moments, work.life.opens[:, 0]), np.searchsorted(moments, work.life.closes[:, 0])
    some = np.flatnonzero(work.life.size_bytes > 0)
    size = work.life.size_bytes[some]
    # some best placement has every storage on the floor or on another, so heights are sums of sizes: multiples of their common divisor
    unit = int(np.gcd.reduce(size)) if len(size) else 1
    clock = work.problem.clock
    width = clock[work.life.closes[some, 0]] - clock[work.life.opens[some, 0]] if len(clock) else upper[some] - lower[some]
    lifetimes = [(lower[some], upper[some], size, w) for w in (width, upper[some] - lower[some])]
    found, offsets, never, left = best, np.zeros(0, np.int64), 0, effort * (GOAL_NODES_PER_EFFORT + BETWEEN_NODES_PER_EFFORT)

    def decided(at: int, most: int) -> bool:
        nonlocal found, offsets, never, left
        verdict, offset, used = _under(lifetimes, at, min(most, left), rng, stop)
        left -= used
        if verdict == FITS:
            found = int((offset + size).max())
            offsets = np.zeros(len(work.life.size_bytes), np.int64)
            offsets[some] = offset
        elif verdict == NEVER:
            never = max(never, at)
        return verdict in (FITS, NEVER)

    decided(goal, effort * GOAL_NODES_PER_EFFORT)
    most, halvings = effort * FIRST_NODES_PER_EFFORT, 1
    while (heights := (found - max(never + 1, goal)) // unit) > 0 and left > 0 and not stop[0]:
        if decided(found - max(1, heights >> halvings) * unit, most):
            halvings = 1
        elif heights >> halvings > 1:
            halvings += 1
        else:
            most, halvings = 2 * most, 1
    return found, offsets, never, unit


def _under(lifetimes: Sequence[tuple[I64, I64, I64, I64]], capacity: int, nodes: int, rng: np.random.Generator, stop: I64) -> tuple[int, I64, int]:
    """The orders in turns, with twice as many nodes each round; after each as many nodes again in short searches under random orders.

    `lifetimes`: (lower, upper, size, width), once for each measure of width. Returns (verdict, offsets, nodes used).
    """
    lower, upper, size, _ = lifetimes[0]
    fixed = list({(rank.tobytes(), by_load): (rank, by_load) for one in lifetimes for rank, by_load in preorders(*one)}.values())
    offset, limit, verdict, left = np.zeros(len(size), np.int64), 2 * len(size), -1, nodes

    def under(rank: I64, by_load: bool, most: int) -> bool:
        nonlocal left, verdict
        verdict, used = search(lower, upper, size, rank, by_load, capacity, min(most, left), offset, stop)
        left -= used
        return verdict in (FITS, NEVER) or left <= 0 or bool(stop[0])

    while True:
        spent = left
        for rank, by_load in fixed:
            if under(rank, by_load, limit):
                return int(verdict), offset, nodes - left
        spent -= left  # nodes of this round under fixed orders, and as many again under random ones
        until = left - spent
        while left > until:
            if under(mixed_order(*lifetimes[0], rng), False, min(limit, MAX_RANDOM_ORDER_NODES)):
                return int(verdict), offset, nodes - left
        limit *= 2


def _label(by: str, best_fit: bool) -> str:
    return f"{by}, {'tightest' if best_fit else 'lowest'} place"


@dataclass(frozen=True)
class _Work:
    """What every way of placing needs."""

    problem: ArenaProblem
    life: Lifetimes
    pairs: Rows
    blocks: Blocks
    bound_bytes: int
    clique: tuple[int, ...]

    @staticmethod
    def of(problem: ArenaProblem) -> _Work:
        life = lifetimes(problem)
        bound, clique = heaviest_antichain(problem, life)
        return _Work(problem, life, conflicts(life), blocks_of(problem, life.size_bytes), bound, clique)

    @property
    def single(self) -> bool:
        return len(self.life.opens[0]) == 1 if len(self.life.opens) else True

    def orders(self) -> dict[str, I64]:
        """Blocks by what makes them hard to place, hardest first."""
        size, pairs = self.life.size_bytes, self.pairs
        degree = np.diff(pairs.starts)
        owner = np.repeat(np.arange(len(size)), degree)
        load = np.bincount(owner, weights=size[pairs.items].astype(np.float64), minlength=len(size)) + size
        last = int(self.life.position.max()) + 1 if len(self.life.position) else 1
        span = (np.minimum(self.life.closes, last) - self.life.opens).clip(0).sum(axis=1).astype(np.float64)
        of_storage = {"size": size.astype(np.float64), "product": size * (degree + 1.0), "load": load, "area": size * span, "span": span}
        of_block = {}
        for by, key in of_storage.items():
            hardest = np.zeros(len(self.blocks.size_bytes))
            np.maximum.at(hardest, self.blocks.block_of, key)
            if by == "size":
                hardest = self.blocks.size_bytes.astype(np.float64)
            of_block[by] = np.lexsort((-self.blocks.size_bytes, -hardest)).astype(np.int64)
        return of_block

    def place(self, order: I64, best_fit: bool, offset: I64) -> int:
        b = self.blocks
        fixed = (b.members.starts, b.members.items, b.inner, self.life.size_bytes, self.pairs.starts, self.pairs.items, b.block_of)
        return int(place(order, 0, *fixed, best_fit, offset))

    def every_order(self) -> tuple[int, I64]:
        """The smallest arena: some order of its blocks by offset, each at its lowest free place, gives it."""
        best, found = -1, np.zeros(0, np.int64)
        for order in permutations(range(len(self.blocks.size_bytes))):
            offset = np.full(len(self.life.size_bytes), -1, np.int64)
            height = self.place(np.array(order, np.int64), False, offset)
            if best < 0 or height < best:
                best, found = height, offset
        return best, found

    def plan(self, strategy: str, height: int, offset: I64, tried: tuple[tuple[str, int], ...]) -> ArenaPlan:
        return ArenaPlan(
            strategy=strategy, offset_bytes=offset, arena_bytes=height, bound_bytes=self.bound_bytes, clique=self.clique, tried=tried,
            optimal=height == self.bound_bytes,
        )  # fmt: skip
