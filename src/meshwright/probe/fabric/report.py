"""What a probe found, for people, as a document, and as a fabric file that says at its head what it rests on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ...errors import FormatError
from ...io.fabric.toml import fabric_document, fabric_toml, parse_fabric_toml
from ...io.quantity import show_rate, show_time
from .infer import Inferred
from .measurements import Measurements

__all__ = ["probe_document", "probe_text", "probed_toml"]

SCHEMA, VERSION = "meshwright.fabric-probe", 1
MAX_IDLE_SHARE_OF_BUSY = 0.05  # of a host's processors: with less idle they may have been the limit


def _summary(measured: Measurements, found: Inferred, tolerance: float) -> list[str]:
    worst = found.worst
    held, judged = found.worst_held_out, sum(measured.held_out)
    lines = [
        f"largest error: {worst.error:.1%} ({worst.trial.kind} of {len(worst.trial.flows)}: {worst.why})"
        + (f"; {held:.1%} on {judged} trials that were held out" if held is not None else "; nothing was held out")
    ]
    several = [c.single for c in found.checks if len(c.trial.flows) > 1]
    if several:
        lines.append(f"single transfers beside others: {float(np.median(several)):.0%} off max-min in the median trial (TCP shares unevenly)")
    if found.latency_error > 0:
        lines.append(f"round trips: the fabric's latencies add up to within {found.latency_error:.0%}")
    for check in found.unexplained(tolerance)[:8]:
        lines.append(f"unexplained: {check.trial.kind} of {len(check.trial.flows)} transfers, {check.error:.0%} off: {check.why}")
    if measured.idle < MAX_IDLE_SHARE_OF_BUSY:
        lines.append(f"the processors were busy ({measured.idle:.0%} idle at the least): some rates may be theirs, not the links'")
    if found.at_least:
        shown = ", ".join(found.at_least[:6]) + (", ..." if len(found.at_least) > 6 else "")
        lines.append(f"never filled, so the rate is a lower bound: {shown}")
    return [*lines, *found.notes]


def _names(measured: Measurements, members: tuple[int, ...]) -> str:
    return ", ".join(measured.names[i] for i in members[:8]) + (f", ... ({len(members)} in all)" if len(members) > 8 else "")


def probe_text(measured: Measurements, found: Inferred, tolerance: float) -> str:
    fabric = found.fabric
    shapes = {"tree": f"a tree of {len(fabric.switches)} switches", "direct": "direct links", "loopback": "one host"}
    shape = "one switch" if found.kind == "tree" and len(fabric.switches) == 1 else shapes[found.kind]
    lines = [f"{fabric.name}: {len(measured)} endpoints, {shape} ({measured.source})"]
    trunk_ends = {s.name for s in fabric.switches}
    if found.kind == "direct":
        for link in fabric.links[::2]:
            lines.append(f"link {link.src} <-> {link.dst}: {show_rate(link.rate_Bps)}, {show_time(link.latency_s)}")
    else:
        up, down = [x for x in fabric.links if x.src not in trunk_ends], [x for x in fabric.links if x.dst not in trunk_ends]
        for what, ports in (("up", up), ("down", down)):
            rates = Counter(x.rate_Bps for x in ports)
            shown = ", ".join(f"{show_rate(r)} ({k}x)" if k > 1 else show_rate(r) for r, k in sorted(rates.items(), reverse=True)[:6])
            lines.append(f"ports {what}: {shown}")
    for trunk in found.trunks:
        lines.append(f"trunk of {_names(measured, trunk.members)}: {show_rate(round(trunk.out_Bps))} out, {show_rate(round(trunk.in_Bps))} in")
    return "\n".join([*lines, *_summary(measured, found, tolerance)])


def probe_document(measured: Measurements, found: Inferred, tolerance: float) -> dict[str, Any]:
    def shown(check: Any) -> dict[str, Any]:
        return {
            "kind": check.trial.kind, "flows": [[measured.names[i], measured.names[j]] for i, j in check.trial.flows],
            "measured_Bps": list(check.trial.rate_Bps), "predicted_Bps": list(check.predicted_Bps), "error": check.error, "why": check.why,
            "held_out": check.held_out,
        }  # fmt: skip

    return {
        "schema": SCHEMA, "version": VERSION, "fabric": fabric_document(found.fabric), "kind": found.kind, "tolerance": tolerance,
        "trunks": [
            {"members": [measured.names[i] for i in t.members], "out_Bps": round(t.out_Bps), "in_Bps": round(t.in_Bps)} for t in found.trunks
        ],
        "error": found.worst.error, "held_out_error": found.worst_held_out, "latency_error": found.latency_error, "worst": shown(found.worst),
        "unexplained": [shown(c) for c in found.unexplained(tolerance)], "at_least": list(found.at_least), "notes": list(found.notes),
        "trials": len(measured.trials), "held_out": sum(measured.held_out), "seconds": measured.seconds, "idle": measured.idle,
        "library_latency_s": measured.library_latency_s, "source": measured.source,
    }  # fmt: skip


def probed_toml(measured: Measurements, found: Inferred, tolerance: float) -> str:
    """The fabric file, its evidence as comments. Raises: FormatError if an endpoint's name cannot be a device's."""
    lines = ["measured by `meshwright fabric probe`: rates are payload of TCP", *_summary(measured, found, tolerance)]
    text = "".join(f"# {line}\n" for line in lines) + "\n" + fabric_toml(found.fabric)
    if parse_fabric_toml(text, where="probed.toml") != found.fabric:
        raise FormatError("the fabric does not read back as it was written", where="probed.toml")
    return text
