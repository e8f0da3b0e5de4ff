"""Does a plan do the job that it says it is for, and is its bound one of that job? Files are edited: halves can be sound alone.

A bound is a claim about the plan's own job: what it bounds is the time of what the plan does, and its certificate speaks of the same operation,
ranks, root and bytes, or of the same stages, placement and seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..bound import Bound
from ..plan.plan import Plan
from ..program.program import REPRODUCIBLE_SUMS, Contract, Program
from .pipeline.figures import figures_of
from .verdict import Finding

__all__ = ["check_bound_is_of_job", "check_job"]

KINDS = ("collective", "training", "pipeline", "experts", "placement", "tables", "halo", "imported")
ROOTED = ("broadcast", "reduce", "scatter", "gather")
# What a plan of a kind may have a bound by; kinds that are not named have none.
CERTIFICATES = {
    "collective": ("cut", "delay", "partition", "metric", "packing", "latency"), "training": ("roofline",), "pipeline": ("pipeline",),
    "placement": ("placement",), "tables": ("tables",), "halo": ("halo",),
}  # fmt: skip


def check_job(plan: Plan) -> list[Finding]:
    """The job's operation, ranks, root, peers and size against the main program's contract, the placement and the bound's certificate."""
    if plan.kind not in KINDS:
        return [Finding(check="plan", message=f"there are no plans of kind {plan.kind[:64]!r}", witness={"field": "kind"})]
    if plan.kind == "training" and plan.layout is None:
        text = "a training plan states no layout, so nothing can be proved of its step"
        return [Finding(check="plan", message=text, witness={"field": "layout"})]
    if plan.kind != "collective":
        return []
    contracts = plan.main.contracts
    if not contracts:
        text = "the program of a collective plan states no contract, so nothing can be proved of its results"
        return [Finding(check="plan", message=text, witness={"field": "contract"})]
    jobs = [("collective", plan.job["collective"])] if "collective" in plan.job else []
    jobs += [(f"collectives[{i}]", job) for i, job in enumerate(plan.job.get("collectives", ()))]
    if len(jobs) != len(contracts) or not all(isinstance(job, Mapping) for _, job in jobs):
        return [_finding("collective", f"the job says {len(jobs)} collectives, the program does {len(contracts)}")]
    return [found for (where, job), contract in zip(jobs, contracts, strict=True) for found in _of_contract(plan, where, job, contract)]


def _of_contract(plan: Plan, where: str, job: Mapping[str, Any], contract: Contract) -> list[Finding]:
    ranks = list(job.get("ranks", ()))
    stated: list[tuple[str, Any, Any]] = [
        ("op", job.get("op"), contract.op), ("ranks", len(ranks), len(contract.members(plan.main.ranks))),
        ("ranks", ranks, [plan.placement[r] for r in contract.members(plan.main.ranks)]),
    ]  # fmt: skip
    if contract.op in ROOTED:
        stated.append(("root", job.get("root"), contract.root))
    if contract.op == "permute" and "peers" in job:
        stated.append(("peers", list(job["peers"]), list(contract.peers)))
    if contract.op in REPRODUCIBLE_SUMS:
        stated.append(("reproducible", job.get("reproducible", "run"), contract.reproducible))
        stated.append(("numbers", list(job.get("numbers", ())), list(contract.numbers)))
    found = [_finding(f"{where}.{name}", f"the job says {_short(says)}, the program {_short(does)}") for name, says, does in stated if says != does]
    size = job.get("size_bytes")
    if isinstance(size, int) and not found and plan.main.fold is None and (moved := _bytes(plan.main, contract)) < size:
        found.append(_finding(f"{where}.size_bytes", f"the job says {size}, the program carries {moved}"))
    return found[:1] if len(found) > 1 and found[0].witness == found[1].witness else found


def check_bound_is_of_job(plan: Plan) -> list[Finding]:
    """What the bound bounds, its unit, and the job that its certificate (and those of its parts) speaks of."""
    bound = plan.bound
    if bound is None:
        return []
    if plan.kind not in CERTIFICATES:
        return [_about(bound, "quantity", f"a plan of kind {plan.kind!r} states no job that a bound could be of")]
    jobs = [plan.job["collective"]] if "collective" in plan.job else list(plan.job.get("collectives", ()))
    # Collectives at once take at least as long as each alone.
    together = {f"{job['op']} time" for job in jobs} | ({"time of all collectives together"} if len(jobs) > 1 else set())
    of_kind = {
        "training": {"step time"}, "pipeline": {"pipeline step time"}, "placement": {"placement time"}, "tables": {"tables iteration time"},
        "halo": {"epoch time"},
    }  # fmt: skip
    what = of_kind.get(plan.kind, together)
    found = []
    everywhere = [str(d["name"]) for d in plan.target_fabric.get("devices", ())]
    if bound.unit != "s":
        found.append(_about(bound, "unit", f"the bound is in {bound.unit}, the plan's time in seconds"))
    if bound.quantity not in what:
        found.append(_about(bound, "quantity", f"the bound is on {bound.quantity[:80]!r}, the plan's job has a {' or a '.join(sorted(what))}"))
    for each in _with_parts(bound):
        kind, data = each.certificate.kind, each.certificate.data
        if kind not in CERTIFICATES[plan.kind]:
            found.append(_about(each, "certificate.kind", f"a {kind} certificate says nothing about the time of a {plan.kind} plan"))
        elif each.parts:
            # Bounds on one time do not add up, whatever their certificates: the step, or the collectives together, are one.
            found.append(_about(each, "parts", "one time has one bound, and this one has parts"))
        elif plan.kind == "collective":
            left = list(jobs)  # each collective pays once, so a certificate that names one twice proves too much
            found += [_about(each, "certificate", text) for group in data.get("groups", [data]) if (text := _of_none(group, left, everywhere))]
        elif kind == "roofline":
            found += [_about(each, "certificate", text) for text in _of_other_speed(plan, data)]
        elif kind == "pipeline":
            found += [_about(each, "certificate", text) for text in figures_of(plan, data)]
    return found


def _with_parts(bound: Bound) -> Iterator[Bound]:
    yield bound
    for part in bound.parts:
        yield from _with_parts(part)


def _of_none(data: Mapping[str, Any], jobs: list[Mapping[str, Any]], everywhere: list[str]) -> str:
    """Why the collective that a certificate speaks of is none of the jobs; "" where it is one, which then leaves `jobs`. A certificate that names no
    devices speaks of all there are, `everywhere`."""
    why = "the plan has no such collective, or not so often"
    for job in jobs:
        stated: list[tuple[str, Any, Any]] = [
            ("demand", data.get("demand"), job["op"]), ("size_bytes", data.get("size_bytes", job["size_bytes"]), job["size_bytes"]),
        ]  # fmt: skip
        stated.append(("devices", sorted(data.get("devices", everywhere)), sorted(job["ranks"])))
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
            jobs.remove(job)
            return ""
        why = wrong[0]
    return why


def _of_other_speed(plan: Plan, data: Mapping[str, Any]) -> Iterator[str]:
    """A roofline's type and peaks are those of the plan's prices, where devices state none too; its operations are those of the layout."""
    cost = plan.job.get("cost", {})
    dtype, default = cost.get("dtype", "fp32"), cost.get("default_flops", 0)
    if data.get("dtype", "fp32") != dtype:
        yield f"it is for {_short(data.get('dtype', 'fp32'))}, the plan computes in {dtype}"
    peak = sum(int(d.get("flops", {}).get(dtype, default)) for d in plan.target_fabric.get("devices", ()))
    if int(data["flops_per_s"]) != peak:
        yield f"the devices do {peak} operations per second, it says {data['flops_per_s']}"


def _about(bound: Bound, name: str, message: str) -> Finding:
    text = f"the bound on {bound.quantity[:80]} ({bound.certificate.kind}): {message}"
    return Finding(check="certificate", message=text, witness={"field": f"bound.{name}", "quantity": bound.quantity, "kind": bound.certificate.kind})


def _bytes(program: Program, contract: Contract) -> int:
    """Bytes of the largest range that a member gives or gets, what a size counts for every operation; padding included, every iteration counted."""
    chunk, turns = program.buffers.chunk_bytes, max((int(x) for x in program.lanes.repeat), default=1)
    return turns * max((int(chunk[buffer]) * count for buffer, _, count in (*contract.inputs, *contract.outputs) if buffer >= 0), default=0)


def _finding(name: str, message: str) -> Finding:
    return Finding(check="plan", message=f"job.{name}: {message}", witness={"field": name.rpartition(".")[2]})


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:197] + "..."
