"""Plans of input pipelines: does everything fit, is the epoch as fast as the measured rates allow and no faster, does the bound hold?

The limits are written down here again, one by one, from what a rate means. Shares nothing with the planner but the types of plan and rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..profile.input_plan import InputPlan
from .verdict import Finding, Verdict, guarded

__all__ = ["check_input_plan"]

TOLERANCE = 1e-9  # of floats, relative
HELD = 0.98  # of what was read, in the page cache right after: below, files cannot be kept there


def check_input_plan(plan: InputPlan) -> Verdict:
    """`facts`: what holds the epoch up, in seconds of an epoch by limit, and the bound over the epoch."""
    facts: dict[str, Any] = {}
    found = guarded("values", lambda: list(_fits(plan)))
    if not found:
        found += guarded("values", lambda: list(_times(plan, facts)))
    notes = [] if plan.bound is not None else ["the plan states no bound"]
    if plan.bound is not None and not found:
        found += guarded("certificate", lambda: list(_bound(plan, facts)))
    return Verdict(findings=tuple(found), facts=facts, notes=tuple(notes))


def _wrong(message: str, field: str, check: str = "values") -> Finding:
    return Finding(check=check, message=message, witness={"field": field})


def _fits(p: InputPlan) -> Iterator[Finding]:
    m, place = p.rates, p.place
    if (p.kept == "") != (p.medium == "") or (not p.kept and p.kept_bytes):
        yield _wrong(f"{p.kept_bytes} bytes are kept {p.kept or 'nowhere'}, in {p.medium or 'nothing'}", "medium")
    if p.kept == "nodes" and place.nodes < 2:
        yield _wrong("one node has no others to keep files with", "kept")
    if p.medium == "page-cache" and m.held < HELD:
        yield _wrong(f"the page cache held {m.held:.0%} of what was read: nothing can be kept there", "medium")
    if p.workers < 0 or p.staged < 0 or p.kept_bytes < 0:
        yield _wrong("a count below 0", "workers, staged, kept_bytes")
    if p.shared and (not p.workers or not p.staged or place.jobs < 2):
        yield _wrong(f"batches are shared by {place.jobs} jobs with {p.workers} workers, and {p.staged} may wait", "shared")
    if not p.shared and p.staged:
        yield _wrong(f"{p.staged} batches wait for nobody", "staged")
    waiting = p.staged * m.batch_bytes
    for what, used, there in (
        ("memory", p.kept_bytes + waiting, place.memory_bytes),
        ("shared memory", waiting + (p.kept_bytes if p.medium == "shared-memory" else 0), place.shared_bytes),
    ):  # fmt: skip
        if used > there:
            yield _wrong(f"{used} bytes of {what} are planned, there are {there}", "kept_bytes")


def _from_memory(p: InputPlan) -> float:
    """Share of an epoch's bytes. A cache that exchanges keeps an item until as many others as fit were read. With a share c of equal items, an item
    at place a of one epoch and b of the next is still there if 1 - a b < c, and the chance of that is c + (1 - c) ln(1 - c)."""
    m = p.rates
    if not m.total_bytes:
        return 1.0
    if p.kept:
        return min(1.0, p.kept_bytes * (p.place.nodes if p.kept == "nodes" else 1) / m.total_bytes)
    c = (p.place.memory_bytes - p.staged * m.batch_bytes) / m.total_bytes if m.held >= HELD else 0.0
    return 1.0 if c >= 1 else c + (1 - c) * math.log(1 - c)


def _limits(p: InputPlan, cached: float) -> dict[str, float]:
    """Seconds of an epoch, of each thing that takes at least so long."""
    m, place, n = p.rates, p.place, p.rates.items
    loaders = 1 if p.shared else place.jobs  # that read and prepare every item
    processes = p.workers * place.jobs if p.shared else p.workers  # of one loader
    read = loaders * (1 - cached) * m.total_bytes
    by_cores = n * m.cpu_s / m.cores
    as_measured = n * m.prepare_s * min(max(m.workers, 1), m.cores) / min(max(processes, 1), m.cores)
    prepare = loaders * max(by_cores, as_measured)
    fetch = n * (cached * m.hit_s + (1 - cached) * m.miss_s)
    found = {"device": n * m.device_s, "preparation": prepare, "storage": read / m.storage_Bps}
    if processes:
        found["waiting"] = (n * m.cpu_s + fetch) / processes
    else:
        found = {"in turn": found["device"] + max(prepare + max(fetch - n * m.hit_s, 0.0), found["storage"])}
    if p.kept == "nodes":
        found["network"] = loaders * cached * m.total_bytes * (place.nodes - 1) / place.nodes / place.network_Bps
    return found


def _times(p: InputPlan, facts: dict[str, Any]) -> Iterator[Finding]:
    cached = _from_memory(p)
    limits = _limits(p, cached)
    epoch_s, loaders = max(limits.values()), 1 if p.shared else p.place.jobs
    facts |= {"limits_s": limits, "cached": cached}
    if abs(p.epoch_s - epoch_s) > TOLERANCE * epoch_s:
        yield _wrong(f"an epoch takes {epoch_s:.9g} s by the rates, claimed are {p.epoch_s:.9g} s", "epoch_s")
    if p.limit not in limits or limits[p.limit] < epoch_s * (1 - TOLERANCE):
        yield _wrong(f"{p.limit[:64]!r} does not limit the epoch", "limit")
    total = p.rates.total_bytes
    network = loaders * cached * total * (p.place.nodes - 1) / p.place.nodes if p.kept == "nodes" else 0
    for field, claimed, bytes_ in (("storage_bytes", p.storage_bytes, loaders * (1 - cached) * total), ("network_bytes", p.network_bytes, network)):
        if abs(claimed - bytes_) > 1 + TOLERANCE * bytes_:
            yield _wrong(f"{field}: {bytes_:.0f} by the rates, claimed are {claimed}", field)


def _bound(p: InputPlan, facts: dict[str, Any]) -> Iterator[Finding]:
    """Each limit proves a bound by itself: every job's device takes every item; every item is prepared once; what no memory holds is read once."""
    bound, m, place = p.bound, p.rates, p.place
    assert bound is not None
    missing = max(0, m.total_bytes - place.nodes * place.memory_bytes)
    proofs = {"device": m.items * m.device_s, "preparation": m.items * m.cpu_s / m.cores, "storage": missing / m.storage_Bps}
    why = bound.certificate.data.get("limit")
    if bound.certificate.kind != "feeding" or why not in proofs or bound.unit != "s" or bound.quantity != "epoch time":
        yield _wrong("the bound is not one of an epoch by device, preparation or storage", "bound", "certificate")
        return
    if float(bound) > proofs[why] * (1 + TOLERANCE):
        yield _wrong(f"{why} proves {proofs[why]:.9g} s, claimed are {float(bound):.9g} s", "bound", "certificate")
    if p.epoch_s < float(bound) * (1 - TOLERANCE):
        yield _wrong(f"the epoch of {p.epoch_s:.9g} s is below the bound of {float(bound):.9g} s", "bound", "certificate")
    facts["ratio"] = p.epoch_s / float(bound) if float(bound) else math.inf
