"""Redesign of a wiring that stands: ports that are free are joined, and as many cables are moved as may be, for fewer steps or a smaller load.

Cite: Singla, Hong, Popa, Godfrey, "Jellyfish: Networking Data Centers Randomly" (NSDI 2012), sections 4.2 and 6, for exchanges of cables' ends; costs
as in `loads`.
Left open by the paper: what to do with the ports that dead parts leave, and how much a moved cable gains. Our answer: rows by cables moved, from the
least that join all ports on, none beaten in moves, steps and load by what was tried.
Deviations: directed links as well as two-way cables.
Invariant: every node ends with all its ports in use, and never more links are unplugged than allowed. `least_moved` is a bound for every redesign.
Cost: `evaluations` breadth-first costs of the wiring, O(N^2 d) each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ....errors import Disconnected, Infeasible, UsageError
from .growth import Arc, Grown
from .loads import gather_cost
from .wiring import Wiring

__all__ = ["Standing", "least_moved", "rewire"]

RESTARTS = 16  # of the evaluations, one in so many joins the free ports anew; the others exchange ends of two links


@dataclass(frozen=True)
class Standing:
    """What is left of a wiring of `nodes` with `ports` each: its links, one way each; two-way cables where `paired`."""

    name: str
    nodes: int
    ports: int
    arcs: tuple[Arc, ...]
    paired: bool

    def free(self) -> tuple[list[int], list[int]]:
        """Ports out and in that no link uses, by node. Raises: UsageError for a node with more links than ports."""
        sides = [Counter(arc[side] for arc in self.arcs) for side in (0, 1)]
        for node in range(self.nodes):
            if max(side[node] for side in sides) > self.ports:
                raise UsageError(f"accelerator {node} has more than {self.ports} links one way", where=self.name, hint="give --ports as they are")
        left = [[self.ports - side[node] for node in range(self.nodes)] for side in sides]
        return left[0], left[1]


def least_moved(standing: Standing) -> int:
    """Links that any redesign without loops unplugs: a node with more free ports than all others can join takes the rest from cables of others."""
    out, into = standing.free()
    return max(0, max(a + b for a, b in zip(out, into, strict=True)) - sum(out))


def rewire(standing: Standing, *, moved: int, evaluations: int, rng: np.random.Generator) -> list[Grown]:
    """Redesigns that unplug at most `least_moved` + `moved` links, none beaten in links unplugged, steps and load; fewest unplugged first.

    Raises: UsageError (see `Standing.free`); Infeasible where a port would stay free (two-way cables), or none that was tried joins all accelerators.
    """
    out, _ = standing.free()
    if standing.paired and sum(out) % 2:
        raise Infeasible(
            f"{sum(out)} free ports of two-way cables are no pairs: one would stay free", where="rewire",
            hint="take another accelerator or cable away, or design anew with one way each", data={"free_ports": sum(out)},
        )  # fmt: skip
    most, met, before = least_moved(standing) + moved, dict[tuple[int, int, Fraction], Grown](), Counter(standing.arcs)
    current: tuple[Fraction, int, int] | None = None
    arcs: list[Arc] = []
    for count in range(max(1, evaluations)):
        tried = _joined(standing, rng) if not arcs or count % RESTARTS == 0 else _exchanged(arcs, standing.paired, rng)
        if tried is None or (before - Counter(tried)).total() > most:
            continue
        found = _made(standing, tried)
        if found is None:
            arcs = arcs if current else tried  # on through wirings that are not connected, until one is
            continue
        cost = (found.load, found.steps, len(found.unplugged))
        if current is None or cost <= current:
            arcs, current = tried, cost
        met.setdefault((len(found.unplugged), found.steps, found.load), found)
    if not met:
        raise Infeasible(
            f"no redesign with at most {most} links unplugged joins all accelerators, of {evaluations} tried", where="rewire",
            hint="allow more with --moved or --evaluations", data={"unplugged": most},
        )  # fmt: skip
    ordered = sorted(met)
    return [met[x] for x in ordered if not any(y != x and y[0] <= x[0] and y[1] <= x[1] and y[2] <= x[2] for y in ordered)]


def _joined(standing: Standing, rng: np.random.Generator) -> list[Arc] | None:
    """Free ports joined at random; where a node would be joined to itself, a cable of others is cut and takes its two ends in."""
    arcs = list(standing.arcs)
    out, into = standing.free()
    senders = rng.permutation(np.repeat(np.arange(standing.nodes), out)).tolist()
    if standing.paired:
        pairs = [(senders[k], senders[k + 1]) for k in range(0, len(senders), 2)]
    else:
        pairs = list(zip(senders, rng.permutation(np.repeat(np.arange(standing.nodes), into)).tolist(), strict=True))
    for k, (a, b) in enumerate(pairs):  # a loop exchanges its end with a pair that has neither
        other = next((m for m, (c, d) in enumerate(pairs) if a == b and a not in (c, d)), None)
        if other is not None:
            c, d = pairs[other]
            pairs[k], pairs[other] = (a, d), (c, a)
    for a, b in pairs:
        if a != b:
            arcs += [(a, b), (b, a)] if standing.paired else [(a, b)]
            continue
        cut = next((arcs[k] for k in rng.permutation(len(arcs)).tolist() if a not in arcs[k] and arcs[k][0] != arcs[k][1]), None)
        if cut is None:
            return None
        for x, y in (cut, cut[::-1]) if standing.paired else (cut,):
            arcs.remove((x, y))
            arcs += [(x, a), (a, y)]
    return arcs


def _exchanged(arcs: list[Arc], paired: bool, rng: np.random.Generator) -> list[Arc] | None:
    """Two links exchange their far ends. None: a link would join a node with itself."""
    (a, b), (c, d) = (arcs[k] for k in rng.choice(len(arcs), 2, replace=len(arcs) < 2).tolist())
    if a == d or c == b or (paired and len({a, b, c, d}) < 4):
        return None
    after = list(arcs)
    for x, y in [(a, b), (c, d), *([(b, a), (d, c)] if paired else [])]:
        after.remove((x, y))
    return after + [(a, d), (c, b)] + ([(d, a), (b, c)] if paired else [])


def _made(standing: Standing, arcs: list[Arc]) -> Grown | None:
    wiring = Wiring.of(f"{standing.name}, rewired", standing.nodes, arcs)
    try:
        gather = gather_cost(wiring)
        scatter = gather if wiring.paired else gather_cost(wiring.transposed())
    except Disconnected:
        return None
    before, after = Counter(standing.arcs), Counter(arcs)
    return Grown(
        wiring, max(gather.steps, scatter.steps), max(gather.load, scatter.load), tuple(sorted((before - after).elements())),
        tuple(sorted((after - before).elements())),
    )  # fmt: skip
