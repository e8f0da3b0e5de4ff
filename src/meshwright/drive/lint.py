"""Linting a fabric or a file that describes one, and what its faults cost: exact bounds as it is and with each kind of fault put right.

A file of one server that has NICs is priced as two such servers through one switch as well, so that faults in front of a NIC count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from ..decide.collective import CollectiveProblem, collective_bound
from ..decide.collective.nccl.model import predict, topology_of
from ..errors import MeshwrightError
from ..fabric.fabric import Fabric
from ..fabric.lint import SEVERITIES, Finding, lint_fabric
from ..fabric.repair import REPAIRS, repaired
from ..io.fabric.imported import Source, format_of, import_fabric
from ..io.fabric.name import select_devices
from ..io.nccl.fabric import Join, nccl_fabric
from ..io.nccl.lint import lint_nccl, repaired_nccl
from ..io.nccl.topology import NcclSystem, parse_nccl_topology
from ..io.quantity import show_rate
from ..kernels.effort import Deadline

__all__ = ["FaultCost", "Lint", "fault_costs", "lint_known_fabric", "lint_source"]

# Bytes of the all-gather whose bound, before and after, prices a fault.
COLLECTIVE_BYTES = 1 << 30
# Devices up to which faults are priced: each bound of a larger fabric takes seconds.
MAX_RANKS = 1024
# Counted work, in seconds of a quiet core, after which no further kind of fault is priced.
MAX_COSTS_WORK_S = 10.0


@dataclass(frozen=True, kw_only=True)
class FaultCost:
    """An all-gather of 1 GiB at best, by exact bounds, as it is and with every finding of one rule put right; beside it an all-reduce as NCCL chooses
    it, by its own model: its rings and trees do not go around a slow part."""

    rule: str
    on: str
    rate_Bps: int
    repaired_Bps: int
    ratio: str  # exact: repaired / as it is
    nccl_Bps: int | None = None  # None where NCCL does not run, or on one server
    nccl_repaired_Bps: int | None = None

    def line(self) -> str:
        much = Fraction(self.ratio)
        if much == 1:
            best = f"{self.rule}: all-gather on {self.on} is bound elsewhere: {show_rate(self.rate_Bps)} at best, repaired or not"
        else:
            then = f"{show_rate(self.repaired_Bps)} if repaired ({_times(much)})"
            best = f"{self.rule}: all-gather on {self.on}: {show_rate(self.rate_Bps)} at best; {then}"
        if not self.nccl_Bps or not self.nccl_repaired_Bps or self.nccl_Bps == self.nccl_repaired_Bps:
            return best
        gain = _times(Fraction(self.nccl_repaired_Bps, self.nccl_Bps))
        now, then = show_rate(self.nccl_Bps), show_rate(self.nccl_repaired_Bps)
        return f"{best}; NCCL's all-reduce, by its model: {now}; {then} if repaired ({gain})"


def _times(much: Fraction) -> str:
    return f"{float(much):.3g} times as fast" if much >= 2 else f"{100 * float(much - 1):+.3g} %"


@dataclass(frozen=True)
class Lint:
    """Findings, errors first, and what those cost that have a repair."""

    name: str
    findings: Sequence[Finding]
    costs: Sequence[FaultCost]

    def to_json(self) -> dict[str, Any]:
        counts = {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES}
        return {"fabric": self.name, "findings": [f.to_json() for f in self.findings], "counts": counts, "costs": [asdict(c) for c in self.costs]}


def lint_known_fabric(fabric: Fabric) -> Lint:
    """A fabric of ours."""
    findings = lint_fabric(fabric)
    return Lint(fabric.name, findings, fault_costs(fabric, findings, lambda rule: repaired(fabric, rule), "this fabric"))


def lint_source(source: Source, form: str = "auto", devices: str | None = None) -> Lint:
    """A file that `import_fabric` reads; NCCL's are judged by line as well. Raises: FormatError; UsageError, UnknownName for `devices`."""
    found = format_of(source) if form == "auto" else form
    if found != "nccl":
        return replace(lint_known_fabric(_part(import_fabric([source], form=found), devices)), name=source.where)
    system = parse_nccl_topology(source.data, source.where)
    by_line = lint_nccl(system)
    known = {f.rule for f in by_line}
    fabric = _part(nccl_fabric([system], source.where), devices)
    findings = by_line + [f for f in lint_fabric(fabric) if f.rule not in known]  # said already, with the line
    with_nics = len(system.hosts) == 1 and devices is None and any(pci.is_nic for _, pci in system.devices())
    costs = []
    for copies in (1, 2) if with_nics else (1,):
        whole = fabric if copies == 1 else _servers(system, copies)

        def repair(rule: str, whole: Fabric = whole, copies: int = copies) -> Fabric | None:
            changed = repaired_nccl(system, rule)
            return repaired(whole, rule) if changed is None else _part(_servers(changed, copies), devices)

        costs += fault_costs(whole, findings, repair, f"{copies} such servers" if copies > 1 else source.where)
    return Lint(source.where, sorted(findings, key=lambda f: SEVERITIES.index(f.severity)), costs)


def _part(fabric: Fabric, devices: str | None) -> Fabric:
    return fabric if devices is None else select_devices(fabric, devices)


def _servers(system: NcclSystem, copies: int) -> Fabric:
    return nccl_fabric([system], f"{copies} such servers", Join(copies=copies))


def fault_costs(fabric: Fabric, findings: Sequence[Finding], repair: Callable[[str], Fabric | None], on: str) -> list[FaultCost]:
    """For every rule among the findings that has a repair: the bound as it is and with it. Nothing where the fabric has no bound at all."""
    rules = [rule for rule in REPAIRS if any(f.rule == rule for f in findings)]
    if not rules or not 2 <= len(fabric.devices) <= MAX_RANKS:
        return []
    deadline, costs = Deadline.after(MAX_COSTS_WORK_S), []
    now = _best(fabric)
    for rule in rules if now is not None else ():
        changed = repair(rule) if not deadline.past else None
        then = None if changed is None else _best(changed)
        if now is None or changed is None or then is None:
            continue
        nccl = _nccl(fabric), _nccl(changed)
        costs.append(
            FaultCost(
                rule=rule, on=on, rate_Bps=int(now), repaired_Bps=int(then), ratio=str(then / now), nccl_Bps=nccl[0], nccl_repaired_Bps=nccl[1],
            )
        )  # fmt: skip
    return costs


def _nccl(fabric: Fabric) -> int | None:
    """Bytes per second of NCCL's choice for an all-reduce of that size between servers, by its model; None where it has none."""
    if len({d.group for d in fabric.devices}) < 2:
        return None
    try:
        best = predict(topology_of(fabric, [d.name for d in fabric.devices]), "all-reduce", COLLECTIVE_BYTES)[0]
    except MeshwrightError:
        return None
    return None if best.time_us is None else int(COLLECTIVE_BYTES / best.time_us * 1e6)


def _best(fabric: Fabric) -> Fraction | None:
    """Bytes per second of an all-gather at best; None where there is no bound (a disconnected fabric, rates too long)."""
    try:
        return COLLECTIVE_BYTES / collective_bound(CollectiveProblem.on(fabric, "all-gather", COLLECTIVE_BYTES)).exact
    except MeshwrightError:
        return None
