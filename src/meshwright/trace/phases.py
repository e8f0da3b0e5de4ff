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

F64 = NDArray[np.float64]
PHASE_ORDER = ("forward", "backward", "optimizer", "tensor-parallel", "gradient", "pipeline", "other")


def phase_seconds(spans: Spans, phase_of_step: NDArray[np.int8], ranks: int | Sequence[int], makespan_s: float) -> list[dict[str, float]]:
    """Per rank: seconds per phase of PHASE_ORDER, plus `idle`. Spans without a step (-1) are ignored.

    `ranks`: how many, or for each the rank whose spans are its own too (`program.flat.represented_by`).
    """
    known = spans.step >= 0
    codes = np.where(known, phase_of_step[np.maximum(spans.step, 0)], 0)
    rows = np.flatnonzero(known & (spans.end_s > spans.start_s))
    rows = rows[np.argsort(spans.rank[rows], kind="stable")]  # once for all ranks: of thousands, a look through all spans for each takes minutes
    owner = spans.rank[rows]
    names = (*PHASE_ORDER, *(("context",) if (phase_of_step == PHASES.index("context")).any() else ()))

    def of(rank: int) -> dict[str, float]:
        own = rows[np.searchsorted(owner, rank) : np.searchsorted(owner, rank, side="right")]
        return _seconds(spans.start_s[own], spans.end_s[own], codes[own], names, makespan_s)

    if not isinstance(ranks, int):
        found = {rank: of(rank) for rank in dict.fromkeys(ranks)}
        return [found[rank] for rank in ranks]
    return [of(rank) for rank in range(ranks)]


def _seconds(start_s: F64, end_s: F64, codes: NDArray[np.integer], names: Sequence[str], makespan_s: float) -> dict[str, float]:
    taken: list[tuple[F64, F64]] = []
    seconds: dict[str, float] = {}
    for name in names:
        chosen = codes == PHASES.index(name)
        taken.append((start_s[chosen], end_s[chosen]))
        seconds[name] = _union(taken) - sum(seconds.values())
    seconds["idle"] = max(makespan_s - sum(seconds.values()), 0.0)
    return seconds


def _union(parts: Sequence[tuple[F64, F64]]) -> float:
    """Length of the union of intervals."""
    start = np.concatenate([p[0] for p in parts])
    end = np.concatenate([p[1] for p in parts])
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(start[1:] - reach[:-1], 0.0).sum()
    return float(reach[-1] - start[0] - gaps)
