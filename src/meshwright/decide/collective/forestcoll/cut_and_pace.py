"""How a forest is best cut into channels and paced, tried on the simulator.

Links share their rate evenly between messages, so channels of unlike shares let the large ones lag. Two cures, each with its price: cut shares
into equal ones (more steps, so fewer pieces fit a program and the pipeline fills slowly), or keep the lanes of a rank in step (`Lowering.pace`).
Which is better depends on the fabric, so a few ways are tried. A try simulates the first pieces only, twice, and goes on at the pace of the
second: a pipeline in full swing takes the same time for every piece. The two best are simulated whole where that is quick, because ranks may
drift apart slowly.
Deviation: the paper does not treat links that messages share evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ....kernels.effort import make_up, worked_s
from ..problem import CollectiveProblem
from ..program_time import simulated
from ..trees.lower import Lowering
from .prepared import Prepared

__all__ = ["Way", "best_way", "timed"]

# Pieces of the shorter simulation of a try: the most that keep to MAX_LONGER_TRY_WORK, or the least; the longer has twice as many. Leads divide them.
TRY_PIECES = (256, 128, 64, 32)
# Work of a try, in steps times ranks: up to the first it has more pieces than the least; beyond the second it is left out ...
MAX_LONGER_TRY_WORK = 13_000_000
MAX_TRY_WORK = 40_000_000
# ... or beyond so many times as much where ranks are rotated: then messages end together, which costs a simulator little.
ROTATED_WORK_FACTOR = 16
MAX_FINALISTS = 2  # ways that are simulated whole, where that is within the limits below
# Pieces times squared steps per piece of a finalist, by whether both are cut alike: then tries mislead less.
MAX_FINAL_WORK = {True: 10_000_000_000, False: 30_000_000_000}
# New rates times channels of a try and of a finalist: they, not steps, are what a simulator works for where messages end one by one.
MAX_LONGER_TRY_RATES = 200_000_000
MAX_FINAL_RATES = 1_000_000_000


@dataclass(frozen=True)
class Way:
    """Most units per channel, pieces, those that a leader may be ahead, and pieces that it is ahead of shorter ways; servers at once (`Lowering`)."""

    quantum: int
    pieces: int
    pace: int
    lead: int = 1
    window: int = 0


def best_way(problem: CollectiveProblem, ready: Prepared, ways: Sequence[Way], lowering: Callable[[Way], Lowering]) -> Way:
    """The way with the least time of those whose try is quick enough; the first of equals, and the first where none is."""
    todo = list(dict.fromkeys(ways))
    if len(todo) < 2:
        return todo[0]
    tried = MAX_TRY_WORK * (ROTATED_WORK_FACTOR if all(f.method == "rotated ranks" for f in ready.forests) else 1)
    tried //= 3 if problem.op == "all-reduce" else 1  # its halves run at once, which costs a simulator more than their sum
    todo = [way for way in todo if _work(ready, way, TRY_PIECES[-1]) <= tried] or todo[:1]
    if len(todo) == 1:
        return todo[0]
    tries = {way: _tried(problem, ready, way, lowering(way)) for way in todo}
    ranked = sorted(todo, key=lambda way: tries[way][0])[:MAX_FINALISTS]
    most = MAX_FINAL_WORK[len({way.quantum for way in ranked}) == 1]
    if any(way.pieces * ready.cut(way.quantum)[1] ** 2 > most or tries[way][1] > MAX_FINAL_RATES for way in ranked):
        return ranked[0]
    return min(ranked, key=lambda way: _simulated(problem, ready, way, lowering(way), way.pieces)[0])


def _work(ready: Prepared, way: Way, pieces: int) -> int:
    # A try simulates `pieces` and twice as many.
    return 3 * pieces * ready.cut(way.quantum)[1] * ready.servers * ready.ranks


def _tried(problem: CollectiveProblem, ready: Prepared, way: Way, how: Lowering) -> tuple[float, float]:
    """Simulated time, from the first pieces; and the new rates that a simulation of all would cost."""
    least = TRY_PIECES[-1]
    first_s, cost = _simulated(problem, ready, way, how, least)
    rates = cost / least  # per piece
    possible = (count for count in TRY_PIECES if _work(ready, way, count) <= MAX_LONGER_TRY_WORK and 3 * count * rates <= MAX_LONGER_TRY_RATES)
    pieces = next(possible, least)
    few = first_s if pieces == least else _simulated(problem, ready, way, how, pieces)[0]
    more = _simulated(problem, ready, way, how, 2 * pieces)[0]
    # The second half of the longer run has a full pipeline: its time per piece holds for all pieces that were not simulated.
    return more + max(0, way.pieces - 2 * pieces) / pieces * (more - few), rates * way.pieces


def _simulated(problem: CollectiveProblem, ready: Prepared, way: Way, how: Lowering, pieces: int) -> tuple[float, int]:
    """Time of so many of the way's pieces, and the new rates it took."""
    return timed(problem, ready, way.quantum, replace(how, pieces=min(pieces, way.pieces), unroll=False))


def timed(problem: CollectiveProblem, ready: Prepared, quantum: int, how: Lowering) -> tuple[float, int]:
    """Simulated time, and the new rates it took: once per program of these forests."""
    key = quantum, how.pieces, how.unroll, how.pace, how.lead, how.window, how.depth, how.chunk_bytes, problem.transport
    begin_s = worked_s()
    if key not in ready.times:
        found = simulated(ready.program(how, quantum), problem.fabric, problem.ranks, problem.transport)
        ready.times[key] = found, worked_s() - begin_s
    time_and_cost, work_s = ready.times[key]
    make_up(begin_s, work_s)
    return time_and_cost
