"""Does a plan do the job that it says it is for, and is its bound one of that job? Files are edited: halves can be sound alone.

A bound is a claim about the plan's own job: what it bounds is the time of what the plan does, and its certificate speaks of the same operation,
ranks, root and bytes, or of the same stages, placement and seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..bound import Bound
from ..plan.plan import Plan
from ..program.program import Contract, Program
from .pipeline.figures import figures_of
from .verdict import Finding

__all__ = ["check_bound_is_of_job", "check_job"]

ROOTED = ("broadcast", "reduce", "scatter", "gather")
# What a plan of a kind may have a bound by; kinds that are not named have none.
CERTIFICATES = {
    "collective": ("cut", "delay", "partition", "metric", "packing", "latency", "sum"), "training": ("roofline", "sum"),
    "pipeline": ("pipeline", "sum"),
}  # fmt: skip


def check_job(plan: Plan) -> list[Finding]:
    """The job's operation, ranks, root, peers and size against the main program's contract, the placement and the bound's certificate."""
    job = plan.job.get("collective")
    if plan.kind != "collective" or not isinstance(job, dict) or plan.main.contract is None:
        return []
    contract, ranks = plan.main.contract, list(job.get("ranks", ()))
    stated: list[tuple[str, Any, Any]] = [
        ("op", job.get("op"), contract.op), ("ranks", len(ranks), len(contract.members(plan.main.ranks))),
        ("ranks", ranks, [plan.placement[r] for r in contract.members(plan.main.ranks)]),
    ]  # fmt: skip
    if contract.op in ROOTED:
        stated.append(("root", job.get("root"), contract.root))
    if contract.op == "permute" and "peers" in job:
        stated.append(("peers", list(job["peers"]), list(contract.peers)))
    found = [_finding(name, f"the job says {_short(says)}, the program {_short(does)}") for name, says, does in stated if says != does]
    size = job.get("size_bytes")
    if isinstance(size, int) and not found and plan.main.fold is None and (moved := _bytes(plan.main, contract)) < size:
        found.append(_finding("size_bytes", f"the job says {size}, the program carries {moved}"))
    return found[:1] if len(found) > 1 and found[0].witness == found[1].witness else found


def check_bound_is_of_job(plan: Plan) -> list[Finding]:
    """What the bound bounds, its unit, and the job that its certificate (and those of its parts) speaks of."""
    bound = plan.bound
    if bound is None or plan.kind not in CERTIFICATES:
        return []
    jobs = [plan.job["collective"]] if "collective" in plan.job else list(plan.job.get("collectives", ()))
    what = {"training": "step time", "pipeline": "pipeline step time"}.get(plan.kind, f"{jobs[0]['op']} time" if len(jobs) == 1 else "")
    found = []
    if bound.unit != "s":
        found.append(_about(bound, "unit", f"the bound is in {bound.unit}, the plan's time in seconds"))
    if what and bound.quantity != what:
        found.append(_about(bound, "quantity", f"the bound is on {bound.quantity[:80]!r}, the plan's job has a {what}"))
    for each in _with_parts(bound):
        kind, data = each.certificate.kind, each.certificate.data
        if kind not in CERTIFICATES[plan.kind]:
            found.append(_about(each, "certificate.kind", f"a {kind} certificate says nothing about the time of a {plan.kind} plan"))
        elif plan.kind == "collective" and kind != "sum":
            found += [_about(each, "certificate", text) for group in data.get("groups", [data]) if (text := _of_none(group, jobs))]
        elif kind == "pipeline":
            found += [_about(each, "certificate", text) for text in figures_of(plan, data)]
    return found


def _with_parts(bound: Bound) -> Iterator[Bound]:
    yield bound
    for part in bound.parts:
        yield from _with_parts(part)


def _of_none(data: Mapping[str, Any], jobs: list[Mapping[str, Any]]) -> str:
    """Why the collective that a certificate speaks of is none of the jobs; "" where it is one."""
    why = "the plan has no collective"
    for job in jobs:
        stated: list[tuple[str, Any, Any]] = [
            ("demand", data.get("demand"), job["op"]), ("size_bytes", data.get("size_bytes", job["size_bytes"]), job["size_bytes"]),
        ]  # fmt: skip
        if "devices" in data:
            stated.append(("devices", sorted(data["devices"]), sorted(job["ranks"])))
        if job["op"] in ROOTED:
            stated.append(("root", data.get("root"), job["ranks"][int(job["root"])]))
        if job["op"] == "permute" and "peers" in job and "peers" in data:
            named = dict(zip(job["ranks"], [job["ranks"][p] if p >= 0 else "" for p in job["peers"]], strict=True))
            stated.append(("peers", dict(zip(data["devices"], data["peers"], strict=True)), named))
        if "shard_bytes" in data or "shard_bytes" in job:
            names = data.get("devices", job["ranks"])
            ours = dict(zip(job["ranks"], job.get("shard_bytes", ()), strict=False))
            stated.append(("shard_bytes", dict(zip(names, data.get("shard_bytes", ()), strict=False)), ours))
        wrong = [f"its {name} is {_short(says)}, the job's {_short(does)}" for name, says, does in stated if says != does]
        if not wrong:
            return ""
        why = wrong[0]
    return why


def _about(bound: Bound, name: str, message: str) -> Finding:
    text = f"the bound on {bound.quantity[:80]} ({bound.certificate.kind}): {message}"
    return Finding(check="certificate", message=text, witness={"field": f"bound.{name}", "quantity": bound.quantity, "kind": bound.certificate.kind})


def _bytes(program: Program, contract: Contract) -> int:
    """Bytes of the largest range that a member gives or gets, what a size counts for every operation; padding included, every iteration counted."""
    chunk, turns = program.buffers.chunk_bytes, max((int(x) for x in program.lanes.repeat), default=1)
    return turns * max((int(chunk[buffer]) * count for buffer, _, count in (*contract.inputs, *contract.outputs) if buffer >= 0), default=0)


def _finding(name: str, message: str) -> Finding:
    return Finding(check="plan", message=f"job.collective.{name}: {message}", witness={"field": name})


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:197] + "..."
