"""Links: every message has a route in the fabric, and how long each link is busy at least, in exact rationals.

A channel's own route is a list of actor names; without one the fabric's routing applies. The time a link needs for the bytes of
all messages over it is a lower bound on the program's time, which no prediction may undercut.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from ...errors import MeshwrightError
from ...fabric.fabric import Fabric
from ...program.program import Program
from ..verdict import Finding
from .order import messages
from .wellformed import witness

__all__ = ["busiest_link", "channel_links", "check_links", "link_time", "placed"]


def channel_links(p: Program, fabric: Fabric, placement: Sequence[str], channel: int) -> tuple[int, ...]:
    """Links of one channel in order. Raises ValueError if its own route is no path from its source to its destination."""
    c = p.channels
    src, dst = (fabric.actor_of[placement[int(end[channel])]] for end in (c.src, c.dst))
    if c.route[channel] < 0:
        return fabric.route(src, dst)
    names = c.routes[int(c.route[channel])]
    if not names or fabric.actor_of.get(names[0]) != src or fabric.actor_of.get(names[-1]) != dst:
        raise ValueError(f"its route {' > '.join(names)} does not lead from {placement[int(c.src[channel])]} to {placement[int(c.dst[channel])]}")
    found = []
    for a, b in pairwise(names):
        here = fabric.actor_of.get(a, -1)
        between = [x for x in (fabric.out_links[here] if here >= 0 else ()) if fabric.links[x].dst == b]
        if not between:
            raise ValueError(f"its route uses a link from {a} to {b}, which does not exist")
        # Of parallel links the fastest, of equal ones the first.
        found.append(max(between, key=lambda x: (fabric.links[x].rate_Bps, -x)))
    return tuple(found)


def placed(p: Program, fabric: Fabric, placement: Sequence[str]) -> list[Finding]:
    """What is wrong with the places: each actor on a device or switch of its own."""
    found: list[Finding] = []
    for actor, name in enumerate(placement):
        at = fabric.actor_of.get(name, -1)
        if at < 0 or (at < len(fabric.devices)) != (actor < p.ranks):
            kind = "device" if actor < p.ranks else "switch"
            text = f"actor {actor} is placed on {name!r}, which is no {kind} of fabric {fabric.name!r}"
            found.append(Finding(check="links", message=text, witness={"rank": actor, "device": name}))
    if len(placement) != p.ranks + p.switches or len(set(placement)) < len(placement):
        text = f"{len(placement)} places ({len(set(placement))} different) for {p.ranks} ranks and {p.switches} switches"
        found.append(Finding(check="links", message=text, witness={"placement": list(placement)}))
    return found


def link_time(p: Program, fabric: Fabric, placement: Sequence[str]) -> tuple[dict[int, Fraction], list[Finding]]:
    """Seconds that every link used needs for its bytes, and what is wrong with the routes."""
    found = placed(p, fabric, placement)
    if found:
        return {}, found
    m = messages(p)
    # All turns of a repeated lane: bytes per run of the program.
    size = p.message_bytes()[m.send] * p.lanes.repeat[p.lane_of_step()[m.send]]
    total = np.zeros(len(p.channels), np.int64)
    np.add.at(total, m.channel, size)
    first = {int(c): int(s) for c, s in zip(m.channel[::-1], m.send[::-1], strict=True)}
    load: dict[int, int] = {}
    for channel in np.flatnonzero(m.per_channel > 0).tolist():
        try:
            path = channel_links(p, fabric, placement, channel)
        except (ValueError, MeshwrightError) as error:
            step = first[channel]
            found.append(Finding(check="links", message=f"{p.describe(step)}: {error}", witness=witness(p, step, channel=channel)))
            continue
        for link in path:
            load[link] = load.get(link, 0) + int(total[channel])
    return {link: Fraction(amount, fabric.links[link].rate_Bps) for link, amount in sorted(load.items())}, found


def check_links(p: Program, fabric: Fabric, placement: Sequence[str], claimed_s: float | None = None) -> list[Finding]:
    """Routes exist; and a claimed time, if given, is not below what the busiest link needs."""
    time, found = link_time(p, fabric, placement)
    return found + busiest_link(time, fabric, claimed_s)


def busiest_link(time: dict[int, Fraction], fabric: Fabric, claimed_s: float | None) -> list[Finding]:
    """A claimed time that is below what the busiest link needs for its bytes, those that its full bucket lets through at once left out."""
    found: list[Finding] = []
    if time and claimed_s is not None:
        bursts = ((i, x.burst_bytes, x.rate_Bps) for i, x in enumerate(fabric.links) if x.burst_bytes and i in time)
        time = time | {i: time[i] - Fraction(burst, rate) for i, burst, rate in bursts}
        most = max({id(t): t for t in time.values()}.values())  # links that are alike share one number
        link = next(i for i, t in time.items() if t is most or t == most)
        if Fraction(claimed_s) < time[link] * (1 - Fraction(1, 10**9)):  # the engine adds up in floats
            x = fabric.links[link]
            name = f"{x.src} > {x.dst}"
            text = f"the link {name} needs {float(time[link]):.6g} s for its bytes, the prediction says {claimed_s:.6g} s"
            found.append(Finding(check="links", message=text, witness={"link": name, "needed_s": str(time[link]), "claimed_s": claimed_s}))
    return found
