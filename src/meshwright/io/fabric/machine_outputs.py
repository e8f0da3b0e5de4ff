"""What tools say of the machine they run on: `nvidia-smi -q`, `ibstat`, `ibv_devinfo -v`, `lscpu`; and the fabric of that machine.

Each parser takes the tool's text as it is, finds the lines it knows, and refuses what contradicts itself; lines it does not know are passed over,
as every version adds some. Nothing here runs a program: `meshwright.probe.fabric.machine` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import FormatError, UsageError
from ...fabric.fabric import Fabric, Provenance
from ...fabric.machines import MACHINES
from ...fabric.near import device_called
from ..nccl.fabric import Join, nccl_fabric
from ..nccl.topology import parse_nccl_topology
from .name import load_fabric
from .nvidia_topo import parse_nvidia_topo
from .topo_matrix import Assumed, TopoMatrix, matrix_fabric

__all__ = ["Cpu", "GpuState", "Port", "machine_fabric", "parse_ibstat", "parse_ibv_devinfo", "parse_lscpu", "parse_nvidia_q"]

MAX_CHARACTERS = 4 << 20  # of one output; `nvidia-smi -q` has 20 kB a GPU
MAX_PARTS = 1024  # GPUs or ports
_LANE_Bps = {1: 187_500_000, 2: 375_000_000, 3: 750_000_000, 4: 1_500_000_000, 5: 3_000_000_000, 6: 6_000_000_000}  # as NCCL counts a PCIe lane


@dataclass(frozen=True)
class GpuState:
    """One GPU: product, bytes of memory, bytes/s of its PCIe link as NCCL counts it; 0 and "" where the text does not say."""

    product: str = ""
    memory_bytes: int = 0
    pcie_Bps: int = 0


@dataclass(frozen=True)
class Port:
    """A port of a host channel adapter: its adapter's name, whether it is up, its rate in bytes/s (0 = not said), "InfiniBand" or "Ethernet"."""

    adapter: str
    up: bool
    rate_Bps: int
    link_layer: str


@dataclass(frozen=True)
class Cpu:
    model: str
    sockets: int
    numa_nodes: int
    cpus: int


def parse_nvidia_q(text: str, where: str = "nvidia-smi -q") -> list[GpuState]:
    """The GPUs in order. Raises: FormatError."""
    gpus: list[dict[str, str]] = []
    head = ""
    for line in _lines(text, where):
        if re.match(r"GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d\s*\Z", line):
            gpus.append({})
        elif gpus and ":" in line:
            key, _, value = (x.strip() for x in line.partition(":"))
            gpus[-1].setdefault(f"{head}/{key}" if line[:1].isspace() and line.startswith(" " * 8) else key, value[:256])
        elif line.strip():
            head = line.strip()
    if not gpus or len(gpus) > MAX_PARTS:
        raise FormatError(f"{len(gpus)} GPUs", where=where, hint=f"the output of `nvidia-smi -q`, 1 to {MAX_PARTS} GPUs")
    return [_gpu_state(gpu) for gpu in gpus]


def _gpu_state(said: Mapping[str, str]) -> GpuState:
    memory = re.match(r"(\d{1,9}) MiB\Z", said.get("FB Memory Usage/Total", ""))
    generation = re.match(r"(\d)\Z", said.get("PCIe Generation/Max", ""))
    width = re.match(r"(\d{1,2})x\Z", said.get("Link Width/Max", said.get("Link Widths/Max", "")))
    lane = _LANE_Bps.get(int(generation[1]), 0) if generation else 0
    return GpuState(said.get("Product Name", ""), int(memory[1]) << 20 if memory else 0, lane * int(width[1]) if width else 0)


def parse_ibstat(text: str, where: str = "ibstat") -> list[Port]:
    """Raises: FormatError for a rate that is no number."""
    ports: list[Port] = []
    adapter = ""
    fields: dict[str, str] = {}
    for line in [*_lines(text, where), "CA ''"]:
        if (found := re.match(r"\s*CA '([\w.-]{0,64})'", line)) or re.match(r"\s*Port \d{1,3}:\s*\Z", line):
            if adapter and "State" in fields:
                rate = _number(fields.get("Rate", "0"), where)
                ports.append(Port(adapter, fields["State"] == "Active", int(rate * 10**9 / 8), fields.get("Link layer", "")))
            fields = {}
            adapter = found[1] if found else adapter
        elif ":" in line:
            key, _, value = (x.strip() for x in line.partition(":"))
            fields[key] = value
    return _at_most(ports, where)


def parse_ibv_devinfo(text: str, where: str = "ibv_devinfo") -> list[Port]:
    """Rates are there only in the output of `ibv_devinfo -v`: lanes times the rate of one. Raises: FormatError for a rate that is no number."""
    ports: list[Port] = []
    adapter = ""
    fields: dict[str, str] = {}
    for line in [*_lines(text, where), "hca_id: "]:
        key, _, value = (x.strip() for x in line.partition(":"))
        if key in ("hca_id", "port"):
            if adapter and "state" in fields:
                lanes = re.match(r"(\d{1,2})X", fields.get("active_width", ""))
                speed = re.match(r"(\d[\d.]{0,7}) Gbps", fields.get("active_speed", ""))
                rate = int(lanes[1]) * _number(speed[1], where) if lanes and speed else 0.0
                ports.append(Port(adapter, fields["state"].startswith("PORT_ACTIVE"), int(rate * 10**9 / 8), fields.get("link_layer", "")))
            fields = {}
            adapter = value[:64] if key == "hca_id" else adapter
        else:
            fields[key] = value
    return _at_most(ports, where)


def parse_lscpu(text: str, where: str = "lscpu") -> Cpu:
    """Raises: FormatError without the number of CPUs."""
    said = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in _lines(text, where)) if colon}
    numbers = {key: int(said[key]) for key in ("CPU(s)", "Socket(s)", "NUMA node(s)") if re.match(r"\d{1,6}\Z", said.get(key, ""))}
    if not numbers.get("CPU(s)"):
        raise FormatError("does not say how many CPUs there are", where=where, hint="the output of `LC_ALL=C lscpu`")
    return Cpu(said.get("Model name", "")[:128], numbers.get("Socket(s)", 1), numbers.get("NUMA node(s)", 1), numbers["CPU(s)"])


def _lines(text: str, where: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise FormatError(f"longer than {MAX_CHARACTERS} characters", where=where)
    return text.splitlines()


def _number(text: str, where: str) -> float:
    if not re.match(r"\d{1,5}(\.\d{1,4})?\Z", text):
        raise FormatError(f"not a rate in Gbit/s: {text[:32]!r}", where=where)
    return float(text)


def _at_most(ports: list[Port], where: str) -> list[Port]:
    if len(ports) > MAX_PARTS:
        raise FormatError(f"{len(ports)} ports", where=where, hint=f"at most {MAX_PARTS}")
    return ports


# ---- the fabric --------------------------------------------------------------------------------------------------------
def machine_fabric(outputs: Mapping[str, str], *, boxes: int = 1, net: str = "switch", cores: int | None = None) -> Fabric:
    """The fabric of the machine with these outputs, or of `boxes` machines like it; by name of the tool: `nccl` (a topology file), `topo`
    (`nvidia-smi topo -m`), `nvidia-q`, `ibstat`, `ibv_devinfo`, `lscpu`. Without GPUs: its CPUs, a process on each of `cores`.

    Raises: FormatError naming the output that cannot be read; UsageError for machines that cannot be joined.
    """
    gpus = parse_nvidia_q(outputs["nvidia-q"]) if outputs.get("nvidia-q") else []
    ports = parse_ibstat(outputs["ibstat"]) if outputs.get("ibstat") else []
    ports = ports or (parse_ibv_devinfo(outputs["ibv_devinfo"]) if outputs.get("ibv_devinfo") else [])
    notes: list[tuple[str, str]] = []
    devices = {device_called(gpu.product) for gpu in gpus}
    make = devices.pop() if len(devices) == 1 else ""
    if gpus:
        products = ", ".join(sorted({g.product for g in gpus}))
        notes.append(("GPUs", f"nvidia-smi -q: {len(gpus)} x {products}" + ("" if make else "; not in our table, FLOP/s are unknown")))
    rates = {p.rate_Bps for p in ports if p.up and p.rate_Bps}
    nic = min(rates, default=None)
    if ports:
        down = [p.adapter for p in ports if not p.up]
        said = f"{len(ports) - len(down)} ports up" + (f", the slowest at {nic} B/s" if nic else ", rates not said")
        notes.append(("ports", said + (f"; down and left out: {', '.join(down)}"[:400] if down else "")))
    if outputs.get("nccl"):
        join = Join(net=net, nic=nic, gpu=make or None, copies=boxes)
        found = nccl_fabric([parse_nccl_topology(outputs["nccl"].encode(), "NCCL's topology file")], "here", join)
    elif outputs.get("topo"):
        pcie = min((g.pcie_Bps for g in gpus if g.pcie_Bps), default=24 * 10**9)
        nvlink = next((m.link_Bps // int(m.link_kind[2:]) for m in MACHINES.values() if m.device == make and m.shape == "nvswitch"), 25 * 10**9)
        matrix = _without(parse_nvidia_topo(outputs["topo"], "nvidia-smi topo -m"), {p.adapter for p in ports if not p.up})
        found = matrix_fabric([matrix], "here", Assumed(nvlink=nvlink, pcie=pcie, nic=nic, net=net, gpu=make or None, copies=boxes))
    else:
        return _cpus(outputs, boxes, cores)
    if gpus and len(found.devices) == len(gpus) * boxes:
        memory = [g.memory_bytes for g in gpus] * boxes
        devices_read = tuple(replace(d, memory_bytes=m or d.memory_bytes) for d, m in zip(found.devices, memory, strict=True))
        found = replace(found, devices=devices_read)
        notes.append(("memory_bytes", "nvidia-smi -q, total frame buffer"))
    return replace(found, provenance=(*found.provenance, *(Provenance(what=what, source=source) for what, source in notes)))


def _without(matrix: TopoMatrix, adapters: set[str]) -> TopoMatrix:
    """The matrix without the NICs of these adapters."""
    keep = [i for i, name in enumerate(matrix.names) if name.startswith("GPU") or matrix.nic_names.get(name, name) not in adapters]
    number = {old: new for new, old in enumerate(keep)}
    cells = {(number[a], number[b]): cell for (a, b), cell in matrix.cells.items() if a in number and b in number}
    numa = {number[i]: node for i, node in matrix.numa.items() if i in number}
    return replace(matrix, names=tuple(matrix.names[i] for i in keep), cells=cells, numa=numa)


def _cpus(outputs: Mapping[str, str], boxes: int, cores: int | None) -> Fabric:
    if boxes > 1:
        raise UsageError("no GPUs and no ports were found to join machines by", where="--boxes", hint="`meshwright fabric probe` measures CPU hosts")
    cpu = parse_lscpu(outputs["lscpu"]) if outputs.get("lscpu") else None
    count = cores or (cpu.cpus if cpu else 1)
    found = load_fabric(f"laptop:{count}?cores={count}")
    said = f"lscpu: {cpu.model}, {cpu.cpus} CPUs, {cpu.sockets} sockets, {cpu.numa_nodes} NUMA nodes" if cpu else "nothing could be read of them"
    notes = (Provenance(what="devices", source=f"no GPUs found; {count} CPU processes. {said}"),)
    return replace(found, name="here", provenance=(*found.provenance, *notes))
