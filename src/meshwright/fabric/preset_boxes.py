"""Presets of GPU servers, alone or joined by a network; the table is in `meshwright.fabric.presets`.

Models follow those that published optima were computed on: a NIC between a GPU and the network is a switch; rates are nominal, per
direction; what a paper leaves out (the PCIe tree across sockets, say) is left out here and said. One box has no network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .fabric import Device, Fabric, Switch
from .preset_parts import GB, Chosen, Parts, network, rate_note

__all__ = [
    "A100", "B200", "GPUS", "H100", "H200", "MI250_GCD", "MI300X", "P100", "V100", "Gpu", "dgx1_p100", "dgx1_v100", "dgx2", "dgx_nvswitch",
    "h100_a100", "mi250", "mi300x", "ndv2", "nvl72",
]  # fmt: skip

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
class Gpu:
    """What one GPU (or die) has; bytes, bytes/s, operations/s by dtype."""

    memory_bytes: int
    bandwidth_Bps: int
    flops: Mapping[str, int]


P100 = Gpu(16 * GB, 732 * GB, {"fp16": 21_200 * GB, "fp32": 10_600 * GB, "fp64": 5_300 * GB})
V100 = Gpu(32 * GB, 900 * GB, {"fp16": 125 * TERA, "fp32": 15_700 * GB, "fp64": 7_800 * GB})
_A100_FLOPS = {"bf16": 312 * TERA, "fp16": 312 * TERA, "tf32": 156 * TERA, "fp32": 19_500 * GB, "fp64": 9_700 * GB, "int8": 624 * TERA}
A100 = Gpu(80 * GB, 2_000 * GB, _A100_FLOPS)
_H100_FLOPS = {
    "bf16": 989 * TERA,
    "fp16": 989 * TERA,
    "tf32": 494 * TERA,
    "fp8": 1_979 * TERA,
    "int8": 1_979 * TERA,
    "fp32": 67 * TERA,
    "fp64": 34 * TERA,
}
H100 = Gpu(80 * GB, 3_350 * GB, _H100_FLOPS)
H200 = Gpu(141 * GB, 4_800 * GB, _H100_FLOPS)
_B200_FLOPS = {
    "bf16": 2_250 * TERA, "fp16": 2_250 * TERA, "tf32": 1_125 * TERA, "fp8": 4_500 * TERA, "fp4": 9_000 * TERA, "int8": 4_500 * TERA,
    "fp32": 75 * TERA, "fp64": 37 * TERA,
}  # fmt: skip
B200 = Gpu(180 * GB, 8_000 * GB, _B200_FLOPS)
_MI300X_FLOPS = {
    "bf16": 1_307 * TERA, "fp16": 1_307 * TERA, "fp8": 2_614 * TERA, "int8": 2_614 * TERA, "fp32": 163_400 * GB, "fp64": 81_700 * GB,
}  # fmt: skip
MI300X = Gpu(192 * GB, 5_300 * GB, _MI300X_FLOPS)
MI250_GCD = Gpu(64 * GB, 1_600 * GB, {"bf16": 181 * TERA, "fp16": 181 * TERA, "fp32": 45_300 * GB, "fp64": 45_300 * GB, "int8": 181 * TERA})


GPUS = {"p100": P100, "v100": V100, "a100": A100, "h100": H100, "h200": H200, "b200": B200, "mi250": MI250_GCD, "mi300x": MI300X}


def _gpus(parts: Parts, box: int, count: int, gpu: Gpu, memory: int | None, prefix: str = "gpu") -> list[str]:
    names = [f"box{box}/{prefix}{i}" for i in range(count)]
    parts.devices += [
        Device(name=name, group=f"box{box}", memory_bytes=memory or gpu.memory_bytes, memory_bandwidth_Bps=gpu.bandwidth_Bps, flops=dict(gpu.flops))
        for name in names
    ]
    return names


def _device_notes(parts: Parts, memory: int | None, default: Gpu) -> None:
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


def _nic_per_pair(parts: Parts, box: int, gpus: Sequence[str]) -> list[str]:
    """A DGX-1's NICs: GPUs 2j and 2j+1 share one, behind their PCIe switch."""
    ports = _nics(parts, box, len(gpus) // 2)
    for i, gpu in enumerate(gpus):
        parts.cable(gpu, ports[i // 2], _PCIE3_Bps, 0.0, "PIX", LIBRARY_NET_S)
    if not box:
        parts.note("GPU - NIC links", f"one NIC per PCIe switch, shared by GPUs 2j and 2j+1; {_PCIE_NOTE}; the PCIe tree between sockets is left out")
    return ports


def dgx_nvswitch(
    gpu: Gpu, nvlink_Bps: int, kind: str, nic_Bps: int, default_net: str, in_network: bool, sources: tuple[str, str]
) -> Callable[[int, str, Chosen], Fabric]:
    """DGX A100, H100, H200 and HGX B200: eight GPUs on NVSwitch, one NIC per GPU."""

    def build(n: int, name: str, chosen: Chosen) -> Fabric:
        parts = Parts()
        nvlink_rate = rate_note(parts, "GPU - NVSwitch rate", chosen.nvlink, nvlink_Bps, sources[0])
        nic_rate = rate_note(parts, "GPU - NIC - network rate", chosen.nic, nic_Bps, sources[1]) if n > 1 else 0
        ports: list[list[str]] = []
        for box in range(n):
            gpus = _gpus(parts, box, 8, gpu, chosen.memory)
            _nvswitch_box(parts, box, gpus, nvlink_rate, kind, in_network=in_network)
            if n > 1:
                ports.append(_own_nics(parts, box, gpus, nic_rate))
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


def dgx1_v100(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate = rate_note(parts, "NVLink rate", chosen.nvlink, 25 * GB, _V100_NVLINK)
    nic_rate = rate_note(parts, "NIC - network rate", chosen.nic, _IB_EDR_Bps, _NIC_NOTE) if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = _gpus(parts, box, 8, V100, chosen.memory)
        _v100_box(parts, box, gpus, rate)
        if n > 1:
            ports.append(_nic_per_pair(parts, box, gpus))
    if n > 1:
        network(parts, ports, nic_rate, chosen)
    _device_notes(parts, chosen.memory, V100)
    return parts.fabric(name)


def ndv2(n: int, name: str, chosen: Chosen) -> Fabric:
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


def dgx2(n: int, name: str, chosen: Chosen) -> Fabric:
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


def mi250(n: int, name: str, chosen: Chosen) -> Fabric:
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


# NVLinks between the eight P100s of a DGX-1: two quads, each fully connected, and one link between the quads per GPU.
_P100_LINKS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (4, 5), (4, 6), (4, 7), (5, 6), (5, 7), (6, 7), (0, 4), (1, 5), (2, 6), (3, 7))


def dgx1_p100(n: int, name: str, chosen: Chosen) -> Fabric:
    """DGX-1 with P100: sixteen single NVLinks, one IB port per two GPUs."""
    parts = Parts()
    source = "20 GB/s per link and direction, nominal; NCCL plans with 18.0"
    rate = rate_note(parts, "NVLink rate", chosen.nvlink, 20 * GB, source)
    nic_rate = rate_note(parts, "NIC - network rate", chosen.nic, _IB_EDR_Bps, f"{_NIC_NOTE}; from memory") if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = _gpus(parts, box, 8, P100, chosen.memory)
        for a, b in _P100_LINKS:
            parts.cable(gpus[a], gpus[b], rate, NVLINK_S, "NV1", LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)
        if n > 1:
            ports.append(_nic_per_pair(parts, box, gpus))
    if n > 1:
        network(parts, ports, nic_rate, chosen)
    _device_notes(parts, chosen.memory, P100)
    return parts.fabric(name)


def mi300x(n: int, name: str, chosen: Chosen) -> Fabric:
    """Eight MI300X, every pair joined by one xGMI link, one NIC per GPU."""
    parts = Parts()
    rate = rate_note(parts, "xGMI rate", chosen.xgmi, 64 * GB, "64 GB/s per link and direction, nominal (48 to 50 achievable), from memory")
    nic_rate = rate_note(parts, "GPU - NIC - network rate", chosen.nic, 50 * GB, "400 Gbit/s, nominal, from memory") if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = _gpus(parts, box, 8, MI300X, chosen.memory)
        for a in range(8):
            for b in range(a + 1, 8):
                parts.cable(gpus[a], gpus[b], rate, NVLINK_S, "XGMI1", LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)
        if n > 1:
            ports.append(_own_nics(parts, box, gpus, nic_rate))
    if n > 1:
        network(parts, ports, nic_rate, chosen)
    _device_notes(parts, chosen.memory, MI300X)
    return parts.fabric(name)


def nvl72(n: int, name: str, chosen: Chosen) -> Fabric:
    """Racks of 72 B200 on one NVSwitch domain; a rack is the group ("box"), its 18 trays are left out."""
    parts = Parts()
    rate = rate_note(parts, "GPU - NVSwitch rate", chosen.nvlink, 900 * GB, _B200_SOURCE)
    nic_rate = rate_note(parts, "GPU - NIC - network rate", chosen.nic, 50 * GB, "CX7, 400 Gbit/s per GPU, from memory; CX8 has 800") if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = _gpus(parts, box, 72, B200, chosen.memory)
        _nvswitch_box(parts, box, gpus, rate, "NV18", in_network=True)
        if n > 1:
            ports.append(_own_nics(parts, box, gpus, nic_rate))
    if n > 1:
        network(parts, ports, nic_rate, chosen)
    _device_notes(parts, chosen.memory, B200)
    return parts.fabric(name)


_B200_SOURCE = "18 NVLinks of 50 GB/s, nominal (NCCL plans with 721.8)"


def _own_nics(parts: Parts, box: int, gpus: Sequence[str], rate_Bps: int) -> list[str]:
    """A NIC per GPU, on the GPU's PCIe switch."""
    names = _nics(parts, box, len(gpus))
    for device, port in zip(gpus, names, strict=True):
        parts.cable(device, port, rate_Bps, 0.0, "PIX", LIBRARY_NET_S)
    return names


def h100_a100(n: int, name: str, chosen: Chosen) -> Fabric:
    """n H100 boxes and n A100 boxes on one network: unlike servers in one job."""
    parts = Parts()
    ports: list[list[str]] = []
    rates: dict[str, int] = {}
    for box in range(2 * n):
        gpu, nvlink, kind, nic = (H100, 450 * GB, "NV18", 50 * GB) if box < n else (A100, 300 * GB, "NV12", 25 * GB)
        gpus = _gpus(parts, box, 8, gpu, chosen.memory)
        _nvswitch_box(parts, box, gpus, nvlink, kind, in_network=box < n)
        ports.append(_own_nics(parts, box, gpus, nic if chosen.nic is None else chosen.nic))
        rates |= dict.fromkeys(ports[-1], nic if chosen.nic is None else chosen.nic)
    network(parts, ports, rates, chosen)
    parts.note("boxes", f"box0 to box{n - 1} as dgx-h100, the rest as dgx-a100; rates nominal as there")
    if chosen.nic is not None:
        parts.note("NIC rate", f"overridden: {chosen.nic} B/s instead of 50 GB/s and 25 GB/s")
    _device_notes(parts, chosen.memory, H100)
    return parts.fabric(name)
