"""Traffic plans and comparisons for people and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..drive.traffic import Risk, TrafficRow, risks_of
from ..explain.numbers import bytes_text, seconds_text
from ..traffic import TrafficPlan

__all__ = ["candidates_text", "compare_text", "plan_summary", "plan_text", "risk_text", "row_document"]


def plan_summary(plan: TrafficPlan) -> dict[str, Any]:
    """The decision without the profile it rests on."""
    least, plain = float(plan.bound), float(plan.uncompressed)
    return {
        "strategy": plan.strategy, "codecs": list(plan.codecs), "ranks": plan.profile.ranks, "tensors": len(plan.profile.tensors),
        "time_s": plan.step_ns / 1e9, "compute_s": plan.profile.compute_ns / 1e9, "leave": plan.leave,
        "plain_s": plan.profile.plain_ns / 1e9 or None, "payload_bytes": plan.payload_bytes,
        "bound": {"time_s": least}, "ratio": plan.step_ns / 1e9 / least if least else None, "uncompressed_bound": {"time_s": plain},
        "groups": [msgspec.to_builtins(g) for g in plan.groups],
        "risks": [msgspec.to_builtins(r) for r in risks_of(plan)],
    }  # fmt: skip


def plan_text(plan: TrafficPlan) -> str:
    """The answer, its bounds, its groups and what they risk."""
    p, least = plan.profile, float(plan.bound)
    over = f"{100 * (plan.step_ns / 1e9 / least - 1):.1f} % above" if plan.step_ns / 1e9 > least else "optimal"
    lines = [
        f"{len(p.tensors)} gradients on {p.ranks} ranks: step {seconds_text(plan.step_ns / 1e9)}, bound {seconds_text(least)} ({over}); "
        f"without compression at least {seconds_text(float(plan.uncompressed))}; backward alone {seconds_text(p.compute_ns / 1e9)}",
        f"each rank sends {bytes_text(plan.payload_bytes)} of payload in {len(plan.groups)} groups",
    ]
    if plan.leave:
        lines.append(f"DDP by itself took {seconds_text(p.plain_ns / 1e9)} where this was measured: gradients are left to it; the best groups are")
    for i, g in enumerate(plan.groups):
        inside = p.tensors[g.first : g.last]
        elements = sum(t.elements for t in inside)
        lines.append(f"  {i:>3}  {g.codec:<24} {len(inside):>4} tensors  {elements:>12,} elements  to {inside[-1].name}")
    return "\n".join(lines + [risk_text(r) for r in risks_of(plan)])


def candidates_text(rows: Sequence[TrafficRow]) -> str:
    """Below a plan: each codec for all groups, in its best groups, with what it states."""
    return "\n".join([f"one codec for all groups{'':4} {_HEADER[29:]}", *(f"{_cells(r)}   {risk_text(r.risks[0]).partition(': ')[2]}" for r in rows)])


_HEADER = f"{'codecs':<28} {'groups':>6} {'step':>10} {'payload':>10} {'bound':>10}"


def _cells(r: TrafficRow) -> str:
    names = "any" if len(r.codecs) > 1 else r.codecs[0]
    sent = bytes_text(r.plan.payload_bytes)
    return f"{names:<28} {len(r.plan.groups):>6} {seconds_text(r.plan.step_ns / 1e9):>10} {sent:>10} {seconds_text(float(r.plan.bound)):>10}"


def risk_text(risk: Risk) -> str:
    """One line: bias, bound of the error, delay."""
    if risk.bias == "exact":
        return f"{risk.codec}: exact"
    error = "no bound of the error for every input"
    if risk.variance is not None:
        error = f"variance at most {risk.variance:.3g} of the squared norm"
    elif risk.contraction is not None:
        error = f"leaves at most {100 * (1 - risk.contraction):.3g} % of the squared norm"
    late = "; the rest is sent later" if risk.feedback else ""
    if risk.delay_steps:
        late += f", after {risk.delay_steps:.3g} steps at most on average"
    return f"{risk.codec}: {risk.bias}; {error}{late}"


def row_document(row: TrafficRow) -> dict[str, Any]:
    return plan_summary(row.plan)


def compare_text(rows: Sequence[TrafficRow]) -> str:
    """A table by predicted step, then what each codec states."""
    lines = [f"{'strategy':<12} {_HEADER}", *(f"{r.strategy:<12} {_cells(r)}" for r in rows)]
    lines.append(f"without compression no step is shorter than {seconds_text(float(rows[0].plan.uncompressed))}")
    return "\n".join(lines + list(dict.fromkeys(risk_text(x) for r in rows for x in r.risks)))
