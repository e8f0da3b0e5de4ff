"""How much of a prediction rests on what: measured here, interpolated from a measured table, or assumed.

The shares are of the critical path, since only what lies on it moves the answer. Idle stretches of the path (waiting for nothing that was
priced, such as a link's latency being covered by no step) go to the path's own steps in proportion, so the shares always sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cost import Cost, Evidence
from .errors import UsageError
from .program.program import Kind, Program
from .timeline import Timeline

__all__ = ["EVIDENCE_CODES", "evidence_of_timeline", "evidence_shares", "step_evidence"]

EVIDENCE_CODES: tuple[Evidence, ...] = ("measured", "interpolated", "assumed")  # code of a step = position here


def evidence_shares(seconds: NDArray[np.float64], codes: NDArray[Any], critical_path: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Shares by kind of evidence, summing to 1.

    `seconds[step]`: duration of one execution; `codes[step]`: index into EVIDENCE_CODES; `critical_path`: (step, iteration) pairs.
    A path of zero length counts as measured: there is nothing that could be wrong.
    Raises: UsageError for codes or steps out of range, or durations that are negative or not finite.
    """
    if len(seconds) != len(codes):
        raise UsageError(f"{len(seconds)} durations for {len(codes)} evidence codes")
    if len(codes) and (np.min(codes) < 0 or np.max(codes) >= len(EVIDENCE_CODES)):
        raise UsageError(f"an evidence code must be 0..{len(EVIDENCE_CODES) - 1}")
    steps = np.asarray([step for step, _ in critical_path], np.int64)
    if len(steps) and (steps.min() < 0 or steps.max() >= len(seconds)):
        raise UsageError(f"the critical path names step {int(steps.max())} of {len(seconds)}")
    on_path = np.asarray(seconds, np.float64)[steps]
    if not np.all(np.isfinite(on_path)) or np.any(on_path < 0):
        raise UsageError("durations must be finite and not negative")
    largest = on_path.max(initial=0.0)
    if largest == 0:
        return {"measured": 1.0, "interpolated": 0.0, "assumed": 0.0}
    weights = np.bincount(np.asarray(codes, np.int64)[steps], weights=on_path / largest, minlength=len(EVIDENCE_CODES))
    return {name: float(w) for name, w in zip(EVIDENCE_CODES, weights / weights.sum(), strict=True)}


def step_evidence(program: Program, cost: Cost) -> NDArray[np.int8]:
    """Evidence code of every step: compute by its price's evidence (the roofline's where the table lacks it), the rest by the transport's."""
    codes = np.full(len(program.steps), EVIDENCE_CODES.index(cost.transport.evidence), np.int8)
    of_op = np.array([EVIDENCE_CODES.index(_evidence(cost, program.ops.key(i))) for i in range(len(program.ops))], np.int8)
    compute = program.steps.kind == Kind.COMPUTE
    codes[compute] = of_op[program.steps.op[compute]]
    return codes


def _evidence(cost: Cost, key: str) -> Evidence:
    return cost.table[key].evidence if key in cost.table else cost.evidence


def evidence_of_timeline(timeline: Timeline, program: Program, cost: Cost) -> dict[str, float]:
    """Shares of a simulated timeline's critical path; `program` is the inlined one that was simulated, priced by `cost`.

    Raises: UsageError when the path names an execution that the timeline has no span of.
    """
    codes = step_evidence(program, cost)
    spans, path = timeline.spans, np.asarray([tuple(p) for p in timeline.critical_path], np.int64).reshape(-1, 2)
    width = int(max(spans.iteration.max(initial=0), path[:, 1].max(initial=0))) + 1
    order = np.argsort(keys := spans.step.astype(np.int64) * width + spans.iteration, kind="stable")
    wanted = path[:, 0] * width + path[:, 1]
    where = np.searchsorted(keys[order], wanted)
    if np.any(where >= len(order)) or np.any(keys[order][np.minimum(where, len(order) - 1)] != wanted):
        raise UsageError("the critical path names a step that was not recorded", hint="simulate with record=True")
    chosen = order[where]
    seconds = np.maximum(spans.end_s[chosen] - spans.start_s[chosen], 0.0)
    return evidence_shares(seconds, codes[path[:, 0]], [(i, 0) for i in range(len(path))])
