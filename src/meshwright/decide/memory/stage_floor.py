"""Seconds that the stages of a rank must run again per micro-batch, whatever schedules their segments' steps follow, when they may hold so few bytes.

A segment that is run as a planned step holds a set of its results from its forward to its backward pass, and computes again what backward reads
and does not find. The least time of that for a set of so many bytes is above the lower convex hull of its minimum cuts (`fusionaware.hull`), and the
same holds of what is there while one of its backward nodes runs. The segments of a rank share its memory and run one at a time, so the bound of all
is a linear programme over the corners of their hulls, with a row for every such moment.
Left out, which makes the bound lower: that a set is held as a whole, and that what is held at two moments of one pass hangs together.
Invariant: no mix of step plans that needs at most `budget_bytes` runs again for less. Cost: some dozens of cuts per moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ...errors import Infeasible
from ...graph.step_graph import StepGraph
from ...kernels.highs import SCALE, require_optimal, solver, values
from .fusionaware.hull import Moment, cut_points, moments
from .lifetimes import lifetimes_of

__all__ = ["Holding", "SegmentFloor", "floor_of", "least_again_s"]

# Backward nodes per segment that get a row, those with most bytes alive first: each costs a hull of cuts, and the fullest ones bind.
MAX_MOMENTS = 8
Corner = tuple[float, float]  # bytes, seconds run again


@dataclass(frozen=True, kw_only=True)
class SegmentFloor:
    """Of one segment. `held`: corners for what it holds of a micro-batch between its passes; `moments`: per moment, for what is there of it while a
    backward node of its runs, gradients on borders included. `border_bytes`: of values that its backward or that of a segment before it reads across
    their borders, which are kept in any case and left out of the corners."""

    held: tuple[Corner, ...]
    moments: tuple[tuple[Corner, ...], ...] = ()
    border_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Micro-batches by stage that a rank holds at once, and the stage whose backward is next (-1: none is known to be)."""

    counts: Mapping[int, int]
    back: int = -1


def floor_of(graph: StepGraph, *, plain_bytes: int, plain_workspace_bytes: int, elsewhere: Sequence[int], whole: bool) -> SegmentFloor:
    """`plain_bytes`, `plain_workspace_bytes`: what the segment holds, and needs beside it in backward, when it is not run as a step.

    `elsewhere`: nodes whose results are counted as border values. `whole`: backward nodes run in the graph's order; where they are parted in two,
    only what is held between the passes is known.
    """
    plain = (float(plain_bytes), 0.0)
    if graph.boundary == len(graph.nodes):  # no backward: nothing is held for it, and nothing runs again
        return SegmentFloor(held=(plain,))
    lives = lifetimes_of(replace(graph, in_flight=1))
    end, *later = moments(lives, most=MAX_MOMENTS if whole else 0)
    size = [s.size_bytes for s in graph.storages]
    outside = {s for x in elsewhere for s in graph.nodes[x].storages if graph.storages[s].kind == "made"}
    handed = sum(s.size_bytes for s in graph.storages if s.kind == "tangent")

    def corners(moment: Moment, plain: Corner) -> tuple[Corner, ...]:
        run = moment.position if moment.position >= 0 else graph.boundary
        counted = sum(size[s] for s in outside if s in moment.present or (not lives.movable[s] and lives.maker[s] <= run))
        base = moment.taken_bytes - graph.fixed_bytes() - counted + (handed if moment.position >= 0 else 0)
        moment = dataclasses.replace(moment, present=moment.present | outside)
        return (plain, *((float(base + p.kept_bytes), p.again_s) for p in cut_points(lives, moment)))

    return SegmentFloor(held=corners(end, plain), moments=tuple(corners(m, (plain[0] + plain_workspace_bytes, 0.0)) for m in later))


def least_again_s(stages: Mapping[int, Sequence[SegmentFloor]], holdings: Sequence[Holding], room_bytes: int) -> dict[int, float]:
    """Per stage its share of the least seconds run again per micro-batch of all of them together; zeros where nothing fits at all.

    `stages`: their segments in the order of forward. `holdings`: what the rank holds at once at some time; it has `room_bytes` for that.
    """
    lp = solver()
    floors = [f for mine in stages.values() for f in mine]
    second, byte = (sum(max(x[i] for x in f.held) for f in floors) / SCALE for i in (1, 0))
    scaled = _Scaled(lp, second or 1.0, byte or 1.0)
    again = {i: [scaled.column(1.0, float("inf")) for _ in mine] for i, mine in stages.items()}
    held = {i: [scaled.mixed(v, f.held) for v, f in zip(again[i], mine, strict=True)] for i, mine in stages.items()}
    needs = {i: [[scaled.mixed(v, m) for m in f.moments] for v, f in zip(again[i], mine, strict=True)] for i, mine in stages.items()}
    border = {i: mine[-1].border_bytes for i, mine in stages.items()}
    for holding in holdings:
        together = [(v, n * x) for i, n in holding.counts.items() for mine in held[i] for v, x in mine]
        room = room_bytes - sum(n * border[i] for i, n in holding.counts.items())
        scaled.most(together, room)
        if (back := holding.back) < 0:
            continue
        for j, moments_of in enumerate(needs[back]):  # of the micro-batch that goes back, later segments hold nothing any more
            gone = [(v, -x) for mine in held[back][j:] for v, x in mine]
            for mine in moments_of:
                scaled.most([*together, *gone, *mine], room + border[back] - stages[back][j].border_bytes)
    try:
        require_optimal(lp, what="least time run again")
    except Infeasible:  # what nothing can keep within needs no bound
        return dict.fromkeys(stages, 0.0)
    x = values(lp)
    # a little less than the solver's sum, for its rounding: the floor must not be above the truth
    return {i: (1 - 1e-9) * scaled.second * sum(x[v] for v in again[i]) for i in stages}


@dataclass
class _Scaled:
    """A linear programme in scaled seconds and bytes."""

    lp: Any
    second: float
    byte: float

    def column(self, cost: float, most: float) -> int:
        self.lp.addVar(0.0, most)
        at = int(self.lp.getNumCol()) - 1
        self.lp.changeColCost(at, cost)
        return at

    def mixed(self, again: int, corners: Sequence[Corner]) -> list[tuple[int, float]]:
        """A mix of corners that takes at most `again`: its columns and their bytes."""
        at = [self.column(0.0, 1.0) for _ in corners]
        self.lp.addRow(1.0, 1.0, len(at), at, [1.0] * len(at))
        self.lp.addRow(-float("inf"), 0.0, len(at) + 1, [*at, again], [*(t / self.second for _, t in corners), -1.0])
        return [(v, b) for v, (b, _) in zip(at, corners, strict=True)]

    def most(self, terms: Sequence[tuple[int, float]], limit_bytes: float) -> None:
        total: dict[int, float] = {}
        for v, x in terms:
            total[v] = total.get(v, 0.0) + x / self.byte
        self.lp.addRow(-float("inf"), limit_bytes / self.byte, len(total), [*total], [*total.values()])
