"""A plan in words and as the document that `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..explain.numbers import bytes_text, seconds_text, share_text
from ..plan.context import exchange_of
from ..plan.plan import Plan
from .columns import columns

__all__ = ["explain_text", "plan_document", "plan_text"]


def plan_document(plan: Plan, *, path: str = "", alternatives: int | None = None) -> dict[str, Any]:
    """The plan's decisions and figures, without its programs."""
    layout, prediction, bound = plan.layout, plan.prediction, plan.bound
    document: dict[str, Any] = {
        "schema": "meshwright.train.plan",
        "version": 1,
        "path": path,
        "model": plan.job["training"]["model"],
        "parameters": plan.job["parameters"],
        "fabric": plan.target_fabric["name"],
        "devices": len(plan.placement),
        "placement": list(plan.placement),
        "decisions": {k: dict(v) for k, v in plan.decisions.items()},
        "alternatives": [msgspec.to_builtins(a) for a in plan.alternatives[:alternatives]],
        "seed": plan.seed,
    }
    if layout is not None:
        document["layout"] = {
            "data": layout.data,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "microbatch_size": layout.microbatch_size,
            "microbatches": layout.microbatches,
            "replica_microbatches": list(layout.replica_microbatches),
            "global_batch": layout.global_batch,
            "zero_level": layout.zero_level,
            "overlap": layout.overlap,
            "bucket_bytes": layout.bucket_bytes,
            "buckets": len(layout.buckets),
            "sequence": layout.sequence,
            "schedule": layout.schedule,
            "stages": len(layout.stages),
            "copies": max(1, len(layout.placement)),
            "split_backward": layout.split_backward,
        }
    if prediction is not None:
        document["prediction"] = msgspec.to_builtins(prediction)
        document["time_s"] = prediction.time_s
    if bound is not None:
        document["bound"] = {**msgspec.to_builtins(bound), "time_s": float(bound)}
    if prediction is not None and bound is not None and float(bound):
        document["ratio"] = prediction.time_s / float(bound)
    return document


def plan_text(plan: Plan, *, written: str = "") -> str:
    """The plan on one screen, at most 80 columns."""
    layout, prediction = plan.layout, plan.prediction
    assert layout is not None and prediction is not None
    training = plan.job["training"]
    memory = max(prediction.memory_peak_bytes, default=0)
    worst = max(prediction.memory_worst_bytes, default=0)
    rows = [
        ("model", f"{training['model']}, {plan.job['parameters']:,} parameters, loss {training['loss']}, {training['optimizer']}"),
        ("recipe", _recipe(training.get("recipe", {}))),
        ("fabric", f"{plan.target_fabric['name']}, {len(plan.placement)} devices"),
        ("layout", _layout_line(plan)),
        ("batch", f"{layout.global_batch} = {layout.microbatch_counts} micro-batches of {layout.microbatch_size}"),
        *([("schedule", _schedule_line(plan))] if layout.pipeline > 1 else []),
        *([("sharding", _sharding_line(plan))] if layout.data > 1 or len(layout.placement) > 1 else []),
        ("compress", str(plan.decisions.get("compress", {}).get("why", ""))),
        ("precision", _precision(plan)),
        ("recompute", _recompute(plan.decisions.get("recompute"))),
        *((_said(k), _collective(v)) for k, v in plan.decisions.items() if k.startswith("collective:")),
        ("step", f"{_bound_line(plan)}"),
        ("routing", "" if "tables" in plan.decisions else _routing(plan.decisions.get("experts", {}).get("options", {}))),
        ("copies", _copies(plan.decisions.get("copies", {}))),
        ("tables", _tables(plan.decisions.get("tables", {}))),
        ("gate", _gate(plan.job.get("gate"))),
        ("shapes", _shapes(plan)),
        ("phases", ", ".join(f"{k} {seconds_text(v)}" for k, v in prediction.phases_s.items() if v > 0)),
        ("memory", f"{bytes_text(memory)} per rank, {bytes_text(worst)} in the worst order"),
        ("evidence", ", ".join(f"{k} {share_text(v)}" for k, v in prediction.evidence.items() if v > 0)),
    ]
    text = "\n".join(_wrapped(name, value) for name, value in rows if value)
    return text + (f"\nplan written to {written}" if written else "")


def _precision(plan: Plan) -> str:
    """Where it is the layout's own."""
    if plan.layout is None or not (p := plan.layout.precision):
        return ""
    state = p.state
    each = f"weight {state.weight:g}, gradient {state.gradient:g} (sent in {state.message:g}), optimizer {state.optimizer:g}"
    return f"{p.dtype}, values of {p.value_bytes:g} B; bytes per parameter: {each}"


def _tables(said: Mapping[str, Any]) -> str:
    """Of a model whose tables were placed."""
    if not said:
        return ""
    bound = f", bound {seconds_text(said['bound_s'])}" if said.get("bound_s") else ""
    return f"in {said['parts']} parts by {said['strategy']}, {seconds_text(said['cost_s'])} an iteration by its costs{bound} ({said['plan']})"


def _copies(said: Mapping[str, Any]) -> str:
    """Of hot experts."""
    if not said.get("options", {}).get("copies"):
        return "of hot experts: none; " + str(said["why"]) if said else ""
    o = said["options"]
    text = f"{o['copies']} of hot experts in {o['layers']} layers, {o['spare']} places a rank; busiest ranks {o['busiest_rows']:,} rows a micro-batch"
    return f"{text} (without {o['before_rows']:,}, bound {o['bound_rows']:,}); {said['why']}"


def _routing(options: Mapping[str, Any]) -> str:
    if "range_s" not in options:
        return ""
    low, high = map(seconds_text, options["range_s"])
    return f"{options['routing']}; step {low} with experts chosen alike, {high} with all tokens on one rank's experts"


def _layout_line(plan: Plan) -> str:
    layout = plan.layout
    assert layout is not None
    context = f" x context {layout.context} ({exchange_of(layout)})" if layout.context > 1 else ""
    folded = f" x {layout.tensor} tensor ranks" if plan.decisions.get("experts", {}).get("options", {}).get("tensor") else ""
    context += f" ({'tables' if 'tables' in plan.decisions else 'experts'} over {layout.expert}{folded})" if layout.expert > 1 or folded else ""
    line = f"data {layout.data // layout.context}{context} x tensor {layout.tensor} x pipeline {layout.pipeline}"
    line += f" ({plan.decisions['placement']['strategy']})"
    division = plan.decisions["layout"].get("options", {}).get("division", "")
    return line + (", sequence-parallel" if layout.sequence else "") + (f", {division}" if division else "")


def _schedule_line(plan: Plan) -> str:
    layout = plan.layout
    assert layout is not None
    line = str(plan.decisions.get("pipeline", {}).get("options", {}).get("schedule", layout.schedule))
    per_rank, copies = len(layout.hosted(0)), max(1, len(layout.placement))
    if per_rank > 1:
        line += f", {per_rank} stages per rank" + (f" in {copies} copies" if copies > 1 else "")
    return line + (", backward in two parts" if layout.split_backward else "")


def _shapes(plan: Plan) -> str:
    """Of the first input, with the step that is predicted for each; the largest first."""
    if not plan.shapes or plan.prediction is None:
        return ""
    sizes = [plan.job["batch"]["inputs"], *(s.inputs for s in plan.shapes)]
    steps = [plan.prediction, *(s.prediction for s in plan.shapes)]
    pairs = zip(sizes, steps, strict=True)
    return ", ".join(f"{'x'.join(map(str, x[0][0][1:]))}: {seconds_text(p.time_s) if p is not None else 'unknown'}" for x, p in pairs)


def _gate(said: Any) -> str:
    return str(said.get("text", "")) if isinstance(said, Mapping) else ""


def _sharding_line(plan: Plan) -> str:
    layout = plan.layout
    assert layout is not None
    divided = ("nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights")
    when = f"summed during backward in {len(layout.buckets)} buckets" if layout.overlap else "summed after backward"
    if layout.zero_level > 1 and not layout.overlap:
        when = f"summed bucket by bucket ({len(layout.buckets)}), backward waits"
    if layout.data == 1:
        return f"gradients of {len(layout.placement)} copies of the stages {when}"
    return f"ZeRO {layout.zero_level}: {divided[layout.zero_level]} divided among {layout.data} replicas; gradients {when}"


def _said(decision: str) -> str:
    purpose = decision.replace("collective:", "")
    if purpose == "statistics":
        return purpose
    return f"{purpose} gather" if purpose in ("weights", "norm") else f"{purpose} sum"


def _recipe(asked: Mapping[str, Any]) -> str:
    words = {
        "no_decay": "no decay of", "schedule": "schedule", "ema": "average", "clip_norm": "norm at most", "clip_value": "elements at most",
        "batch_statistics": "batch statistics",
    }  # fmt: skip
    told = {k: v for k, v in asked.items() if v and v not in ("fp32", "run")}
    return ", ".join(f"{words.get(k, k)} {' '.join(v) if isinstance(v, (list, tuple)) else v}" for k, v in told.items())


def _wrapped(name: str, value: str, width: int = 80) -> str:
    import textwrap

    return textwrap.fill(value, width, initial_indent=f"{name:<13}", subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False)


def _recompute(decision: Any) -> str:
    """Empty where everything is kept."""
    stages = decision["options"]["stages"] if decision else ()
    whole = bool(decision) and decision["strategy"] == "steps"
    parts = [
        f"stage {s['stage']} {'whole' if whole else str(s['layers']) + ' layers'}, {bytes_text(s['saved_bytes'])} fewer kept and "
        f"{seconds_text(s['time_s'])} more per micro-batch" + (f" (at least {seconds_text(s['bound_s'])})" if s["bound_s"] < s["time_s"] else "")
        for s in stages
    ]
    least = decision["options"].get("least_step_s") if decision else None
    if least:
        parts.append(f"no plans of these stages that fit make the step shorter than {seconds_text(least)}")
    return f"{decision['strategy']}: " + "; ".join(parts) if parts else ""


def _collective(decision: Any) -> str:
    alone = [p["alone_s"] for p in decision["programs"]]
    return f"{decision['strategy']}, {seconds_text(max(alone))} alone, {len(alone)} schedule{'s' if len(alone) != 1 else ''}"


def _bound_line(plan: Plan) -> str:
    assert plan.prediction is not None
    line = f"{seconds_text(plan.prediction.time_s)} predicted"
    if plan.bound is not None and float(plan.bound):
        line += f", bound {seconds_text(float(plan.bound))} ({plan.prediction.time_s / float(plan.bound):.2f} times)"
    rival = next((a for a in plan.alternatives if a.time_s is not None), None)
    if rival is not None and rival.time_s is not None:
        line += f"; next best {seconds_text(rival.time_s)}: {rival.what}"
    return line


def explain_text(plan: Plan, *, limit: int) -> str:
    """Why each decision was taken, and the runners-up with what they lost by."""
    lines = [plan_text(plan), ""]
    for name, decision in plan.decisions.items():
        lines.append(_wrapped(name[:12], f"{decision['strategy']}: {decision['why']}"))
        for program in decision.get("programs", ()):
            tried = ", ".join(
                f"{t['strategy']} {seconds_text(t['alone_s'])}" if t["alone_s"] is not None else f"{t['strategy']}: {t['why']}"
                for t in program["tried"]
            )
            lines.append(_wrapped("", f"alone: {tried}"))
    if plan.bound is not None:
        data = plan.bound.certificate.data
        facts = ", ".join(f"{k} {v}" for k, v in data.items())
        lines.append(_wrapped("bound", f"{seconds_text(float(plan.bound))} by {plan.bound.certificate.kind}: {facts}"))
    judged = [a for a in plan.alternatives if a.time_s is not None][:limit]
    if judged:
        rows = [[a.what, seconds_text(a.time_s or 0.0), bytes_text(a.memory_peak_bytes or 0), a.why] for a in judged]
        lines += ["", "runners-up", *columns([["layout", "step", "memory", "why not"], *rows])]
    refused = [a for a in plan.alternatives if a.time_s is None]
    if refused:
        lines += ["", f"not simulated ({len(refused)})", *(f"  {a.what}: {a.why}" for a in refused[:limit])]
    return "\n".join(lines)
