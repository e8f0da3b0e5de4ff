"""Whether a plan file was made for the job at hand: enough ranks, its own devices, links like those of the fabric it was planned for.

A plan for other devices would never run, and one for other links would run, correctly, at any speed: both are refused when the group is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from ...errors import Disconnected, PlanMismatch
from ...fabric.fabric import Fabric

__all__ = ["MAX_RATE_SKEW_FACTOR", "require_fitting"]

MAX_RATE_SKEW_FACTOR = 1.5  # between the largest and the smallest ratio of a rate here to the planned one: labs scale all rates, measurements scatter
MAX_COMPARED_DEVICES = 64  # whose pairs are compared: there are as many routes as pairs


def require_fitting(
    path: str, planned: Sequence[str], planned_for: Fabric, *, world: int, devices: Sequence[str], known: Sequence[str], fabric: Fabric | None
) -> None:
    """`planned`: the plan's devices by rank; `world`: ranks of the job; `devices`: theirs by rank, if this group is the whole job and they are known;
    `known`: all names that any rank may have, () while unknown; `fabric`: what the job was told it runs on.

    Raises: PlanMismatch, with what to do.
    """
    if len(planned) > world:
        raise PlanMismatch(
            f"the plan is for {len(planned)} ranks, the job has {world}", where=path, hint=f"start {len(planned)} ranks, or plan for {world} devices"
        )
    strange = [name for name in planned if name not in known] if known else []
    if strange:
        raise PlanMismatch(
            f"the plan is for other devices: {strange[0]} is not a device of this job ({_some(known)})", where=path,
            hint="plan for this job's fabric (in a lab: $MESHWRIGHT_FABRIC), or say with MESHWRIGHT_DEVICES which device each rank is",
        )  # fmt: skip
    if len(planned) == len(devices) == world and tuple(planned) != tuple(devices):
        raise PlanMismatch(
            f"the plan has the devices in the order {_some(planned)}, the ranks in the order {_some(devices)}", where=path,
            hint="start the ranks in the plan's order (`lab run --order`, MESHWRIGHT_DEVICES), or plan for theirs (`collective plan --ranks`)",
        )  # fmt: skip
    if fabric is not None and (found := _unlike(planned, planned_for, fabric)):
        raise PlanMismatch(
            f"the plan is for another fabric, {planned_for.name!r}: {found}", where=path,
            hint="plan for the fabric in MESHWRIGHT_FABRIC; unset that to run the plan all the same",
        )  # fmt: skip


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _unlike(planned: Sequence[str], planned_for: Fabric, fabric: Fabric) -> str:
    """In words where the two fabrics differ between the plan's devices; empty where rates are in proportion."""
    some = planned[:MAX_COMPARED_DEVICES]
    shares: dict[str, float] = {}
    for a, b in permutations(some, 2):
        before, now = (_rate_Bps(f, a, b) for f in (planned_for, fabric))
        if bool(before) != bool(now):
            return f"{a} -> {b} is {'a path there and none' if before else 'no path there and one'} here"
        if before and now:
            shares[f"{a} -> {b}"] = now / before
    for name in some:
        before, now = (_leaving_Bps(f, name, planned) for f in (planned_for, fabric))
        if before and now:
            shares[f"all that leaves {name}"] = now / before
    if not shares:
        return ""
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    factor = shares[most] / shares[least]
    return f"beside {most}, {least} is {factor:.3g} times slower here than there" if factor > MAX_RATE_SKEW_FACTOR else ""


def _leaving_Bps(fabric: Fabric, name: str, planned: Sequence[str]) -> int:
    """Of a device's links to switches and to the plan's devices."""
    others = {d.name for d in fabric.devices} - set(planned)
    return sum(x.rate_Bps for x in fabric.links if x.src == name and x.dst not in others)


def _rate_Bps(fabric: Fabric, src: str, dst: str) -> int:
    """Of the narrowest link between two devices; 0 where there is no path."""
    try:
        return min(fabric.links[x].rate_Bps for x in fabric.route(fabric.actor_of[src], fabric.actor_of[dst]))
    except Disconnected:
        return 0
