"""What presets are made of: options, parts of a fabric in the making, networks between boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import UsageError
from .fabric import Device, Fabric, Link, Provenance, Switch
from .machines import GPUS, device_source

__all__ = [
    "GB", "IB_S", "LIBRARY_NET_S", "LIBRARY_NVLINK_S", "MEMORY", "NETWORK", "NVLINK_S", "NVSWITCH_S", "OVERSUBSCRIPTION", "Chosen", "Option", "Parts",
    "Preset", "device_notes", "devices_of", "network", "nic_switches", "nvswitch_box", "own_nics", "rate_note",
]  # fmt: skip

GB = 10**9
# Wire latencies in seconds per link, where nothing was measured. Published models: TE-CCL 0.35 us (DGX-2), 0.7 us (NDv2), 1.3 us (IB).
NVSWITCH_S, NVLINK_S, IB_S = 0.35e-6, 0.7e-6, 1.3e-6
# What the library adds per message: NCCL's ring constants for the Simple protocol. Charged where a message leaves a device.
LIBRARY_NVLINK_S, LIBRARY_NET_S = 3.4e-6, 14.0e-6
_LATENCY = "TE-CCL models: 0.35 us per NVSwitch link, 0.7 us per direct link, 1.3 us per InfiniBand link; library: NCCL constants, ring, Simple"


@dataclass(frozen=True)
class Option:
    """One `?name=value`: how it is read and what it does. `choices` for kind "choice"; the first is the default."""

    kind: Literal["choice", "rate", "size", "flops", "count", "flag", "sides"]
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The options' values; None = the preset's own figure. A preset reads those it lists."""

    net: str | None = None
    oversubscription: int = 1
    nics: str = "gcd"
    sketch: bool = False
    nvlink: int | None = None
    xgmi: int | None = None
    nic: int | None = None
    link: int | None = None
    trunk: int | None = None
    memory: int | None = None
    flops: int | None = None
    cores: int | None = None
    leaf: int | None = None
    dims: str = "2"
    gpu: str | None = None
    gpus: int | None = None
    slices: int = 1
    topology: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Preset:
    """`build(n, name, chosen)` makes the fabric of `n` units; the caller checks `devices_in(n, chosen) <= MAX_DEVICES`."""

    name: str
    summary: str
    unit: str
    default: int
    devices_per_unit: int
    options: Mapping[str, Option]
    build: Callable[[int, str, Chosen], Fabric]
    count: Callable[[int, Chosen], int] | None = None  # devices of n units, where it is not devices_per_unit · n (which is then 0 or a hint)
    sources: tuple[str, ...] = ()  # of its figures, in words
    aliases: tuple[str, ...] = ()  # its provider's names; `*` stands for a size

    def devices_in(self, n: int, chosen: Chosen) -> int:
        return n * self.devices_per_unit if self.count is None else self.count(n, chosen)


@dataclass
class Parts:
    """A fabric in the making."""

    devices: list[Device] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    notes: list[Provenance] = field(default_factory=list)

    def one_way(self, src: str, dst: str, rate_Bps: int, latency_s: float, kind: str, library_s: float = 0.0) -> None:
        self.links.append(Link(src=src, dst=dst, rate_Bps=rate_Bps, latency_s=latency_s, library_latency_s=library_s, kind=kind))

    def cable(self, a: str, b: str, rate_Bps: int, latency_s: float, kind: str, library_s: float = 0.0, back_s: float = 0.0) -> None:
        """Both directions; `library_s` for a -> b, `back_s` for b -> a."""
        self.one_way(a, b, rate_Bps, latency_s, kind, library_s)
        self.one_way(b, a, rate_Bps, latency_s, kind, back_s)

    def note(self, what: str, source: str) -> None:
        self.notes.append(Provenance(what=what, source=source))

    def fabric(self, name: str) -> Fabric:
        return Fabric(name=name, devices=tuple(self.devices), switches=tuple(self.switches), links=tuple(self.links), provenance=tuple(self.notes))


# ---- networks between boxes --------------------------------------------------------------------------------------------
_NETS = ("switch", "rails", "spine", "planes", "direct", "trunk")
NET = Option(
    "choice",
    "between boxes: one non-blocking switch, a switch per rail, rails under a spine, two planes, cables (two boxes), a switch per box on a trunk",
    _NETS,
)
OVERSUBSCRIPTION = Option("count", "how many times what is below exceeds the uplink: of a rail (net=spine), a box (net=trunk) or a leaf")
_TRUNK = Option("rate", "with net=trunk: rate of one box's uplink (default: its ports together over the oversubscription)")
MEMORY = Option("size", "memory of one device")
NETWORK: dict[str, Option] = {
    "net": NET, "oversubscription": OVERSUBSCRIPTION, "trunk": _TRUNK, "nic": Option("rate", "rate of one network port"), "memory": MEMORY,
}  # fmt: skip


def network(
    parts: Parts,
    ports: Sequence[Sequence[str]],
    rate_Bps: int | Mapping[str, int],
    chosen: Chosen,
    *,
    default: str = "switch",
    library_s: float = 0.0,
) -> None:
    """Connect `ports[box][i]` (a NIC, or a device itself, which then pays `library_s`) as `chosen.net` says; `rate_Bps` for all or by port.

    Raises: UsageError for net=direct with more or fewer than two boxes, or with unlike numbers of ports.
    """
    net, oversubscription = chosen.net or default, chosen.oversubscription
    rate = rate_Bps if isinstance(rate_Bps, Mapping) else {port: rate_Bps for box in ports for port in box}
    if net == "direct":
        _direct(parts, ports, rate, library_s)
    elif net == "trunk":
        _trunk(parts, ports, rate, chosen, library_s)
    else:
        _switched(parts, ports, rate, net, oversubscription, library_s)
    wiring = {
        "switch": "one non-blocking switch",
        "rails": "port i of every box on its own switch; no spine: traffic between rails crosses a device",
        "spine": f"rails joined by a spine, oversubscribed {oversubscription}:1",
        "planes": "port i on plane i mod 2; traffic between planes crosses a device",
        "direct": "port i of one box to port i of the other by a cable",
        "trunk": "a switch per box; its uplink to a core switch " + (
            f"carries {chosen.trunk} B/s" if chosen.trunk is not None else f"carries its ports over {oversubscription}"),
    }[net]  # fmt: skip
    parts.note("wiring between boxes", wiring)


def _switched(parts: Parts, ports: Sequence[Sequence[str]], rate: Mapping[str, int], net: str, oversubscription: int, library_s: float) -> None:
    most = max(map(len, ports))
    names = {"switch": ["ib"], "planes": ["plane0", "plane1"][:most]}.get(net) or [f"rail{i}" for i in range(most)]
    parts.switches += [Switch(name=name) for name in names]
    below = dict.fromkeys(names, 0)
    for box in ports:
        for i, port in enumerate(box):
            below[names[i % len(names)]] += rate[port]
            parts.cable(port, names[i % len(names)], rate[port], IB_S, "NET", library_s)
    if net == "spine":
        parts.switches.append(Switch(name="spine"))
        for name in names:
            parts.cable(name, "spine", max(1, below[name] // oversubscription), IB_S, "NET")


def _direct(parts: Parts, ports: Sequence[Sequence[str]], rate: Mapping[str, int], library_s: float) -> None:
    if len(ports) != 2 or len(ports[0]) != len(ports[1]):
        raise UsageError(f"net=direct joins two boxes with equally many ports, got {len(ports)} boxes", hint="use another net=, or two boxes")
    for a, b in zip(*ports, strict=True):
        parts.cable(a, b, min(rate[a], rate[b]), IB_S, "NET", library_s, library_s)


def _trunk(parts: Parts, ports: Sequence[Sequence[str]], rate: Mapping[str, int], chosen: Chosen, library_s: float) -> None:
    parts.switches += [Switch(name=f"tor{box}") for box in range(len(ports))] + [Switch(name="core")]
    for number, box in enumerate(ports):
        for port in box:
            parts.cable(port, f"tor{number}", rate[port], IB_S, "NET", library_s)
        below = sum(rate[port] for port in box)
        parts.cable(f"tor{number}", "core", chosen.trunk or max(1, below // chosen.oversubscription), IB_S, "NET")


def rate_note(parts: Parts, what: str, used: int | None, default: int, source: str) -> int:
    parts.note(what, source if used is None else f"overridden: {used} B/s instead of {default} B/s")
    return default if used is None else used


# ---- parts of boxes ----------------------------------------------------------------------------------------------------
def devices_of(parts: Parts, group: str, count: int, device: str, memory: int | None, prefix: str = "gpu") -> list[str]:
    """Adds `count` devices of this make (a name in `machines.GPUS`) to a server; their names."""
    make = GPUS[device]
    names = [f"{group}/{prefix}{i}" for i in range(count)]
    parts.devices += [
        Device(name=x, group=group, memory_bytes=memory or make.memory_bytes, memory_bandwidth_Bps=make.bandwidth_Bps, flops=dict(make.flops))
        for x in names
    ]
    return names


def device_notes(parts: Parts, memory: int | None, device: str, latency: str = _LATENCY) -> None:
    parts.note("FLOP/s, memory and memory bandwidth of devices", device_source(device))
    if memory is not None:
        parts.note("memory_bytes", f"overridden: {memory} instead of {GPUS[device].memory_bytes}")
    parts.note("latencies", latency)


def nvswitch_box(parts: Parts, group: str, gpus: Sequence[str], rate_Bps: int, kind: str, *, in_network: bool = False) -> None:
    switch = f"{group}/nvswitch"
    parts.switches.append(Switch(name=switch, group=group, multicast=in_network, aggregate=in_network))
    for gpu in gpus:
        parts.cable(gpu, switch, rate_Bps, NVSWITCH_S, kind, LIBRARY_NVLINK_S)


def nic_switches(parts: Parts, group: str, count: int) -> list[str]:
    """Adds NICs, which are switches here; their names."""
    names = [f"{group}/nic{i}" for i in range(count)]
    parts.switches += [Switch(name=name, group=group) for name in names]
    return names


def own_nics(parts: Parts, group: str, gpus: Sequence[str], rate_Bps: int) -> list[str]:
    """A NIC per GPU, on the GPU's PCIe switch."""
    names = nic_switches(parts, group, len(gpus))
    for device, port in zip(gpus, names, strict=True):
        parts.cable(device, port, rate_Bps, 0.0, "PIX", LIBRARY_NET_S)
    return names
