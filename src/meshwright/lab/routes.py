"""Host routes of a routed lab: every packet between two devices goes exactly over `Fabric.route`.

A router looks at the destination alone, but two routes to one destination may part at an actor that they share: the widest way
from A may differ from what is widest from there on. Where that happens, the pair gets a rule of its own (`ip rule from A to B`)
and a table of its own at that actor.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .wiring import Wiring

__all__ = ["Hop", "Routes", "find_routes", "walk"]

FIRST_ROUTE_TABLE = 1000  # number of the first routing table of a device: the kernel keeps 253 to 255 for itself


@dataclass(frozen=True)
class Hop:
    """At `actor`, packets for device `dst` (from device `src` alone, if given) leave over the fabric's link `link`."""

    actor: int
    dst: int
    link: int
    src: int | None = None


@dataclass(frozen=True)
class Routes:
    """`main`: one per actor and destination. `special`: pairs that leave an actor by another link than `main` says."""

    main: tuple[Hop, ...]
    special: tuple[Hop, ...]


def find_routes(wiring: Wiring) -> Routes:
    """Raises: Disconnected."""
    fabric = wiring.fabric
    wanted: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # (actor, dst) -> link -> sources
    for src in range(len(fabric.devices)):
        for dst in range(len(fabric.devices)):
            for link in fabric.route(src, dst):
                wanted[fabric.link_ends[link][0], dst][link].append(src)
    main, special = [], []
    for (actor, dst), links in sorted(wanted.items()):
        own = next((link for link, sources in links.items() if actor in sources), None)
        usual = own if own is not None else max(links, key=lambda x: (len(links[x]), -x))
        main.append(Hop(actor, dst, usual))
        special += [Hop(actor, dst, link, src) for link, sources in sorted(links.items()) if link != usual for src in sources]
    return Routes(tuple(main), tuple(special))


def walk(wiring: Wiring, routes: Routes, src: int, dst: int) -> list[int]:
    """The links that a packet from device `src` to device `dst` takes under these routes. Raises: LookupError for a loop or a dead end."""
    main = {(h.actor, h.dst): h.link for h in routes.main}
    special = {(h.actor, h.dst, h.src): h.link for h in routes.special}
    path: list[int] = []
    actor = src
    while actor != dst:
        link = special.get((actor, dst, src), main.get((actor, dst)))
        if link is None or len(path) > len(wiring.fabric.links):
            raise LookupError(f"packets from {src} to {dst} {'loop' if link is not None else 'end'} at {actor}")
        path.append(link)
        actor = wiring.fabric.link_ends[link][1]
    return path
