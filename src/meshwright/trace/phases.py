"""Where the time of a step went: seconds of each rank in each phase, the same sum for a simulation and for a real run.

At every instant a rank is in exactly one phase: in the compute step that runs, else in the communication that is under way
(tensor-parallel before gradient before pipeline), else idle. So a rank's phases and its idle time sum to the step.
Overlapped communication costs nothing here: what is shown is what stands in the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..program.phases import PHASES
from ..timeline import Spans

__all__ = ["PHASE_ORDER", "phase_seconds"]

PHASE_ORDER = ("forward", "backward", "optimizer", "tensor-parallel", "gradient", "pipeline", "other")


def phase_seconds(spans: Spans, phase_of_step: NDArray[np.int8], ranks: int | Sequence[int], makespan_s: float) -> list[dict[str, float]]:
    """Per rank: seconds per phase of PHASE_ORDER, plus `idle`. Spans without a step (-1) are ignored.

    `ranks`: how many, or for each the rank whose spans are its own too (`program.flat.represented_by`).
    """
    if not isinstance(ranks, int):
        rows = {rank: _seconds(spans, phase_of_step, rank, makespan_s) for rank in dict.fromkeys(ranks)}
        return [rows[rank] for rank in ranks]
    return [_seconds(spans, phase_of_step, rank, makespan_s) for rank in range(ranks)]


def _seconds(spans: Spans, phase_of_step: NDArray[np.int8], rank: int, makespan_s: float) -> dict[str, float]:
    known = spans.step >= 0
    codes = np.where(known, phase_of_step[np.maximum(spans.step, 0)], 0)
    mine = known & (spans.rank == rank) & (spans.end_s > spans.start_s)
    taken: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    seconds: dict[str, float] = {}
    context = PHASES.index("context")
    for name in (*PHASE_ORDER, *(("context",) if (phase_of_step == context).any() else ())):
        chosen = mine & (codes == PHASES.index(name))
        taken.append((spans.start_s[chosen], spans.end_s[chosen]))
        seconds[name] = _union(taken) - sum(seconds.values())
    seconds["idle"] = max(makespan_s - sum(seconds.values()), 0.0)
    return seconds


def _union(parts: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float:
    """Length of the union of intervals."""
    start = np.concatenate([p[0] for p in parts])
    end = np.concatenate([p[1] for p in parts])
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(start[1:] - reach[:-1], 0.0).sum()
    return float(reach[-1] - start[0] - gaps)
