"""A fabric as planners of whole servers see it: kinds of server, what is inside one, the NICs it shares, zones, rates between kinds.

Nothing is assumed: kinds are what the fabric's devices say of themselves, a NIC is where traffic leaves a server, a zone is a set of servers
between which only their own NICs limit. A ring's rate inside a server is that of its most loaded link under the fabric's routing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import Infeasible, UsageError
from ..profile.network import NetworkProfile, RateCurve
from .fabric import Device, Fabric
from .machines import GPUS

__all__ = ["ServerKind", "network_of", "ring_Bps", "server_kinds"]


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """`servers` alike servers of `gpus` devices in one zone. `inside_Bps[t]`: rate of every hop when rings of t devices fill the server.

    `inside_latency_s` and `outside_latency_s`: of one message between neighbours in a server, and between servers.
    """

    name: str
    zone: str
    device: Device
    gpus: int
    nics: int
    nic_Bps: int
    servers: tuple[str, ...]
    inside_Bps: Mapping[int, float]
    inside_latency_s: float
    outside_latency_s: float
    far_Bps: Mapping[tuple[str, str], float]  # (kind, zone) -> the narrowest link on the way to such a server

    @property
    def devices(self) -> int:
        return self.gpus * len(self.servers)

    @property
    def device_nic_Bps(self) -> float:
        """Share of one device in its server's NICs when all use them."""
        return self.nic_Bps * self.nics / self.gpus if self.nics else 0.0


def ring_Bps(fabric: Fabric, members: Sequence[int], size: int) -> float:
    """Rate of every hop when the members form rings of `size` neighbours (in order), all at once: the most loaded link decides."""
    load: Counter[int] = Counter()
    hops: list[tuple[int, ...]] = []
    for start in range(0, len(members) - size + 1, size):
        ring = members[start : start + size]
        for i, device in enumerate(ring):
            route = fabric.route(device, ring[(i + 1) % size])
            load.update(route)
            hops.append(route)
    return min((fabric.links[x].rate_Bps / load[x] for route in hops for x in route), default=float("inf"))


def server_kinds(fabric: Fabric) -> tuple[ServerKind, ...]:
    """Kinds in the order of their first device; names are unique and equal for equal devices in different zones.

    Raises: Infeasible when a server holds unlike devices (tensor degrees inside it would not be even); Disconnected; UsageError without devices.
    """
    if not fabric.devices:
        raise UsageError("the fabric has no devices", where=fabric.name)
    servers = _servers(fabric)
    nics = _nics(fabric, servers)
    zones = _zones(fabric, servers, nics)
    labels = _labels(fabric, servers, nics)
    found: dict[tuple[str, str], list[str]] = {}
    for name in servers:
        found.setdefault((labels[name], zones[name]), []).append(name)
    kinds = []
    heads = {key: servers[names[-1]] for key, names in found.items()}
    for (label, zone), names in found.items():
        members = servers[names[0]]
        count, rate = nics[names[0]]
        inside = {t: ring_Bps(fabric, members, t) for t in range(2, len(members) + 1) if len(members) % t == 0}
        near = fabric.route(members[0], members[1]) if len(members) > 1 else ()
        other = next((m[0] for n, m in servers.items() if n != names[0]), None)
        far = fabric.route(members[0], other) if other is not None else ()
        kinds.append(
            ServerKind(
                name=label, zone=zone, device=fabric.devices[members[0]], gpus=len(members), nics=count, nic_Bps=rate, servers=tuple(names),
                inside_Bps=inside, inside_latency_s=_latency(fabric, near), outside_latency_s=_latency(fabric, far),
                far_Bps={key: _narrowest(fabric, members, other) for key, other in heads.items()},
            )
        )
    return tuple(kinds)


def network_of(kinds: Sequence[ServerKind]) -> NetworkProfile:
    """Rates of single messages as a `NetworkProfile`: constant in size, of one pair of devices inside, of one NIC between servers.

    Between zones a message has the narrowest link of its way to itself: several at once are not slowed by each other there.
    """
    inside = {(k.name, k.gpus): _curve(k.inside_Bps[k.gpus]) for k in kinds if k.gpus > 1}
    between = {}
    for a in kinds:
        for b in kinds:
            if a.nic_Bps and b.nic_Bps:
                way = a.far_Bps[b.name, b.zone] if a.zone != b.zone else float("inf")
                between[a.zone, a.name, a.gpus, b.zone, b.name, b.gpus] = _curve(min(float(min(a.nic_Bps, b.nic_Bps)), way))
    return NetworkProfile(inside=inside, between=between)


def _curve(rate_Bps: float) -> RateCurve:
    return RateCurve(c2=0.0, c1=0.0, c0=rate_Bps / 1e9, peak_Bps=rate_Bps)


def _narrowest(fabric: Fabric, a: Sequence[int], b: Sequence[int]) -> float:
    return float(min((fabric.links[x].rate_Bps for x in fabric.route(a[0], b[-1])), default=0)) or float("inf")


def _latency(fabric: Fabric, route: Sequence[int]) -> float:
    return sum(fabric.links[x].latency_s + fabric.links[x].library_latency_s for x in route)


def _servers(fabric: Fabric) -> dict[str, tuple[int, ...]]:
    """Devices by server; a device that names none is a server of its own."""
    found: dict[str, list[int]] = {}
    for i, d in enumerate(fabric.devices):
        found.setdefault(d.group or d.name, []).append(i)
    for name, members in found.items():
        if len({_signature(fabric.devices[i]) for i in members}) > 1:
            raise Infeasible(
                f"server {name!r} holds unlike devices", where=fabric.name, hint="give each kind a server (group) of its own in the fabric file"
            )
    return {name: tuple(members) for name, members in found.items()}


def _signature(d: Device) -> tuple[object, ...]:
    quota = (d.cpu_share, d.cpu_period_s, d.cpu_overrun_s, d.cpu_stretch, d.cpu_cores, tuple(sorted(d.cpu_speeds.items())))
    return (d.kind, d.memory_bytes, d.memory_bandwidth_Bps, tuple(sorted(d.flops.items())), *quota, d.sm)


def _nics(fabric: Fabric, servers: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """(number, bytes/s of one) of the places where traffic leaves every server."""
    server_of = {fabric.devices[i].name: name for name, members in servers.items() for i in members}
    of_group = {fabric.devices[members[0]].group: name for name, members in servers.items()}
    server_of |= {s.name: of_group[s.group] for s in fabric.switches if s.group and s.group in of_group}
    out: dict[str, Counter[str]] = {name: Counter() for name in servers}
    for link in fabric.links:
        if (source := server_of.get(link.src)) is not None and source != server_of.get(link.dst):
            out[source][link.src] += link.rate_Bps
    return {name: (len(x), min(x.values())) if x else (0, 0) for name, x in out.items()}


def _group(fabric: Fabric, name: str) -> str:
    actor = fabric.actor_of[name]
    return (fabric.devices[actor] if actor < len(fabric.devices) else fabric.switches[actor - len(fabric.devices)]).group


def _labels(fabric: Fabric, servers: Mapping[str, Sequence[int]], nics: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Server -> name of its kind: a known GPU's, else the device's kind with a number; sizes and NICs are added where they differ."""
    shape = {name: (_signature(fabric.devices[m[0]]), len(m), nics[name]) for name, m in servers.items()}
    base: dict[object, str] = {}
    for (signature, _, _), members in zip(shape.values(), servers.values(), strict=True):
        device = fabric.devices[members[0]]
        known = next((k for k, g in GPUS.items() if (g.flops, g.bandwidth_Bps) == (dict(device.flops), device.memory_bandwidth_Bps)), "")
        wanted = known or device.kind
        number = sum(1 for v in base.values() if v.rstrip("0123456789-") == wanted or v == wanted) if signature not in base else 0
        base.setdefault(signature, wanted if not number else f"{wanted}-{number + 1}")
    variants: dict[str, list[tuple[object, ...]]] = {}
    labels = {}
    for name, key in shape.items():
        seen = variants.setdefault(base[key[0]], [])
        if key not in seen:
            seen.append(key)
        index = seen.index(key)
        labels[name] = base[key[0]] if not index else f"{base[key[0]]}/{index + 1}"
    return labels


def _zones(fabric: Fabric, servers: Mapping[str, Sequence[int]], nics: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Servers are in one zone when nothing between them is slower than their NICs."""
    heads: list[str] = []
    zone: dict[str, str] = {}
    for name, members in servers.items():
        for i, head in enumerate(heads):
            route = fabric.route(members[0], servers[head][0])
            group = {fabric.links[x].src: _group(fabric, fabric.links[x].src) for x in route}
            outside = [x for x in route if not (group[fabric.links[x].src] and group[fabric.links[x].src] == _group(fabric, fabric.links[x].dst))]
            narrow = min((fabric.links[x].rate_Bps for x in outside), default=0)
            if narrow >= min(nics[name][1], nics[head][1]):
                zone[name] = f"zone{i}"
                break
        else:
            zone[name] = f"zone{len(heads)}"
            heads.append(name)
    return zone if len(heads) > 1 else dict.fromkeys(zone, "")
