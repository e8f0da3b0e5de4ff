"""A restart as a program of transfers, its time on a fabric, and what no way of restarting can beat.

Storage is one more actor, joined to every device by a path of its own; all of it together gives `storage_Bps`. Every pair of ranks exchanges one
message, all at once: the fabric's links decide. Reading the own device's files is not counted.

Lower bound, exact: whatever is sent from wherever, (a) every device takes in the bytes it lacks through its links; (b) every server takes in, through
the links that enter it, what its ranks need and no file inside holds, each byte once; (c) storage gives what no device holds, each byte once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from ...cost import Cost
from ...errors import UsageError
from ...fabric.fabric import Device, Fabric, Link, Switch
from ...plan.regions import Box, minus
from ...program.builder import ProgramBuilder
from ...program.program import Program
from ...simulate import simulate_program
from .problem import STORAGE, RestartProblem, Transfers

__all__ = ["RestartEstimate", "estimate_restart", "restart_program", "with_storage"]

STORAGE_NAME = "storage"


@dataclass(frozen=True, kw_only=True)
class RestartEstimate:
    """`program` is None when nothing moves. `bound_where`: what limits the bound, in words."""

    time_s: float
    bound_s: Fraction
    bound_where: str
    program: Program | None


def with_storage(fabric: Fabric, storage_Bps: int) -> Fabric:
    """The fabric and a storage system that every device reads from. Raises: UsageError for a rate < 1, or a fabric that has such an actor."""
    if storage_Bps < 1:
        raise UsageError(f"must be at least 1 byte/s, got {storage_Bps}", where="storage rate")
    if {STORAGE_NAME, f"{STORAGE_NAME}-port"} & set(fabric.actor_names):
        raise UsageError(f"the fabric has an actor called {STORAGE_NAME!r}", where=fabric.name, hint="rename it")
    port = f"{STORAGE_NAME}-port"
    links = [Link(src=STORAGE_NAME, dst=port, rate_Bps=storage_Bps)]
    links += [Link(src=port, dst=d.name, rate_Bps=storage_Bps) for d in fabric.devices]
    return replace(
        fabric, devices=(*fabric.devices, Device(name=STORAGE_NAME, kind="cpu")), switches=(*fabric.switches, Switch(name=port)),
        links=(*fabric.links, *links),
    )  # fmt: skip


def restart_program(found: Transfers, ranks: int) -> Program:
    """One message per pair; actor `ranks` is storage."""
    b = ProgramBuilder(ranks=ranks + 1, name="restart")
    for (source, rank), size in found.links.items():
        actor = ranks if source == STORAGE else source
        name = f"restart:{'storage' if source == STORAGE else source}:{rank}"
        have = b.buffer(actor, chunks=1, chunk_bytes=size, role="weight", persistent=True, name=f"{name}:from")
        gets = b.buffer(rank, chunks=1, chunk_bytes=size, role="weight", persistent=True, name=name)
        channel = b.channel(actor, rank)
        b.lane(actor).send(channel, have, 0)
        b.lane(rank).recv(channel, gets, 0)
    return b.build()


def estimate_restart(problem: RestartProblem, found: Transfers, fabric: Fabric, cost: Cost, storage_Bps: int) -> RestartEstimate:
    """Time of the transfers, simulated with those of storage, and its lower bound."""
    bound, where = _bound(problem, found, fabric, storage_Bps)
    if not found.links:
        return RestartEstimate(time_s=0.0, bound_s=bound, bound_where=where, program=None)
    program = restart_program(found, len(problem.placement))
    full = with_storage(fabric, storage_Bps)
    timeline = simulate_program(program, full, (*problem.placement, STORAGE_NAME), cost, record=False, memory=False)
    return RestartEstimate(time_s=timeline.makespan_s, bound_s=bound, bound_where=where, program=program)


def _bound(problem: RestartProblem, found: Transfers, fabric: Fabric, storage_Bps: int) -> tuple[Fraction, str]:
    """Rates of links add up exactly; storage adds its own path to what can enter."""
    bounds: list[tuple[Fraction, str]] = [(Fraction(0), "nothing has to move")]
    nowhere = _lacking_bytes(problem, tuple(range(len(problem.placement))))
    if nowhere:
        bounds.append((Fraction(nowhere, storage_Bps), "what only storage holds"))
    inward = {d: sum(fabric.links[i].rate_Bps for i in fabric.in_links[fabric.actor_of[d]]) for d in problem.placement}
    for rank, device in enumerate(problem.placement):
        lacks = _lacking_bytes(problem, (rank,))
        if lacks:
            bounds.append((Fraction(lacks, inward[device] + storage_Bps), f"what enters {device}"))
    group = {d.name: d.group for d in fabric.devices} | {s.name: s.group for s in fabric.switches}
    for server in sorted({group[d] for d in problem.placement if group[d]}):
        ranks = tuple(r for r, d in enumerate(problem.placement) if group[d] == server)
        lacks = _lacking_bytes(problem, ranks)
        rate = sum(x.rate_Bps for x in fabric.links if group[x.dst] == server != group[x.src]) + storage_Bps
        if lacks:
            bounds.append((Fraction(lacks, rate), f"what enters server {server}"))
    return max(bounds, key=lambda b: b[0])


def _lacking_bytes(problem: RestartProblem, ranks: Iterable[int]) -> int:
    """Bytes that some of these ranks need and none of their devices has a file of, each byte once."""
    ranks = tuple(ranks)
    here = {problem.placement[r] for r in ranks}
    files = {f for f, devices in problem.homes.items() if here & set(devices)}
    total = 0
    for tensor in sorted({t for r in ranks for t in problem.needs[r]}):
        wanted: list[Box] = []
        for r in ranks:
            new = list(problem.needs[r].get(tensor, ()))
            for box in wanted:
                new = minus(new, box)
            wanted += new
        for file, region in problem.holders.get(tensor, []):
            if file in files:
                for box in region:
                    wanted = minus(wanted, box)
        total += problem.size_bytes(tensor, *wanted)
    return total
