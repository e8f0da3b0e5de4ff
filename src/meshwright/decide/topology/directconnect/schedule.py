"""All-gathers as lists of transfers: breadth-first ones, and those that expansions make of a smaller graph's, as in the paper's rules.

A transfer is a run of pieces of one source's shard over one link in one step. What a rule makes is a schedule of the expanded wiring whose load the
rule promises. On the explicit graph of a line graph breadth-first broadcasts are at least as good: `collective plan --strategy bfb` runs them.
Only for wirings without loops and parallel arcs, where a link is a pair of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product as cross
from math import lcm

import numpy as np

from ....errors import Disconnected, Unsupported
from ....kernels.port_division import divide
from .loads import gather_cost
from .wiring import Wiring, copies, line_graph, product

__all__ = ["MAX_PIECES", "Schedule", "Transfer", "breadth_first", "expanded", "of_copies", "of_line_graph", "of_power", "turned"]

MAX_PIECES = 24  # of a shard, that are tried: halves to quarters, sixths and eighths


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pieces `first` .. `last` - 1 of the shard of `source` go from `sender` to `receiver` in `step`, counted from 0."""

    step: int
    source: int
    first: int
    last: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class Schedule:
    """`pieces`: of every shard."""

    wiring: Wiring
    pieces: int
    transfers: tuple[Transfer, ...]

    @property
    def steps(self) -> int:
        return 1 + max(t.step for t in self.transfers)

    @property
    def load(self) -> Fraction:
        """Shards over the busiest link, summed over steps."""
        on: dict[tuple[int, int, int], int] = {}
        for t in self.transfers:
            key = t.step, t.sender, t.receiver
            on[key] = on.get(key, 0) + t.last - t.first
        busiest = [0] * self.steps
        for (step, _, _), pieces in on.items():
            busiest[step] = max(busiest[step], pieces)
        return Fraction(sum(busiest), self.pieces)


def expanded(wiring: Wiring) -> Schedule:
    """By the rule of the expansion that the wiring comes from, and so on down to its base graph, which has a breadth-first one.

    Raises: as `breadth_first`.
    """
    rule, base, count = wiring.made or ("", wiring, 1)
    if rule == "line":
        return of_line_graph(expanded(base))
    if rule == "copies":
        return of_copies(expanded(base), count)
    if rule == "power":
        return of_power(expanded(base), count)
    return breadth_first(wiring, gather_cost(wiring).load)


def turned(wiring: Wiring) -> Schedule:
    """An all-gather on the wiring with every arc turned round, by the same rules; played backwards it is a reduce-scatter on the wiring itself.

    A line graph turned round is the line graph of the base turned round, its nodes numbered by the base's arcs as they were.
    Raises: as `breadth_first`.
    """
    rule, base, count = wiring.made or ("", wiring, 1)
    if rule == "copies":
        return of_copies(turned(base), count)
    if rule == "power":
        return of_power(turned(base), count)
    back = wiring.transposed()
    if rule != "line":
        return breadth_first(back, gather_cost(back).load)
    made = of_line_graph(turned(base))
    number = {(int(a), int(b)): k for k, (a, b) in enumerate(base.arcs)}
    to = [number[int(a), int(b)] for b, a in base.transposed().arcs]
    moved = (Transfer(t.step, to[t.source], t.first, t.last, to[t.sender], to[t.receiver]) for t in made.transfers)
    return Schedule(back, made.pieces, tuple(moved))


def _require_simple(wiring: Wiring) -> None:
    if any(count > 1 for count in wiring.links().values()) or (wiring.arcs[:, 0] == wiring.arcs[:, 1]).any():
        raise Unsupported(f"{wiring.name} has loops or parallel arcs", where="schedule", hint="use breadth-first broadcasts on the explicit graph")


def breadth_first(wiring: Wiring, load: Fraction) -> Schedule:
    """Every shard along all its shortest ways, in the fewest pieces that reach `load` (as `gather_cost` finds it), else the pieces that come nearest.

    Raises: Unsupported (loops, parallel arcs), Disconnected."""
    _require_simple(wiring)
    n = wiring.nodes
    into = [[int(a) for a, b in wiring.links() if b == u] for u in range(n)]
    hops = np.full((n, n), -1)  # [v, u]
    for v in range(n):
        hops[v, v], front, t = 0, [v], 0
        while front:
            t += 1
            front = [u for u in range(n) if hops[v, u] < 0 and any(hops[v, w] == t - 1 for w in into[u])]
            hops[v, front] = t
    if hops.min() < 0:
        raise Disconnected(f"{wiring.name} is not connected", where="schedule", hint="see `fabric show`")
    classes: list[list[dict[int, list[int]]]] = [[{} for _ in range(int(hops[:, u].max()))] for u in range(n)]
    for v, u in cross(range(n), repeat=2):
        if v != u:
            mask = sum(1 << k for k, w in enumerate(into[u]) if hops[v, w] == hops[v, u] - 1)
            classes[u][hops[v, u] - 1].setdefault(mask, []).append(v)
    found = (Schedule(wiring, pieces, tuple(_divided(classes, into, pieces))) for pieces in range(1, MAX_PIECES + 1))
    best: Schedule | None = None
    for schedule in found:
        if best is None or schedule.load < best.load:
            best = schedule
        if best.load == load:
            break
    assert best is not None, "one piece is always tried"
    return best


def _divided(classes: list[list[dict[int, list[int]]]], into: list[list[int]], pieces: int) -> Iterator[Transfer]:
    for u, steps in enumerate(classes):
        for t, own in enumerate(steps):
            sent = divide({mask: len(shards) for mask, shards in own.items()}, dict.fromkeys(range(len(into[u])), 1), pieces).sent
            for mask, shards in own.items():
                at = 0  # of the class's pieces, shard after shard
                for k, w in enumerate(into[u]):
                    end = at + sent.get((mask, k), 0)
                    while at < end:
                        shard, first = divmod(at, pieces)
                        last = min(pieces, first + end - at)
                        yield Transfer(t, shards[shard], first, last, w, u)
                        at += last - first


def of_line_graph(base: Schedule) -> Schedule:
    """First every node sends its shard on; then what a link of the base carries goes on to all that follow. Load: `ports` times the base's, and 1."""
    arcs = [(int(a), int(b)) for a, b in base.wiring.arcs]
    number = {arc: k for k, arc in enumerate(arcs)}
    leaving: dict[int, list[int]] = {}
    entering: dict[int, list[int]] = {}
    for k, (a, b) in enumerate(arcs):
        leaving.setdefault(a, []).append(k)
        entering.setdefault(b, []).append(k)
    made = [Transfer(0, a, 0, base.pieces, a, b) for a, (_, end) in enumerate(arcs) for b in leaving[end] if a != b]
    for t in base.transfers:
        link = number[t.sender, t.receiver]
        made += [
            Transfer(t.step + 1, a, t.first, t.last, link, b) for a in entering[t.source] for b in leaving[t.receiver] if a != b
        ]  # fmt: skip
    return Schedule(line_graph(base.wiring), base.pieces, tuple(made))


def of_copies(base: Schedule, count: int) -> Schedule:
    """The base's transfers between all copies; last, copies of one node get each other's shards, a part from every neighbour."""
    wiring = copies(base.wiring, count)
    pieces = lcm(base.pieces, wiring.ports)
    scale, part = pieces // base.pieces, pieces // wiring.ports
    made = [
        Transfer(t.step, t.source * count + j, t.first * scale, t.last * scale, t.sender * count + j, t.receiver * count + i)
        for t in base.transfers for i in range(count) for j in range(count)
    ]  # fmt: skip
    senders: dict[int, list[int]] = {}
    for a, b in sorted(wiring.links()):
        senders.setdefault(b, []).append(a)
    for node in range(wiring.nodes):
        first = node - node % count
        for twin in range(first, first + count):
            if twin != node:
                made += [Transfer(base.steps, twin, k * part, (k + 1) * part, w, node) for k, w in enumerate(senders[node])]
    return Schedule(wiring, pieces, tuple(made))


def of_power(base: Schedule, dims: int) -> Schedule:
    """A product of equal factors: part j of every shard runs the base on dimension j, then on j + 1, ... with all that it has; parts never meet."""
    wiring, n = base.wiring, base.wiring.nodes
    for _ in range(dims - 1):
        wiring = product(wiring, base.wiring)
    made = []
    for part, phase, t in cross(range(dims), range(dims), base.transfers):
        axis = (part + phase) % dims
        gathered = {(part + p) % dims for p in range(phase)}
        for others in cross(range(n), repeat=dims - 1):
            here = [*others[:axis], 0, *others[axis:]]
            free = [range(n) if k in gathered else [here[k]] for k in range(dims)]
            for source in cross(*(([t.source] if k == axis else free[k]) for k in range(dims))):
                ends = (source, [*here[:axis], t.sender, *here[axis + 1 :]], [*here[:axis], t.receiver, *here[axis + 1 :]])
                v, u, w = (sum(x * n ** (dims - 1 - k) for k, x in enumerate(at)) for at in ends)
                shift = part * base.pieces
                made.append(Transfer(phase * base.steps + t.step, v, shift + t.first, shift + t.last, u, w))
    return Schedule(wiring, dims * base.pieces, tuple(made))
