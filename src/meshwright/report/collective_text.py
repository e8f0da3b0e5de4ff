"""The result document of a collective (`schema` "meshwright.collective") and its line for people."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from fractions import Fraction
from textwrap import fill
from typing import Any

import msgspec

from ..bound import Bound
from ..decide.collective.problem import ROOTED, CollectiveProblem, Ranked, busbw_factor
from ..io.quantity import show_rate, show_size, show_time

__all__ = ["bound_document", "bound_line", "bound_values", "head_of", "plan_document", "plan_line"]

MAX_COLUMNS = 100  # lines are not longer, and not wider than a terminal
MAX_EXPLAINED = 3  # refusals that are explained one by one; more are counted


def head_of(problem: CollectiveProblem) -> dict[str, Any]:
    head: dict[str, Any] = {
        "schema": "meshwright.collective",
        "version": 1,
        "op": problem.op,
        "fabric": problem.fabric.name,
        "devices": len(problem.ranks),
        "size_bytes": problem.size_bytes,
    }
    if problem.op in ROOTED:
        head["root"] = problem.ranks[problem.root]
    if problem.shard_bytes is not None:
        head["shard_bytes"] = list(problem.shard_bytes)
    if problem.peers:
        head["peers"] = list(problem.peers)
    if problem.reproducible != "run":
        head["reproducible"] = problem.reproducible
    if problem.numbers:
        head["numbers"] = list(problem.numbers)
    return head


def bound_values(problem: CollectiveProblem, bound: Bound) -> dict[str, Any]:
    algbw = problem.size_bytes / bound.exact if bound.exact else Fraction(0)
    return {
        "time_s": float(bound),
        "exact_time_s": bound.value,
        "algbw_Bps": str(algbw),
        "busbw_Bps": str(algbw * busbw_factor(problem.op, len(problem.ranks))),
        "certificate": msgspec.to_builtins(bound.certificate),
    }


def bound_document(problem: CollectiveProblem, bound: Bound) -> dict[str, Any]:
    return head_of(problem) | {"bound": bound_values(problem, bound)}


def plan_document(problem: CollectiveProblem, ranked: Sequence[Ranked]) -> dict[str, Any]:
    """The fastest candidate, the bound, the ratio between them, and the other candidates with the reason why they lost."""
    best = ranked[0]
    assert best.plan is not None and best.time_s is not None
    document = head_of(problem)
    algbw = problem.size_bytes / best.time_s
    document |= {
        "strategy": best.strategy,
        "options": dict(best.plan.options),
        "notes": dict(best.plan.notes),
        "steps": best.plan.program.executed_steps,
        "time_s": best.time_s,
        "algbw_Bps": algbw,
        "busbw_Bps": algbw * float(busbw_factor(problem.op, len(problem.ranks))),
    }
    if best.plan.bound is not None:
        bound = best.plan.bound
        document |= {"ratio": best.time_s / float(bound) if bound.exact else None, "bound": bound_values(problem, bound)}
    document["alternatives"] = [{"strategy": other.strategy, "time_s": other.time_s, "why": other.why} for other in ranked[1:]]
    return document


def bound_line(problem: CollectiveProblem, bound: Bound) -> str:
    """One line with the bound, one with the cut that proves it."""
    algbw = problem.size_bytes / bound.exact if bound.exact else Fraction(0)
    data = bound.certificate.data
    if bound.certificate.kind == "partition":
        parts, entering = len(data["parts"]), show_rate(int(Fraction(data["entering_Bps"])))
        why = f"{parts} parts must take in {2 * (parts - 1)} messages of this size over links of {entering} in all"
    elif bound.certificate.kind == "latency":
        if not bound.exact:
            return f"{_what(problem)}: nothing has to move"
        why = f"no path from {data['from']} to {data['to']} is quicker"
    elif bound.certificate.kind == "metric":
        why = f"all pairs together need more of {len(data['lengths'])} weighted links than these carry in less time"
    elif bound.certificate.kind == "packing":
        why = f"every tree that collects and spreads it needs more of {len(data['lengths'])} weighted links than these carry in less time"
    elif "crossing_bytes" not in data:
        why = f"the certificate ({bound.certificate.kind}) says so"
    else:
        crossing = Fraction(data["crossing_bytes"]) / problem.size_bytes
        leaving = show_rate(int(Fraction(data["leaving_Bps"])))
        why = f"{crossing} of it must leave {data['devices_inside']} of {data['ranks']} devices over links of {leaving} in all"
        if bound.certificate.kind == "delay":
            after_s = float(bound.exact - Fraction(data["crossing_bytes"]) / Fraction(data["leaving_Bps"]))
            why += f", and what leaves last has still {show_time(after_s)} to travel"
    return f"{_what(problem)}: at least {show_time(float(bound))} ({show_rate(int(algbw))}), since {why}"


def plan_line(problem: CollectiveProblem, ranked: Sequence[Ranked]) -> str:
    """The fastest beside the bound, then who came next and who refused."""
    best = ranked[0]
    assert best.plan is not None and best.time_s is not None
    line = f"{_what(problem)}: {best.strategy} {show_time(best.time_s)}"
    if best.plan.bound is not None:
        bound_s = float(best.plan.bound)
        line += f", bound {show_time(bound_s)}" + (f" ({100 * (best.time_s / bound_s - 1):.1f} % above)" if bound_s else "")
    if "time" in best.plan.notes:
        line += "\n" + _filled(str(best.plan.notes["time"]))
    if "shortest_ways" in best.plan.notes:
        least = best.plan.notes["shortest_ways"]
        why = f"along shortest ways no plan takes less than {show_time(least['least_s'])}: {least['shards']} shards have no way"
        why += f" {'from' if problem.op == 'reduce-scatter' else 'to'} {least['rank']} but its links {_named(least['ports'])}"
        line += "\n" + _filled(why + "; --strategy auto weighs detours too")
    lost = [f"{other.strategy} {show_time(other.time_s)}" for other in ranked[1:] if other.time_s is not None]
    refused = [other for other in ranked[1:] if other.time_s is None]
    if lost:
        line += "\n" + _filled("next: " + ", ".join(lost))
    if len(refused) > MAX_EXPLAINED:
        line += "\n" + _filled("refused: " + ", ".join(other.strategy for other in refused) + " (--json says why)")
    return line + "".join("\n" + _filled(f"{other.strategy} refused: {other.why}") for other in refused if len(refused) <= MAX_EXPLAINED)


def _named(ports: Sequence[str]) -> str:
    return "with " + ", ".join(ports[:MAX_EXPLAINED]) + (f" and {len(ports) - MAX_EXPLAINED} more" if len(ports) > MAX_EXPLAINED else "")


def _filled(text: str) -> str:
    columns = min(MAX_COLUMNS, shutil.get_terminal_size((MAX_COLUMNS, 24)).columns)
    return fill(text, columns, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _what(problem: CollectiveProblem) -> str:
    bits = {"tree": ", bits of the fold", "exact": ", exact sums"}.get(problem.reproducible, "")
    return f"{problem.op} {show_size(problem.size_bytes)} on {len(problem.ranks)} devices of {problem.fabric.name}{bits}"
