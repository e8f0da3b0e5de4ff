"""Servers that are alike, for programs that are folded over them."""

from __future__ import annotations

import functools

from meshwright.fabric.fabric import Device, Fabric, Link, Switch

__all__ = ["boxes"]


@functools.cache
def boxes(count: int, per: int) -> Fabric:
    """Servers of `per` devices behind a switch each, a NIC per device, one core."""
    devices, switches, links = [], [Switch(name="core")], []
    for box in range(count):
        switches.append(Switch(name=f"b{box}/sw", group=f"b{box}"))
        for i in range(per):
            gpu, nic = f"b{box}/g{i}", f"b{box}/nic{i}"
            devices.append(Device(name=gpu, group=f"b{box}", memory_bytes=10**10, memory_bandwidth_Bps=10**12, flops={"fp32": 10**13}))
            switches.append(Switch(name=nic, group=f"b{box}"))
            for a, b, rate in ((gpu, f"b{box}/sw", 3 * 10**11), (gpu, nic, 25 * 10**9), (nic, "core", 25 * 10**9)):
                links.append(Link(src=a, dst=b, rate_Bps=rate, latency_s=1e-6, library_latency_s=3e-6))
                links.append(Link(src=b, dst=a, rate_Bps=rate, latency_s=1e-6))
    return Fabric(name="boxes", devices=tuple(devices), switches=tuple(switches), links=tuple(links))
