"""Fabrics from NCCL topology files: one file or several, one box each, joined by a network that is stated.

Rates are those NCCL plans with (graph/topo.h, graph/topo.cc of NVIDIA/nccl 2.30; RCCL's xGMI figures from memory): PCIe = width · lane / 80
GB/s; NVLink = count · a figure per compute capability; between NUMA nodes a figure per CPU; c2c = bw · count MB/s; a NIC its speed. With
`rates="nominal"` NVLink and xGMI carry their nominal rate instead.

In the fabric a GPU is a device, everything else a switch: a CPU (`box0/cpu1`), a PCIe switch (`box0/pci-16-00`), a NIC (`box0/mlx5_0`), the
NVSwitches of a host together (`box0/nvswitch`, as NCCL counts them; one `nvswitch` for all where the file holds several hosts). Kinds of
links are chosen so that `fabric show` says PIX, PXB, PHB and SYS where `nvidia-smi topo -m` would. With a single box the NICs lead nowhere.
Left out: NCCL's factor 6/5 on Intel CPUs for traffic between GPUs, and its flattening of two-level switches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import FormatError, UsageError
from ...fabric.fabric import Device, Fabric, Switch
from ...fabric.machines import GPUS, device_source
from ...fabric.preset_parts import LIBRARY_NET_S, LIBRARY_NVLINK_S, NVLINK_S, NVSWITCH_S, Chosen, Parts, network
from .topology import NcclCpu, NcclLink, NcclNet, NcclPci, NcclSystem

__all__ = ["Join", "bus_id", "nccl_fabric", "nvlink_rate_Bps", "safe_name"]

_NVLINK = ((100, 40_100, 50_000), (90, 20_600, 25_000), (86, 12_000, 14_000), (80, 20_000, 25_000), (70, 20_000, 25_000), (60, 18_000, 20_000))
_XGMI = (("gfx95", 48_000, 64_000), ("gfx94", 48_000, 64_000), ("gfx90a", 36_000, 50_000), ("gfx908", 24_000, 25_000), ("gfx906", 24_000, 25_000))
_MIN_MULTICAST_SM = 90  # compute capability (times ten) from which a GPU's NVLinks reduce and multicast in the switch
LOCAL_Bps = 5000 * 10**9  # NCCL's figure for what is no cable: two addresses of one chip, a virtual NIC
_BAD = re.compile(r"[^A-Za-z0-9_.:+-]")


@dataclass(frozen=True, kw_only=True)
class Join:
    """How boxes are joined, and what files leave out. Rates in bytes/s; None = as in the file.

    net, oversubscription, trunk: as a preset's options. nic: rate of every NIC. nvswitch: an NVSwitch that the file does not show (files for
    virtual machines), by the rate of one GPU. gpu: a GPU's make (`h100`), for memory and FLOP/s. copies: boxes like each file.
    """

    net: str = "switch"
    oversubscription: int = 1
    trunk: int | None = None
    nic: int | None = None
    nvswitch: int | None = None
    gpu: str | None = None
    copies: int = 1
    rates: str = "nccl"


def nvlink_rate_Bps(sm: int, *, nominal: bool = False) -> int:
    """One NVLink, one direction, at a compute capability (80, 90, ...); below 60 as 60."""
    for least, nccl, name in _NVLINK:
        if sm >= least:
            return (name if nominal else nccl) * 10**6
    return (_NVLINK[-1][2] if nominal else _NVLINK[-1][1]) * 10**6


def safe_name(text: str) -> str:
    """A name from outside as an actor's name: characters that names may not have become `_`."""
    return _BAD.sub("_", text)[:64].lstrip("-") or "unnamed"


def nccl_fabric(systems: Sequence[NcclSystem], name: str, join: Join | None = None) -> Fabric:
    """The fabric of the boxes in these files. Raises: FormatError for links that lead nowhere; UsageError for what cannot be joined."""
    how = join or Join()
    if not systems or how.copies < 1:
        raise UsageError("no topology is given", hint="name at least one file, and copies >= 1")
    if how.gpu is not None and how.gpu not in GPUS:
        raise UsageError(f"no GPU make {how.gpu!r}", where="--gpu", hint=f"one of: {', '.join(GPUS)}")
    boxes = [(system, host) for system in systems for host in system.hosts for _ in range(how.copies)]
    if len(boxes) > 2048:
        raise UsageError(f"{len(boxes)} boxes are too many", hint="at most 2048")
    parts, ports = Parts(), []
    rates: dict[str, int] = {}
    for number, (system, host) in enumerate(boxes):
        box = _Box(parts, f"box{number}", system, host, how, shared=len(system.hosts) > 1)
        ports.append(box.build())
        rates |= box.port_rate
    if len(boxes) > 1:
        _join(parts, ports, rates, how)
    _notes(parts, systems, how, len(boxes))
    return parts.fabric(name)


def _join(parts: Parts, ports: Sequence[Sequence[str]], rates: Mapping[str, int], how: Join) -> None:
    for number, box in enumerate(ports):
        if not box:
            raise UsageError(f"box{number} has no NIC to join it by", hint="dump the topology while a network is used, or give the file's <net> tags")
    network(parts, ports, rates, Chosen(net=how.net, oversubscription=how.oversubscription, trunk=how.trunk))


def _notes(parts: Parts, systems: Sequence[NcclSystem], how: Join, boxes: int) -> None:
    files = ", ".join(dict.fromkeys(system.where for system in systems))
    parts.note("devices, switches, links", f"NCCL topology {files[:1024]}; {boxes} boxes" + (f", {how.copies} per file" if how.copies > 1 else ""))
    figure = "nominal" if how.rates == "nominal" else "as NCCL 2.30 plans with"
    parts.note("NVLink and xGMI rates", f"links in the file times a figure per GPU generation, {figure}")
    parts.note("PCIe rates", "width · lane / 80 GB/s, NCCL's figures; unknown speeds as gen 3, widths of 0 as 16")
    parts.note("rates between NUMA nodes", "NCCL's figures per CPU make")
    parts.note("latencies", "TE-CCL models: 0.35 us per NVSwitch link, 0.7 us per direct link, 1.3 us per network link; library: NCCL constants")
    if how.nic is not None:
        parts.note("NIC rates", f"overridden: {how.nic} B/s instead of the file's")
    if how.nvswitch is not None:
        parts.note("NVSwitch", f"added: {how.nvswitch} B/s per GPU; the file shows none")
    if how.gpu is not None:
        parts.note("memory, FLOP/s", f"given; {device_source(how.gpu)}")


@dataclass
class _Box:
    """One host in the making."""

    parts: Parts
    name: str
    system: NcclSystem
    host: str
    how: Join
    shared: bool
    port_rate: dict[str, int] = field(default_factory=dict)
    gpus: list[tuple[str, NcclPci, str]] = field(default_factory=list)  # (device, PCIe device, CPU switch)
    taken: set[str] = field(default_factory=set)
    cpu_name: dict[int, str] = field(default_factory=dict)
    switch_of: dict[str, str] = field(default_factory=dict)  # bus id of a PCIe switch -> its name

    def build(self) -> list[str]:
        """Adds everything; returns the NICs in the order of their device numbers."""
        nics: list[tuple[int, int, str]] = []
        for cpu in (c for c in self.system.cpus if c.host == self.host):
            top = self.cpu_name[cpu.numa] = self._switch(f"cpu{cpu.numa}")
            for pci in cpu.below:
                self._pci(pci, top, top, cpu, nics, "PHB")
            for net in cpu.nets:
                nics.append(self._net(net, top, "PHB", self.parts))
        self._connect_cpus()
        self._connect_switches()
        self._gpu_links()
        return [port for _, _, port in sorted(nics)]

    def _switch(self, name: str, *, in_network: bool = False) -> str:
        full = self._free(name)
        self.parts.switches.append(Switch(name=full, group=self.name, multicast=in_network, aggregate=in_network))
        return full

    def _free(self, name: str) -> str:
        candidate, number = f"{self.name}/{safe_name(name)}", 2
        while candidate in self.taken:
            candidate, number = f"{self.name}/{safe_name(name)}.{number}", number + 1
        self.taken.add(candidate)
        return candidate

    def _pci(self, pci: NcclPci, above: str, cpu: str, at: NcclCpu, nics: list[tuple[int, int, str]], kind: str) -> None:
        """`kind`: of the link up to a CPU; below a PCIe switch a device's link is PIX, a switch's PXB."""
        if pci.is_gpu:
            number = pci.gpu.dev if pci.gpu is not None and pci.gpu.dev >= 0 else len(self.gpus)
            device = self._free(f"gpu{number}")
            make = GPUS.get(self.how.gpu or "")
            facts = {} if make is None else {
                "memory_bytes": make.memory_bytes, "memory_bandwidth_Bps": make.bandwidth_Bps, "flops": dict(make.flops)}  # fmt: skip
            sm = pci.gpu.sm if pci.gpu is not None and not pci.gpu.gcn else 0
            self.parts.devices.append(Device(name=device, group=self.name, sm=sm, **facts))  # type: ignore[arg-type]
            self.gpus.append((device, pci, cpu))
            self.parts.cable(device, above, pci.rate_Bps, 0.0, kind, LIBRARY_NET_S)
        elif pci.is_nic:
            nets = pci.nets or [NcclNet(f"nic-{_short(pci.busid)}", -1, 0, -1, -1, pci.line)]
            if len(nets) > 1:  # the ports of one card share its PCIe link
                card = self._switch(f"card-{_short(pci.busid)}")
                self.parts.cable(card, above, pci.rate_Bps, 0.0, kind)
                nics += [self._net(net, card, "PIX", self.parts, pci.rate_Bps) for net in nets]
            else:
                nics.append(self._net(nets[0], above, kind, self.parts, pci.rate_Bps))
        else:
            here = self._switch(f"pci-{_short(pci.busid)}")
            self.switch_of[pci.busid.lower()] = here
            self.parts.cable(here, above, pci.rate_Bps, 0.0, "PHB" if above == cpu else "PXB")
            for child in pci.below:
                self._pci(child, here, cpu, at, nics, "PIX")

    def _net(self, net: NcclNet, above: str, kind: str, parts: Parts, rate_Bps: int | None = None) -> tuple[int, int, str]:
        port = self._switch(net.name or f"net{max(net.dev, 0)}")
        self.port_rate[port] = self.how.nic if self.how.nic is not None else net.rate_Bps
        parts.cable(port, above, rate_Bps if rate_Bps is not None else LOCAL_Bps, 0.0, kind)
        return (net.dev if net.dev >= 0 else 1 << 30, len(self.port_rate), port)

    def _connect_cpus(self) -> None:
        cpus = [c for c in self.system.cpus if c.host == self.host]
        for i, a in enumerate(cpus):
            for b in cpus[i + 1 :]:
                rate = min(_cpu_rate(a), _cpu_rate(b)) * 10**9
                self.parts.cable(self.cpu_name[a.numa], self.cpu_name[b.numa], rate, 0.0, "SYS")

    def _connect_switches(self) -> None:
        """<pcilink>: two addresses of one PCIe switch; as wide as the wider uplink."""
        done: set[frozenset[str]] = set()
        for cpu, pci in self.system.devices(self.host):
            for target in pci.targets:
                a, b = self.switch_of.get(pci.busid.lower()), self.switch_of.get(target.lower())
                if cpu is not None and a and b and a != b and frozenset((a, b)) not in done:
                    done.add(frozenset((a, b)))
                    self.parts.cable(a, b, LOCAL_Bps, 0.0, "PIX")

    # ---- NVLink, xGMI, c2c ---------------------------------------------------------------------------------------------
    def _gpu_links(self) -> None:
        by_bus = {bus_id(pci.busid): device for device, pci, _ in self.gpus}
        ways: dict[tuple[str, str], tuple[int, str]] = {}  # (from, to) -> (rate, kind prefix with count)
        counts: dict[tuple[str, str], int] = {}
        to_switch: list[tuple[str, int, int]] = []
        for device, pci, cpu in self.gpus:
            through = 0
            for link in pci.gpu.links if pci.gpu is not None else ():
                rate = self._link_rate(link, pci)
                target = by_bus.get(bus_id(link.target)) if link.target else cpu
                if link.kind == "c2c" or link.target_class == "0x068001":
                    self.parts.cable(device, cpu, max(1, rate), NVLINK_S, "C2C" if link.kind == "c2c" else f"NV{link.count}", LIBRARY_NVLINK_S)
                elif link.target_class == "0x068000" or link.target.lower().startswith("fffffff"):
                    through += link.count
                elif target is None:
                    at = f"{self.system.where}: line {link.line}: <{link.kind}>"
                    raise FormatError(f"target {link.target} is no GPU of this file", where=at, hint="name the NVSwitch by tclass 0x068000")
                elif target != device and link.count:
                    counts[device, target] = counts.get((device, target), 0) + link.count
                    ways[device, target] = (ways.get((device, target), (0, ""))[0] + rate, "XGMI" if link.kind == "xgmi" else "NV")
            if through:
                sm = pci.gpu.sm if pci.gpu is not None else 0
                to_switch.append((device, through * nvlink_rate_Bps(sm, nominal=self.how.rates == "nominal"), through))
        for (a, b), (rate, kind) in ways.items():
            self.parts.one_way(a, b, rate, NVLINK_S, f"{kind}{counts[a, b]}", LIBRARY_NVLINK_S)
        self._nvswitch(to_switch)

    def _nvswitch(self, to_switch: Sequence[tuple[str, int, int]]) -> None:
        given = self.how.nvswitch
        if not to_switch and given is None:
            return
        if to_switch and given is not None:
            raise UsageError(f"{self.system.where} has an NVSwitch already", where="--nvswitch", hint="leave it out")
        capable = not to_switch or all(pci.gpu is not None and pci.gpu.sm >= _MIN_MULTICAST_SM for _, pci, _ in self.gpus)
        if self.shared:
            switch = "nvswitch"
            if all(s.name != switch for s in self.parts.switches):
                self.parts.switches.append(Switch(name=switch, multicast=capable, aggregate=capable))
        else:
            switch = self._switch("nvswitch", in_network=capable and given is None)
        rows = to_switch or [(device, given or 0, 0) for device, _, _ in self.gpus]
        for device, rate, count in rows:
            self.parts.cable(device, switch, rate, NVSWITCH_S, f"NV{count}" if count else "NV", LIBRARY_NVLINK_S)

    def _link_rate(self, link: NcclLink, pci: NcclPci) -> int:
        assert pci.gpu is not None
        nominal = self.how.rates == "nominal"
        if link.kind == "c2c":
            return link.bandwidth * link.count * 10**6
        if link.kind == "xgmi":
            row = next((x for x in _XGMI if pci.gpu.gcn.startswith(x[0])), _XGMI[-1])
            return link.count * (row[2] if nominal else row[1]) * 10**6
        return link.count * nvlink_rate_Bps(pci.gpu.sm, nominal=nominal)


def bus_id(text: str) -> str:
    """A bus id that compares equal however it is written: 0000:07:00.0 and 00000000:07:00.0."""
    head, _, function = text.lower().partition(".")
    return ":".join(x.lstrip("0") or "0" for x in head.split(":")) + "." + (function.lstrip("0") or "0")


def _short(busid: str) -> str:
    domain, _, rest = busid.lower().partition(":")
    return safe_name((rest if domain.strip("0") == "" else busid.lower()).replace(":", "-").partition(".")[0])


def _cpu_rate(cpu: NcclCpu) -> int:
    """GB/s between two NUMA nodes, NCCL's figures."""
    if cpu.arch == "ppc64":
        return 32
    if cpu.vendor == "GenuineIntel":
        return 6 if cpu.family != 6 else 40 if cpu.model >= 0xCF else 22 if cpu.model >= 0x8F else 10 if cpu.model >= 0x55 else 6
    return 16 if cpu.vendor == "AuthenticAMD" else 6


