"""Simulating a folded program without expanding it.

All members of a class do the same at the same time, so the representative's steps are simulated alone. What a channel's image at
another member sends to the representative, the representative's own channel sends to that member at the same instant: the stored
channel stands for both. Links: the images of one stored channel pass an orbit of K links with M members in all; with fair
sharing every image gets the same rate (progressive filling raises symmetric flows together), so the orbit is one link of rate
K/M times the rate of each, crossed once by every stored channel. That holds where the fabric has the program's symmetry and its
routes keep it (`fabric.symmetry`), or else where every link of an orbit has the same rate and latency and is crossed by the same channels
equally often, which is verified route by route, for every member. Anything else is refused, as are devices of one class that differ, token
buckets, and exclusive links that several messages share (first come, first served breaks the symmetry). Cost: routes of the stored channels
and a look at every link; then as for a program of the stored size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cost import Cost
from ..errors import Unsupported, UsageError
from ..fabric.fabric import Fabric
from ..fabric.symmetry import link_orbits, routing_symmetry
from ..graph.graph import Work
from ..program.fold import generators, image, members, representative, require_folded
from ..program.fold_calls import inline_folded
from ..program.program import Fold, Program
from ..timeline import Timeline
from .engine import finished
from .network import Mode, Network, link_names, used_channels
from .pricing import durations
from .results import make_timeline, refuse_unfinished
from .tables import link_tables, make_state, program_tables

__all__ = ["FoldedNetwork", "fold_network", "simulate_folded"]

Ints = NDArray[np.int64]
MAX_LISTED_ROUTES = 400_000  # of (stored channel, member), where no symmetry of the fabric shows: some seconds


@dataclass(frozen=True, kw_only=True)
class FoldedNetwork:
    """`network`: one link per orbit. `orbits`: the fabric's links in each."""

    network: Network
    orbits: tuple[tuple[int, ...], ...]


def fold_network(program: Program, fabric: Fabric, placement: Sequence[str], *, mode: Mode = "auto") -> FoldedNetwork:
    """The links of `fabric` as the stored channels of a folded program without calls see them.

    Raises: Unsupported when the fabric or the placement does not have the program's symmetry (says where), or exclusive links are shared;
    UsageError, UnknownName, Disconnected as `compile_network`.
    """
    k, channels = require_folded(program).members, len(program.channels)
    paths, orbit_of, sizes = _paths(program, fabric, placement)
    ptr = np.zeros(channels + 1, np.int32)
    np.cumsum([len(path) for path in paths], out=ptr[1:])
    first = np.array([x for path in paths for x in path], np.int64)
    flat = orbit_of[first].astype(np.int32)
    # fewer links than members: some image shares a link with another
    shared = bool(np.any(sizes < k)) or bool(np.any(np.bincount(flat, minlength=1) > 1))
    if mode == "exclusive" and shared:
        raise Unsupported("exclusive links shared by symmetric messages cannot be folded", where=program.name, hint="use fair links, or expand it")
    library = np.zeros(channels)
    latency = np.array([x.latency_s for x in fabric.links], np.float64)
    flight = np.zeros(channels)
    for c in range(channels):
        path = first[ptr[c] : ptr[c + 1]]
        library[c] = max((fabric.links[x].library_latency_s for x in path), default=0.0)
        flight[c] = sum(latency[path].tolist()) + library[c]
    lead = np.full(len(sizes), -1, np.int64)
    lead[orbit_of[first]] = first
    # one link stands for all of an orbit, one message for its k images: the orbit's rates together, divided among k
    rate = np.array([x.rate_Bps for x in fabric.links], np.float64)[lead] * sizes / k
    network = Network(
        mode="exclusive" if mode == "exclusive" or (mode == "auto" and not shared) else "fair", segment_bytes=None, route_ptr=ptr, route_link=flat,
        rate_Bps=rate, latency_s=latency[lead], burst_bytes=np.zeros(len(sizes)), library_latency_s=library, flight_s=flight,
        link_names=tuple(f"orbit of {fabric.links[x].src}->{fabric.links[x].dst}" for x in lead.tolist()),
    )  # fmt: skip
    held: list[list[int]] = [[] for _ in range(len(sizes))]
    for link in np.flatnonzero(orbit_of >= 0).tolist():
        held[int(orbit_of[link])].append(link)
    return FoldedNetwork(network=network, orbits=tuple(map(tuple, held)))


def _paths(p: Program, fabric: Fabric, placement: Sequence[str]) -> tuple[list[tuple[int, ...]], Ints, Ints]:
    """Links of every stored channel, the orbit of every link (-1 unused), and how many links each orbit has."""
    fold = require_folded(p)
    if len(placement) != p.ranks:
        raise UsageError(f"names {len(placement)} actors, the program has {p.ranks} ranks", where="placement")
    for name in placement:
        fabric.device(name)
    if np.any(p.channels.route >= 0):
        raise Unsupported("a folded program with pinned routes", where=p.name, hint="leave the routes to the fabric")
    on = np.array([fabric.actor_of[name] for name in placement], np.int64)
    used, pairs = used_channels(p), list(zip(on[p.channels.src].tolist(), on[p.channels.dst].tolist(), strict=True))
    known = {pair: fabric.route(*pair) for pair in {pairs[c] for c in np.flatnonzero(used).tolist()}}  # many channels join the same two
    paths = [known[pair] if used[c] else () for c, pair in enumerate(pairs)]
    routes = list(known.values())
    first = _orbits_by_symmetry(fold, fabric, on, routes)
    if first is None:
        return paths, *_orbits_by_listing(p, fabric, on, used)
    mine = np.unique(first[[x for route in routes for x in route]]) if any(routes) else np.zeros(0, np.int64)
    for link in (fabric.links[x] for x in mine.tolist()):
        if link.burst_bytes:
            raise Unsupported(f"link {link.src}->{link.dst} has a token bucket, which cannot be folded", hint="expand the program")
    orbit_of = np.where(np.isin(first, mine), np.searchsorted(mine, first), -1)
    return paths, orbit_of, np.bincount(orbit_of[orbit_of >= 0])


def _orbits_by_symmetry(fold: Fold, fabric: Fabric, on: Ints, routes: Sequence[tuple[int, ...]]) -> Ints | None:
    """The first link of every link's orbit, or None where the fabric does not show the fold's symmetry."""
    ranks = np.arange(len(on))
    kind = dict(zip(on.tolist(), on[representative(fold, ranks)].tolist(), strict=True))
    moves = []
    for step in generators(fold):
        goes = dict(zip(on.tolist(), on[image(fold, ranks, step)].tolist(), strict=True))
        moved = routing_symmetry(fabric, goes, routes, kind)
        if moved is None:
            return None
        moves.append(moved)
    return link_orbits(moves, len(fabric.links))


def _orbits_by_listing(p: Program, fabric: Fabric, on: Ints, used: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Orbits from the routes of every (stored channel, member): where links are used alike, whatever moves them."""
    fold = require_folded(p)
    everyone, channels = members(fold), np.flatnonzero(used)
    if len(channels) * len(everyone) > MAX_LISTED_ROUTES:
        text = f"routes of {len(everyone)} members are not each other's images, as far as the order of links shows"
        raise Unsupported(text, where=p.name, hint="expand the program")
    src = [on[image(fold, p.channels.src[channels], m)].tolist() for m in everyone]
    dst = [on[image(fold, p.channels.dst[channels], m)].tolist() for m in everyone]
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    crossings, hops = [], []
    for at, c in enumerate(channels.tolist()):
        rows = []
        for pair in ((src[m][at], dst[m][at]) for m in range(len(everyone))):
            if pair not in known:
                known[pair] = fabric.route(*pair)
            rows.append(known[pair])
        if len({len(r) for r in rows}) > 1:
            raise Unsupported(f"routes of channel {c} have different lengths for different members", where=p.name, hint="expand the program")
        crossings.append(np.array(rows, np.int64).T.reshape(-1))
        hops.append(len(rows[0]))
    entry = np.repeat(np.arange(sum(hops)), len(everyone))  # (stored channel, hop)
    return _orbits(fabric, np.concatenate(crossings) if crossings else np.zeros(0, np.int64), entry)


def _orbits(fabric: Fabric, crossings: Ints, entry: Ints) -> tuple[Ints, Ints]:
    """Orbit of every link (-1 unused) and its size; links are alike when crossed equally often by the same (channel, hop) entries."""
    orbit_of = np.full(len(fabric.links), -1, np.int64)
    if not len(crossings):
        return orbit_of, np.zeros(0, np.int64)
    pair, times = np.unique(np.stack([crossings, entry], axis=1), axis=0, return_counts=True)
    bounds = np.flatnonzero(np.diff(pair[:, 0], prepend=-1))
    profiles: dict[tuple[bytes, int, float, float], int] = {}
    orbit_of_entry: dict[int, int] = {}
    for lo, hi in zip(bounds.tolist(), [*bounds[1:].tolist(), len(pair)], strict=True):
        link = fabric.links[int(pair[lo, 0])]
        if link.burst_bytes:
            raise Unsupported(f"link {link.src}->{link.dst} has a token bucket, which cannot be folded", hint="expand the program")
        profile = (pair[lo:hi, 1].tobytes() + times[lo:hi].tobytes(), link.rate_Bps, link.latency_s, link.library_latency_s)
        orbit = profiles.setdefault(profile, len(profiles))
        orbit_of[int(pair[lo, 0])] = orbit
        if any(orbit_of_entry.setdefault(e, orbit) != orbit for e in pair[lo:hi, 1].tolist()):
            raise Unsupported(
                f"link {link.src}->{link.dst} is not used like the links that other members use in its place",
                hint="the fabric or the placement lacks the program's symmetry: expand the program",
                data={"link": f"{link.src}->{link.dst}"},
            )
    return orbit_of, np.bincount(orbit_of[orbit_of >= 0])


def simulate_folded(
    program: Program, fabric: Fabric, placement: Sequence[str], cost: Cost | None = None, *, durations_s: NDArray[np.float64] | None = None,
    works: Mapping[str, Work] | None = None, programs: Mapping[str, Program] | None = None, network: Mode = "auto", record: bool = False,
) -> Timeline:  # fmt: skip
    """Simulate a folded program (calls are inlined with `inline_folded`) on all its ranks' devices; see the module.

    Args as `simulate_program`; `durations_s` is per stored step after inlining. Returns a `Timeline` whose spans are those of the
    representatives; memory peaks and link busy seconds are of all ranks and links. Raises Unsupported where the symmetry fails.
    """
    inlined = inline_folded(program, programs or {})
    p = inlined.program
    fold = require_folded(p)
    folded = fold_network(p, fabric, placement, mode=network)
    _require_equal_devices(p, fabric, placement)
    if durations_s is not None:
        if len(durations_s) != len(p.steps):
            raise UsageError(f"{len(durations_s)} durations for {len(p.steps)} steps", where="durations_s", hint="one per stored, inlined step")
        time_s = np.asarray(durations_s, np.float64)
    elif cost is not None:
        time_s = durations(p, cost, fabric, placement, works)
    else:
        time_s = np.zeros(len(p.steps))
    tables, messages = program_tables(p, time_s, p.message_bytes(), p.channels.depth.astype(np.int64))
    links = link_tables(folded.network)
    state = finished(tables, links, lambda: make_state(tables, links, messages, record=record), record)
    refuse_unfinished(p, tables, state)
    makespan_s = float(max(state.step["last_end"].max(initial=0.0), 0.0))
    attributes = {"network": folded.network.mode, "program": program.name, "folded_members": fold.members}
    stored = make_timeline(
        inlined, tables, state, folded.network, fabric_name=fabric.name, makespan_s=makespan_s, record=record, memory=True,
        staging=False, attributes=attributes,
    )  # fmt: skip
    return replace(stored, memory_peak_bytes=_unfold_peaks(p, stored.memory_peak_bytes), link_busy_s=_unfold_busy(fabric, folded, state.link["busy"]))


def _require_equal_devices(p: Program, fabric: Fabric, placement: Sequence[str]) -> None:
    fold = require_folded(p)
    kinds = [replace(fabric.device(name), name="", group="") for name in placement]
    for other, rank in enumerate(representative(fold, np.arange(p.ranks)).tolist()):
        if kinds[other] != kinds[rank]:
            raise Unsupported(
                f"ranks {rank} and {other} share a lane body, but {placement[rank]} and {placement[other]} differ", where=p.name,
                hint="expand the program", data={"ranks": [rank, other]},
            )  # fmt: skip


def _unfold_peaks(p: Program, peaks: Sequence[int]) -> tuple[int, ...]:
    """Every rank's peak is its representative's."""
    return tuple(np.asarray(peaks)[representative(require_folded(p), np.arange(p.ranks))].tolist())


def _unfold_busy(fabric: Fabric, folded: FoldedNetwork, busy: NDArray[np.float64]) -> dict[str, float]:
    names = link_names(fabric)
    return {names[x]: float(busy[orbit]) for orbit, links in enumerate(folded.orbits) for x in links}
