"""The bottleneck of a collective, and what would widen it.

A bound's certificate names a set of actors and the links that leave it (`cut`, `partition`), or weighs links (`metric`, `packing`), or
names two ranks (`latency`). Here that becomes facts that `meshwright.report.bottleneck_text` says in words: whose links they are, how many
other places are just as tight, and by how much the collective could run faster or slower if one were added or lost. Every such figure is
the exact bound of the changed fabric against the bound of the given one, computed anew; what "one more" is stands in
`meshwright.fabric.edit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ....bound import Bound
from ....errors import MeshwrightError
from ....fabric.edit import is_port, with_one_more, without
from ....fabric.fabric import Fabric
from ....kernels.effort import Deadline
from ..problem import CollectiveProblem
from .bandwidth import bandwidth_bound, crossing_bytes
from .latency import latency_bound

__all__ = ["Bottleneck", "bottleneck_facts", "find_bottleneck"]

MAX_CHANGES_WORK_S = 10.0  # counted work, seconds of a quiet core: after it no further change of the fabric is tried
MAX_RANKS = 2048  # on larger fabrics no change is tried: each costs as much as the bound itself
MAX_TIED_PLACES = 4096  # servers or devices that are compared exactly with the bottleneck; of more, none is named as tied
MAX_LINK_CLASSES = 2  # kinds of links of which one more, one less and a faster one are tried, those of the largest share first


@dataclass(frozen=True)
class Bottleneck:
    """Where it is tight: `side` are the actors on the near side of the cut, `links` the numbers of the links that bind."""

    side: tuple[str, ...]
    where: str  # "box3", "box0/gpu5", "12 devices"
    links: tuple[int, ...]
    tied: Mapping[str, tuple[int, ...]]  # other servers or devices that are exactly as tight, with the links that bind there
    outward: bool  # the bytes leave `side`


def find_bottleneck(problem: CollectiveProblem, bound: Bound) -> Bottleneck | None:
    """The binding links of a bound's certificate; None where no links bind (latency, anything that is no set of links)."""
    data, fabric = bound.certificate.data, problem.fabric
    if bound.certificate.kind == "cut":
        inside = set(data["inside"])
        links = tuple(i for i, x in enumerate(fabric.links) if x.src in inside and x.dst not in inside)
        outward = _near_is_inside(fabric, inside, links)
        side = tuple(name for name in fabric.actor_names if (name in inside) == outward)
        where = _where(fabric, side)
        return Bottleneck(side, where, links, _tied(problem, bound, where), outward)
    if bound.certificate.kind == "partition":
        part_of = {name: i for i, part in enumerate(data["parts"]) for name in part}
        into: dict[int, list[int]] = {i: [] for i in range(len(data["parts"]))}
        for i, x in enumerate(fabric.links):
            if x.dst in part_of and part_of.get(x.src) != part_of[x.dst]:
                into[part_of[x.dst]].append(i)
        names = [_where(fabric, part) for part in data["parts"]]
        rest = {name: tuple(into[i]) for i, name in enumerate(names) if i}
        return Bottleneck(tuple(data["parts"][0]), names[0], tuple(sorted(i for part in into.values() for i in part)), rest, False)
    if bound.certificate.kind in ("metric", "packing"):
        weighed = {(u, v) for u, v, length in data["lengths"] if length}
        links = tuple(i for i, x in enumerate(fabric.links) if (x.src, x.dst) in weighed)
        return Bottleneck(tuple(dict.fromkeys(fabric.links[i].src for i in links)), "", links, {}, True)
    return None


def _near_is_inside(fabric: Fabric, inside: set[str], links: Sequence[int]) -> bool:
    """Whether the side to speak of is the inside: the one whose servers own the binding links, else the one with fewer devices."""
    group_of = {d.name: d.group for d in fabric.devices} | {s.name: s.group for s in fabric.switches}
    near, far = {group_of[fabric.links[i].src] for i in links}, {group_of[fabric.links[i].dst] for i in links}
    # The side whose servers own the binding links is the one to name; the other end of them belongs to no server.
    if ("" in near) != ("" in far):
        return "" in far
    within = sum(d.name in inside for d in fabric.devices)
    return 2 * within <= len(fabric.devices)


def _where(fabric: Fabric, side: Sequence[str]) -> str:
    """A server, a device, or a count: the shortest true name of a set of actors."""
    devices = [name for name in side if fabric.actor_of[name] < len(fabric.devices)]
    groups = {fabric.device(name).group for name in devices}
    if len(devices) == 1:
        return devices[0]
    if len(groups) == 1 and (group := next(iter(groups))) and len(fabric.groups[group]) == len(devices):
        return group
    if groups and "" not in groups and sum(len(fabric.groups[g]) for g in groups) == len(devices):
        names = [g for g in fabric.groups if g in groups]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more servers" if len(names) > 3 else "")
    return f"{len(devices)} devices ({', '.join(devices[:3])}{', ...' if len(devices) > 3 else ''})" if devices else f"{len(side)} switches"


def _tied(problem: CollectiveProblem, bound: Bound, where: str) -> dict[str, tuple[int, ...]]:
    """Other servers (or devices) whose own links, out or in, give exactly the same bound."""
    fabric = problem.fabric
    if where in fabric.groups:
        places: dict[str, set[str]] = {g: {fabric.devices[i].name for i in members} for g, members in fabric.groups.items()}
        for switch in fabric.switches:
            places.get(switch.group, set()).add(switch.name)
    elif where in fabric.actor_of:
        places = {d.name: {d.name} for d in fabric.devices}
    else:
        return {}
    if len(places) > MAX_TIED_PLACES:
        return {}
    owner = {name: place for place, names in places.items() for name in names}
    crossing: dict[str, tuple[list[int], list[int]]] = {place: ([], []) for place in places}
    for i, x in enumerate(fabric.links):
        a, b = owner.get(x.src), owner.get(x.dst)
        if a != b:
            if a is not None:
                crossing[a][0].append(i)
            if b is not None:
                crossing[b][1].append(i)
    ranks: dict[str, list[int]] = {place: [] for place in places}
    for r, name in enumerate(problem.ranks):
        ranks[owner[name]].append(r)
    found: dict[str, tuple[int, ...]] = {}
    for place in places:
        for outward, links in zip((True, False), crossing[place], strict=True):
            rate = sum(fabric.links[i].rate_Bps for i in links)
            inside = [not outward] * len(problem.ranks)
            for r in ranks[place]:
                inside[r] = outward
            if place != where and rate and crossing_bytes(problem, inside) / rate == bound.exact:
                found.setdefault(place, tuple(links))
    return found


# ---- facts -------------------------------------------------------------------------------------------------------------
def bottleneck_facts(problem: CollectiveProblem, bound: Bound, *, effort_s: float = MAX_CHANGES_WORK_S) -> dict[str, Any]:
    """Where it is tight, and exactly what one more, one less or twice the rate would do; JSON-able.

    `changes`: for each, `what` was tried, the `edit`, its exact `gain` of throughput and what `then` is tight. Changes that cannot be tried
    within so much counted work are left out, and `complete` is then false. (`meshwright.report.bottleneck_text` says it in words.)
    """
    if bound.certificate.kind == "delay":  # gains are of throughput, which the time that last bytes travel says nothing about
        bound = _steady_bound(problem)
    place = find_bottleneck(problem, bound)
    data = bound.certificate.data
    if place is None:
        ends = {"from": data["from"], "to": data["to"]} if bound.certificate.kind == "latency" else {}
        return {"kind": bound.certificate.kind, "complete": True, "changes": [], **ends}
    fabric = problem.fabric
    changes, complete = _changes(problem, bound, place, effort_s if len(problem.ranks) <= MAX_RANKS else -1.0)
    links = [{"kind": k, "rate_Bps": r, "count": n, "example": e, "nics": _nics(fabric, place.links, (k, r))}
             for (k, r), (n, e) in _classes(fabric, place.links).items()]  # fmt: skip
    return {
        "kind": bound.certificate.kind, "where": place.where, "outward": place.outward, "links": links,
        "rate_Bps": sum(fabric.links[i].rate_Bps for i in place.links), "tied": list(place.tied), "changes": changes, "complete": complete,
    }  # fmt: skip


def _steady_bound(problem: CollectiveProblem) -> Bound:
    """Of bytes alone or of latency alone."""
    return max(bandwidth_bound(problem), latency_bound(problem), key=lambda b: b.exact)


def _classes(fabric: Fabric, links: Sequence[int]) -> dict[tuple[str, int], tuple[int, str]]:
    """(kind, rate) of links -> how many, and the first of them by name."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    for i in links:
        x = fabric.links[i]
        count, example = found.get((x.kind, x.rate_Bps), (0, f"{x.src} -> {x.dst}"))
        found[x.kind, x.rate_Bps] = count + 1, example
    return found


def _nics(fabric: Fabric, links: Sequence[int], kind: tuple[str, int]) -> int:
    """How many NICs the links of a class lead through; 0 unless every one does."""
    ends = [[name for name in (fabric.links[i].src, fabric.links[i].dst) if is_port(fabric, name)] for i in links if _class(fabric, i) == kind]
    return len({name for names in ends for name in names[:1]}) if all(ends) else 0


# ---- changes -----------------------------------------------------------------------------------------------------------
Element = str | tuple[str, str]  # a NIC by name, a link (both directions) by its ends


def _changes(problem: CollectiveProblem, bound: Bound, place: Bottleneck, effort_s: float) -> tuple[list[dict[str, Any]], bool]:
    fabric, deadline = problem.fabric, Deadline.after(effort_s)
    classes = _classes(fabric, place.links)
    by_share = sorted(classes, key=lambda c: -c[1] * classes[c][0])[:MAX_LINK_CLASSES]
    tried: list[tuple[str, dict[str, Any], Callable[[], Fabric]]] = []
    for kind in by_share:
        one = _element(fabric, _own(fabric, place, kind))
        alike = [_element(fabric, same) for links in place.tied.values() if (same := _like(fabric, links, kind))]
        everywhere = list(dict.fromkeys([one, *alike]))
        name = one if isinstance(one, str) else "<->".join(one)
        if len(everywhere) > 1:
            others = f"each of the {len(place.tied)} others" if len(place.tied) > 1 else next(iter(place.tied))
            tried.append((f"one more {_called(one)}, and one at {others}", {"add": everywhere}, partial(with_one_more, fabric, everywhere)))
        alone = f" at {place.where} alone" if len(everywhere) > 1 else ""
        tried.append((f"one more {_called(one)}{alone}", {"add": [one]}, partial(with_one_more, fabric, [one])))
        tried.append((f"{_called(one, named=True)} down", {"without": [name]}, partial(without, fabric, [name])))
        tried.append((f"{_all(one, kind)} twice as fast", {"twice": list(kind)}, partial(_twice, fabric, one, kind)))
    found: list[dict[str, Any]] = []
    for what, edit, change in tried:
        if deadline.past:
            return found, False
        try:
            changed = replace(problem, fabric=change())
            new = _steady_bound(changed)
        except MeshwrightError as error:
            found.append({"what": what, "edit": edit, "gain": "-1", "then": f" ({error.message})"})
            continue
        # Both bounds are exact fractions, so the gain is, too.
        gain = bound.exact / new.exact - 1
        after = find_bottleneck(changed, new)
        moved = f"; then {after.where} is the bottleneck" if after is not None and after.where and after.where != place.where else ""
        found.append({"what": what, "edit": edit, "gain": str(gain), "then": moved if gain >= 0 else ""})
    return found, True


def _like(fabric: Fabric, links: Sequence[int], kind: tuple[str, int]) -> list[int]:
    """Those of the links that are of the class, or else as fast (a NIC's two sides are of unlike kinds)."""
    return [i for i in links if _class(fabric, i) == kind] or [i for i in links if fabric.links[i].rate_Bps == kind[1]]


def _class(fabric: Fabric, link: int) -> tuple[str, int]:
    return fabric.links[link].kind, fabric.links[link].rate_Bps


def _own(fabric: Fabric, place: Bottleneck, kind: tuple[str, int]) -> list[int]:
    """Binding links of a class that touch the place itself."""
    side = set(place.side)
    links = [i for i in place.links if _class(fabric, i) == kind]
    return [i for i in links if fabric.links[i].dst in side or fabric.links[i].src in side] or links


def _element(fabric: Fabric, links: Sequence[int]) -> Element:
    """What one would add beside these links: the NIC at the end of the last of them, else a link like it."""
    last = fabric.links[links[-1]]
    a, b = sorted((last.src, last.dst), key=fabric.actor_of.__getitem__)  # the same link from either end is one element
    return next((name for name in (a, b) if is_port(fabric, name)), (a, b))


def _called(one: Element, *, named: bool = False) -> str:
    what, name = ("NIC", one) if isinstance(one, str) else ("link", " <-> ".join(one))
    return f"{what} {name}" if named else f"{what} like {name}"


def _all(one: Element, kind: tuple[str, int]) -> str:
    return "all NICs like it" if isinstance(one, str) else f"all {kind[0]} links like it"


def _twice(fabric: Fabric, one: Element, kind: tuple[str, int]) -> Fabric:
    """Every link of the class at twice its rate; for NICs, all links of the NICs that have one of that class."""
    chosen = {i for i in range(len(fabric.links)) if _class(fabric, i) == kind}
    if isinstance(one, str):
        ports = {name for i in chosen for name in (fabric.links[i].src, fabric.links[i].dst) if is_port(fabric, name)}
        chosen |= {i for i, x in enumerate(fabric.links) if x.src in ports or x.dst in ports}
    return replace(fabric, links=tuple(replace(x, rate_Bps=2 * x.rate_Bps) if i in chosen else x for i, x in enumerate(fabric.links)))
