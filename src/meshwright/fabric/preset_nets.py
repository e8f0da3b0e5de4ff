"""Presets without GPUs of a make: CPU processes, teaching examples, textbook networks, offices and sites."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise, product

from ..errors import UsageError
from .fabric import Device, Fabric, Switch
from .preset_parts import GB, Chosen, Parts, rate_note

__all__ = [
    "devices_of_dragonfly", "devices_of_fat_tree", "devices_of_grid", "devices_of_hypercube", "dragonfly", "fat_tree", "hypercube", "lan", "laptop",
    "line", "mesh", "ring", "star", "star_gpu", "torus", "two_islands", "usable_cores", "wan",
]  # fmt: skip


# ---- CPU fabrics -------------------------------------------------------------------------------------------------------
_CPU_FLOPS = {"fp32": 50 * GB, "bf16": 50 * GB, "fp64": 25 * GB}
_CPU_MEMORY, _CPU_BANDWIDTH = 4 * GB, 10 * GB


def _cpu(name: str, group: str, memory: int, flops: int | None, share: float = 0.0) -> Device:
    rates = dict(_CPU_FLOPS) if flops is None else {"fp32": flops, "bf16": flops, "fp64": max(1, flops // 2)}
    return Device(name=name, kind="cpu", group=group, memory_bytes=memory, memory_bandwidth_Bps=_CPU_BANDWIDTH, flops=rates, cpu_share=share)


def usable_cores() -> int:
    """Cores this process may use (the scheduler's mask where the system has one)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 1 << 62


def laptop(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    used = usable_cores() if chosen.cores is None else chosen.cores
    share = min(1.0, 0.8 * used / n)
    each = min(_CPU_MEMORY, int(0.8 * _machine_memory()) // n) if chosen.memory is None else chosen.memory
    parts.devices += [_cpu(f"cpu{i}", "laptop", each, chosen.flops, share) for i in range(n)]
    parts.switches.append(Switch(name="loopback", group="laptop"))
    rate = rate_note(parts, "loopback rate", chosen.link, GB, "assumed: 1 GB/s per process over loopback TCP; `train run` calibrates it")
    for device in parts.devices:
        parts.cable(device.name, "loopback", rate, 10e-6, "LO")
    parts.note("cpu_share", f"80 % of {used} cores{'' if chosen.cores is None else ' (given)'} shared by {n} devices, at most one core each")
    parts.note("FLOP/s, memory bandwidth, latency", "assumed, per whole core; `train run` calibrates them on the machine")
    parts.note("memory_bytes", "at most 4 GB, and 80 % of the machine's memory over all devices" if chosen.memory is None else "given")
    return parts.fabric(name)


def two_islands(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate = rate_note(parts, "device - switch rate", chosen.link, 125_000_000, "1 Gbit/s by definition")
    trunk_rate = rate_note(parts, "trunk rate", chosen.trunk, 25_000_000, "200 Mbit/s by definition")
    for island in range(2):
        parts.devices += [_cpu(f"island{island}/cpu{i}", f"island{island}", chosen.memory or _CPU_MEMORY, chosen.flops) for i in range(n)]
        parts.switches.append(Switch(name=f"island{island}/switch", group=f"island{island}"))
    for device in parts.devices:
        parts.cable(device.name, f"{device.group}/switch", rate, 20e-6, "NET")
    parts.cable("island0/switch", "island1/switch", trunk_rate, 20e-6, "NET")
    parts.note("FLOP/s, memory, latencies", "assumed: a teaching example, not a measurement")
    return parts.fabric(name)


# ---- textbook networks: devices d0, d1, ..., each a server of its own unless said --------------------------------------
_LINK_Bps, _HOP_S = GB, 1e-6


def _nodes(parts: Parts, count: int, chosen: Chosen, groups: Sequence[str] = ()) -> list[str]:
    names = [f"d{i}" for i in range(count)]
    parts.devices += [_cpu(x, groups[i] if groups else f"host{i}", chosen.memory or _CPU_MEMORY, chosen.flops) for i, x in enumerate(names)]
    return names


def _net(parts: Parts, name: str, chosen: Chosen, what: str) -> Fabric:
    parts.note("shape", what)
    parts.note("FLOP/s, memory, latencies", "assumed: a textbook network, not a machine")
    return parts.fabric(name)


def _rate(parts: Parts, chosen: Chosen) -> int:
    return rate_note(parts, "link rate", chosen.link, _LINK_Bps, "1 GB/s by definition")


def line(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate, nodes = _rate(parts, chosen), _nodes(parts, n, chosen)
    for a, b in pairwise(nodes):
        parts.cable(a, b, rate, _HOP_S, "NET")
    return _net(parts, name, chosen, "devices in a row")


def ring(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate, nodes = _rate(parts, chosen), _nodes(parts, n, chosen)
    for i, a in enumerate(nodes if n > 2 else nodes[:-1]):
        parts.cable(a, nodes[(i + 1) % n], rate, _HOP_S, "NET")
    return _net(parts, name, chosen, "devices in a circle, both ways")


def star(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate, nodes = _rate(parts, chosen), _nodes(parts, n, chosen)
    parts.switches.append(Switch(name="hub"))
    for a in nodes:
        parts.cable(a, "hub", rate, _HOP_S, "NET")
    return _net(parts, name, chosen, "every device on one switch")


def star_gpu(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate, nodes = _rate(parts, chosen), _nodes(parts, n, chosen)
    for a in nodes[1:]:
        parts.cable(nodes[0], a, rate, _HOP_S, "NET")
    return _net(parts, name, chosen, "device 0 in the middle, the others around it")


def devices_of_fat_tree(n: int, chosen: Chosen) -> int:
    return n * (chosen.leaf or 4)


def fat_tree(n: int, name: str, chosen: Chosen) -> Fabric:
    """n leaf switches with `leaf` devices each, under one spine; a leaf's uplink is its devices' rate over the oversubscription."""
    parts = Parts()
    rate, leaf = _rate(parts, chosen), chosen.leaf or 4
    nodes = _nodes(parts, n * leaf, chosen, [f"leaf{i // leaf}" for i in range(n * leaf)])
    parts.switches += [Switch(name=f"leaf{i}/switch", group=f"leaf{i}") for i in range(n)]
    for i, a in enumerate(nodes):
        parts.cable(a, f"leaf{i // leaf}/switch", rate, _HOP_S, "NET")
    if n > 1:
        parts.switches.append(Switch(name="spine"))
        for i in range(n):
            parts.cable(f"leaf{i}/switch", "spine", max(1, leaf * rate // chosen.oversubscription), _HOP_S, "NET")
    return _net(parts, name, chosen, f"{n} leaves of {leaf} devices, oversubscribed {chosen.oversubscription}:1, one non-blocking spine")


_ROUTERS, _PER_ROUTER = 4, 2


def devices_of_dragonfly(n: int, chosen: Chosen) -> int:
    return n * _ROUTERS * _PER_ROUTER


def dragonfly(n: int, name: str, chosen: Chosen) -> Fabric:
    """n groups of four routers with two devices each; routers of a group all joined, one link between any two groups (Kim et al. 2008)."""
    parts = Parts()
    rate = _rate(parts, chosen)
    trunk = rate_note(parts, "rate between groups", chosen.trunk, rate, "as the link rate")
    _nodes(parts, devices_of_dragonfly(n, chosen), chosen, [f"group{i // 8}" for i in range(8 * n)])
    routers = [[f"group{g}/router{r}" for r in range(_ROUTERS)] for g in range(n)]
    parts.switches += [Switch(name=x, group=f"group{g}") for g, row in enumerate(routers) for x in row]
    for i in range(8 * n):
        parts.cable(f"d{i}", routers[i // 8][i // 2 % _ROUTERS], rate, _HOP_S, "NET")
    for row in routers:
        for a in range(_ROUTERS):
            for b in range(a + 1, _ROUTERS):
                parts.cable(row[a], row[b], rate, _HOP_S, "NET")
    for a in range(n):
        for b in range(a + 1, n):  # group a numbers its neighbours 0..n-2; neighbour k hangs on router k mod 4
            parts.cable(routers[a][(b - 1) % _ROUTERS], routers[b][a % _ROUTERS], trunk, _HOP_S, "NET")
    return _net(parts, name, chosen, f"{n} groups of {_ROUTERS} routers, {_PER_ROUTER} devices per router, one link between any two groups")


def devices_of_grid(n: int, chosen: Chosen) -> int:
    return int(n ** int(chosen.dims))


def mesh(n: int, name: str, chosen: Chosen) -> Fabric:
    """A grid of side n in 2 or 3 dimensions; device numbers count the last coordinate fastest."""
    return _grid(n, name, chosen, wrap=False)


def torus(n: int, name: str, chosen: Chosen) -> Fabric:
    """A mesh whose rows are closed; of side 2 there is one cable between neighbours, not two."""
    return _grid(n, name, chosen, wrap=True)


def _grid(n: int, name: str, chosen: Chosen, *, wrap: bool) -> Fabric:
    parts = Parts()
    dims = int(chosen.dims)
    rate, nodes = _rate(parts, chosen), _nodes(parts, devices_of_grid(n, chosen), chosen)
    for at in product(range(n), repeat=dims):
        for axis in range(dims):
            step = at[axis] + 1
            if step < n or (wrap and n > 2):
                there = (*at[:axis], step % n, *at[axis + 1 :])
                parts.cable(nodes[_number(at, n)], nodes[_number(there, n)], rate, _HOP_S, "NET")
    return _net(parts, name, chosen, f"{dims}-dimensional {'torus' if wrap else 'mesh'} of side {n}")


def _number(at: Sequence[int], n: int) -> int:
    number = 0
    for x in at:
        number = number * n + x
    return number


def devices_of_hypercube(n: int, chosen: Chosen) -> int:
    if n > 20:
        raise UsageError(f"a hypercube of dimension {n} has too many devices", hint="n is the dimension: hypercube:4 has 16 devices")
    return 1 << n


def hypercube(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate, nodes = _rate(parts, chosen), _nodes(parts, 1 << n, chosen)
    for a in range(1 << n):
        for bit in range(n):
            if a < a ^ (1 << bit):
                parts.cable(nodes[a], nodes[a ^ (1 << bit)], rate, _HOP_S, "NET")
    return _net(parts, name, chosen, f"hypercube of dimension {n}")


# ---- offices and sites -------------------------------------------------------------------------------------------------
def lan(n: int, name: str, chosen: Chosen) -> Fabric:
    """n wired devices at 1 Gbit/s and n on Wi-Fi, whose access point carries 300 Mbit/s for all of them together."""
    parts = Parts()
    wired = rate_note(parts, "wired rate", chosen.link, 125_000_000, "1 Gbit/s Ethernet")
    air = rate_note(parts, "Wi-Fi rate", chosen.trunk, 37_500_000, "300 Mbit/s, shared by all on the access point; assumed")
    nodes = _nodes(parts, 2 * n, chosen)
    parts.switches += [Switch(name="switch"), Switch(name="wifi")]
    for i, a in enumerate(nodes):
        parts.cable(a, "switch" if i < n else "wifi", wired if i < n else air, 50e-6 if i < n else 2e-3, "NET")
    parts.cable("wifi", "switch", air, 50e-6, "NET")
    parts.note("FLOP/s, memory, latencies", "assumed: 50 us per wired hop, 2 ms on Wi-Fi")
    return parts.fabric(name)


def wan(n: int, name: str, chosen: Chosen) -> Fabric:
    """n sites of two devices; every pair of sites has its own path of 100 Mbit/s and 1 to 100 ms, ten times more per site further."""
    parts = Parts()
    local = rate_note(parts, "rate within a site", chosen.link, 125_000_000, "1 Gbit/s Ethernet")
    wide = rate_note(parts, "rate between sites", chosen.trunk, 12_500_000, "100 Mbit/s, assumed")
    nodes = _nodes(parts, 2 * n, chosen, [f"site{i // 2}" for i in range(2 * n)])
    parts.switches += [Switch(name=f"site{i}/router", group=f"site{i}") for i in range(n)]
    for i, node in enumerate(nodes):
        parts.cable(node, f"site{i // 2}/router", local, 50e-6, "NET")
    for a in range(n):
        for b in range(a + 1, n):
            parts.cable(f"site{a}/router", f"site{b}/router", wide, min(0.1, 1e-3 * 10 ** (b - a - 1)), "NET")
    parts.note("FLOP/s, memory, latencies", "assumed: 50 us within a site, 1 to 100 ms between sites")
    return parts.fabric(name)
