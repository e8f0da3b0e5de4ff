"""Where the time of a step went: seconds of each rank in each phase, the same sum for a simulation and for a real run.

At every instant a rank is in exactly one phase: in the compute step that runs, else in the communication that is under way, else idle. Of several
under way, what a layer exchanges inside comes first (tensor-parallel, context, experts): its own computation waits for that. Gradients and messages
between stages are posted early and wait for their partners. So a rank's phases and its idle time sum to the step.
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
I64 = NDArray[np.int64]
PHASE_ORDER = ("forward", "backward", "optimizer", "tensor-parallel", "context", "experts", "gradient", "pipeline", "other")
# Named only for steps that have them: most have none.
PHASES_OF_SOME = ("context", "experts")


def phase_seconds(spans: Spans, phase_of_step: NDArray[np.int8], ranks: int | Sequence[int], makespan_s: float) -> list[dict[str, float]]:
    """Per rank: seconds per phase of PHASE_ORDER, plus `idle`. Spans without a step (-1) are ignored.

    `ranks`: how many, or for each the rank whose spans are its own too (`program.flat.represented_by`).
    """
    known = spans.step >= 0
    codes = np.where(known, phase_of_step[np.maximum(spans.step, 0)], 0)
    rows = np.flatnonzero(known & (spans.end_s > spans.start_s))
    rows = rows[np.argsort(spans.rank[rows], kind="stable")]  # once for all ranks: of thousands, a look through all spans for each takes minutes
    owner = spans.rank[rows]
    names = tuple(name for name in PHASE_ORDER if name not in PHASES_OF_SOME or (phase_of_step == PHASES.index(name)).any())

    wanted = list(range(ranks)) if isinstance(ranks, int) else list(dict.fromkeys(ranks))
    place = np.full(max([*wanted, int(owner.max(initial=0))], default=0) + 1, -1)
    place[wanted] = np.arange(len(wanted))
    rows = rows[place[owner] >= 0]
    per_rank = _seconds(place[spans.rank[rows]], spans.start_s[rows], spans.end_s[rows], codes[rows], names, makespan_s, len(wanted))
    found = dict(zip(wanted, per_rank, strict=True))
    return [found[rank] for rank in (wanted if isinstance(ranks, int) else ranks)]


def _seconds(
    owner: I64, start_s: F64, end_s: F64, codes: NDArray[np.integer], names: Sequence[str], makespan_s: float, ranks: int
) -> list[dict[str, float]]:
    """`owner`: of every span, ascending."""
    taken = np.zeros(len(codes), np.bool_)
    columns: dict[str, F64] = {}
    before = np.zeros(ranks)
    for name in names:
        taken |= codes == PHASES.index(name)
        covered = _unions(owner[taken], start_s[taken], end_s[taken], ranks)
        columns[name], before = covered - before, covered
    columns["idle"] = np.maximum(makespan_s - before, 0.0)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _unions(owner: I64, start_s: F64, end_s: F64, ranks: int) -> F64:
    """Length of the union of each owner's intervals."""
    found = np.zeros(ranks)
    order = np.lexsort((start_s, owner))
    owner, start, end = owner[order], start_s[order], end_s[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    if not len(first):
        return found
    # Owners one after the other on one axis, so far apart that what one has covered never reaches the next one's.
    apart = (float(end.max()) - min(float(start.min()), 0.0) + 1.0) * owner
    reach = np.maximum.accumulate(end + apart) - apart
    gaps = np.maximum(start[1:] - reach[:-1], 0.0)
    gaps[first[1:] - 1] = 0.0
    last = np.append(first[1:], len(owner)) - 1
    found[owner[first]] = reach[last] - start[first] - np.add.reduceat(np.append(0.0, gaps), first)
    return found
