"""Where the page's numbers come from: one entry for every source that a figure links to, and everything they rest on."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...cost import Cost
from ...drive.citations import citations
from ...drive.plans import cost_of
from ...errors import MeshwrightError
from ...explain.numbers import seconds_text
from ...program.hash import program_hash
from .content import PageContent
from .html import Html, joined, shortened, table, tag

__all__ = ["sources"]


def sources(page: PageContent) -> Html:
    """Entries with the ids `source-simulated`, `source-measured`, ...; then the fabric's provenance, publications, versions."""
    entries = [_simulated(page)]
    if page.plan.bound is not None:
        entries.append(_bound(page))
    if page.run is not None:
        entries += [_simulated_for_run(page), _measured(page)]
    made = tag("dl", *entries, cls="sources")
    parts = [made, tag("p", "Not modelled: stragglers, data loading, clock changes of the devices, other jobs on the network.", cls="note")]
    provenance = [[shortened(p.what, 60), p.source] for p in page.fabric.provenance]
    if provenance:
        parts.append(table(f"The figures of fabric {page.fabric.name}", ["what", "where it came from"], provenance))
    try:
        cited = [[part, cite.line()] for part, cite in citations(page.plan)]
    except MeshwrightError as error:  # a plan from elsewhere may name what this version does not know
        cited = [["not known here", error.message]]
    if cited:
        parts.append(table("Publications that the strategies follow", ["part", "publication"], cited))
    return joined(parts)


def _entry(source: str, *sentences: str | None) -> Html:
    name = source.replace(" ", "-")
    return joined(
        [tag("dt", source, id=f"source-{name}", cls=f"source {source.partition(' ')[0]}"), tag("dd", *(tag("p", s) for s in sentences if s))]
    )


def _versions(found: dict[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in found.items())


def _simulated(page: PageContent) -> Html:
    plan, t = page.plan, page.timeline
    strategies = ", ".join(f"{k}: {v.get('strategy')}" for k, v in plan.decisions.items() if isinstance(v, dict) and v.get("strategy"))
    checked = "accepted by every checker before this page was written" if page.checked else "not checked"
    cycle = f" It is number {page.entry + 1} of the plan's cycle of {len(plan.cycle)} programs." if len(plan.cycle) > 1 else ""
    folded = f" Each stored rank stands for {plan.main.fold.members} alike." if plan.main.fold is not None else ""
    return _entry(
        "simulated",
        f"The plan's own program {program_hash(plan.main)[:12]}, simulated by the event engine on fabric {t.run_fabric} in virtual time, links "
        f"{t.attributes.get('network', '')}; it was {checked}.{cycle}{folded}",
        f"Plan: {page.plan_file}; strategies: {strategies or 'none named'}; seed {plan.seed}; {_versions(dict(plan.versions))}.",
        f"Prices: {_prices(cost_of(plan))}",
    )


def _prices(cost: Cost) -> str:
    counts = Counter(p.evidence for p in cost.table.values())
    table_said = ", ".join(f"{n} operations {kind}" for kind, n in sorted(counts.items())) or "no operation has a price of its own"
    return f"{cost.source}; {table_said}; the rest by a roofline ({cost.evidence}); messages: {cost.transport.evidence}."


def _bound(page: PageContent) -> Html:
    bound = page.plan.bound
    assert bound is not None
    facts = ", ".join(f"{k} {_short(v)}" for k, v in bound.certificate.data.items())
    checked = " The checker re-verified the certificate in exact numbers." if page.checked else " Its certificate was not re-verified here."
    return _entry(
        "bound", f"{bound.quantity}: at least {seconds_text(float(bound))} (exactly {bound.value} {bound.unit}), by a certificate of kind "
        f"{bound.certificate.kind}.{checked}", f"It says: {facts}.",
    )  # fmt: skip


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple, dict)):
        return f"({len(value)} entries)"
    return str(value)[:60]


def _simulated_for_run(page: PageContent) -> Html:
    run = page.run
    assert run is not None
    rests = ", ".join(f"{k} {100 * v:.0f} %" for k, v in run.comparison.evidence.items() if v > 0)
    return _entry(
        "simulated for the run",
        f"The same program, simulated on {run.comparison.measured.run_fabric} with costs calibrated on the machine that ran it. Its critical path "
        f"rests on prices that are: {rests}.",
    )


def _measured(page: PageContent) -> Html:
    run = page.run
    assert run is not None
    d, c = run.document, run.comparison
    machine, use = d.get("machine", {}), d.get("machine_use", {})
    pacing = d.get("pacing", {})
    step = c.typical_step().attributes.get("training_step")
    return _entry(
        "measured",
        f"Run {run.folder}: {d.get('ranks')} ranks, device {d.get('device')}, data {d.get('data')}, started by {d.get('launcher')}; "
        f"{len(c.step_s)} steps, the first ones and those under the memory profiler are left out. The step's time is the median, its "
        f"phases are in proportion as in the middle half of the steps; the timeline shows step {step}, the one closest to it.",
        f"Machine: {machine.get('cpu_model')}, {machine.get('cores')} cores; pacing {pacing.get('mode')} ({pacing.get('why')}); other programs used "
        f"{100 * float(use.get('others', 0.0)):.0f} % of it.",
        f"{_versions(d.get('versions', {}))}.",
        *(f"Note: {n}" for n in c.measured.notes),
    )
