"""Parametric minimum cut over storages: which sets to keep at one moment are best for some price of a byte, and a floor on time from them.

At a moment every storage that backward reads later is either kept, or the node that makes it runs again, and then what that node reads is needed
too. Minimising seconds run again + price * bytes kept is a minimum cut: for storage s and its maker m, an arc need(s) -> rerun(m) of price * size(s),
an arc rerun(m) -> sink of time(m), and rerun(m) -> need(what m reads) without limit. Views and what is there through the step cost nothing, and
chains need no care of their own: a kept value spares everything before it that only it needed. Sweeping the price gives the lower convex hull of
(bytes kept, seconds run again); the hull at a capacity is the Lagrangian (so linear programming) bound: no plan keeping so few bytes runs less again.

The floor takes several moments: the end of the forward pass, and while a backward node runs, when its operands, its result and its workspace
must exist beside the gradients. A node that forward does not run costs nothing here: it runs once, whenever that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ....kernels.maxflow import MAX_CAPACITY, FlowNetwork
from ....kernels.step_schedule import NEVER
from ..lifetimes import Lifetimes

__all__ = ["CutPoint", "Moment", "cut_points", "floor_s", "moments"]

I32 = NDArray[np.int32]
# Whole units that the larger of all times and all priced bytes becomes in a network: rounding is below 1e-13 of it, and flows stay within 64 bits.
TOTAL_UNITS = 1 << 44
# Corners of one hull at most, a minimum cut each. Fewer corners lower the floor between them and never make it wrong.
MAX_HULL_POINTS = 48


@dataclass(frozen=True, kw_only=True)
class Moment:
    """`needed`: storages that backward reads after it. `present`: of the movable ones those that exist anyway. `taken_bytes`: all that must exist at
    this moment, fixed storages included, movable ones not present left out. `position`: backward node, -1 at the end of the forward pass.
    `copies`: of a byte kept, one per micro-batch in flight."""

    position: int
    needed: frozenset[int]
    present: frozenset[int]
    taken_bytes: int
    copies: int = 1

    def capacity_bytes(self, budget_bytes: int) -> int:
        """What may be kept of a micro-batch beside what must be."""
        return (budget_bytes - self.taken_bytes) // self.copies


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """`keep`: storages kept; their bytes (those present anyway not counted), and the seconds run again."""

    kept_bytes: int
    again_s: float
    keep: frozenset[int]


def moments(lives: Lifetimes, most: int = 8) -> tuple[Moment, ...]:
    """The end of the forward pass, and the backward nodes at which the schedule that keeps all has most bytes alive."""
    first = _moment(lives, -1)
    lives.measure(lives.keep_all())
    w = lives.scratch
    count, begin = int(w.counts[0]), int(w.counts[1])
    order = sorted(range(begin, count), key=lambda c: (-int(w.live[c]), c))
    nodes = [int(w.runs[c]) for c in order if w.runs[c] >= lives.arrays.boundary][:most]
    return (first, *(_moment(lives, b) for b in nodes))


def _moment(lives: Lifetimes, position: int) -> Moment:
    graph, arrays = lives.graph, lives.arrays
    start = arrays.boundary if position < 0 else position
    needed: set[int] = set()
    for b in range(start + (position >= 0), len(graph.nodes)):
        if arrays.wanted[b]:
            for x in graph.nodes[b].inputs:
                needed.update(s for s in graph.nodes[x].storages if lives.maker[s] >= 0)
    exist = {s for r in graph.results if r < start for s in graph.nodes[r].storages if lives.maker[s] >= 0}
    taken = arrays.fixed_bytes
    present: set[int] = set()
    if position >= 0:
        node = graph.nodes[position]
        operands = {s for x in node.inputs for s in graph.nodes[x].storages if lives.maker[s] >= 0}
        present = {s for s in operands if lives.movable[s]}
        exist |= operands | {*node.makes}
        taken += node.workspace_bytes
    exist |= {s for s in needed if lives.maker[s] < start and not lives.movable[s] and lives.maker[s] >= 0}
    copies = graph.in_flight if position < 0 else 1  # later the others hold at least nothing
    taken += copies * int(arrays.size[sorted(exist)].sum())
    return Moment(
        position=position, needed=frozenset(s for s in needed if lives.movable[s]), present=frozenset(present), taken_bytes=taken,
        copies=copies,
    )  # fmt: skip


@dataclass
class _Cut:
    """The network of one moment; capacities are set per price."""

    lives: Lifetimes
    moment: Moment
    network: FlowNetwork = field(init=False)
    storages: list[int] = field(init=False)
    makers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        lives, arrays = self.lives, self.lives.arrays
        reached, stack = set(self.moment.needed), sorted(self.moment.needed)
        reads: dict[int, list[int]] = {}
        while stack:
            m = int(lives.maker[stack.pop()])
            if m in reads:
                continue
            reads[m] = self._read(m)
            for s in reads[m]:
                if s not in reached:
                    reached.add(s)
                    stack.append(s)
        self.storages, self.makers = sorted(reached), sorted(reads)
        at = {s: 2 + i for i, s in enumerate(self.storages)}
        run = {m: 2 + len(at) + i for i, m in enumerate(self.makers)}
        arcs = [(at[s], run[int(lives.maker[s])]) for s in self.storages] + [(run[m], 1) for m in self.makers]
        endless = [(0, at[s]) for s in sorted(self.moment.needed)] + [(run[m], at[s]) for m in self.makers for s in reads[m]]
        tails, heads = (np.array([a[i] for a in [*arcs, *endless]], np.int64) for i in (0, 1))
        self.network = FlowNetwork.of_arrays(2 + len(at) + len(run), tails, heads, np.zeros(len(tails), np.int64))
        self._priced = self.network.slots(tails[: len(at)], heads[: len(at)])
        self._timed = self.network.slots(tails[len(at) : len(arcs)], heads[len(at) : len(arcs)])
        self._endless = self.network.slots(tails[len(arcs) :], heads[len(arcs) :])
        self.size = np.array([0 if s in self.moment.present else arrays.size[s] for s in self.storages], np.int64)
        self.time = np.array([arrays.time[m] if arrays.forward_wanted[m] else 0.0 for m in self.makers], np.float64)

    def _read(self, m: int) -> list[int]:
        """Movable storages that running node m again reads."""
        return sorted({s for x in self.lives.graph.nodes[m].inputs for s in self.lives.graph.nodes[x].storages if self.lives.movable[s]})

    def at(self, price: float) -> CutPoint:
        """The best set for a price in seconds per byte."""
        priced = self.size * price
        scale = TOTAL_UNITS / max(float(priced.sum()), float(self.time.sum()), 1e-30)
        self.network.capacity[self._priced] = np.rint(priced * scale).astype(np.int64)
        self.network.capacity[self._timed] = np.rint(self.time * scale).astype(np.int64)
        self.network.capacity[self._endless] = MAX_CAPACITY // (4 * max(len(self._endless), 1))
        self.network.max_flow(0, 1)
        side = self.network.source_side()
        need = side[2 : 2 + len(self.storages)]
        again = side[2 + len(self.storages) :]
        # a storage that is needed and whose maker does not run is cut off by its price: it is kept
        run = {m for m, x in zip(self.makers, again, strict=True) if x}
        keep = [i for i, s in enumerate(self.storages) if need[i] and int(self.lives.maker[s]) not in run]
        return CutPoint(
            kept_bytes=int(self.size[keep].sum()), again_s=float(self.time[again].sum()), keep=frozenset(self.storages[i] for i in keep),
        )  # fmt: skip


def cut_points(lives: Lifetimes, moment: Moment) -> tuple[CutPoint, ...]:
    """The corners of the hull, most bytes first; the last one keeps least. At most 48 of them."""
    cut = _Cut(lives, moment)
    if not len(cut.size):
        return (CutPoint(kept_bytes=0, again_s=0.0, keep=frozenset()),)
    total_s, total = float(cut.time.sum()), max(int(cut.size.sum()), 1)
    # prices so low that no run is worth a byte saved, and so high that any run is: the two ends of the hull
    most = cut.at(1e-6 * max(float(cut.time[cut.time > 0].min(initial=1e-9)), 1e-12) / total)
    least = cut.at(1e6 * max(total_s, 1e-9))
    points = [most, least]
    _between(cut, most, least, points)
    return tuple(sorted(points, key=lambda p: (-p.kept_bytes, p.again_s)))


def _between(cut: _Cut, high: CutPoint, low: CutPoint, points: list[CutPoint]) -> None:
    """Corners between two: the cut at the price that makes both equal, as long as it is better than either."""
    if len(points) >= MAX_HULL_POINTS or high.kept_bytes <= low.kept_bytes or low.again_s <= high.again_s:
        return
    price = (low.again_s - high.again_s) / (high.kept_bytes - low.kept_bytes)
    middle = cut.at(price)
    both = high.again_s + price * high.kept_bytes
    if middle.again_s + price * middle.kept_bytes >= both * (1 - 1e-9) or not low.kept_bytes < middle.kept_bytes < high.kept_bytes:
        return
    # better than either at this price, so a corner between them: the same again on both sides
    points.append(middle)
    _between(cut, high, middle, points)
    _between(cut, middle, low, points)


def floor_s(points: tuple[CutPoint, ...], capacity_bytes: int) -> float:
    """Seconds that must run again when at most so many bytes are kept: the hull at the capacity; inf below its least."""
    if capacity_bytes < points[-1].kept_bytes:
        return float("inf")
    best = 0.0
    for high, low in pairwise(points):
        if high.kept_bytes > low.kept_bytes:
            price = (low.again_s - high.again_s) / (high.kept_bytes - low.kept_bytes)
            # the hull is convex, so at any capacity the highest of the lines through its corners is the hull itself
            best = max(best, low.again_s - price * (capacity_bytes - low.kept_bytes))
    return best


def held_of(lives: Lifetimes, keep: Iterable[int], again: int = 1) -> I32:
    """The schedule that keeps these storages from forward; what runs again is held from stage `again` on (NEVER: each time anew)."""
    held = np.full(len(lives.maker), min(again, NEVER), np.int32)
    held[~lives.movable] = 0
    held[sorted(keep)] = 0
    return held
