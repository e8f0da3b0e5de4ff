"""How a fabric becomes namespaces and cables. Pure: nothing is made here.

Every device and every switch is a network namespace; the links of both directions between two of them are one cable (a veth
pair) whose two ends are shaped separately, so a direction that does not exist is an end through which nothing may leave.

- `bridged`: every device hangs on one switch by one two-way cable and the switches form a tree. A switch is a bridge, a device
  has its address on `eth0`.
- `routed`: everything else (direct links, several networks, cycles, one-way links). Each cable is a /30 network; a device has
  one identity address on the holder interface `id0`; packets follow host routes that are exactly `Fabric.route`.

Addresses exist only inside the lab: devices 10.77.0.0/16, bridges 10.76.0.0/16, cables from 10.80.0.0.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..errors import Infeasible
from ..fabric.fabric import Fabric
from .impair import UNIMPAIRED, Impairment, Method
from .scaling import MAX_SEGMENT_BYTES, segment_bytes

__all__ = ["MAX_NAMESPACES", "Cable", "End", "Wiring", "wire"]

MAX_NAMESPACES = 512  # of one lab, a network stack of the kernel each
_CABLES = int(ipaddress.IPv4Address("10.80.0.0"))


@dataclass(frozen=True, kw_only=True)
class End:
    """One end of a cable. `link` is the fabric's link that leaves here, None for a direction that does not exist.

    `impairment` is that of what leaves here.
    """

    actor: int
    interface: str
    mac: str
    address: str  # of the /30; unused when bridged
    link: int | None
    segment_bytes: int  # largest super-packet
    impairment: Impairment = UNIMPAIRED


@dataclass(frozen=True, kw_only=True)
class Cable:
    """A veth pair, or with `relayed` a pair of TAP interfaces joined by a relay."""

    number: int
    ends: tuple[End, End]
    relayed: bool = False

    def end_of(self, actor: int) -> End:
        return self.ends[0] if self.ends[0].actor == actor else self.ends[1]

    def other(self, actor: int) -> End:
        return self.ends[1] if self.ends[0].actor == actor else self.ends[0]


@dataclass(frozen=True)
class Wiring:
    """`fabric` is the rehearsed one; `namespaces[actor]` is "" for a switch that no cable reaches."""

    fabric: Fabric
    style: Literal["bridged", "routed"]
    namespaces: tuple[str, ...]
    cables: tuple[Cable, ...]
    mtu: int
    method: Method = ""  # of delays and losses
    acks_first: bool = False  # acknowledgements do not wait behind data

    @property
    def interface(self) -> str:
        """The interface that holds a device's address: what GLOO_SOCKET_IFNAME must name."""
        return "eth0" if self.style == "bridged" else "id0"

    def address(self, actor: int) -> str:
        """Identity of a device, or of a switch (used by bridges only)."""
        devices = len(self.fabric.devices)
        number = actor if actor < devices else actor - devices
        return f"10.{77 if actor < devices else 76}.{number // 250}.{number % 250 + 1}"

    def hostname(self, actor: int) -> str:
        """A device's or switch's name as a host name: letters, digits and dashes, unique in the lab."""
        name = "".join(c if c.isascii() and c.isalnum() else "-" for c in self.fabric.actor_names[actor]).strip("-").lower()[:48]
        return name if name and self._host_counts[name] == 1 else f"{name or 'actor'}-{actor}"

    @cached_property
    def _host_counts(self) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)
        for name in self.fabric.actor_names:
            counts["".join(c if c.isascii() and c.isalnum() else "-" for c in name).strip("-").lower()[:48]] += 1
        return counts

    @cached_property
    def cables_of(self) -> tuple[tuple[Cable, ...], ...]:
        """Cables at each actor."""
        found: list[list[Cable]] = [[] for _ in self.fabric.actor_names]
        for cable in self.cables:
            for end in cable.ends:
                found[end.actor].append(cable)
        return tuple(map(tuple, found))

    @cached_property
    def exit_of(self) -> dict[int, tuple[Cable, End]]:
        """Fabric link -> its cable and the end through which it leaves."""
        return {end.link: (cable, end) for cable in self.cables for end in cable.ends if end.link is not None}


def wire(
    fabric: Fabric, prefix: str, *, mtu: int = 1500, offload: bool = True, impaired: Mapping[int, Impairment] | None = None, method: Method = "",
    acks_first: bool = False,
) -> Wiring:  # fmt: skip
    """Cables, names and addresses for a rehearsed fabric. `offload=False` sends single packets instead of super-packets.

    `impaired` says which links get delay or loss, `method` how.

    Raises: Infeasible when the fabric has too many parts for one machine.
    """
    pairs: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for index, (src, dst) in enumerate(fabric.link_ends):
        there, back = pairs.setdefault((min(src, dst), max(src, dst)), ([], []))
        (there if src < dst else back).append(index)
    used = set(range(len(fabric.devices))) | {actor for pair in pairs for actor in pair}
    if len(used) > MAX_NAMESPACES:
        raise Infeasible(
            f"{len(used)} devices and switches; a lab holds at most {MAX_NAMESPACES}",
            where=fabric.name, hint="rehearse a part: --devices", data={"actors": len(used), "most": MAX_NAMESPACES},
        )  # fmt: skip
    style = _style(fabric, pairs)
    cables: list[Cable] = []
    for (a, b), (there, back) in pairs.items():
        for i in range(max(len(there), len(back))):
            links = (there[i] if i < len(there) else None, back[i] if i < len(back) else None)
            cables.append(_impair(_cable(fabric, style, len(cables), (a, b), links, i, mtu, offload), impaired or {}, method))
    names = tuple(_short(fabric, prefix, actor) if actor in used else "" for actor in range(len(fabric.actor_names)))
    return Wiring(fabric, style, names, tuple(cables), mtu, method, acks_first)


def _short(fabric: Fabric, prefix: str, actor: int) -> str:
    devices = len(fabric.devices)
    return f"{prefix}d{actor}" if actor < devices else f"{prefix}s{actor - devices}"


def _style(fabric: Fabric, pairs: dict[tuple[int, int], tuple[list[int], list[int]]]) -> Literal["bridged", "routed"]:
    devices = len(fabric.devices)
    hangs = [0] * devices
    root = list(range(len(fabric.actor_names)))

    def find(x: int) -> int:
        while root[x] != x:
            root[x] = root[root[x]]
            x = root[x]
        return x

    for (a, b), (there, back) in pairs.items():
        if len(there) != 1 or len(back) != 1 or b < devices:  # one-way, parallel, or between two devices
            return "routed"
        if a < devices:
            hangs[a] += 1
        if find(a) == find(b):
            return "routed"
        root[find(a)] = find(b)
    return "bridged" if all(count == 1 for count in hangs) else "routed"


def _cable(
    fabric: Fabric, style: str, number: int, pair: tuple[int, int], links: tuple[int | None, int | None], parallel: int, mtu: int, offload: bool
) -> Cable:
    a, b = pair
    devices = len(fabric.devices)

    def segment(actor: int, link: int | None) -> int:
        """Only where packets begin: a switch that cut what it forwards would spend the processor on it."""
        if actor >= devices or link is None:
            return MAX_SEGMENT_BYTES
        return segment_bytes(fabric.links[link].rate_Bps) if offload else mtu + 14

    low = _CABLES + 4 * number
    return Cable(
        number=number,
        ends=tuple(  # type: ignore[arg-type]
            End(
                actor=actor, interface=_interface(fabric, style, actor, peer, number, parallel), link=link, segment_bytes=segment(actor, link),
                mac=f"02:4d:{number >> 16 & 255:02x}:{number >> 8 & 255:02x}:{number & 255:02x}:{side + 1:02x}",
                address=str(ipaddress.IPv4Address(low + side + 1)),
            )
            for side, (actor, peer, link) in enumerate(((a, b, links[0]), (b, a, links[1])))
        ),
    )  # fmt: skip


def _impair(cable: Cable, impaired: Mapping[int, Impairment], method: Method) -> Cable:
    found = [impaired.get(end.link) if end.link is not None else None for end in cable.ends]
    if not any(found):
        return cable
    a, b = (replace(end, impairment=x or Impairment()) for end, x in zip(cable.ends, found, strict=True))
    return replace(cable, ends=(a, b), relayed=method == "relay")


def _interface(fabric: Fabric, style: str, actor: int, peer: int, number: int, parallel: int) -> str:
    devices = len(fabric.devices)
    if style == "bridged" and actor < devices:
        return "eth0"
    name = f"to-d{peer}" if peer < devices else f"to-s{peer - devices}"
    return f"{name}.{parallel}" if parallel else name
