"""Symmetries of a fabric that its routing keeps: one route then stands for those of all its images.

    moved = routing_symmetry(fabric, goes, routes)   # None: no symmetry, or one that routes need not keep
    orbit = link_orbits([moved, ...])                # the smallest link among the images of every link

A map of some devices is carried on to switches and other devices by the order of their links, and then verified link by link: ends, rate, latency,
bucket. Shortest routes and widths are moved by any such map; the last rule of routing, the smallest link numbers, need not be. Two routes from one
actor part at some actor, so it is enough that the map keeps the order of those links out of one actor among which a route may choose. Of a route
its busiest switch is taken as the middle. Up to there, all links out of every actor that is as near to the source must keep their order; from there
on, of the links out of one actor those that lead nearer to the destination. Both are looked at for every device once, never for pairs. What keeps
routes may be applied again and again.
Cost: O(links log links), and the neighbourhood of every device up to the middle of its routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .fabric import Fabric

__all__ = ["Moved", "link_orbits", "routing_symmetry"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Moved:
    """Where every actor and every link of a fabric goes."""

    actor: Ints
    link: Ints


def routing_symmetry(fabric: Fabric, goes: Mapping[int, int], routes: Iterable[Sequence[int]], kind: Mapping[int, int] | None = None) -> Moved | None:
    """The symmetry that moves devices as `goes` says, if it and all its powers move these routes of the fabric, and their images, to routes.

    Args:
        goes: device -> its image; a permutation of some devices.
        routes: links of the routes in question; those of images need not be named.
        kind: device -> a number that it shares with all its images, under other symmetries too; None = each device for itself.

    None also where a route passes a device.
    """
    actor = _carried_on(fabric, list(goes), list(goes.values()))
    link = _moved_links(fabric, actor) if actor is not None else None
    if actor is None or link is None:
        return None
    leave: dict[int, int] = {}  # levels around a device up to the middle of the routes from it, and to it; of its kind
    arrive: dict[int, int] = {}
    of = kind if kind is not None else {}
    ends, out = fabric.link_ends, fabric.out_links
    for path in filter(len, routes):
        inner = [ends[x][1] for x in path[:-1]]
        if any(a < len(fabric.devices) for a in inner):
            return None
        middle = 1 + max(range(len(inner)), key=lambda i: len(out[inner[i]])) if inner else 1
        src, dst = (of.get(a, a) for a in (ends[path[0]][0], ends[path[-1]][1]))
        leave[src] = max(leave.get(src, 0), middle)
        arrive[dst] = max(arrive.get(dst, 0), len(path) - middle)
    kept = _order_kept(fabric, link)
    for device in range(len(fabric.devices)):
        forward, backward = leave.get(of.get(device, device), 0), arrive.get(of.get(device, device), 0)
        if not _leaves_alike(fabric, device, forward, kept) or not _arrives_alike(fabric, device, backward, kept, link):
            return None
    return Moved(actor, link)


def link_orbits(moves: Sequence[Moved], links: int) -> Ints:
    """Of every link the smallest one that the symmetries, one after another and again and again, move it to."""
    first = np.arange(links)
    while True:
        before = first
        for moved in moves:
            step = moved.link
            # Twice as far at every turn: after k turns the smallest of 2^k images in a row.
            for _ in range(max(1, links.bit_length())):
                first, step = np.minimum(first, first[step]), step[step]
        if np.array_equal(first, before):
            return first


def _carried_on(fabric: Fabric, devices: Sequence[int], images: Sequence[int]) -> Ints | None:
    """Actors by the order of the links that join them to actors placed already, nearest first; None where that is no permutation."""
    goes = np.full(len(fabric.actor_names), -1, np.int64)
    goes[list(devices)] = list(images)
    ends = fabric.link_ends
    todo = list(devices)
    for here in todo:
        there = int(goes[here])
        for side, out in ((1, fabric.out_links), (0, fabric.in_links)):
            mine = [a for a in dict.fromkeys(ends[x][side] for x in out[here]) if goes[a] < 0]
            if not mine:
                continue
            # What is not placed yet goes, in order, to what nothing placed beside `here` goes to.
            taken = {int(goes[ends[x][side]]) for x in out[here]}
            other = [a for a in dict.fromkeys(ends[x][side] for x in out[there]) if a not in taken]
            if len(mine) != len(other):
                return None
            goes[mine] = other
            todo += mine
    left = np.flatnonzero(goes < 0)  # joined to nothing that moves: they stay
    goes[left] = left
    split = len(fabric.devices)
    whole = bool(np.array_equal(np.sort(goes), np.arange(len(goes)))) and bool(np.all((goes < split) == (np.arange(len(goes)) < split)))
    return goes if whole else None


def _moved_links(fabric: Fabric, actor: Ints) -> Ints | None:
    """Every link's image, parallel links in order; None unless each has one of equal rate, latency and bucket."""
    ends = np.array(fabric.link_ends, np.int64).reshape(-1, 2)
    number = np.arange(len(ends))
    own = np.lexsort((number, ends[:, 1], ends[:, 0]))
    after = actor[ends]
    moved = np.lexsort((number, after[:, 1], after[:, 0]))
    if not np.array_equal(ends[own], after[moved]):
        return None
    link = np.empty(len(ends), np.int64)
    link[moved] = own
    facts = np.array([(x.rate_Bps, x.latency_s, x.library_latency_s, x.burst_bytes) for x in fabric.links], np.float64).reshape(-1, 4)
    rates = np.array([x.rate_Bps for x in fabric.links], np.int64)
    return link if np.array_equal(facts, facts[link]) and np.array_equal(rates, rates[link]) else None


def _order_kept(fabric: Fabric, link: Ints) -> NDArray[np.bool_]:
    """Of every actor: are the images of the links out of it in the order of the links?"""
    kept = np.ones(len(fabric.actor_names), bool)
    tail = np.array([src for src, _ in fabric.link_ends], np.int64)
    by = np.argsort(tail, kind="stable")
    falls = (tail[by][1:] == tail[by][:-1]) & (np.diff(link[by]) < 0)
    kept[tail[by][1:][falls]] = False
    return kept


def _leaves_alike(fabric: Fabric, device: int, levels: int, kept: NDArray[np.bool_]) -> bool:
    front, seen = [device], {device}
    for level in range(levels):
        if not all(kept[a] for a in front):
            return False
        if level + 1 < levels:
            front = _next(fabric, front, seen, forward=True)
    return True


def _arrives_alike(fabric: Fabric, device: int, levels: int, kept: NDArray[np.bool_], link: Ints) -> bool:
    """Links into each level towards the device: those that leave one actor keep their order."""
    front, seen, ends = [device], {device}, fabric.link_ends
    for level in range(levels):
        last: dict[int, int] = {}
        for x in sorted(x for a in front for x in fabric.in_links[a] if not kept[ends[x][0]] and ends[x][0] not in seen):
            tail = ends[x][0]
            if link[x] < last.get(tail, -1):
                return False
            last[tail] = int(link[x])
        if level + 1 < levels:
            front = _next(fabric, front, seen, forward=False)
    return True


def _next(fabric: Fabric, front: list[int], seen: set[int], *, forward: bool) -> list[int]:
    """Switches one link further."""
    side, links, out = (1, fabric.out_links, []) if forward else (0, fabric.in_links, list[int]())
    for a in front:
        for x in links[a]:
            found = fabric.link_ends[x][side]
            if found >= len(fabric.devices) and found not in seen:
                seen.add(found)
                out.append(found)
    return out
