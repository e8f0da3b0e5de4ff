"""The inferred fabric as a `Fabric`: devices by host, switches, links with rates of three digits, latencies fitted to round trips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...errors import UsageError
from ...fabric.fabric import Device, Fabric, Link, Provenance, Switch
from .direct import MAX_RATE_DIFFERENCE_SHARE, DirectFit, alike
from .fair_share import F64, Bools
from .measurements import Measurements

__all__ = ["Nodes", "build_direct", "build_loopback", "build_tree", "least_squares", "provenance_of"]

RATE_DIGITS = 3  # significant digits of an inferred rate: measurements do not give more


@dataclass(frozen=True)
class Nodes:
    """`node[i]`: number of endpoint i's host in `hosts`. A host with one endpoint is that device; with several, a switch that they share."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]
    node: tuple[int, ...]

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first endpoint of every host."""
        return tuple(self.node.index(h) for h in range(len(self.hosts)))

    def members(self, host: int) -> tuple[int, ...]:
        return tuple(i for i, h in enumerate(self.node) if h == host)

    def actor(self, host: int) -> str:
        """What stands for a host in the fabric."""
        members = self.members(host)
        return self.names[members[0]] if len(members) == 1 else _free(f"host{host}", self.names)


def _free(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _rates(rates: F64, exact: bool, within: float = 0.04) -> list[int]:
    """Whole bytes/s. Not exact: rates within noise of each other are equal, and have three digits."""
    if exact:
        return [max(1, round(float(r))) for r in rates]
    return [max(1, round(float(f"{r:.{RATE_DIGITS}g}"))) for r in alike(rates, within=within)]


def _devices(nodes: Nodes) -> tuple[Device, ...]:
    return tuple(Device(name=name, kind="cpu", group=nodes.hosts[h]) for name, h in zip(nodes.names, nodes.node, strict=True))


def _inside_hosts(nodes: Nodes, loopback: Mapping[int, tuple[float, float]]) -> tuple[list[Switch], list[Link]]:
    switches, links = [], []
    for host in range(len(nodes.hosts)):
        members = nodes.members(host)
        if len(members) < 2:
            continue
        if host not in loopback:
            text = f"no transfer between two endpoints of host {nodes.hosts[host]} by itself was measured"
            raise UsageError(text, where="measurements", hint="add a trial with that one transfer")
        rate, latency = loopback[host]
        switches.append(Switch(name=nodes.actor(host), group=nodes.hosts[host]))
        facts = {"rate_Bps": _rates(np.array([rate]), False)[0], "latency_s": round(latency / 2, 9), "kind": "LO"}
        for i in members:
            for src, dst in ((nodes.names[i], nodes.actor(host)), (nodes.actor(host), nodes.names[i])):
                links.append(Link(src=src, dst=dst, **facts))  # type: ignore[arg-type]
    return switches, links


def provenance_of(measured: Measurements) -> tuple[Provenance, ...]:
    source = measured.source or f"{len(measured.trials)} trials"
    notes = [Provenance(what="rates", source=f"measured: {source}; payload of TCP"), Provenance(what="latencies", source="half the round trips")]
    if measured.library_latency_s:
        notes.append(Provenance(what="library_latency_s", source="measured: a small message of the library beyond half a round trip"))
    return tuple(notes)


def _finished(fabric: Fabric, measured: Measurements) -> Fabric:
    if not measured.library_latency_s:
        return fabric
    # What the library adds is paid once per message (the largest on the route), so every link carries it.
    return replace(fabric, links=tuple(replace(x, library_latency_s=round(measured.library_latency_s, 9)) for x in fabric.links))


def build_loopback(nodes: Nodes, loopback: Mapping[int, tuple[float, float]], name: str, measured: Measurements) -> Fabric:
    """All endpoints on one host."""
    switches, links = _inside_hosts(nodes, loopback)
    found = Fabric(name=name, devices=_devices(nodes), switches=tuple(switches), links=tuple(links), provenance=provenance_of(measured))
    return _finished(found, measured)


def build_tree(
    nodes: Nodes, capacity_Bps: F64, splits: Sequence[Bools], rtt: F64, loopback: Mapping[int, tuple[float, float]], name: str,
    measured: Measurements, *, exact: bool,
) -> tuple[Fabric, list[str]]:  # fmt: skip
    """Ports and trunks as switches and links; (fabric, name of each fitted link in the order of `tree_paths`)."""
    n = len(nodes.hosts)
    by_size = sorted(range(len(splits)), key=lambda s: int(splits[s].sum()))
    switch = ["sw0"] + [f"sw{1 + k}" for k in range(len(splits))]
    switch = [_free(x, [*nodes.names, *map(nodes.actor, range(n))]) for x in switch]

    def home(inside: Bools, among: Sequence[int]) -> str:
        """The switch of the smallest set that holds all of `inside`, the root's if none does."""
        return next((switch[1 + s] for s in among if splits[s][inside].all()), switch[0])

    ends: list[tuple[str, str]] = []
    ports = [home(np.arange(n) == v, by_size) for v in range(n)]
    ends += [(nodes.actor(v), ports[v]) for v in range(n)] + [(ports[v], nodes.actor(v)) for v in range(n)]
    for s, inside in enumerate(splits):
        larger = [t for t in by_size if splits[t].sum() > inside.sum()]
        above = home(inside, larger)
        ends += [(switch[1 + s], above), (above, switch[1 + s])]
    latency = _tree_latencies(n, splits, rtt)
    rates = _rates(capacity_Bps, exact)
    order = [x for v in range(n) for x in (v, n + v)] + list(range(2 * n, len(ends)))
    links = [Link(src=ends[x][0], dst=ends[x][1], rate_Bps=rates[x], latency_s=latency[x]) for x in order]
    inner, loops = _inside_hosts(nodes, loopback)
    switches = (*inner, *(Switch(name=x) for x in switch))
    found = Fabric(name=name, devices=_devices(nodes), switches=switches, links=(*loops, *links), provenance=provenance_of(measured))
    return _finished(found, measured), [f"{a} -> {b}" for a, b in ends]


def _tree_latencies(n: int, splits: Sequence[Bools], rtt: F64) -> list[float]:
    """One way, per link: ports and trunks whose sums come nearest to half the round trips."""
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n) if rtt[i, j] > 0]
    if not pairs:
        return [0.0] * (2 * n + 2 * len(splits))
    rows = np.array([[float(v in (i, j)) for v in range(n)] + [float(s[i] != s[j]) for s in splits] for i, j in pairs])
    found = least_squares(rows, np.array([rtt[p] / 2 for p in pairs]))
    half = [round(float(x), 9) for x in found]
    return half[:n] * 2 + [x for x in half[n:] for _ in range(2)]


def least_squares(rows: F64, target: F64, *, sweeps: int = 400) -> F64:
    """Non-negative x with least relative squared error of rows @ x against target > 0, by coordinate descent."""
    a, b = rows / target[:, None], np.ones(len(target))
    x = np.full(a.shape[1], 1.0) * float(target.mean()) / max(1.0, float(rows.sum(axis=1).mean()))
    weight = (a * a).sum(axis=0)
    rest = b - a @ x
    for _ in range(sweeps):
        for k in np.flatnonzero(weight):
            step = max(float(a[:, k] @ rest) / float(weight[k]), -float(x[k]))
            x[k] += step
            rest -= step * a[:, k]
    return np.asarray(x)


def build_direct(
    nodes: Nodes, direct: DirectFit, rtt: F64, loopback: Mapping[int, tuple[float, float]], name: str, measured: Measurements, *, exact: bool
) -> tuple[Fabric, list[str]]:
    """One cable per pair that has one; (fabric, name of each fitted link)."""
    rates = _rates(direct.fit.capacity_Bps, exact, MAX_RATE_DIFFERENCE_SHARE)
    links = []
    for k, (i, j) in enumerate(direct.pairs):
        for way, (a, b) in enumerate(((i, j), (j, i))):
            latency = round(float(rtt[i, j]) / 2, 9)
            links.append(Link(src=nodes.actor(a), dst=nodes.actor(b), rate_Bps=rates[2 * k + way], latency_s=latency))
    inner, loops = _inside_hosts(nodes, loopback)
    found = Fabric(name=name, devices=_devices(nodes), switches=tuple(inner), links=(*loops, *links), provenance=provenance_of(measured))
    return _finished(found, measured), [f"{x.src} -> {x.dst}" for x in links]
