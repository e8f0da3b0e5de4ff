"""A fabric as a graph of integer rates, ranks first: what the bounds and the tree planner compute on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import Disconnected
from ...fabric.fabric import Fabric
from .memo import remember

__all__ = ["RateGraph", "pinned_route", "rate_graph", "whole_graph", "with_relays"]

T = TypeVar("T")


@dataclass(frozen=True)
class RateGraph:
    """Node i < ranks is rank i; the rest are switches and relaying devices. `arcs[u, v]` · `unit_Bps` is the rate from u to v."""

    names: tuple[str, ...]
    ranks: int
    group: tuple[int, ...]
    arcs: dict[tuple[int, int], int]
    unit_Bps: int

    @property
    def nodes(self) -> int:
        return len(self.names)

    @cached_property
    def mirrored(self) -> bool:
        """Every arc has a twin of equal rate the other way."""
        return all(self.arcs.get((v, u), 0) == rate for (u, v), rate in self.arcs.items())

    @cached_property
    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[int]]:
        """(tail, head, place of its rate among the different ones) of every arc, and those rates: a fabric has few."""
        pairs = np.array(list(self.arcs), np.int64).reshape(-1, 2)
        rates = list(dict.fromkeys(self.arcs.values()))
        place = {rate: i for i, rate in enumerate(rates)}
        return pairs[:, 0], pairs[:, 1], np.fromiter((place[rate] for rate in self.arcs.values()), np.int64, len(pairs)), rates

    def reversed(self) -> RateGraph:
        return RateGraph(self.names, self.ranks, self.group, {(v, u): rate for (u, v), rate in self.arcs.items()}, self.unit_Bps)

    def leaving(self, inside: Sequence[bool]) -> int:
        """Rate (in units) of the arcs that leave a set of nodes."""
        return sum(rate for (u, v), rate in self.arcs.items() if inside[u] and not inside[v])


def whole_graph(fabric: Fabric, ranks: Sequence[str]) -> RateGraph:
    """`rate_graph` with relays: bounds and choices of every size ask for it."""
    return rate_graph(fabric, ranks)


def rate_graph(fabric: Fabric, ranks: Sequence[str], *, relay: bool = True) -> RateGraph:
    """The fabric's graph with parallel links added up, made once for a fabric and its ranks.

    Args: `relay`: keep devices that are no rank, as nodes that forward. Bounds must keep them, since their links exist.
    """
    relay = relay or len(ranks) == len(fabric.devices)  # without others there is one graph
    return remember(fabric, ("rate graph", tuple(ranks), relay), lambda: _rate_graph(fabric, ranks, relay))


def _rate_graph(fabric: Fabric, ranks: Sequence[str], relay: bool) -> RateGraph:
    own = set(ranks)
    kept = list(ranks) + ([d.name for d in fabric.devices if d.name not in own] if relay else []) + [s.name for s in fabric.switches]
    number = {name: i for i, name in enumerate(kept)}
    found: dict[tuple[int, int], int] = {}
    for link in fabric.links:
        u, v = number.get(link.src), number.get(link.dst)
        if u is not None and v is not None and u != v:
            found[u, v] = found.get((u, v), 0) + link.rate_Bps
    arcs = dict(sorted(found.items()))
    unit = gcd(*arcs.values()) if arcs else 1
    labels = {d.name: d.group for d in fabric.devices} | {s.name: s.group or s.name for s in fabric.switches}
    order = {label: i for i, label in enumerate(dict.fromkeys(labels[name] for name in kept))}
    return RateGraph(tuple(kept), len(ranks), tuple(order[labels[name]] for name in kept), {a: r // unit for a, r in arcs.items()}, unit)


def with_relays(fabric: Fabric, ranks: Sequence[str], relay: bool | None, make: Callable[[bool], T]) -> tuple[T, bool]:
    """`make(relay)` and that relay; None: devices outside the collective forward only if the ranks are not connected without them.

    Raises: Disconnected, as the last `make` does.
    """
    if relay is not None or len(ranks) == len(fabric.devices):
        return make(bool(relay)), bool(relay)
    try:
        return make(False), False
    except Disconnected:
        return make(True), True


def pinned_route(fabric: Fabric, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """The route of a channel along these actors; None where the fabric's own routing takes it anyway, so that programs stay free of names."""
    links = fabric.route(fabric.actor_of[names[0]], fabric.actor_of[names[-1]])
    return None if names == (names[0], *(fabric.links[x].dst for x in links)) else names
