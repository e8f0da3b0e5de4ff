"""What presets are made of: options, parts of a fabric in the making, networks between boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .fabric import Device, Fabric, Link, Provenance, Switch

__all__ = ["IB_S", "NET", "OVERSUBSCRIPTION", "Chosen", "Option", "Parts", "Preset", "network", "rate_note"]

IB_S = 1.3e-6  # wire latency per InfiniBand link in the published models (TE-CCL), where nothing was measured


@dataclass(frozen=True)
class Option:
    """One `?name=value`: how it is read and what it does. `choices` for kind "choice"; the first is the default."""

    kind: Literal["choice", "rate", "size", "flops", "count", "flag"]
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


@dataclass(frozen=True)
class Preset:
    """`build(n, name, chosen)` makes the fabric of `n` units; the caller checks `n * devices_per_unit <= MAX_DEVICES`."""

    name: str
    summary: str
    unit: str
    default: int
    devices_per_unit: int
    options: Mapping[str, Option]
    build: Callable[[int, str, Chosen], Fabric]


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
_NETS = ("switch", "rails", "spine", "planes")
NET = Option("choice", "between boxes: one non-blocking switch, one switch per rail, rails under a spine, or two planes", _NETS)
OVERSUBSCRIPTION = Option("count", "with net=spine: how many times a rail's ports exceed its uplink")


def network(parts: Parts, ports: Sequence[Sequence[str]], rate_Bps: int, chosen: Chosen, *, default: str = "switch", library_s: float = 0.0) -> None:
    """Connect `ports[box][i]` (a NIC, or a device itself, which then pays `library_s`) as `chosen.net` says."""
    net, oversubscription = chosen.net or default, chosen.oversubscription
    per_box = len(ports[0])
    names = {"switch": ["ib"], "planes": ["plane0", "plane1"]}.get(net) or [f"rail{i}" for i in range(per_box)]
    parts.switches += [Switch(name=name) for name in names]
    for box in ports:
        for i, port in enumerate(box):
            parts.cable(port, names[i % len(names)], rate_Bps, IB_S, "NET", library_s)
    if net == "spine":
        parts.switches.append(Switch(name="spine"))
        for name in names:
            parts.cable(name, "spine", len(ports) * rate_Bps // oversubscription, IB_S, "NET")
    wiring = {
        "switch": "one non-blocking switch",
        "rails": "port i of every box on its own switch; no spine: traffic between rails crosses a device",
        "spine": f"rails joined by a spine, oversubscribed {oversubscription}:1",
        "planes": "port i on plane i mod 2; traffic between planes crosses a device",
    }[net]
    parts.note("wiring between boxes", wiring)


def rate_note(parts: Parts, what: str, used: int | None, default: int, source: str) -> int:
    parts.note(what, source if used is None else f"overridden: {used} B/s instead of {default} B/s")
    return default if used is None else used
