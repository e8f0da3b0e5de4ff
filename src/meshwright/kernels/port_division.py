"""How shards divide among a rank's ports: exactly, and why no division is quicker.

Shards that the same ports can bring are a class; a class is a bit mask of ports. The least time is, by Hall's theorem, the largest over sets of ports
of the shards that no other port can bring, over the rate of the set. It is found by cuts: a time is tried by a maximum flow, whose cut names a set
that needs longer. That set is the certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor, gcd

from .maxflow import FlowNetwork

__all__ = ["Division", "Ports", "divide"]

Ports = Mapping[int, int]  # neighbour -> rate of the way from there, in any unit


@dataclass(frozen=True)
class Division:
    """`time`: until the last port is done, a piece taking 1 / rate. `sent[class, neighbour]`: pieces of the class that come from there.
    `ports`: a set of neighbours that cannot be done sooner, were pieces as small as one likes; `shards`: those that only they can bring."""

    time: Fraction
    sent: Mapping[tuple[int, int], int]
    ports: tuple[int, ...]
    shards: int


def divide(counts: Mapping[int, int], ports: Ports, pieces: int = 0) -> Division:
    """The quickest division of `counts[class]` shards, each of so many whole pieces; 0: pieces as small as one likes (then nothing is `sent`).

    The time of whole pieces is exact too: between two times at which some port could bring one piece more, nothing changes.
    Raises: Unsupported where rates are so unlike that exact numbers leave 64 bits.
    """
    names = sorted(ports)
    common = gcd(*ports.values())
    rates = [ports[w] // common for w in names]
    classes = sorted(counts)
    shards = sum(counts.values())
    each = pieces or 1
    time, tight = Fraction(each * shards, sum(rates)), (1 << len(names)) - 1
    while True:
        # whole pieces: what fits before `time`; else both sides are multiplied by its denominator
        scale = 1 if pieces else time.denominator
        room = [floor(time * rate) if pieces else time.numerator * rate for rate in rates]
        demand = {mask: each * counts[mask] * scale for mask in classes}
        source, sink = len(classes) + len(names), len(classes) + len(names) + 1
        arcs = {(source, i): demand[mask] for i, mask in enumerate(classes)}
        arcs |= {(i, len(classes) + k): demand[mask] for i, mask in enumerate(classes) for k in range(len(names)) if mask >> k & 1}
        arcs |= {(len(classes) + k, sink): room[k] for k in range(len(names))}
        network = FlowNetwork.of(sink + 1, arcs)
        if network.max_flow(source, sink) == sum(demand.values()):
            break
        reached = network.source_side()
        short = sum(1 << k for k in range(len(names)) if reached[len(classes) + k])
        needed = Fraction(each * _confined(counts, short), sum(rate for k, rate in enumerate(rates) if short >> k & 1))
        if needed > time:
            time, tight = needed, short
        else:  # only rounding is in the way
            time = min(Fraction(floor(time * rate) + 1, rate) for rate in rates)
    sent = {}
    if pieces:
        flows = network.flows()
        sent = {(classes[i], names[k - len(classes)]): x for (i, k), x in flows.items() if i < len(classes) <= k < source}
    return Division(time / common, sent, tuple(w for k, w in enumerate(names) if tight >> k & 1), _confined(counts, tight))


def _confined(counts: Mapping[int, int], ports: int) -> int:
    """Shards that only these ports can bring."""
    return sum(count for mask, count in counts.items() if not mask & ~ports)
