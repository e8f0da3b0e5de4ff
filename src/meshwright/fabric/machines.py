"""Machines that people have, by their makers' figures: the table in `machines.toml`, which ships with the package, as values.

A device is one GPU, chip or die. A machine is a server (or rack, or TPU slice) of one kind of device: its shape, its links, its ports, the
names its provider gives it, and where each figure was read. Builders for the shapes are in `fabric.machine_shapes`; `fabric.presets` joins
the machines to the other presets. The table is our own file, so a mistake in it is a bug: the tests read it, users do not.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import Any

__all__ = ["ELSEWHERE", "GPUS", "MACHINES", "SOURCES", "Elsewhere", "Gpu", "Machine", "Source", "device_source"]


@dataclass(frozen=True)
class Source:
    """A public document. read: "page" (its text was read), "quoted" (others' quotations were), "known" (neither)."""

    title: str
    date: str
    url: str
    read: str

    def __str__(self) -> str:
        return f"{self.title}, {self.date}" + ("" if self.read == "page" else f" ({self.read}, not read)")


@dataclass(frozen=True)
class Gpu:
    """What one device has: bytes, bytes/s, dense operations/s by dtype. derived: which figures its source does not give, and how they came."""

    memory_bytes: int
    bandwidth_Bps: int
    flops: Mapping[str, int]
    source: str = ""
    derived: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of server. Rates are bytes/s and per direction; 0 and "" where the shape has no such part.

    shape: nvswitch, mesh (every pair linked), pcie (a tree of switches and sockets), torus (`torus` gives the sides), single (one device),
    slice (a torus of any size: `axes`, `wrap`, at most `most` chips, `per_host` of them with one port). nics: ports of a server, each for one device
    or for several in order. pcie_Bps: from a device to a port that it shares. took: figure -> how the source says it.
    """

    name: str
    summary: str
    shape: str
    device: str
    devices: int
    unit: str = "boxes"
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()  # other devices that fit into it
    in_network: bool = False
    link_Bps: int = 0
    link_kind: str = ""
    nics: int = 0
    nic_Bps: int = 0
    pcie_Bps: int = 0
    per_switch: int = 0
    per_socket: int = 0
    socket_Bps: int = 0
    torus: tuple[int, ...] = ()
    axes: int = 0
    wrap: str = ""
    per_host: int = 0
    most: int = 0
    cores_per_chip: int = 1
    net: str = "switch"
    sources: tuple[str, ...] = ()
    assumed: str = ""
    took: Mapping[str, str] = field(default_factory=dict)

    @property
    def network_Bps(self) -> int:
        """What one server can send."""
        return (self.nics or 1) * self.nic_Bps


@dataclass(frozen=True)
class Elsewhere:
    """A machine that has no preset; only what tells which preset is near."""

    device: str
    devices: int
    network_Bps: int


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("machines.toml").read_text(encoding="utf-8")
    return tomllib.loads(text, parse_float=Fraction)


def _bytes(entry: Mapping[str, Any], stem: str, suffix: str = "") -> int:
    """`stem` + GB, GiB, Gbps with `suffix` behind the unit, as bytes (per second); 0 where it is not there."""
    if f"{stem}Gbps" in entry:
        return int(Fraction(entry[f"{stem}Gbps"]) * 10**9 / 8)
    return int(Fraction(entry.get(f"{stem}GB{suffix}", 0)) * 10**9 + Fraction(entry.get(f"{stem}GiB{suffix}", 0)) * 2**30)


def _gpu(entry: Mapping[str, Any]) -> Gpu:
    flops = {dtype: int(Fraction(value) * 10**12) for dtype, value in entry["tflops"].items()}
    return Gpu(_bytes(entry, "memory_"), _bytes(entry, "memory_", "ps"), flops, entry["source"], entry.get("derived", ""))


def _machine(name: str, entry: Mapping[str, Any]) -> Machine:
    link, nic, pcie = (entry.get(part, {}) for part in ("link", "nic", "pcie"))
    took = {what: part["source"] for what, part in (("link", link), ("nic", nic), ("pcie", pcie)) if part}
    plain = ("summary", "shape", "device", "unit", "in_network", "axes", "wrap", "per_host", "most", "cores_per_chip", "net", "assumed")
    return Machine(
        name=name, devices=entry.get("devices", 1), aliases=tuple(entry.get("aliases", ())), choices=tuple(entry.get("choices", ())),
        link_Bps=_bytes(link, "", "ps"), link_kind=link.get("kind", ""), nics=nic.get("count", 0), nic_Bps=_bytes(nic, ""),
        pcie_Bps=_bytes(nic, "pcie_", "ps") or _bytes(pcie, "", "ps"), per_switch=pcie.get("per_switch", 0), per_socket=pcie.get("per_socket", 0),
        socket_Bps=_bytes(pcie, "socket_", "ps"), torus=tuple(entry.get("torus", ())), sources=tuple(entry["sources"]), took=took,
        **{key: entry[key] for key in plain if key in entry},
    )  # fmt: skip


SOURCES: dict[str, Source] = {name: Source(**entry) for name, entry in _table()["source"].items()}
GPUS: dict[str, Gpu] = {name: _gpu(entry) for name, entry in _table()["device"].items()}
MACHINES: dict[str, Machine] = {name: _machine(name, entry) for name, entry in _table()["machine"].items()}
ELSEWHERE: dict[str, Elsewhere] = {
    name: Elsewhere(entry["device"], entry["devices"], _bytes(entry, "")) for name, entry in _table()["elsewhere"].items()
}


def device_source(device: str) -> str:
    """Where a device's memory and FLOP/s come from, in words."""
    gpu = GPUS[device]
    return f"{device}: {SOURCES[gpu.source]}; dense, nominal" + (f"; {gpu.derived}" if gpu.derived else "")
