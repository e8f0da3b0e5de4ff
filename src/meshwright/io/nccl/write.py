"""A server of a fabric as an NCCL topology file (version 1, or RCCL's 2 where GPUs have xGMI), for NCCL_TOPO_FILE.

Every server is written alike, so one file can hold one: fabrics of several servers name the one to write. PCIe switches, CPUs, GPUs, NICs and
NVLinks become what `nccl_topology` reads; rates become the nearest PCIe generation and width, network speed, and the compute capability whose
NVLink comes nearest to the link's rate; a NIC that leads nowhere gets its PCIe link's rate as speed. Bus ids are invented where a name does
not hold one: on a machine, NCCL wants its own.
A server without CPUs (presets leave the PCIe tree out) gets one, with a PCIe switch for every group of GPUs and NICs that share one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import quoteattr

from ...errors import UsageError
from ...fabric.edit import PCIE_KINDS
from ...fabric.fabric import Fabric
from .topology import LANE

__all__ = ["nccl_topology_text"]

_SPEEDS = {15: "2.5 GT/s PCIe", 30: "5.0 GT/s PCIe", 60: "8.0 GT/s PCIe", 120: "16.0 GT/s PCIe", 240: "32.0 GT/s PCIe", 480: "64.0 GT/s PCIe"}
_SM = ((20_600, 90), (20_000, 80), (18_000, 60), (40_100, 100), (25_000, 80), (50_000, 100), (12_000, 86))  # MB/s per NVLink -> sm
_GCN = ((48_000, "gfx942"), (36_000, "gfx90a"), (24_000, "gfx908"), (64_000, "gfx942"), (50_000, "gfx90a"))
_CPU = {16: ("x86_64", "AuthenticAMD", 175, 1), 6: ("x86_64", "GenuineIntel", 6, 79), 10: ("x86_64", "GenuineIntel", 6, 85),
        22: ("x86_64", "GenuineIntel", 6, 143), 40: ("x86_64", "GenuineIntel", 6, 207), 32: ("ppc64", "", 0, 0)}  # fmt: skip
_BUNDLE = re.compile(r"(NV|XGMI)(\d{1,4})\Z")
_PCI_NAME = re.compile(r"pci-(?:([0-9a-f]{4,8})-)?([0-9a-f]{1,2})-([0-9a-f]{1,2})(?:\.\d+)?\Z")
FASTEST_PCIE_Bps = 16 * max(LANE.values()) * 12_500_000
_NVSWITCH = "fffffff:ffff:ff"


def nccl_topology_text(fabric: Fabric, group: str | None = None) -> str:
    """The file for one server. Raises: UsageError where the fabric has several servers and none is named, or the named one has no device."""
    groups = [g for g in fabric.groups if g]
    chosen = group if group is not None else groups[0] if len(groups) == 1 else ""
    if chosen not in fabric.groups:
        raise UsageError(f"the fabric has {len(groups)} servers", hint=f"a topology file holds one; name one of {', '.join(groups[:8])}")
    return _Writer(fabric, chosen).text()


class _Writer:
    def __init__(self, fabric: Fabric, group: str) -> None:
        self.fabric, self.group = fabric, group
        self.gpus = [fabric.devices[i].name for i in fabric.groups[group]]
        switches = [s.name for s in fabric.switches if s.group == group]
        self.rate: dict[tuple[str, str], int] = {}
        self.kind: dict[tuple[str, str], str] = {}
        mine = {*self.gpus, *switches}
        self.near: dict[str, list[str]] = {name: [] for name in mine}
        for x in fabric.links:
            if x.src in mine and x.dst in mine and x.kind in PCIE_KINDS and x.dst not in self.near[x.src]:
                self.near[x.src].append(x.dst)
                self.rate[x.src, x.dst], self.kind[x.src, x.dst] = x.rate_Bps, x.kind
        local = {name: name.removeprefix(f"{group}/") for name in mine}
        self.cpus = [s for s in switches if re.fullmatch(r"cpu-?\d+", local[s])]
        self.bridges = {s for s in switches if s not in self.cpus and (_PCI_NAME.match(local[s]) or self._joins(s))}
        self.nics = [s for s in switches if s not in self.cpus and s not in self.bridges and self.near[s]]
        self.local, self.named, self.done, self.next_bus = local, set(local.values()), set[str](), 0
        self.lines: list[str] = []

    def _joins(self, switch: str) -> bool:
        """Whether it is a PCIe switch: PCIe links to two or more, and nothing outside."""
        outside = any(x.src == switch and x.kind == "NET" for x in self.fabric.links)
        return len(self.near[switch]) > 1 and not outside

    def text(self) -> str:
        xgmi = any(x.kind.startswith("XGMI") and x.src in self.gpus for x in self.fabric.links)
        self.lines.append(f'<system version="{2 if xgmi else 1}">')
        if self.cpus:
            arch, vendor, family, model = _CPU.get(self._between_cpus(), _CPU[16])
            for cpu in self.cpus:
                self.done.add(cpu)
                numa = self.local[cpu].removeprefix("cpu")
                made = f'numaid="{numa}" affinity="" arch="{arch}" vendor="{vendor}" familyid="{family}" modelid="{model}"'
                self._element("cpu", made, 1, [peer for peer in self.near[cpu] if peer not in self.cpus], cpu)
        left = [name for name in (*self.gpus, *self.nics) if name not in self.done]
        if left:
            self.lines.append(f'  <cpu numaid="{len(self.cpus)}" affinity="" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">')
            for part in self._components(left):
                self._loose(part)
            self.lines.append("  </cpu>")
        return "\n".join([*self.lines, "</system>"]) + "\n"

    def _between_cpus(self) -> int:
        rates = [self.rate[a, b] // 10**9 for a in self.cpus for b in self.near[a] if b in self.cpus]
        return min(rates, default=16)

    def _components(self, names: Sequence[str]) -> list[list[str]]:
        """GPUs and NICs that PCIe links join without a CPU."""
        found: list[list[str]] = []
        seen: set[str] = set()
        for start in names:
            if start in seen:
                continue
            part, todo = [], [start]
            seen.add(start)
            while todo:
                here = todo.pop(0)
                part.append(here)
                for peer in self.near[here]:
                    if peer not in seen and peer in names:
                        seen.add(peer)
                        todo.append(peer)
            found.append(part)
        return found

    def _loose(self, part: Sequence[str]) -> None:
        widest = max((self.rate[pair] for pair in self.rate if pair[0] in part), default=24 * 10**9)
        if len(part) == 1:
            self._device(part[0], 2, widest)
            return
        self.lines.append(f"    <pci {self._bus('')} class=\"0x060400\" {_pcie(widest)}>")
        for name in part:
            self._device(name, 3, max((r for (a, _), r in self.rate.items() if a == name), default=widest))
        self.lines.append("    </pci>")

    def _element(self, tag: str, made: str, depth: int, below: Sequence[str], parent: str) -> None:
        pad = "  " * depth
        self.lines.append(f"{pad}<{tag} {made}>")
        for name in below:
            if name in self.done:
                continue
            if name in self.bridges:
                self.done.add(name)
                inside = f'{self._bus(self.local[name])} class="0x060400" {_pcie(self.rate[name, parent])}'
                self._element("pci", inside, depth + 1, [peer for peer in self.near[name] if peer != parent], name)
            elif name in self.gpus or name in self.nics:
                self._device(name, depth + 1, self.rate[name, parent])
        self.lines.append(f"{pad}</{tag}>")

    def _device(self, name: str, depth: int, rate_Bps: int) -> None:
        self.done.add(name)
        pad = "  " * depth
        gpu = name in self.gpus
        if not gpu and rate_Bps > FASTEST_PCIE_Bps:  # a NIC without a card: NCCL hangs it under the CPU itself
            self.lines += self._nic(name, depth)
            return
        made = f'{self._bus("", name)} class="{"0x030200" if gpu else "0x020700"}" {_pcie(rate_Bps)}'
        inside = self._gpu(name, depth + 1) if gpu else self._nic(name, depth + 1)
        self.lines += [f"{pad}<pci {made}>", *inside, f"{pad}</pci>"]

    def _bus(self, local: str, name: str = "") -> str:
        match = _PCI_NAME.match(local)
        if match:
            return f'busid="{match[1] or "0000"}:{match[2]}:{match[3]}.0"'
        if name in self.gpus:
            return f'busid="{self._gpu_bus(name)}"'
        while True:  # names of PCIe switches may hold ids that an earlier file invented
            self.next_bus += 1
            found = f"00ff:{self.next_bus >> 5:02x}:{self.next_bus & 31:02x}"
            if f"pci-{found.replace(':', '-')}" not in self.named:
                return f'busid="{found}.0"'

    def _gpu_bus(self, name: str) -> str:
        number = self.gpus.index(name)
        return f"00fe:{number:02x}:00.0"

    def _gpu(self, name: str, depth: int) -> list[str]:
        links, sm, gcn = [], 0, ""
        for x in self.fabric.links:
            if x.src != name or x.kind in PCIE_KINDS or x.kind == "NET":
                continue
            match = _BUNDLE.match(x.kind)
            count = int(match[2]) if match and int(match[2]) else 1
            if x.kind == "C2C":
                links.append(f'<c2c bw="{max(1, x.rate_Bps // 10**6)}" count="1"/>')
            elif match and x.dst in self.gpus and match[1] == "XGMI":
                gcn = gcn or _nearest(_GCN, x.rate_Bps // count)
                links.append(f'<xgmi target="{self._gpu_bus(x.dst)}" count="{count}" tclass="0x120000"/>')
            elif x.kind.startswith("NV"):
                sm = sm or int(_nearest(_SM, x.rate_Bps // count))
                there, kind = (self._gpu_bus(x.dst), "0x030200") if x.dst in self.gpus else (_NVSWITCH, "0x068000")
                kind = "0x068001" if x.dst in self.cpus else kind
                links.append(f'<nvlink target="{there}" count="{count}" tclass="{kind}"/>')
        number = self.gpus.index(name)
        own = re.search(r"(\d+)\Z", name)
        dev = int(own[1]) if own and len({re.sub(r".*?(\d+)\Z", r"\1", g) for g in self.gpus}) == len(self.gpus) else number
        made = f'dev="{dev}" sm="{sm or 80}" rank="{number}" gdr="1"' + (f' gcn="{gcn}"' if gcn else "")
        pad = "  " * depth
        return [f"{pad}<gpu {made}>", *(f"{pad}  {link}" for link in links), f"{pad}</gpu>"] if links else [f"{pad}<gpu {made}/>"]

    def _nic(self, name: str, depth: int) -> list[str]:
        outside = [x.rate_Bps for x in self.fabric.links if x.src == name and x.kind == "NET"]
        inside = [rate for (a, _), rate in self.rate.items() if a == name]
        speed = max(outside or inside) // 125_000
        number = self.nics.index(name)
        made = f'name={quoteattr(self.local[name])} dev="{number}" speed="{speed}" port="1" latency="0" guid="0x{number + 1:x}" maxconn="131072"'
        pad = "  " * depth
        return [f"{pad}<nic>", f'{pad}  <net {made} gdr="1"/>', f"{pad}</nic>"]


def _nearest(rows: Sequence[tuple[int, object]], rate_Bps: int) -> str:
    return str(min(rows, key=lambda row: abs(row[0] * 10**6 - rate_Bps))[1])


def _pcie(rate_Bps: int) -> str:
    """The link's generation and width: exact where there is one, the widest first, else the nearest below or above."""
    lanes = sorted(set(LANE.values()))
    options: Mapping[tuple[int, int], int] = {(width, lane): width * lane * 12_500_000 for width in (16, 8, 4, 2, 1) for lane in lanes}
    width, lane = min(options, key=lambda key: (abs(options[key] - rate_Bps), -key[0]))
    return f'link_speed="{_SPEEDS[lane]}" link_width="{width}"'
