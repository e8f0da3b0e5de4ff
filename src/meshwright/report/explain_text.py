"""An explanation in words and as the document that `--json` prints (the plan's own document with `explanation` in it)."""

from __future__ import annotations

from typing import Any

import msgspec

from ..explain.assumptions import NOT_MODELLED
from ..explain.explanation import Explanation
from ..explain.numbers import bytes_text, seconds_text
from ..plan.plan import Plan
from .columns import columns
from .plan_text import explain_text as decisions_text
from .plan_text import plan_document, plan_text

__all__ = ["explain_document", "explain_text"]


def explain_document(plan: Plan, found: Explanation, *, path: str = "", limit: int | None = None) -> dict[str, Any]:
    document = plan_document(plan, path=path, alternatives=limit)
    document["explanation"] = {k: v for k, v in msgspec.to_builtins(found).items() if k != "cut"} | {"not_modelled": NOT_MODELLED}
    return document


def explain_text(plan: Plan, found: Explanation, *, limit: int) -> str:
    """Where the step goes, what binds, what it rests on, who came next, what would change it; then the decisions as the plan has them."""
    sections = [
        plan_text(plan).splitlines(), [found.breakdown.bottleneck], _time(found), _memory(found), _flops(found), _assumptions(found),
        _rivals(found, limit), _crossings(found), _what_ifs(found), _recompute(found), [f"note: {n}" for n in found.notes],
        _gains(plan), ["decisions", *_decisions(plan, found, limit)],
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _decisions(plan: Plan, found: Explanation, limit: int) -> list[str]:
    """The plan's own account after its summary; its list of runners-up only where they were not simulated again."""
    lines = decisions_text(plan, limit=limit).splitlines()[len(plan_text(plan).splitlines()) + 1 :]
    if not found.rivals or "runners-up" not in lines:
        return lines
    start = lines.index("runners-up")
    end = lines.index("", start) if "" in lines[start:] else len(lines)
    return [*lines[: start - 1], *lines[end:]]


def _gains(plan: Plan) -> list[str]:
    """What each decision gained and took, in the order in which they were made; plans of earlier versions do not say."""
    rows = [["decision", "step before", "after", "gained", "candidates judged"]]
    for made in plan.decisions.get("layout", {}).get("made", ()):
        before, after = made["before_s"], made["after_s"]
        gained = f"{100 * (1 - after / before):.1f} %" if before and after else ""
        rows.append([made["decision"], *(seconds_text(s) if s else "none fits" for s in (before, after)), gained, str(made["evaluations"])])
    return columns(rows) if len(rows) > 1 else []


def _time(found: Explanation) -> list[str]:
    names = [n for n in found.breakdown.stages[0].seconds if any(s.seconds[n] > 0 for s in found.breakdown.stages)]
    rows = [["time", *names]]
    rows += [[s.name, *(seconds_text(s.seconds[n]) for n in names)] for s in found.breakdown.stages]
    names_of = {s.stage: s.name for s in found.breakdown.stages}
    path = ", ".join(f"{p.phase} on {names_of[p.stage]} {100 * p.share:.0f} %" for p in found.breakdown.path[:5])
    lines = [*columns(rows), f"critical path: {path}"]
    again = [s for s in found.breakdown.stages if s.recompute_s > 0]
    if again:
        parts = [f"{s.name} {seconds_text(s.recompute_s)} ({100 * s.recompute_s / max(s.seconds['backward'], 1e-30):.0f} %)" for s in again]
        lines.append(f"recomputation, of backward: {', '.join(parts)}")
    return lines


def _memory(found: Explanation) -> list[str]:
    names = [*found.breakdown.stages[0].memory_bytes]
    rows = [["memory", *names, "device has"]]
    for s in found.breakdown.stages:
        has = bytes_text(s.limit_bytes) if s.limit_bytes else "not stated"
        rows.append([s.name, *(bytes_text(s.memory_bytes[n]) for n in names), has])
    return columns(rows)


def _flops(found: Explanation) -> list[str]:
    f = found.flops
    said = f"{'measured' if f.measured else 'predicted'} step {seconds_text(f.step_time_s)}"
    counted = "counted in full" if f.causal == "full" else "counted below the diagonal"
    if f.model:
        return [
            f"utilisation: MFU {100 * f.mfu:.1f} %, HFU {100 * f.hfu:.1f} % at the {said}; "
            f"{f.model:.4g} model and {f.hardware:.4g} hardware operations, causal attention {counted}"
        ]
    if f.hardware:
        return [f"utilisation: HFU {100 * f.hfu:.1f} % at the {said}; {f.hardware:.4g} operations, model operations need the graph"]
    return []


def _assumptions(found: Explanation) -> list[str]:
    rows = [["rests on", "value", "evidence", "error", "step then"]]
    rows += [
        [a.what, a.value, a.evidence, f"+-{100 * a.error:.0f} %", f"{seconds_text(a.low_s)} to {seconds_text(a.high_s)}"] for a in found.assumptions
    ]
    head = f"error bar: {seconds_text(found.low_s)} to {seconds_text(found.high_s)} if all compute and all communication are wrong the same way"
    sources = list(dict.fromkeys(a.source for a in found.assumptions))
    return [head, *columns(rows), *(f"source: {s}" for s in sources), f"not modelled: {NOT_MODELLED}"]


def _rivals(found: Explanation, limit: int) -> list[str]:
    if not found.rivals:
        return []
    rows = [["runners-up", "step", "times", "why it loses"]]
    rows += [[r.what, seconds_text(r.time_s), f"{r.ratio:.3f}", r.why] for r in found.rivals[:limit]]
    return columns(rows)


def _crossings(found: Explanation) -> list[str]:
    """Directions in which nothing is found are said as well."""
    if not found.rivals:
        return []
    lines = ["how wrong the rates may be"]
    for axis in ("compute", "links"):
        for slower in (True, False):
            word = f"{axis} {'slower' if slower else 'faster'}"
            hit = next((c for c in found.crossings if c.axis == axis and (c.factor < 1) == slower), None)
            if hit is None:
                lines.append(f"  {word}: no runner-up wins within 4 times")
            else:
                lines.append(f"  {word} than believed, at {hit.factor:.3g} times the rate: {hit.rival} wins")
    return lines


def _what_ifs(found: Explanation) -> list[str]:
    if not found.what_ifs:
        return []
    lines = ["what would change it"]
    for w in found.what_ifs:
        gain = f"{100 * w.gain:.1f} % off the step, {seconds_text(w.time_s)}: {w.layout}" if w.gain and w.time_s is not None else w.why
        lines.append(f"  {w.what}: {gain}")
    return lines


def _recompute(found: Explanation) -> list[str]:
    advice = found.recompute
    if advice is None:
        return []
    lines = [f"recomputing instead of keeping ({advice.layers} layers like {advice.layer}, {bytes_text(advice.layer_bytes)} each per micro-batch)"]
    rows = [["policy", "keeps", "share", "extra of forward", "above the bound at most"]]
    for p in advice.points:
        rows.append([p.what, bytes_text(p.kept_bytes), f"{100 * p.kept_share:.0f} %", f"{100 * p.time_share:.1f} %", f"{100 * p.gap:.1f} %"])
    lines += columns(rows)
    for s in advice.stages:
        if s.why:
            lines.append(f"stage {s.stage}: {s.why}")
        elif s.recomputed:
            lines.append(f"stage {s.stage}: {s.recomputed} of {s.slots} kept layers are computed again, {100 * s.time_share:.1f} % more forward")
    return lines
