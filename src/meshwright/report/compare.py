"""Prediction over measurement: the plan's own program simulated on the fabric that the run really had, beside what happened.

`Measured` is what a run left behind, already on one clock. Nothing here times anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import UsageError
from ..explain.numbers import bytes_text, seconds_text
from ..plan.plan import Plan
from ..program.calls import InlinedProgram
from ..program.phases import phases
from ..timeline import Timeline
from ..trace.measured import Measured
from ..trace.phases import PHASE_ORDER, phase_seconds
from .columns import columns

__all__ = ["Comparison", "compare", "compare_document", "compare_text"]

WARM_UP_STEPS = 2  # left out: first sends, allocator growth, page faults


@dataclass(frozen=True, kw_only=True)
class Comparison:
    predicted: Timeline  # of one step on the run's fabric
    predicted_phases: list[dict[str, float]]  # per rank
    measured: Measured
    measured_phases: list[dict[str, float]]  # per rank, as in the mean of the middle half of the steps, adding up to the median one
    measured_step_s: float  # median after warm-up
    step_s: list[float]
    target_step_s: float
    target_phases: Mapping[str, float]
    target_fabric: str
    bound_s: float
    busiest_bound_s: float  # on the run's fabric: no order of this plan's steps is faster than its busiest rank's compute
    evidence: Mapping[str, float]
    cpu_s: Sequence[float] = field(default_factory=list)  # predicted processor seconds per rank

    def typical_step(self) -> Timeline:
        """The recorded step whose duration is closest to the median."""
        return min(self.measured.steps[WARM_UP_STEPS:] or self.measured.steps, key=lambda t: abs(t.makespan_s - self.measured_step_s))

    @property
    def error(self) -> float:
        return self.predicted.makespan_s / self.measured_step_s - 1


def compare(
    plan: Plan, inlined: InlinedProgram, predicted: Timeline, measured: Measured, *, evidence: Mapping[str, float], cpu_s: Sequence[float] = ()
) -> Comparison:
    """`predicted`: the plan's program simulated on the run's fabric with the run's calibrated costs."""
    codes = phases(inlined)
    ranks = inlined.program.ranks
    if not measured.steps:
        raise UsageError("the run recorded no complete step", hint="run more steps: the first ones and those under the memory profiler are left out")
    warm = measured.steps[WARM_UP_STEPS:] or measured.steps
    step_s = list(measured.step_s)
    per_step = [phase_seconds(t.spans, codes, ranks, t.makespan_s) for t in _middle(warm)]
    median_s = float(np.median([t.makespan_s for t in warm]))
    scale = median_s / sum(t.makespan_s for t in _middle(warm))
    mean = [{k: scale * sum(s[r][k] for s in per_step) for k in per_step[0][r]} for r in range(ranks)]
    predicted_phases = phase_seconds(predicted.spans, codes, ranks, predicted.makespan_s)
    compute = ("forward", "backward", "optimizer")
    if plan.prediction is None:
        raise UsageError("the plan carries no prediction to compare with", where="plan.prediction", hint="make it with `meshwright train plan`")
    return Comparison(
        predicted=predicted,
        predicted_phases=predicted_phases,
        measured=measured,
        measured_phases=mean,
        measured_step_s=median_s,
        step_s=step_s,
        target_step_s=plan.prediction.time_s,
        target_phases=plan.prediction.phases_s,
        target_fabric=plan.prediction.target_fabric,
        bound_s=float(plan.bound) if plan.bound is not None else 0.0,
        busiest_bound_s=max(sum(p[k] for k in compute) for p in predicted_phases),
        evidence=dict(evidence),
        cpu_s=list(cpu_s),
    )


def _middle(steps: Sequence[Timeline]) -> list[Timeline]:
    """The middle half of the steps by duration. Means over all would follow a few disturbed steps; in a single one a phase under a quota lasts a
    third or three times as long, as it meets the end of a period or not."""
    ordered = sorted(steps, key=lambda t: t.makespan_s)
    return ordered[(len(ordered) - 1) // 4 : len(ordered) - (len(ordered) - 1) // 4]


def _mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return float(np.mean([r[key] for r in rows]))


def _phase_names(c: Comparison) -> list[str]:
    """Of its step, which the run and its prediction share."""
    return [k for k in (*PHASE_ORDER, "idle") if k in c.predicted_phases[0]]


def compare_document(c: Comparison) -> dict[str, Any]:
    return {
        "schema": "meshwright.train.compare",
        "version": 1,
        "run_fabric": c.measured.run_fabric,
        "target_fabric": c.target_fabric,
        "pacing": c.measured.pacing,
        "others_share": c.measured.others_share,
        "step": {
            "predicted_s": c.predicted.makespan_s,
            "measured_s": c.measured_step_s,
            "error": c.error,
            "target_s": c.target_step_s,
            "bound_s": c.busiest_bound_s,
            "target_bound_s": c.bound_s,
        },
        "steps_s": c.step_s,
        "losses": list(c.measured.losses),
        "phases": {
            k: {"predicted_s": _mean(c.predicted_phases, k), "measured_s": _mean(c.measured_phases, k), "target_s": c.target_phases.get(k, 0.0)}
            for k in _phase_names(c)
        },
        "memory": [
            {"rank": r, "predicted_bytes": p, "measured_bytes": m, "rss_bytes": s}
            for r, (p, m, s) in enumerate(zip(c.predicted.memory_peak_bytes, c.measured.memory_peak_bytes, c.measured.rss_peak_bytes, strict=True))
        ],
        "cpu": {"predicted_s": list(c.cpu_s), "measured_s": list(c.measured.cpu_s)},
        "evidence": dict(c.evidence),
        "notes": list(c.measured.notes),
    }


def compare_text(c: Comparison, *, trace: str = "") -> str:
    """Tables of steps, phases and memory, at most 80 columns wide."""
    header = ["", "predicted", "measured", "error", f"on {c.target_fabric}"]
    rows = [header, ["step", *_pair(c.predicted.makespan_s, c.measured_step_s), seconds_text(c.target_step_s)]]
    rows.append(["bound", seconds_text(c.busiest_bound_s), "", "", seconds_text(c.bound_s)])
    for k in _phase_names(c):
        p, m, t = _mean(c.predicted_phases, k), _mean(c.measured_phases, k), c.target_phases.get(k, 0.0)
        if max(p, m, t) > 0:
            rows.append([f"  {k}", *_pair(p, m), seconds_text(t)])
    if c.cpu_s:
        rows.append(["cpu time", *_pair(float(np.mean(c.cpu_s)), float(np.mean(c.measured.cpu_s))), ""])
    memory = [["rank", "memory predicted", "measured", "error", "resident set"]]
    for r, (p, m) in enumerate(zip(c.predicted.memory_peak_bytes, c.measured.memory_peak_bytes, strict=True)):
        memory.append([str(r), bytes_text(p), bytes_text(m), f"{100 * (p / m - 1):+.1f} %" if m else "", bytes_text(c.measured.rss_peak_bytes[r])])
    losses = c.measured.losses
    steps = f"{len(c.step_s)} steps on {c.measured.run_fabric} ({c.measured.pacing}), the median one below, loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    lines = [steps, "", *columns(rows), "", *columns(memory), ""]
    lines.append("prediction rests on " + ", ".join(f"{k} {100 * v:.0f} %" for k, v in c.evidence.items() if v > 0))
    if c.measured.others_share > 0.1:
        share = 100 * c.measured.others_share
        lines.append(f"note: other programs used {share:.0f} % of the machine during this run; repeat it for a fair comparison")
    lines += [f"note: {n}" for n in c.measured.notes]
    if trace:
        lines.append(f"trace with both timelines: {trace} (open in https://ui.perfetto.dev)")
    return "\n".join(lines)


def _pair(predicted: float, measured: float) -> list[str]:
    error = f"{100 * (predicted / measured - 1):+.1f} %" if measured > 1e-6 else ""
    return [seconds_text(predicted), seconds_text(measured), error]
