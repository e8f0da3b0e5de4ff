"""NCCL and RCCL topology files (NCCL_TOPO_DUMP_FILE writes one, NCCL_TOPO_FILE reads it), versions 1 and 2.

    <system version="1">
      <cpu numaid="0" affinity=".." arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1" host_hash="..">
        <pci busid="0000:16:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">       a PCIe switch
          <pci busid="0000:18:00.0" class="0x030200" ...> <gpu dev="0" sm="80" rank="0" gdr="1">
              <nvlink target="0000:c7:00.0" count="2" tclass="0x068000"/> <xgmi ../> <c2c bw="44712" count="5"/> </gpu> </pci>
          <pci busid="0000:19:00.0" class="0x020700" ...> <nic> <net name="mlx5_0" dev="0" speed="200000" .../> </nic> </pci>

Files for virtual machines often hold only `cpu` and `pci`: GPUs and NICs are then known by their class. Read as NCCL reads: other elements
and attributes are ignored, a speed that it does not know counts as PCIe gen 3, a width of 0 as 16, a network speed of 0 as 10 Gbit/s.
Refused, with file and line: what is not such a document, bus ids and device numbers used twice, numbers that are none.
Facts: graph/xml.cc and graph/topo.cc of NVIDIA/nccl and ROCm/rccl.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import FormatError
from ..limits import MAX_INT32, MaxBytes
from ..xml_reader import XmlLimits, XmlNode, parse_xml, read_xml

__all__ = ["LANE", "NcclCpu", "NcclGpu", "NcclLink", "NcclNet", "NcclPci", "NcclSystem", "parse_nccl_topology", "read_nccl_topology"]

LIMITS = XmlLimits(max_bytes=MaxBytes.NCCL_XML, elements=200_000, depth=64, characters=1024)
# 100 Mbit/s per lane that NCCL counts for a generation; both spellings of the kernel. Unknown: DEFAULT_LANE.
LANE = {"2.5": 15, "5": 30, "5.0": 30, "8": 60, "8.0": 60, "16": 120, "16.0": 120, "32": 240, "32.0": 240, "64": 480, "64.0": 480}
DEFAULT_LANE, DEFAULT_WIDTH, DEFAULT_NET_MBITPS = 60, 16, 10_000
_BUS = re.compile(r"[0-9a-fA-F]{1,8}:[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,2})?(\.[0-9a-fA-F]{1,2})?\Z")
_SPEED = re.compile(r"(\d{1,3}(?:\.\d)?) GT/s(?: PCIe)?\Z")


@dataclass(frozen=True)
class NcclLink:
    """One <nvlink>, <xgmi> or <c2c> of a GPU; `target` is a bus id ("" for c2c), `bandwidth` MB/s per link (c2c only)."""

    kind: str
    target: str
    count: int
    target_class: str
    bandwidth: int
    line: int


@dataclass(frozen=True)
class NcclGpu:
    dev: int  # -1: the file does not say
    sm: int  # compute capability, 90; 0 = unknown. RCCL: number of compute units
    rank: int
    gdr: int  # -1: the file does not say
    gcn: str  # RCCL: gfx942
    links: tuple[NcclLink, ...]


@dataclass(frozen=True)
class NcclNet:
    name: str
    dev: int
    speed_Mbitps: int  # as in the file; <= 0 = unknown
    port: int
    gdr: int
    line: int

    @property
    def rate_Bps(self) -> int:
        return (self.speed_Mbitps if self.speed_Mbitps > 0 else DEFAULT_NET_MBITPS) * 125_000


@dataclass
class NcclPci:
    """A PCIe device: a switch with devices below it, a GPU, or a NIC."""

    busid: str
    pci_class: str
    speed: str
    width: int
    line: int
    gpu: NcclGpu | None = None
    nets: list[NcclNet] = field(default_factory=list)
    below: list[NcclPci] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)  # <pcilink>: other PCIe switches of the same chip

    @property
    def lane(self) -> int | None:
        """100 Mbit/s per lane, None for a speed that NCCL does not know."""
        match = _SPEED.match(self.speed)
        return LANE.get(match[1]) if match else None

    @property
    def rate_Bps(self) -> int:
        return (self.width or DEFAULT_WIDTH) * (self.lane or DEFAULT_LANE) * 12_500_000

    @property
    def is_gpu(self) -> bool:
        return self.gpu is not None or (not self.below and not self.nets and self.pci_class[:4] in ("0x03", "0x12"))

    @property
    def is_nic(self) -> bool:
        return not self.is_gpu and (bool(self.nets) or (not self.below and self.pci_class.startswith("0x02")))

    def walk(self) -> Iterator[NcclPci]:
        yield self
        for child in self.below:
            yield from child.walk()


@dataclass
class NcclCpu:
    numa: int
    host: str
    arch: str
    vendor: str
    family: int
    model: int
    line: int
    below: list[NcclPci] = field(default_factory=list)
    nets: list[NcclNet] = field(default_factory=list)  # NICs without a PCIe address: virtual ones


@dataclass(frozen=True)
class NcclSystem:
    """One file: the CPUs (NUMA nodes) of one host, or of several that were merged."""

    where: str
    version: int
    cpus: tuple[NcclCpu, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cpu.host for cpu in self.cpus))

    def devices(self, host: str | None = None) -> Iterator[tuple[NcclCpu, NcclPci]]:
        """Every PCIe device with its CPU, in file order."""
        for cpu in self.cpus:
            if host is None or cpu.host == host:
                for top in cpu.below:
                    for pci in top.walk():
                        yield cpu, pci


def read_nccl_topology(path: str | os.PathLike[str]) -> NcclSystem:
    """The topology in a file (`-`: standard input). Raises: UsageError if it cannot be read; FormatError with file and line."""
    where = "standard input" if str(path) == "-" else Path(path).name
    return _system(read_xml(path, limits=LIMITS), where)


def parse_nccl_topology(data: bytes, where: str = "topology.xml") -> NcclSystem:
    """The topology in a document. Raises: FormatError."""
    return _system(parse_xml(data, where, limits=LIMITS), where)


# ---- reading -----------------------------------------------------------------------------------------------------------
def _wrong(where: str, node: XmlNode, message: str, hint: str = "") -> FormatError:
    return FormatError(message, where=f"{where}: line {node.line}: <{node.name[:32]}>", hint=hint, data={"line": node.line})


def _integer(node: XmlNode, name: str, where: str, default: int) -> int:
    text = node.attributes.get(name)
    if text is None or text == "":
        return default
    try:
        value = int(text, 16 if text.lower().startswith(("0x", "-0x")) else 10) if len(text) <= 20 else MAX_INT32 + 1
    except ValueError:
        raise _wrong(where, node, f"{name}: must be a whole number, got {text[:32]!r}") from None
    if not -MAX_INT32 <= value <= MAX_INT32:
        raise _wrong(where, node, f"{name}: must be within ±{MAX_INT32}, got {text[:32]!r}")
    return value


def _system(root: XmlNode, where: str) -> NcclSystem:
    if root.name != "system":
        hint = "a graph file: `meshwright fabric import` shows its rings and trees" if root.name == "graphs" else "NCCL_TOPO_DUMP_FILE writes one"
        raise _wrong(where, root, "must be a <system> document", hint)
    version = _integer(root, "version", where, 1)
    if version not in (1, 2):
        raise _wrong(where, root, f"version {version} is not known", "versions 1 (NCCL) and 2 (RCCL) are read")
    cpus = [_cpu(node, where) for node in root.all("cpu")]
    if not cpus:
        raise _wrong(where, root, "has no <cpu>", "every device hangs below one")
    system = NcclSystem(where, version, tuple(cpus))
    _require_unique(system, root)
    return system


def _require_unique(system: NcclSystem, root: XmlNode) -> None:
    buses: dict[tuple[str, str], int] = {}
    devs: dict[tuple[str, int], int] = {}
    numas: set[tuple[str, int]] = set()
    for cpu in system.cpus:
        if (cpu.host, cpu.numa) in numas:
            raise FormatError(f"numaid {cpu.numa} is used twice", where=f"{system.where}: line {cpu.line}: <cpu>", data={"line": cpu.line})
        numas.add((cpu.host, cpu.numa))
    for cpu, pci in system.devices():
        at = f"{system.where}: line {pci.line}: <pci>"
        bus = cpu.host, pci.busid.lower()
        if bus in buses:
            raise FormatError(f"busid {pci.busid} is used twice, first in line {buses[bus]}", where=at, data={"line": pci.line})
        buses[bus] = pci.line
        if pci.gpu is not None and pci.gpu.dev >= 0:
            dev = cpu.host, pci.gpu.dev
            if dev in devs:
                raise FormatError(f"GPU dev {pci.gpu.dev} is used twice, first in line {devs[dev]}", where=at, data={"line": pci.line})
            devs[dev] = pci.line
    if not any(pci.is_gpu for _, pci in system.devices()):
        raise _wrong(system.where, root, "has no GPU", "neither a <gpu> nor a <pci> of class 0x03 (NVIDIA) or 0x12 (AMD)")


def _cpu(node: XmlNode, where: str) -> NcclCpu:
    values = node.attributes
    cpu = NcclCpu(
        _integer(node, "numaid", where, 0), values.get("host_hash", ""), values.get("arch", ""), values.get("vendor", ""),
        _integer(node, "familyid", where, 0), _integer(node, "modelid", where, 0), node.line,
    )  # fmt: skip
    for child in node.children:
        if child.name == "pci":
            cpu.below.append(_pci(child, where))
        elif child.name == "nic":
            cpu.nets += _nets(child, where)
    return cpu


def _pci(node: XmlNode, where: str) -> NcclPci:
    bus = node.attributes.get("busid", "")
    if not _BUS.match(bus):
        raise _wrong(where, node, f"busid: must look like 0000:18:00.0, got {bus[:32]!r}")
    width = _integer(node, "link_width", where, 0)
    if not 0 <= width <= 64:
        raise _wrong(where, node, f"link_width: must be 0..64 lanes, got {width}")
    found = NcclPci(bus, node.attributes.get("class", "").lower(), node.attributes.get("link_speed", ""), width, node.line)
    for child in node.children:
        if child.name == "pci":
            found.below.append(_pci(child, where))
        elif child.name == "gpu":
            if found.gpu is not None:
                raise _wrong(where, child, "a second <gpu> in one <pci>")
            found.gpu = _gpu(child, where)
        elif child.name == "nic":
            found.nets += _nets(child, where)
        elif child.name == "pcilink":
            found.targets.append(child.attributes.get("target", ""))
    return found


def _gpu(node: XmlNode, where: str) -> NcclGpu:
    links = tuple(_link(child, where) for child in node.children if child.name in ("nvlink", "xgmi", "c2c"))
    numbers = {name: _integer(node, name, where, -1) for name in ("dev", "rank", "gdr")}
    return NcclGpu(numbers["dev"], _integer(node, "sm", where, 0), numbers["rank"], numbers["gdr"], node.attributes.get("gcn", ""), links)


def _link(node: XmlNode, where: str) -> NcclLink:
    count = _integer(node, "count", where, 1)
    bandwidth = _integer(node, "bw", where, 0)
    if not 0 <= count <= 1024:
        raise _wrong(where, node, f"count: must be 0..1024, got {count}")
    if not 0 <= bandwidth <= 10**7:
        raise _wrong(where, node, f"bw: must be 0..10000000 MB/s, got {bandwidth}")
    target = node.attributes.get("target", "")
    if node.name != "c2c" and not _BUS.match(target):
        raise _wrong(where, node, f"target: must be a bus id, got {target[:32]!r}")
    return NcclLink(node.name, target, count, node.attributes.get("tclass", "").lower(), bandwidth, node.line)


def _nets(node: XmlNode, where: str) -> list[NcclNet]:
    found = []
    for net in node.all("net"):
        speed = _integer(net, "speed", where, 0)
        numbers = {name: _integer(net, name, where, -1) for name in ("dev", "port", "gdr")}
        found.append(NcclNet(net.attributes.get("name", ""), numbers["dev"], speed, numbers["port"], numbers["gdr"], net.line))
    return found
