"""Fabrics with names: `laptop:4`, `two-islands`, `dgx-h100:16`, `mi250:2?net=rails`, ...

Every number carries its provenance. GPU boxes follow the models that published optima were computed on, so that those
optima come out exactly: a NIC between a GPU and the network is a switch; rates are nominal, per direction; what a paper
leaves out (the PCIe tree across sockets, say) is left out here and said. Growing a preset never changes what is inside a
box. One box has no network. Names are parsed by `meshwright.io.fabric_name`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .fabric import Device, Fabric, Switch
from .preset_parts import NET, OVERSUBSCRIPTION, Chosen, Option, Parts, Preset, network, rate_note

__all__ = ["MAX_DEVICES", "PRESETS", "Chosen", "Option", "Preset", "usable_cores"]

MAX_DEVICES = 16_384
GB = 10**9
TERA = 10**12

# Wire latencies in seconds per link, where nothing was measured. Published models: TE-CCL 0.35 us (DGX-2), 0.7 us (NDv2), 1.3 us (IB).
NVSWITCH_S, NVLINK_S = 0.35e-6, 0.7e-6
# What the library adds per message: NCCL's ring constants for the Simple protocol. Charged where a message leaves a device.
LIBRARY_NVLINK_S, LIBRARY_NET_S = 3.4e-6, 14.0e-6

_DATA_SHEET = "vendor data sheets, dense, from memory; nominal"
_LATENCY = "TE-CCL models: 0.35 us per NVSwitch link, 0.7 us per direct link, 1.3 us per InfiniBand link; library: NCCL constants, ring, Simple"
_NIC_NOTE = "the InfiniBand port's nominal rate; a NIC is modelled as a switch"


# ---- boxes -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Gpu:
    memory_bytes: int
    bandwidth_Bps: int
    flops: Mapping[str, int]


V100 = _Gpu(32 * GB, 900 * GB, {"fp16": 125 * TERA, "fp32": 15_700 * GB, "fp64": 7_800 * GB})
_A100_FLOPS = {"bf16": 312 * TERA, "fp16": 312 * TERA, "tf32": 156 * TERA, "fp32": 19_500 * GB, "fp64": 9_700 * GB, "int8": 624 * TERA}
A100 = _Gpu(80 * GB, 2_000 * GB, _A100_FLOPS)
_H100_FLOPS = {
    "bf16": 989 * TERA,
    "fp16": 989 * TERA,
    "tf32": 494 * TERA,
    "fp8": 1_979 * TERA,
    "int8": 1_979 * TERA,
    "fp32": 67 * TERA,
    "fp64": 34 * TERA,
}
H100 = _Gpu(80 * GB, 3_350 * GB, _H100_FLOPS)
MI250_GCD = _Gpu(64 * GB, 1_600 * GB, {"bf16": 181 * TERA, "fp16": 181 * TERA, "fp32": 45_300 * GB, "fp64": 45_300 * GB, "int8": 181 * TERA})


def _gpus(parts: Parts, box: int, count: int, gpu: _Gpu, memory: int | None, prefix: str = "gpu") -> list[str]:
    names = [f"box{box}/{prefix}{i}" for i in range(count)]
    parts.devices += [
        Device(name=name, group=f"box{box}", memory_bytes=memory or gpu.memory_bytes, memory_bandwidth_Bps=gpu.bandwidth_Bps, flops=dict(gpu.flops))
        for name in names
    ]
    return names


def _device_notes(parts: Parts, memory: int | None, default: _Gpu) -> None:
    parts.note("FLOP/s, memory and memory bandwidth of devices", _DATA_SHEET)
    if memory is not None:
        parts.note("memory_bytes", f"overridden: {memory} instead of {default.memory_bytes}")
    parts.note("latencies", _LATENCY)


def _nvswitch_box(parts: Parts, box: int, gpus: Sequence[str], rate_Bps: int, kind: str, *, in_network: bool = False) -> None:
    switch = f"box{box}/nvswitch"
    parts.switches.append(Switch(name=switch, group=f"box{box}", multicast=in_network, aggregate=in_network))
    for gpu in gpus:
        parts.cable(gpu, switch, rate_Bps, NVSWITCH_S, kind, LIBRARY_NVLINK_S)


def _nics(parts: Parts, box: int, count: int) -> list[str]:
    names = [f"box{box}/nic{i}" for i in range(count)]
    parts.switches += [Switch(name=name, group=f"box{box}") for name in names]
    return names


def _dgx_nvswitch(
    gpu: _Gpu, nvlink_Bps: int, kind: str, nic_Bps: int, default_net: str, in_network: bool, sources: tuple[str, str]
) -> Callable[[int, str, Chosen], Fabric]:
    """DGX A100 and H100: eight GPUs on NVSwitch, one NIC per GPU."""

    def build(n: int, name: str, chosen: Chosen) -> Fabric:
        parts = Parts()
        nvlink_rate = rate_note(parts, "GPU - NVSwitch rate", chosen.nvlink, nvlink_Bps, sources[0])
        nic_rate = rate_note(parts, "GPU - NIC - network rate", chosen.nic, nic_Bps, sources[1]) if n > 1 else 0
        ports: list[list[str]] = []
        for box in range(n):
            gpus = _gpus(parts, box, 8, gpu, chosen.memory)
            _nvswitch_box(parts, box, gpus, nvlink_rate, kind, in_network=in_network)
            if n > 1:
                ports.append(_nics(parts, box, 8))
                for device, port in zip(gpus, ports[-1], strict=True):
                    parts.cable(device, port, nic_rate, 0.0, "PIX", LIBRARY_NET_S)
        if n > 1:
            network(parts, ports, nic_rate, chosen, default=default_net)
        _device_notes(parts, chosen.memory, gpu)
        return parts.fabric(name)

    return build


# Bundles of NVLinks between the eight V100s of a DGX-1 or NDv2 box, from the published topology files of msccl-tools, TACCL and TE-CCL.
_V100_LINKS = ("02112000", "20120100", "11020020", "12200001", "20000211", "01002012", "00201102", "00011220")


def _v100_box(parts: Parts, box: int, gpus: Sequence[str], rate_Bps: int) -> None:
    for a, row in enumerate(_V100_LINKS):
        for b in range(a + 1, 8):
            if width := int(row[b]):
                parts.cable(gpus[a], gpus[b], width * rate_Bps, NVLINK_S, f"NV{width}", LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)


_PCIE3_Bps, _IB_EDR_Bps = 12 * GB, 12_500_000_000
_V100_NVLINK = "25 GB/s per link and direction, nominal; NCCL plans with 20.0, TACCL profiled 21.7 to 23"
_PCIE_NOTE = "NCCL's figure for PCIe gen 3 x16 is 12 GB/s"


def _dgx1_v100(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate = rate_note(parts, "NVLink rate", chosen.nvlink, 25 * GB, _V100_NVLINK)
    nic_rate = rate_note(parts, "NIC - network rate", chosen.nic, _IB_EDR_Bps, _NIC_NOTE) if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = _gpus(parts, box, 8, V100, chosen.memory)
        _v100_box(parts, box, gpus, rate)
        if n > 1:
            ports.append(_nics(parts, box, 4))
            for i, gpu in enumerate(gpus):
                parts.cable(gpu, ports[-1][i // 2], _PCIE3_Bps, 0.0, "PIX", LIBRARY_NET_S)
    if n > 1:
        network(parts, ports, nic_rate, chosen)
        parts.note("GPU - NIC links", f"one NIC per PCIe switch, shared by GPUs 2j and 2j+1; {_PCIE_NOTE}; the PCIe tree between sockets is left out")
    _device_notes(parts, chosen.memory, V100)
    return parts.fabric(name)


def _ndv2(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate = rate_note(parts, "NVLink rate", chosen.nvlink, 25 * GB, _V100_NVLINK)
    nic_rate = rate_note(parts, "NIC - network rate", chosen.nic, _IB_EDR_Bps, _NIC_NOTE) if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = _gpus(parts, box, 8, V100, chosen.memory)
        _v100_box(parts, box, gpus, rate)
        if n > 1:
            ports.append(_nics(parts, box, 1))
            port = ports[-1][0]
            if chosen.sketch:
                parts.one_way(gpus[0], port, nic_rate, 0.0, "PIX", LIBRARY_NET_S)
                parts.one_way(port, gpus[1], nic_rate, 0.0, "PIX")
            else:
                for gpu in gpus[:2]:
                    parts.cable(gpu, port, _PCIE3_Bps, 0.0, "PIX", LIBRARY_NET_S)
    if n > 1:
        network(parts, ports, nic_rate, chosen)
        sketch = "published sketch (TACCL): only GPU 0 sends, only GPU 1 receives between boxes"
        where = sketch if chosen.sketch else f"the NIC is reached by GPUs 0 and 1; {_PCIE_NOTE}"
        parts.note("GPU - NIC links", f"{where}; the PCIe tree between sockets is left out")
    _device_notes(parts, chosen.memory, V100)
    return parts.fabric(name)


def _dgx2(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    source = "125 GB/s as TE-CCL models and TACCL profiled (8 us/MB); nominal is 6 x 25 = 150"
    rate = rate_note(parts, "GPU - NVSwitch rate", chosen.nvlink, 125 * GB, source)
    nic_rate = rate_note(parts, "NIC - network rate", chosen.nic, _IB_EDR_Bps, _NIC_NOTE) if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = _gpus(parts, box, 16, V100, chosen.memory)
        _nvswitch_box(parts, box, gpus, rate, "NV6")
        if n > 1:
            ports.append(_nics(parts, box, 8))
            for j, port in enumerate(ports[-1]):
                if chosen.sketch:
                    parts.one_way(gpus[2 * j + 1], port, nic_rate, 0.0, "PIX", LIBRARY_NET_S)
                    parts.one_way(port, gpus[2 * j], nic_rate, 0.0, "PIX")
                else:
                    for gpu in gpus[2 * j : 2 * j + 2]:
                        parts.cable(gpu, port, _PCIE3_Bps, 0.0, "PIX", LIBRARY_NET_S)
    if n > 1:
        network(parts, ports, nic_rate, chosen)
        sketch = "published sketch (TACCL): GPU 2j+1 sends, GPU 2j receives through NIC j"
        where = sketch if chosen.sketch else f"GPUs 2j and 2j+1 share NIC j; {_PCIE_NOTE}"
        parts.note("GPU - NIC links", where)
    _device_notes(parts, chosen.memory, V100)
    return parts.fabric(name)


# xGMI bundles between the 16 compute dies of an 8 x MI250 box (partner: width), from ForestColl's and TE-CCL's topologies, which agree.
_MI250_LINKS: tuple[dict[int, int], ...] = (
    {1: 4, 4: 2, 8: 1}, {0: 4, 5: 1, 9: 1, 10: 1}, {3: 4, 6: 1, 9: 1, 10: 1}, {2: 4, 7: 2, 11: 1}, {0: 2, 5: 4, 6: 1}, {1: 1, 4: 4, 6: 1, 7: 1},
    {2: 1, 4: 1, 5: 1, 7: 4}, {3: 2, 5: 1, 6: 4}, {0: 1, 9: 4, 12: 2}, {1: 1, 2: 1, 8: 4, 13: 1}, {1: 1, 2: 1, 11: 4, 14: 1}, {3: 1, 10: 4, 15: 2},
    {8: 2, 13: 4, 14: 1}, {9: 1, 12: 4, 14: 1, 15: 1}, {10: 1, 12: 1, 13: 1, 15: 4}, {11: 2, 13: 1, 14: 4},
)  # fmt: skip


def _mi250(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate = rate_note(parts, "xGMI rate", chosen.xgmi, 50 * GB, "50 GB/s per link and direction (ForestColl and TE-CCL agree)")
    default, source = 16 * GB, "ForestColl: every die at 16 GB/s to the network"
    if chosen.nics == "pair":
        default, source = 25 * GB, "TE-CCL: one 25 GB/s NIC per two dies"
    nic_rate = rate_note(parts, "network rate", chosen.nic, default, source) if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        dies = _gpus(parts, box, 16, MI250_GCD, chosen.memory, "gcd")
        for a, partners in enumerate(_MI250_LINKS):
            for b, width in partners.items():
                if a < b:
                    parts.cable(dies[a], dies[b], width * rate, NVLINK_S, f"XGMI{width}", LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)
        if n > 1 and chosen.nics == "pair":
            ports.append(_nics(parts, box, 8))
            for i, die in enumerate(dies):
                parts.cable(die, ports[-1][i // 2], nic_rate, 0.0, "PIX", LIBRARY_NET_S)
        elif n > 1:
            ports.append(dies)
    if n > 1:
        network(parts, ports, nic_rate, chosen, library_s=LIBRARY_NET_S if chosen.nics == "gcd" else 0.0)
    _device_notes(parts, chosen.memory, MI250_GCD)
    return parts.fabric(name)


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


def _laptop(n: int, name: str, chosen: Chosen) -> Fabric:
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


def _two_islands(n: int, name: str, chosen: Chosen) -> Fabric:
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


# ---- the table ---------------------------------------------------------------------------------------------------------
_MEMORY = Option("size", "memory of one device")
_NVLINK = Option("rate", "NVLink rate: of one GPU to NVSwitch, or of one link")
_NIC = Option("rate", "rate of one network port")
_SKETCH = Option("flag", "1 = the published communication sketch: separate sending and receiving GPUs")
_FLOPS = Option("flops", "fp32 operations/s of one core")
_LINK = Option("rate", "rate of one device's link")
_NICS = Option("choice", "a port per die, or one NIC per two dies", ("gcd", "pair"))
_NETWORK: dict[str, Option] = {"net": NET, "oversubscription": OVERSUBSCRIPTION, "nic": _NIC, "memory": _MEMORY}

_A100_SOURCES = ("12 NVLinks of 25 GB/s, nominal (ForestColl; NCCL plans with 240)", "HDR 200 Gbit/s (ForestColl); PCIe gen 4 x16 is 24 in NCCL")
_H100_SOURCES = ("18 NVLinks of 25 GB/s, nominal (NCCL plans with 370.8)", "NDR 400 Gbit/s, nominal; PCIe gen 5 x16 is 48 GB/s in NCCL")

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset("laptop", "CPU processes on this machine, joined by loopback", "devices", 2, 1,
               {"cores": Option("count", "cores to share (default: this machine's)"), "memory": _MEMORY, "flops": _FLOPS, "link": _LINK}, _laptop),
        Preset("two-islands", "two islands of n CPU devices at 1 Gbit/s, a 200 Mbit/s trunk between them", "devices per island", 2, 2,
               {"link": _LINK, "trunk": Option("rate", "rate of the trunk"), "memory": _MEMORY, "flops": _FLOPS}, _two_islands),
        Preset("dgx1-v100", "DGX-1: 8 V100, direct NVLinks, 4 InfiniBand ports", "boxes", 1, 8, _NETWORK | {"nvlink": _NVLINK}, _dgx1_v100),
        Preset("ndv2", "Azure NDv2: 8 V100, direct NVLinks, 1 InfiniBand port", "boxes", 1, 8,
               {"sketch": _SKETCH, "nvlink": _NVLINK, "nic": _NIC, "memory": _MEMORY}, _ndv2),
        Preset("dgx2", "DGX-2: 16 V100 on NVSwitch, 8 InfiniBand ports", "boxes", 1, 16, _NETWORK | {"sketch": _SKETCH, "nvlink": _NVLINK}, _dgx2),
        Preset("dgx-a100", "DGX A100: 8 A100 on NVSwitch, 8 InfiniBand ports on two planes", "boxes", 1, 8, _NETWORK | {"nvlink": _NVLINK},
               _dgx_nvswitch(A100, 300 * GB, "NV12", 25 * GB, "planes", False, _A100_SOURCES)),
        Preset("dgx-h100", "DGX H100: 8 H100 on NVSwitch with multicast, 8 InfiniBand ports", "boxes", 1, 8, _NETWORK | {"nvlink": _NVLINK},
               _dgx_nvswitch(H100, 450 * GB, "NV18", 50 * GB, "switch", True, _H100_SOURCES)),
        Preset("mi250", "8 MI250 (16 dies), xGMI mesh, one network port per die", "boxes", 1, 16,
               _NETWORK | {"nics": _NICS, "xgmi": Option("rate", "rate of one xGMI link")}, _mi250),
    )
}  # fmt: skip
