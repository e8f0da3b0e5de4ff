"""Growth: more accelerators for a wiring that stands, with as few cables moved as possible.

Cite: Singla, Hong, Popa, Godfrey, "Jellyfish: Networking Data Centers Randomly" (NSDI 2012), section 4.2, for the rule; costs as in `loads`.
Left open by the paper: which cables are cut. Our answer: a counted search for the cuts, and the new cables' ends, with the best steps and load.
Deviations: directed links as well as two-way cables; any number of nodes at once; designs count with the worse of their two directions.
Invariant: every new node enters d cables, each of which is cut in two; no other cable is touched. Of one new node's growth nothing moves fewer:
all old ports are in use, so whoever sends to a new node has given up a cable.
Cost: `evaluations` breadth-first costs of the grown wiring, O(N^2 d) each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ....errors import Disconnected, Infeasible, UsageError
from ....fabric.fabric import Fabric
from ....kernels.effort import time_is_up
from ..problem import nondominated
from .loads import gather_cost
from .wiring import Wiring

__all__ = ["Grown", "grow", "least_unplugged", "links_of", "wiring_of"]

RESTARTS = 8  # of the evaluations, one in so many begins from new cuts; the others exchange ends of new cables
Arc = tuple[int, int]


@dataclass(frozen=True)
class Grown:
    """`unplugged`, `plugged`: links of the old wiring that went, and those that came; a link is one way."""

    wiring: Wiring
    steps: int
    load: Fraction
    unplugged: tuple[Arc, ...]
    plugged: tuple[Arc, ...]


def links_of(fabric: Fabric, port_Bps: int = 0) -> tuple[int, list[Arc]]:
    """The rate of one port (`port_Bps`, or what all rates are multiples of), and the links, a fast one as often as it takes ports. Raises: UsageError
    where there are switches."""
    if fabric.switches:
        raise UsageError("has switches: a wiring is accelerators alone", where=fabric.name, hint="give a file that `fabric design --nodes` wrote")
    unit = port_Bps or (int(np.gcd.reduce([link.rate_Bps for link in fabric.links])) if fabric.links else 1)
    return unit, [end for link, end in zip(fabric.links, fabric.link_ends, strict=True) for _ in range(link.rate_Bps // unit)]


def wiring_of(fabric: Fabric) -> Wiring:
    """The wiring that a fabric file describes: devices with equally many ports and no switches. Raises: UsageError."""
    try:
        return Wiring.of(fabric.name, len(fabric.devices), links_of(fabric)[1])
    except ValueError:
        hint = "links of one rate, equally many of every device"
        raise UsageError("its devices have unlike numbers of ports", where=fabric.name, hint=hint) from None


def least_unplugged(added: int, ports: int) -> int:
    """Of any growth without parallel cables: links from old nodes to new ones, each of which frees an old port first."""
    return max(1, added * (ports - min(ports, added - 1)))


def grow(base: Wiring, nodes: int, *, evaluations: int, rng: np.random.Generator) -> list[Grown]:
    """The best growths found, none beaten in both steps and load, fewest steps first. Two-way cables stay two-way.

    Raises: UsageError (not more nodes), Infeasible (two-way cables with an odd number of ports, or none that was tried joins all accelerators).
    """
    if nodes <= base.nodes:
        raise UsageError(f"the wiring has {base.nodes} accelerators already, {nodes} are no more", where="nodes")
    paired = base.paired
    if paired and base.ports % 2:
        raise Infeasible(
            f"a new accelerator cannot enter two-way cables with {base.ports} ports: each cable it enters takes two", where="growth",
            hint="leave a port of every new accelerator free, or design anew", data={"ports": base.ports},
        )  # fmt: skip
    met: dict[tuple[int, Fraction], Grown] = {}
    current: tuple[Fraction, int] | None = None
    arcs: list[Arc] = []
    for count in range(max(1, evaluations)):
        if count and time_is_up():
            break
        fresh = count % RESTARTS == 0 or not arcs
        tried = _cut(base, nodes, paired, rng) if fresh else _exchanged(arcs, base.nodes, paired, rng)
        found = _grown(base, nodes, tried)
        if found is None:
            arcs = arcs if current else tried  # on through wirings that are not connected, until one is
            continue
        if current is None or (found.load, found.steps) <= current:
            arcs, current = tried, (found.load, found.steps)
        known = met.get((found.steps, found.load))
        if known is None or len(found.unplugged) < len(known.unplugged):
            met[found.steps, found.load] = found
    if not met:
        raise Infeasible(
            f"no growth to {nodes} accelerators joins all of them, of {evaluations} tried", where="growth", hint=_why_apart(base),
            data={"nodes": nodes},
        )  # fmt: skip
    rows = list(met.values())
    return [rows[i] for i in nondominated([(row.steps, row.load) for row in rows])]


def _why_apart(base: Wiring) -> str:
    try:
        gather_cost(base)
    except Disconnected as error:
        return f"{error.message} before it grows: join its parts first, with --rewire"
    return "allow more with --evaluations"


def _cut(base: Wiring, nodes: int, paired: bool, rng: np.random.Generator) -> list[Arc]:
    """Every new node enters cables that have no end in common, as far as there are such."""
    arcs = [(int(a), int(b)) for a, b in base.arcs]
    for new in range(base.nodes, nodes):
        ends = set[int]()
        for _ in range(base.ports // 2 if paired else base.ports):
            order = [arcs[k] for k in rng.permutation(len(arcs)).tolist()]
            free = [arc for arc in order if new not in arc]
            a, b = next((arc for arc in free if not ends & set(arc) and arc[0] != arc[1]), free[0])
            ends |= {a, b}
            for x, y in ((a, b), (b, a)) if paired else ((a, b),):
                arcs.remove((x, y))
                arcs += [(x, new), (new, y)]
    return arcs


def _exchanged(arcs: list[Arc], old: int, paired: bool, rng: np.random.Generator) -> list[Arc]:
    """Two new cables exchange their far ends: what was unplugged stays as it is."""
    new = [arc for arc in arcs if max(arc) >= old and (not paired or arc[0] < arc[1])]
    (a, b), (c, d) = (new[k] for k in rng.choice(len(new), 2, replace=len(new) < 2).tolist())
    after, lost, made = list(arcs), [(a, b), (c, d)], [(a, d), (c, b)]
    if a == d or c == b or max(a, d) < old or max(c, b) < old:
        return after
    for x, y in lost + [(y, x) for x, y in lost] * paired:
        if (x, y) not in after:
            return list(arcs)
        after.remove((x, y))
    return after + made + [(y, x) for x, y in made] * paired


def _grown(base: Wiring, nodes: int, arcs: list[Arc]) -> Grown | None:
    wiring = Wiring.of(f"{base.name} + {nodes - base.nodes}", nodes, arcs)
    try:
        gather = gather_cost(wiring)
        scatter = gather if wiring.paired else gather_cost(wiring.transposed())
    except Disconnected:
        return None
    before, after = Counter((int(a), int(b)) for a, b in base.arcs), Counter(arcs)
    return Grown(
        wiring, max(gather.steps, scatter.steps), max(gather.load, scatter.load), tuple(_sorted(before - after)), tuple(_sorted(after - before)),
    )  # fmt: skip


def _sorted(links: Counter[Arc]) -> Iterator[Arc]:
    return iter(sorted(links.elements()))
