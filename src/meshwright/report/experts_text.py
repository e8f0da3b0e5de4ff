"""Choices of an expert layer as documents and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..explain.numbers import seconds_text
from .columns import columns

if TYPE_CHECKING:
    from ..decide.experts import ExpertProblem
    from ..drive.experts import RankedChoice
    from ..drive.experts.replicas import LayerReplicas

__all__ = ["choices_text", "fixed_times", "loads_text", "row_document"]

SHADES = " .:-=+*#%@"  # of a map, least to most
MAX_SHOWN_EXPERTS = 64  # columns of a map; more experts are shown by their largest


def row_document(x: RankedChoice) -> dict[str, Any]:
    bound_s = float(x.bound.time_s)
    return {
        "capacity": x.capacity, "degree": x.choice.degree, "chunks": x.choice.chunks, "algorithm": x.choice.algorithm, "time_s": x.time_s,
        "forward_s": x.forward_s, "backward_s": x.backward_s, "tokens_bytes": x.tokens_bytes, "weights_bytes": x.weights_bytes,
        "bound": {"time_s": bound_s, "exact_s": str(x.bound.time_s), "follows_from": [w for w in x.bound.why if w]},
        "ratio": None if x.time_s is None else x.time_s / bound_s, "why": x.why,
    }  # fmt: skip


def fixed_times(ranked: Sequence[Sequence[RankedChoice]]) -> dict[str, Any]:
    """Seconds of one step at every capacity: with the best choice of each, and with one choice for all, the best of which is named."""
    adaptive = sum(rows[0].time_s or 0.0 for rows in ranked)
    totals: dict[str, float] = {}
    for x in ranked[0]:
        times = [y.time_s for rows in ranked for y in rows if y.choice == x.choice]
        if all(t is not None for t in times):
            totals[x.choice.text] = sum(t for t in times if t is not None)
    best = min(totals, key=lambda name: (totals[name], name)) if totals else ""
    return {"adaptive_s": adaptive, "best_fixed": best, "best_fixed_s": totals.get(best), "totals_s": totals}


def choices_text(problem: ExpertProblem, ranked: Sequence[Sequence[RankedChoice]], fixed: dict[str, Any] | None = None) -> str:
    shape = problem.shape
    what = "forward and backward" if problem.passes == "training" else "forward"
    head = f"{shape.experts} experts of {shape.model} x {shape.inner} on {shape.ranks} devices of {problem.fabric.name}; {what} of one layer"
    table = [["capacity", "choice", "time", "bound", "above it", "tokens in", "weights in", "bound from"]]
    refused = {f"{x.choice.algorithm}: {x.why}" for rows in ranked for x in rows if x.time_s is None}
    for rows in ranked:
        for x in rows:
            if x.time_s is not None:
                bound_s = float(x.bound.time_s)
                table.append([
                    str(x.capacity), x.choice.text, seconds_text(x.time_s), seconds_text(bound_s), f"{x.time_s / bound_s - 1:.1%}",
                    f"{x.tokens_bytes} B", f"{x.weights_bytes} B", x.bound.why[0],
                ])  # fmt: skip
    lines = [head, *columns(table), *(f"refused: {why}" for why in sorted(refused))]
    if fixed is not None and fixed["best_fixed_s"]:
        gain = fixed["best_fixed_s"] / fixed["adaptive_s"]
        times = [f"{seconds_text(fixed[name])} with the best" for name in ("adaptive_s", "best_fixed_s")]
        lines.append(f"one step at each capacity: {times[0]} choice of each, {times[1]} fixed one ({fixed['best_fixed']}): {gain:.3f} times")
    return "\n".join(lines)


def loads_text(layers: Sequence[LayerReplicas]) -> str:
    """Loads as a map, a row per layer (or per moment, where the file's layers are moments) and a column per expert; copies and whether they pay."""
    most = max((max(x.loads) for x in layers), default=0)
    name = max(len(x.layer) for x in layers)
    lines = [f"rows of every expert, '{SHADES[-1]}' {most}, ' ' none:"]
    for x in layers:
        each = -(-len(x.loads) // MAX_SHOWN_EXPERTS)
        shown = [max(x.loads[i : i + each]) for i in range(0, len(x.loads), each)]
        lines.append(f"  {x.layer:<{name}} |{''.join(SHADES[-(-n * (len(SHADES) - 1) // max(1, most))] for n in shown)}|")
    table = [["layer", "copies", "busiest rank", "without", "bound", "saved", "weights", ""]]
    for x in layers:
        m = x.made
        copies = ", ".join(f"{e} on {r}" for e, r in m.copies[:4]) + (f" and {len(m.copies) - 4} more" if len(m.copies) > 4 else "")
        table.append([
            x.layer, copies or "none", f"{m.busiest} rows", f"{m.before}", f"{m.bound}", seconds_text(x.saved_s), seconds_text(x.moved_s),
            "pays" if x.pays else "does not pay",
        ])  # fmt: skip
    return "\n".join([*lines, *columns(table)])
