"""What notebooks show of a noun: a heading, a small table, and a drawing where there is one. Static, escaped, bounded in size.

Every text comes from files or users, so nothing is put into HTML unescaped, and long ones are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from html import escape

import numpy as np

from ..bound import Bound
from ..explain.numbers import bytes_text, seconds_text, share_text
from ..fabric.fabric import Fabric
from ..graph.graph import OpGraph
from ..interop.chakra import ChakraSet
from ..plan.plan import Plan
from ..program.program import Program
from ..timeline import Timeline
from ..trace.trace import Trace
from .fabric_svg import fabric_svg
from .schedule_svg import schedule_svg
from .svg import cut

__all__ = ["html_of"]

MAX_ROWS = 8  # of a card's table
MAX_TEXT_CHARACTERS = 120  # of one cell
MAX_DRAWN_DEVICES = 32  # larger fabrics get their table only
MAX_DRAWN_SPANS = 2_000  # longer timelines get their table only

Rows = Sequence[tuple[str, str]]


@singledispatch
def html_of(noun: object) -> str:
    """HTML of a noun; of anything else, its type and its `repr`."""
    return _card(type(noun).__name__, [("", repr(noun))])


@html_of.register
def _fabric(fabric: Fabric) -> str:
    kinds: dict[str, int] = {}
    for link in fabric.links:
        kinds[link.kind] = kinds.get(link.kind, 0) + 1
    rows = [
        ("devices", f"{len(fabric.devices)} in {len(fabric.groups)} servers"), ("switches", str(len(fabric.switches))),
        ("links", f"{len(fabric.links)}: {', '.join(f'{n} {k}' for k, n in sorted(kinds.items()))}"),
    ]  # fmt: skip
    return _card(f"fabric {fabric.name}", rows, fabric_svg(fabric) if len(fabric.devices) <= MAX_DRAWN_DEVICES else "")


@html_of.register
def _plan(plan: Plan) -> str:
    rows = [("fabric", f"{plan.target_fabric.get('name', '')}, {len(plan.placement)} placed")]
    if plan.prediction is not None:
        bound = float(plan.bound) if plan.bound is not None and plan.bound.unit == "s" else 0.0
        above = f", bound {seconds_text(bound)} ({share_text(plan.prediction.time_s / bound - 1)} above)" if bound else ""
        rows.append(("predicted", seconds_text(plan.prediction.time_s) + above))
        if plan.prediction.memory_peak_bytes:
            rows.append(("memory", f"{bytes_text(max(plan.prediction.memory_peak_bytes))} on the fullest rank"))
    rows += [(name, str(decision.get("strategy", ""))) for name, decision in plan.decisions.items()]
    rows += [("program", _program_text(plan.main)), ("alternatives", str(len(plan.alternatives)))]
    return _card(f"{plan.kind} plan", rows)


def _program_text(p: Program) -> str:
    return f"{p.ranks} ranks, {len(p.lanes)} lanes, {len(p.steps)} steps, {len(p.channels)} channels"


@html_of.register
def _program(p: Program) -> str:
    promised = ", ".join(dict.fromkeys(c.op for c in p.contracts))
    rows = [("", _program_text(p)), ("buffers", str(len(p.buffers))), ("uses", ", ".join(p.requires)), ("promises", promised)]
    return _card(f"program {p.name or '(unnamed)'}", rows)


@html_of.register
def _timeline(t: Timeline) -> str:
    rows = [("", f"{t.origin} on {t.run_fabric}"), ("time", seconds_text(t.makespan_s)), ("spans", str(len(t.spans)))]
    if t.memory_peak_bytes:
        rows.append(("memory", f"{bytes_text(max(t.memory_peak_bytes))} on the fullest rank"))
    if t.link_busy_s and t.makespan_s > 0:
        link = max(t.link_busy_s, key=lambda name: (t.link_busy_s[name], name))
        rows.append(("busiest link", f"{link}, {share_text(t.link_busy_s[link] / t.makespan_s)}"))
    return _card("timeline", rows, schedule_svg(t) if 0 < len(t.spans) <= MAX_DRAWN_SPANS else "")


@html_of.register
def _bound(bound: Bound) -> str:
    units = {"s": seconds_text, "bytes": bytes_text}
    value = units[bound.unit](float(bound)) if bound.unit in units else f"{float(bound):.4g} {bound.unit}"
    facts = ", ".join(f"{k}: {v}" for k, v in bound.certificate.data.items())
    rows = [("value", f"{value} (exactly {bound.value})"), ("certificate", bound.certificate.kind), ("", facts)]
    return _card(f"lower bound of {bound.quantity}", rows)


@html_of.register
def _graph(graph: OpGraph) -> str:
    rows = [("parameters", f"{graph.parameter_count:,} in {len(graph.parameters)} tensors"), ("operators", str(len(graph.nodes)))]
    rows.append(("loss", graph.loss))
    return _card(f"graph of {graph.model}", rows)


@html_of.register
def _chakra(traces: ChakraSet) -> str:
    nodes = [len(t.nodes) for t in traces.traces]
    return _card("Chakra traces", [("ranks", str(len(nodes))), ("nodes", f"{sum(nodes):,}"), ("groups", str(len(traces.groups)))])


@html_of.register
def _trace(trace: Trace) -> str:
    per_track, per_category = np.diff(trace.track_start), np.bincount(trace.category, minlength=len(trace.categories))
    busiest = trace.tracks[int(per_track.argmax())] if len(trace) else None
    order = sorted(range(len(trace.categories)), key=lambda c: (-int(per_category[c]), trace.categories[c]))
    kinds = ", ".join(f"{per_category[c]:,} {trace.categories[c] or '(none)'}" for c in order if per_category[c])
    world = f" of {trace.world_size}" if trace.world_size is not None else ""
    rows = [
        ("rank", f"{trace.rank}{world}" if trace.rank is not None else ""), ("slices", f"{len(trace):,} on {len(trace.tracks)} threads and streams"),
        ("time", seconds_text(float(trace.end_ns.max() - trace.start_ns.min()) * 1e-9) if len(trace) else ""), ("of", kinds),
        ("fullest", f"{busiest.process} {busiest.thread or busiest.tid}, {int(per_track.max()):,} slices" if busiest is not None else ""),
        ("collectives", str(len(trace.collectives)) if len(trace.collectives) else ""),
        ("warnings", ", ".join(f"{w.kind} ({w.count})" for w in trace.warnings)),
    ]  # fmt: skip
    return _card(f"trace {trace.source}", rows)


def _card(title: str, rows: Rows, drawing: str = "") -> str:
    shown = [(k, v) for k, v in rows if v][:MAX_ROWS]
    left = len([v for _, v in rows if v]) - len(shown)
    shown += [("", f"and {left} more")] if left else []
    cells = "".join(
        f'<tr><td style="text-align:left;padding:1px 12px 1px 0;opacity:.7">{escape(cut(k, 40))}</td>'
        f'<td style="text-align:left;padding:1px 0">{escape(cut(v, MAX_TEXT_CHARACTERS))}</td></tr>'
        for k, v in shown
    )
    head = f'<div style="font-weight:bold">{escape(cut(title, MAX_TEXT_CHARACTERS))}</div>'
    picture = f'<div style="max-width:100%;overflow-x:auto">{drawing}</div>' if drawing else ""
    return f'<div class="meshwright">{head}<table>{cells}</table>{picture}</div>'
