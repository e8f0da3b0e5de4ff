"""The fabric as a program sees it: for every channel the links its messages pass, with rates and latencies.

Two models of a shared link (see `exclusive` and `fair`). `auto` takes max-min fair sharing where two channels share a link
and exclusive links elsewhere, or exclusive links with segments when a segment size is stated.

A message's time on a route: each link's latency, once per hop, and once per message the largest `library_latency_s` of the
route. A link with `burst_bytes` > 0 is a token bucket: it fills at the link's rate up to that size, starts full, and bytes
that find tokens pass in no time. Exclusive: on each link by itself. Fair: a message takes, when it starts, the fewest tokens
that any link of its route offers (none if one of them has no bucket); the rest shares the rate; buckets fill with the unused rate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import Disconnected, UnknownName, UsageError
from ..fabric.fabric import Fabric
from ..program.program import Kind, Part, Program
from ..program.tables import I32, Channels, Steps

__all__ = ["Mode", "Network", "compile_network", "link_names", "unpinned", "used_channels"]

Mode = Literal["fair", "exclusive", "auto"]
# Networks kept per fabric: those of one plan's programs, which are simulated again and again.
MAX_KEPT_NETWORKS = 16
F64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Network:
    """Routes as CSR over channels (link numbers of the fabric); per link rate (B/s), latency (s) and bucket (bytes); per channel
    the library's latency and `flight_s`, the time from the end of a lone message's sending to its arrival."""

    mode: Literal["fair", "exclusive"]
    segment_bytes: int | None
    route_ptr: I32
    route_link: I32
    rate_Bps: F64
    latency_s: F64
    burst_bytes: F64
    library_latency_s: F64
    flight_s: F64
    link_names: tuple[str, ...]


def compile_network(
    program: Program, fabric: Fabric, placement: Sequence[str], *, mode: Mode = "auto", segment_bytes: int | None = None
) -> Network:
    """Route every channel of `program` over `fabric`.

    Args:
        placement: fabric device of every rank, then fabric switch of every switch actor, by name.
        segment_bytes: exclusive links only: messages are cut into segments of at most this size, which take turns on a link.

    Raises: UsageError (placement of the wrong length, a bad mode or segment size), UnknownName (no such actor), Disconnected
    (no path, or a pinned route that names no link).
    """
    if mode not in ("fair", "exclusive", "auto"):
        raise UnknownName(f"no network model {mode!r}", hint="fair, exclusive or auto")
    if segment_bytes is not None and segment_bytes < 1:
        raise UsageError(f"segment size must be >= 1 byte, got {segment_bytes}", where="segment_bytes")
    if segment_bytes is not None and mode == "fair":
        raise UsageError("segments belong to exclusive links", where="segment_bytes", hint="use network='exclusive', or drop the segment size")
    # Planners simulate one set of channels with many numbers of pieces; tables are never changed, so their identity says that they are the same.
    kept: OrderedDict[object, tuple[Channels, Steps, Network]] = fabric.__dict__.setdefault("_networks", OrderedDict())
    key = (id(program.channels), id(program.steps), tuple(placement), mode, segment_bytes)
    if key not in kept:
        made = _compiled(program, fabric, placement, mode, segment_bytes)
        kept[key] = program.channels, program.steps, made  # held, so that no other table gets their identity
        if len(kept) > MAX_KEPT_NETWORKS:
            kept.popitem(last=False)
    return kept[key][2]


def _compiled(program: Program, fabric: Fabric, placement: Sequence[str], mode: Mode, segment_bytes: int | None) -> Network:
    actors = _actors(program, fabric, placement)
    routes, kind = _routes(program, fabric, actors)
    ptr = np.zeros(len(kind) + 1, np.int32)
    np.cumsum(np.array([len(r) for r in routes], np.int32)[kind], out=ptr[1:])
    links = fabric.links
    latency = np.array([x.latency_s for x in links], np.float64)
    library_of = [max((links[k].library_latency_s for k in r), default=0.0) for r in routes]
    flight_of = [sum(links[k].latency_s for k in r) + a for r, a in zip(routes, library_of, strict=True)]
    library, flight = np.array(library_of, np.float64)[kind], np.array(flight_of, np.float64)[kind]
    start = np.cumsum([0, *(len(r) for r in routes[:-1])])[kind]
    flat = np.array([k for r in routes for k in r], np.int32)[np.repeat(start - ptr[:-1], np.diff(ptr)) + np.arange(ptr[-1])]
    resolved: Literal["fair", "exclusive"]
    if mode == "auto":
        shared = bool(len(flat)) and int(np.bincount(flat).max()) > 1
        resolved = "fair" if shared and segment_bytes is None else "exclusive"
    else:
        resolved = mode
    return Network(
        mode=resolved, segment_bytes=segment_bytes, route_ptr=ptr, route_link=flat,
        rate_Bps=np.array([x.rate_Bps for x in links], np.float64), latency_s=latency,
        burst_bytes=np.array([x.burst_bytes for x in links], np.float64), library_latency_s=library, flight_s=flight,
        link_names=link_names(fabric),
    )  # fmt: skip


def _actors(program: Program, fabric: Fabric, placement: Sequence[str]) -> list[int]:
    """Fabric actor of every program actor."""
    wanted = program.ranks + program.switches
    if len(placement) != wanted:
        raise UsageError(f"names {len(placement)} actors, the program has {program.ranks} ranks and {program.switches} switches", where="placement")
    found = []
    for at, name in enumerate(placement):
        actor = fabric.actor_of.get(name, -1)
        is_device = 0 <= actor < len(fabric.devices)
        if actor < 0 or is_device != (at < program.ranks):
            what = "device" if at < program.ranks else "switch"
            raise UnknownName(f"fabric {fabric.name!r} has no {what} {name!r}", where=f"placement[{at}]", hint="see `meshwright fabric show`")
        found.append(actor)
    return found


def used_channels(program: Program) -> NDArray[np.bool_]:
    used = np.zeros(len(program.channels), np.bool_)
    s = program.steps
    sends = (s.kind == Kind.TRANSFER) & ((s.parts & Part.SEND) != 0)
    single = sends & ((s.parts & Part.OUT_SET) == 0)
    used[s.chan_out[single]] = True
    for number in np.unique(s.chan_out[sends & ~single]):
        used[program.channels.sets[int(number)]] = True
    return used


def _routes(program: Program, fabric: Fabric, actors: Sequence[int]) -> tuple[list[tuple[int, ...]], NDArray[np.intp]]:
    """(routes, which of them every channel takes): the first is empty, of channels that nobody sends on; many channels share one."""
    c, used = program.channels, np.flatnonzero(used_channels(program))
    kind = np.zeros(len(c), np.intp)
    if not len(used):
        return [()], kind
    ends = np.array(actors, np.int64)
    key = (ends[c.src[used]] * (max(actors) + 1) + ends[c.dst[used]]) * (len(c.routes) + 1) + c.route[used] + 1
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # as channels come, so that an error names the first that is wrong
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order))
    kind[used] = 1 + place[number]
    return [(), *(_route(program, fabric, actors, int(used[first[i]])) for i in order)], kind


def unpinned(program: Program) -> Program:
    """The program on whatever routes a fabric has: for a prediction on another one than that whose routes it is pinned to."""
    channels = replace(program.channels, route=np.full(len(program.channels), -1, np.int32), routes=())
    return replace(program, channels=channels)


def _route(program: Program, fabric: Fabric, actors: Sequence[int], channel: int) -> tuple[int, ...]:
    c = program.channels
    src, dst = actors[int(c.src[channel])], actors[int(c.dst[channel])]
    if c.route[channel] < 0:
        return fabric.route(src, dst)
    names = c.routes[int(c.route[channel])]
    path = []
    for a, b in pairwise(names):
        link = _widest_link(fabric, a, b)
        if link < 0:
            raise Disconnected(
                f"channel {channel} is pinned to {' -> '.join(names)}, but fabric {fabric.name!r} has no link {a} -> {b}",
                hint="plan again for this fabric", data={"src": a, "dst": b},
            )  # fmt: skip
        path.append(link)
    ends = (fabric.actor_of.get(names[0], -1), fabric.actor_of.get(names[-1], -1)) if names else (-1, -1)
    if ends != (src, dst):
        raise UsageError(
            f"channel {channel} is pinned to {' -> '.join(names)}, but its ends are on {fabric.actor_names[src]} and {fabric.actor_names[dst]}",
            where="placement", hint="a program with pinned routes runs on the devices it was planned for",
        )  # fmt: skip
    return tuple(path)


def _widest_link(fabric: Fabric, a: str, b: str) -> int:
    """The link from a to b with the highest rate, the first of them on a tie; -1 if there is none."""
    src, dst = fabric.actor_of.get(a, -1), fabric.actor_of.get(b, -1)
    if src < 0 or dst < 0:
        return -1
    found = [k for k in fabric.out_links[src] if fabric.link_ends[k][1] == dst]
    return max(found, key=lambda k: (fabric.links[k].rate_Bps, -k), default=-1)


def link_names(fabric: Fabric) -> tuple[str, ...]:
    """`a->b`, and `a->b#2` for the second parallel link."""
    seen: dict[str, int] = {}
    out = []
    for x in fabric.links:
        name = f"{x.src}->{x.dst}"
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(out)
