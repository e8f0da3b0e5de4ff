"""The page's tables and sentences, made here so that they can be read without a script: summary, breakdown, layout, decisions, alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...explain.numbers import bytes_text, seconds_text, share_text
from ...explain.opening import opening
from ...program.flat import represented_by
from ...program.phases import phases
from ...trace.phases import PHASE_ORDER, phase_seconds
from .bars import error_bars_table
from .content import PageContent
from .html import Html, figure_of, joined, shortened, source_link, table, tag

__all__ = ["alternatives", "breakdown_section", "decisions", "layout_table", "summary"]

MAX_UNFOLDED = 12  # alternatives before the rest is folded away
MAX_ALTERNATIVES = 300  # alternatives in all; the plan's file has the rest
MAX_RANKS = 128  # rows of per-rank tables


def summary(page: PageContent) -> Html:
    """The figures that one looks for first, each with its source."""
    plan, run = page.plan, page.run
    figures = []
    predicted_s = page.timeline.makespan_s
    what = {"training": "training step", "pipeline": "pipeline step"}.get(plan.kind, "time")
    bars = page.bars
    sure = f"{seconds_text(bars.low_s)} to {seconds_text(bars.high_s)} if its prices are off" if bars is not None else ""
    figures.append(figure_of(seconds_text(predicted_s), f"{what} on {plan.target_fabric.get('name', '')}", "simulated", note=sure))
    if plan.bound is not None and float(plan.bound):
        ratio = predicted_s / float(plan.bound)
        above = (
            "the plan reaches it"
            if ratio < 1.0005
            else f"the plan takes {ratio:.3g} times as long"
            if ratio > 2
            else f"the plan is {100 * (ratio - 1):.1f} % above"
        )
        figures.append(figure_of(seconds_text(float(plan.bound)), "nothing can be faster than", "bound", note=above))
    if plan.kind == "collective" and predicted_s:
        size = _size_bytes(plan.job)
        if size:
            figures.append(figure_of(f"{bytes_text(size / predicted_s)}/s", f"algorithm bandwidth at {bytes_text(size)}", "simulated"))
    if run is not None:
        c = run.comparison
        figures.append(
            figure_of(seconds_text(c.predicted.makespan_s), "the same step predicted for the machine that ran it", "simulated for the run")
        )
        off = f"the prediction is {100 * c.error:+.1f} % off"
        figures.append(figure_of(seconds_text(c.measured_step_s), f"median step measured on {c.measured.run_fabric}", "measured", note=off))
    peak = max(page.timeline.memory_peak_bytes, default=0)
    if peak and plan.kind != "collective":
        figures.append(figure_of(bytes_text(peak), "most memory of a rank", "simulated"))
    rival = next((a for a in plan.alternatives if a.time_s is not None), None)
    if rival is not None and rival.time_s is not None:
        figures.append(figure_of(seconds_text(rival.time_s), "next best", "simulated", note=shortened(rival.what, 64)))
    said = []
    if page.breakdown is not None:
        said = [tag("p", " ".join(opening(plan, page.breakdown)), cls="lead"), tag("p", page.breakdown.bottleneck)]
    if not page.checked:
        said.append(tag("p", "This plan was not checked: the page shows what its file says.", cls="warning"))
    return joined([*said, tag("dl", *figures, cls="figures")])


def _size_bytes(job: Mapping[str, Any]) -> int:
    collective = job.get("collective")
    size = collective.get("size_bytes", 0) if isinstance(collective, dict) else 0
    return size if isinstance(size, int) else 0


def breakdown_section(page: PageContent) -> Html:
    """Where the time goes: mean over ranks per phase, then stage by stage; the critical path."""
    parts: list[Html] = []
    run = page.run
    rows: list[tuple[str, str, Mapping[str, float]]] = [(f"predicted for {page.timeline.run_fabric}", "simulated", _mean(_per_rank(page)))]
    if run is not None:
        c = run.comparison
        rows.append((f"predicted for {c.measured.run_fabric}", "simulated for the run", _mean(c.predicted_phases)))
        rows.append((f"median step measured on {c.measured.run_fabric}", "measured", _mean(c.measured_phases)))
    names = [n for n in (*PHASE_ORDER, "idle") if any(seconds.get(n, 0.0) > 0 for _, _, seconds in rows)]
    parts += [tag("figure", tag("figcaption", what, " ", source_link(source)), _bar(seconds, names)) for what, source, seconds in rows]
    body = [[what, *(seconds_text(seconds.get(n, 0.0)) for n in names), seconds_text(sum(seconds.values()))] for what, _, seconds in rows]
    parts.append(table("Seconds of a rank per phase, mean over ranks", ["which step", *names, "step"], body, numbers=range(1, len(names) + 2)))
    found = page.breakdown
    if found is not None:
        names = [n for n in (*PHASE_ORDER, "idle") if any(s.seconds.get(n, 0.0) > 0 for s in found.stages)]
        body = [[s.name, *(seconds_text(s.seconds.get(n, 0.0)) for n in names)] for s in found.stages]
        stages = table("Stage by stage, predicted", ["stage", *names], body, numbers=range(1, len(names) + 1))
        named = {s.stage: s.name for s in found.stages}
        path = [[f"{p.phase} on {named[p.stage]}", seconds_text(p.seconds), share_text(p.share)] for p in found.path[:MAX_UNFOLDED]]
        longest = table("What the critical path consists of, predicted", ["phase", "time", "share"], path, numbers=(1, 2))
        parts.append(tag("div", stages, longest, cls="tables"))
        rests = ", ".join(f"{k} {share_text(v)}" for k, v in found.evidence.items() if v > 0)
        parts.append(tag("p", f"The predicted path rests on prices that are: {rests}. ", source_link("simulated")))
    if page.bars is not None:
        parts.append(error_bars_table(page.bars, page.timeline.makespan_s))
    return joined(parts)


def _per_rank(page: PageContent) -> list[dict[str, float]]:
    of = represented_by(page.plan.main).tolist()
    return phase_seconds(page.timeline.spans, phases(page.inlined), of, page.timeline.makespan_s)


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {k: sum(r[k] for r in rows) / len(rows) for k in rows[0]} if rows else {}


def _bar(seconds: Mapping[str, float], names: Sequence[str]) -> Html:
    """One stacked bar over the whole width; the table below has the numbers."""
    whole = sum(seconds.values()) or 1.0
    at, parts = 0.0, []
    for name in names:
        share = 1000 * seconds.get(name, 0.0) / whole
        title = tag("title", f"{name}: {seconds_text(seconds.get(name, 0.0))}, {share_text(share / 1000)}")
        parts.append(tag("rect", title, x=f"{at:.1f}", y=0, width=f"{share:.1f}", height=10, cls=f"phase {name}"))
        at += share
    key = [tag("li", tag("span", cls=f"swatch {n}"), f"{n} {share_text(seconds.get(n, 0.0) / whole)}") for n in names if seconds.get(n, 0.0) > 0]
    svg = tag("svg", *parts, viewBox="0 0 1000 10", preserveAspectRatio="none", cls="bar", aria_hidden="true")
    return joined([svg, tag("ul", *key, cls="key")])


def layout_table(page: PageContent) -> Html:
    """Who is what: ranks with their devices and coordinates."""
    layout, plan = page.plan.layout, page.plan
    parts: list[Html] = []
    if layout is not None:
        held = [layout.held(p) for p in range(layout.pipeline)]
        rows = []
        for p, stage in enumerate(held):
            keys = stage.segments
            ranks = [layout.rank(p, d, t) for d in range(layout.data) for t in range(layout.tensor)]
            name = "+".join(str(s) for s, _ in layout.hosted(p))
            said = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"  # neighbours: the pipeline is the outermost axis
            rows.append([f"stage {name}", said, str(len(keys)), shortened(", ".join(keys), 60), str(len(stage.params))])
        head = (
            f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}; {layout.microbatch_counts} micro-batches of "
            f"{layout.microbatch_size}, {layout.global_batch} samples a step; schedule {layout.schedule}; ZeRO {layout.zero_level}"
            + ("; sequence-parallel" if layout.sequence else "")
            + (f"; gradients summed during backward in {len(layout.buckets)} buckets" if layout.overlap else "")
        )
        parts += [tag("p", head), table("Pipeline stages", ["stage", "ranks", "segments", "which", "parameter tensors"], rows, numbers=(2, 4))]
        parts += [tag("p", "note: ", n) for n in layout.notes]
    ranks = list(range(min(page.ranks, MAX_RANKS)))
    heads = ["rank", "device", *(("stage", "replica", "part") if layout is not None else ())]
    body = []
    for r in ranks:
        more = []
        if layout is not None:
            pipeline, data, tensor = layout.coordinates(r)
            more = ["+".join(str(s) for s, _ in layout.hosted(pipeline)), str(data), str(tensor)]
        body.append([str(r), shortened(plan.placement[r]), *more])
    left = f", the first {MAX_RANKS} of {page.ranks}" if page.ranks > MAX_RANKS else ""
    listing = table(f"Ranks and their devices{left}", heads, body)
    parts.append(tag("details", tag("summary", f"Where {page.ranks} ranks are"), listing))
    return joined(parts)


def alternatives(page: PageContent) -> Html:
    """The chosen plan and what was judged beside it, over the bound."""
    plan = page.plan
    bound_s = float(plan.bound) if plan.bound is not None else 0.0
    rows: list[list[object]] = []

    def row(what: Html, time_s: float | None, memory: int | None, why: str) -> list[object]:
        ratio = f"{time_s / bound_s:.3g}" if time_s is not None and bound_s else ""
        return [what, seconds_text(time_s) if time_s is not None else "not simulated", ratio, bytes_text(memory) if memory else "", why]

    if plan.bound is not None:
        rows.append([tag("em", "lower bound"), seconds_text(bound_s), "1" if bound_s else "", "", f"by certificate: {plan.bound.certificate.kind}"])
    peak = max(page.timeline.memory_peak_bytes, default=0) if plan.kind != "collective" else 0
    rows.append(row(tag("strong", "this plan"), plan.prediction.time_s if plan.prediction else None, peak, _chosen_why(plan.decisions)))
    others = [row(shortened(a.what, 72), a.time_s, a.memory_peak_bytes, a.why) for a in plan.alternatives[:MAX_ALTERNATIVES]]
    heads = ["what", "time", "times bound", "memory", "why"]
    parts = [table("This plan and the best of the others", heads, [*rows, *others[:MAX_UNFOLDED]], numbers=(1, 2, 3))]
    if others[MAX_UNFOLDED:]:
        more = table("The others", heads, others[MAX_UNFOLDED:], numbers=(1, 2, 3))
        parts.append(tag("details", tag("summary", f"{len(others) - MAX_UNFOLDED} more"), more))
    if len(plan.alternatives) > MAX_ALTERNATIVES:
        parts.append(tag("p", f"{len(plan.alternatives) - MAX_ALTERNATIVES} more are in the plan's file."))
    if not plan.alternatives:
        parts.append(tag("p", "The plan names no alternatives."))
    elif page.bars is not None:
        near = sum(a.time_s is not None and a.time_s <= page.bars.high_s for a in plan.alternatives)
        said = f"{near} of the {len(plan.alternatives)} others are within this plan's error bar, up to {seconds_text(page.bars.high_s)}. "
        parts.append(tag("p", said, "All are priced alike, so their order is surer than their times: `meshwright train explain` says how wrong the "
                         "rates of compute or of links must be for another to win.", cls="note"))  # fmt: skip
    return joined(parts)


def _chosen_why(made: Mapping[str, Any]) -> str:
    for name, decision in made.items():
        if isinstance(decision, dict) and (name in ("layout", "pipeline") or name.startswith("collective")):
            return str(decision.get("why", ""))
    return ""


def decisions(page: PageContent) -> Html:
    """What was decided, by which strategy, why."""
    rows = []
    for name, made in page.plan.decisions.items():
        if not isinstance(made, dict):
            continue
        options = made.get("options")
        said = ", ".join(f"{k}={v}" for k, v in options.items()) if isinstance(options, dict) else ""
        rows.append([name, str(made.get("strategy", "")), shortened(said, 80), str(made.get("why", ""))])
    return table("Decisions", ["decision", "strategy", "options", "why"], rows)
