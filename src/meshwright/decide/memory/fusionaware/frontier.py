"""All schedules worth having of one step: for every budget the fastest found, computed once and for all budgets together.

So plans are monotone: as the budget falls, the peak never rises and the time never falls. The search begins at the corners of the hull (hull.py) and
at the schedules of Chen, Revolve and Rotor, which stay in the frontier where nothing better is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....graph.step_graph import StepGraph
from ....kernels.stages import stage
from ....kernels.step_anneal import anneal
from ....kernels.step_schedule import NEVER
from ....kernels.step_search import DEFAULT_SEED, Archive, archive_for, search
from ..baselines import Chen, Revolve, Rotor, chen, revolve, rotor
from ..baselines.chain import chain_of
from ..lifetimes import Lifetimes, lifetimes_of
from .alike import searched_alike
from .hull import CutPoint, Moment, cut_points, floor_s, held_of, moments

__all__ = ["MAX_PUBLISHED_NODES", "Entry", "Frontier", "cheapest_floor_s", "fastest_within", "frontier_of", "least_bytes"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
# Ranges of peak bytes of which the archive keeps the fastest schedule each: how finely a frontier is told apart.
ARCHIVE_BINS = 1024
# Peaks, from keeping everything to the least, that a frontier is searched at.
FRONTIER_TARGETS = 40
# Peaks on the way from keeping everything down to one budget.
DESCENT_TARGETS = 16
# Disturbances tried at one target after its local optimum, at most; the effort ends most rounds sooner.
MAX_KICKS = 40
# Share of the effort for one budget that small changes get, after the search.
SMALL_CHANGES_SHARE = 0.6
# The same share where all budgets are searched together, whose schedules profit from each other's search.
FRONTIER_SMALL_CHANGES_SHARE = 0.4
# Share of what the search has for one budget, or of the whole effort for all budgets, that the way down gets.
DESCENT_SHARE = 0.5
# How much slower a small change may make a schedule at first, as a share of the time that the budget costs; it falls to nothing.
MAX_WORSENING_SHARE = 0.03
# Nodes of a graph beyond which a search for one budget does not begin at Chen's, Revolve's and Rotor's schedules as well: making them takes longer
# than a glance then, for every choice of implementations anew. A search that goes on from a schedule makes no minimum cuts there either. The frontier
# of all budgets begins at them always.
MAX_PUBLISHED_NODES = 3000
# Share of the effort for one budget of such a graph that goes to changes of storages alike, before small ones.
ALIKE_SHARE = 0.7
# Price of a byte above the budget, in mean prices of a byte between the budget and keeping everything: so dear that staying above it does not pay.
EXCESS_PRICE_FACTOR = 60


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One schedule; `hold_to` and `ahead` None: to the last use, as late as possible."""

    peak_bytes: int
    time_s: float
    hold_from: I32
    hold_to: I32 | None = None
    ahead: I32 | None = None
    origin: str = "search"


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """`entries`: falling peak, rising time, none better than another in both. `plain_s`: everything once. `least_bytes`: no schedule needs less.
    `published`: every schedule of Chen, Revolve and Rotor, by `origin`."""

    lives: Lifetimes
    entries: tuple[Entry, ...]
    hulls: tuple[tuple[Moment, tuple[CutPoint, ...]], ...]
    plain_s: float
    least_bytes: int
    published: tuple[Entry, ...] = ()

    def within(self, budget_bytes: int | None) -> Entry | None:
        """The fastest within the budget (None: the least peak); None where there is none."""
        if budget_bytes is None:
            return self.entries[-1]
        return next((e for e in self.entries if e.peak_bytes <= budget_bytes), None)

    def floor_s(self, budget_bytes: int) -> float:
        """No plan within the budget takes less: everything once, and what must run again at the worst of some moments."""
        # each moment bounds by itself, and all must be met: the highest floor holds
        again = max(floor_s(points, moment.capacity_bytes(budget_bytes)) for moment, points in self.hulls)
        return self.plain_s + (again if np.isfinite(again) else 0.0)


@lru_cache(maxsize=8)
@stage("time and memory of the step")
def frontier_of(graph: StepGraph, effort: int, replay_random: bool = True, once: bool = False) -> Frontier:
    """`effort`: runs of nodes simulated, at most (10^8 take some seconds). `once`: nothing runs more than twice."""
    start = _Start.of(graph, replay_random, once)
    low, top = start.least_bytes, start.most_bytes
    large = 1.0 if once else 1 - FRONTIER_SMALL_CHANGES_SHARE  # small changes may run a thing more than twice
    archive = archive_for(len(start.lives.maker), low, top, bins=ARCHIVE_BINS, effort=int(effort * large))
    targets = _falling(top, low, FRONTIER_TARGETS)
    found = start.searched(archive, targets, FRONTIER_TARGETS, down=DESCENT_SHARE / large)
    if not once and found:
        least = min(e.peak_bytes for e in found)
        reached = [t for t in targets[::-1].tolist() if t >= least]
        # from the least peak up: each target gets an equal part of what the ones before have left
        for i, target in enumerate(reached):
            archive.spent[1] = archive.spent[0] + max((effort - archive.spent[0]) // (len(reached) - i), 1)
            found = start.annealed(archive, _first(found, target), target)
    entries = _best([*start.published, *found])
    return Frontier(
        lives=start.lives, entries=entries, hulls=start.hulls, plain_s=start.plain_s, least_bytes=low, published=start.published,
    )  # fmt: skip


def fastest_within(
    graph: StepGraph, budget_bytes: int, effort: int, *, kept: Sequence[Sequence[int]] = (), begin: Sequence[I32] = (), down: bool = True,
    seed: int = DEFAULT_SEED,
) -> tuple[Lifetimes, Entry]:  # fmt: skip
    """One budget, all of the effort spent on it: the fastest schedule found within it, else the one of least peak.

    `kept`: more sets of storages to begin with. `begin`: schedules (`Entry.hold_from`) to begin with instead of Chen's, Revolve's and Rotor's.
    `down`: the search also comes down from keeping everything, not only from the first of them. `seed`: of the changes tried at random.
    """
    large = len(graph.nodes) > MAX_PUBLISHED_NODES
    start = _Start.of(graph, True, False, kept, published=not begin and not large, cuts=not (begin and large))
    seeds = _distinct([*start.seeds, *begin] if down else [*begin, *start.seeds])
    if large:
        alike, spent = searched_alike(start.lives, seeds, budget_bytes, int(effort * ALIKE_SHARE))
        tried = [Entry(peak_bytes=peak, time_s=s, hold_from=h) for h in alike for peak, s in (start.lives.measure(h),) if peak <= budget_bytes]
        if tried:
            best = _first(tried, budget_bytes)
            archive = archive_for(len(start.lives.maker), 0, budget_bytes, bins=1, effort=max(effort - spent, 1), seed=seed)
            return start.lives, _first([best, *start.annealed(archive, best, budget_bytes)], budget_bytes)
        seeds = _distinct([*seeds, *alike])
    top = max(start.most_bytes, budget_bytes + 1)
    width = -(-(top - budget_bytes) // (ARCHIVE_BINS - 1))  # the first bin ends at the budget, so nothing beyond it is kept there
    low = budget_bytes + 1 - width
    changes = int(effort * (1 - SMALL_CHANGES_SHARE))
    archive = archive_for(len(start.lives.maker), low, low + width * ARCHIVE_BINS - 1, bins=ARCHIVE_BINS, effort=changes, seed=seed)
    targets = np.array([*(_falling(top, budget_bytes, DESCENT_TARGETS) if down else ()), budget_bytes], np.int64)
    found = start.searched(archive, targets, 1, np.stack(seeds))
    archive.spent[1] = effort
    if found and min(e.peak_bytes for e in found) <= budget_bytes:
        found = start.annealed(archive, _first(found, budget_bytes), budget_bytes)
    else:  # small changes lead nowhere from above the budget: the way down once more, further
        found = start.searched(archive, targets, 1, np.stack(seeds), down=1.0)
    return start.lives, _first([*start.published, *found], budget_bytes)


def cheapest_floor_s(graph: StepGraph, budget_bytes: int) -> float:
    """No plan within the budget takes less, whatever implementations it chooses: minimum cuts of a step in which every node takes its least time and
    reads only what all of its implementations read. A node that may write its result over an operand needs no bytes for it."""
    nodes = []
    for n in graph.nodes:
        ways = n.alternatives
        inputs = tuple(x for x in n.inputs if all(x in a.inputs for a in ways))
        time_s = min([n.time_s, *(a.time_s for a in ways)])
        nodes.append(msgspec.structs.replace(n, inputs=inputs if ways else n.inputs, time_s=time_s, workspace_bytes=0, alternatives=()))
    cheapest = msgspec.structs.replace(graph, nodes=tuple(nodes))
    lives = lifetimes_of(cheapest)
    again = 0.0
    for moment in moments(lives):
        ways = () if moment.position < 0 else graph.nodes[moment.position].alternatives
        over = sum(int(lives.arrays.size[s]) for s in nodes[moment.position].makes) if any(a.over >= 0 for a in ways) else 0
        again = max(again, floor_s(cut_points(lives, moment), moment.capacity_bytes(budget_bytes + over)))
    plain_s = sum(n.time_s for n, wanted in zip(nodes, lives.arrays.wanted, strict=True) if wanted)
    return plain_s + (again if np.isfinite(again) else 0.0)


def _first(entries: Sequence[Entry], budget_bytes: int) -> Entry:
    """The fastest within the budget, else the one of least peak."""
    within = [e for e in entries if e.peak_bytes <= budget_bytes]
    return min(within or entries, key=lambda e: (e.time_s, e.peak_bytes) if within else (e.peak_bytes, e.time_s))


def _falling(top: int, low: int, count: int) -> I64:
    step = max((top - low) // count, 1)
    return np.array([top - 1 - i * step for i in range(count) if top - 1 - i * step >= low], np.int64)


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Where a search begins. `seeds`: schedules, that of keeping everything first. `groups`: storages inside each stage of the chain."""

    lives: Lifetimes
    hulls: tuple[tuple[Moment, tuple[CutPoint, ...]], ...]
    seeds: NDArray[np.int32]
    published: tuple[Entry, ...]
    groups: tuple[tuple[int, ...], ...]
    once: bool
    most_bytes: int
    plain_s: float
    least_bytes: int

    @staticmethod
    def of(
        graph: StepGraph, replay_random: bool, once: bool, kept: Sequence[Sequence[int]] = (), *, published: bool = True, cuts: bool = True
    ) -> _Start:
        lives = lifetimes_of(graph, replay_random=replay_random)
        hulls = tuple((m, cut_points(lives, m)) for m in moments(lives)) if cuts else ()
        chain = chain_of(lives)
        seeds, schedules = [lives.keep_all()], list[Entry]()
        for keep in (*(p.keep for _, points in hulls for p in points), *kept):
            # what is not kept: computed once in backward and held to its last use, or (where that is allowed) anew for every use
            seeds += [held_of(lives, keep)] if once else [held_of(lives, keep), held_of(lives, keep, NEVER)]
        for name, tried in ((Chen.name, chen.tried), (Revolve.name, revolve.tried), (Rotor.name, rotor.tried)) if published else ():
            for held, ahead, _ in tried(chain):
                hold_from, hold_to = chain.with_last_input(held)
                early = np.where(hold_from > 0, 1, 0).astype(np.int32)
                seeds += [early] if once else [hold_from, early]
                peak, seconds = lives.measure(hold_from, hold_to, ahead)
                if not once and np.isfinite(seconds):
                    schedules.append(Entry(peak_bytes=peak, time_s=seconds, hold_from=hold_from, hold_to=hold_to, ahead=ahead, origin=name))
        top, plain_s = lives.measure(seeds[0])
        crossing = {s for row in chain.crossing for s in row}
        return _Start(
            lives=lives, hulls=hulls, seeds=np.stack(_distinct(seeds)), published=tuple(schedules), once=once, most_bytes=top,
            groups=tuple(tuple(s for s in row if s not in crossing) for row in chain.inside), plain_s=plain_s, least_bytes=least_bytes(lives),
        )  # fmt: skip

    def searched(
        self, archive: Archive, targets: I64, bettered: int, seeds: NDArray[np.int32] | None = None, *, down: float = DESCENT_SHARE
    ) -> list[Entry]:
        """The schedules of the archive after a search over targets, of which the last `bettered` are gone back to. `seeds`: instead of its own;
        `down`: the share of the effort for the way down."""
        lives, begin = self.lives, self.seeds if seeds is None else seeds
        ptr = np.zeros(len(self.groups) + 1, np.int32)
        np.cumsum([len(x) for x in self.groups], out=ptr[1:])
        search(
            lives.arrays, lives.scratch, archive, lives.to_the_end(), lives.lazy(), begin, targets, min(bettered, len(targets)), lives.movable, ptr,
            np.array([s for row in self.groups for s in row], np.int32), self.once, MAX_KICKS, down,
        )  # fmt: skip
        return _entries(archive)

    def annealed(self, archive: Archive, begin: Entry, budget_bytes: int) -> list[Entry]:
        """The schedules of the archive after small changes of one of them, for the effort that is left."""
        lives, costs_s = self.lives, max(begin.time_s - self.plain_s, 0.0)
        price = EXCESS_PRICE_FACTOR * costs_s / max(self.most_bytes - budget_bytes, 1)
        if costs_s > 0:
            anneal(
                lives.arrays, lives.scratch, archive, begin.hold_from.copy(), lives.to_the_end(), lives.lazy(), budget_bytes,
                np.flatnonzero(lives.movable), MAX_WORSENING_SHARE * costs_s, price,
            )  # fmt: skip
        return _entries(archive)


def _entries(archive: Archive) -> list[Entry]:
    return [
        Entry(peak_bytes=int(archive.peak[i]), time_s=float(archive.time[i]), hold_from=archive.hold_from[i].copy())
        for i in np.flatnonzero(np.isfinite(archive.time))
    ]


def _distinct(rows: list[I32]) -> list[I32]:
    return list({r.tobytes(): r for r in rows}.values())


def _best(entries: list[Entry]) -> tuple[Entry, ...]:
    """Those that no other beats in both peak and time, most bytes first."""
    kept: list[Entry] = []
    for e in sorted(entries, key=lambda e: (e.peak_bytes, e.time_s)):
        if not kept or e.time_s < kept[-1].time_s:
            kept.append(e)
    return tuple(reversed(kept))


def least_bytes(lives: Lifetimes) -> int:
    """Bytes that some node needs by itself: its operands, its result, its workspace, and the results of the step before it."""
    graph, arrays = lives.graph, lives.arrays
    made = [s.kind == "made" for s in graph.storages]
    results = {*graph.results}
    done: set[int] = set()
    most, held = arrays.fixed_bytes, arrays.fixed_bytes
    for i, n in enumerate(graph.nodes):
        if arrays.wanted[i] and not arrays.given[i]:
            beside = {s for x in (*n.inputs, i) for s in graph.nodes[x].storages if made[s]} - done
            if i >= arrays.boundary or arrays.forward_wanted[i]:
                most = max(most, held + n.workspace_bytes + sum(graph.storages[s].size_bytes for s in beside))
            if i in results:  # once made they stay to the end of the step
                mine = {s for s in n.storages if made[s]} - done
                done |= mine
                held += sum(graph.storages[s].size_bytes for s in mine)
    return most


