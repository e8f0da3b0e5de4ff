"""The bottleneck of a collective in plain words: whose links are tight, who else is, what one more or one less would do."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ..bound import Bound
from ..decide.collective.bounds.sensitivity import MAX_CHANGES_WORK_S, bottleneck_facts
from ..decide.collective.problem import CollectiveProblem
from ..io.quantity import show_rate

__all__ = ["bottleneck_lines", "explain_bottleneck"]


def explain_bottleneck(problem: CollectiveProblem, bound: Bound, *, effort_s: float = MAX_CHANGES_WORK_S) -> tuple[list[str], dict[str, Any]]:
    """Lines for people, and the facts they say (`decide.collective.bounds.sensitivity.bottleneck_facts`)."""
    facts = bottleneck_facts(problem, bound, effort_s=effort_s)
    return bottleneck_lines(facts), facts


def bottleneck_lines(facts: dict[str, Any]) -> list[str]:
    """`bottleneck: what box0 can receive: 8 NICs at 50 GB/s (ib -> box0/nic0); ...` and a line per change."""
    if facts["kind"] == "latency":
        return [f"bottleneck: latency from {facts['from']} to {facts['to']}; faster links would not help at this size"]
    if "links" not in facts:
        return []
    what = " and ".join(_links(x) for x in facts["links"])
    lines = [f"bottleneck: {_head(facts)} {what}; {show_rate(facts['rate_Bps'])} in all"]
    tied = facts["tied"]
    if tied:
        word = "the other parts" if facts["kind"] == "partition" else "just as tight"
        lines.append(f"  {word}: {len(tied)} ({', '.join(tied[:3])}{', ...' if len(tied) > 3 else ''})")
    for change in facts["changes"]:
        if change["gain"] != "0" or not tied or "add" not in change["edit"]:  # elsewhere it is just as tight: nothing to say
            lines.append(f"  {change['what']}: {_percent(Fraction(change['gain']))}{change['then']}")
    return lines


def _links(x: dict[str, Any]) -> str:
    nics = f"{x['nics']} NIC{'s' if x['nics'] > 1 else ''}"
    what = f"{x['count']} x {x['kind']}" if not x["nics"] else nics if x["nics"] == x["count"] else f"{x['count']} links of {nics}"
    return f"{what} at {show_rate(x['rate_Bps'])} ({x['example']})"


def _head(facts: dict[str, Any]) -> str:
    if facts["kind"] == "partition":
        return f"the links into {facts['where']} and {len(facts['tied'])} more parts:"
    if facts["kind"] in ("metric", "packing"):
        return f"{sum(x['count'] for x in facts['links'])} links that together carry all routes:"
    return f"what {facts['where']} can {'send' if facts['outward'] else 'receive'}:"


def _percent(gain: Fraction) -> str:
    return "no gain" if not gain else f"{'+' if gain > 0 else '-'}{abs(float(gain)) * 100:.3g} % throughput"
