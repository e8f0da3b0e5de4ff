"""Presets of servers whose insides no general shape has: the DGX-1s, NDv2, DGX-2, MI250; and unlike servers in one job.

All others are machines of `machines.toml`, built by `fabric.machine_shapes`. Models follow those that published optima were computed on: a NIC
between a GPU and the network is a switch; rates are nominal, per direction; what a paper leaves out (the PCIe tree across sockets, say) is left
out here and said. One box has no network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .fabric import Fabric
from .machines import MACHINES
from .preset_parts import (
    GB,
    LIBRARY_NET_S,
    LIBRARY_NVLINK_S,
    NVLINK_S,
    Chosen,
    Parts,
    device_notes,
    devices_of,
    network,
    nic_switches,
    nvswitch_box,
    own_nics,
    rate_note,
)  # fmt: skip

__all__ = ["dgx1_p100", "dgx1_v100", "dgx2", "h100_a100", "mi250", "ndv2"]

_NIC_NOTE = "the InfiniBand port's nominal rate; a NIC is modelled as a switch"


def _nic_per_pair(parts: Parts, box: int, gpus: Sequence[str]) -> list[str]:
    """A DGX-1's NICs: GPUs 2j and 2j+1 share one, behind their PCIe switch."""
    ports = nic_switches(parts, f"box{box}", len(gpus) // 2)
    for i, gpu in enumerate(gpus):
        parts.cable(gpu, ports[i // 2], _PCIE3_Bps, 0.0, "PIX", LIBRARY_NET_S)
    if not box:
        parts.note("GPU - NIC links", f"one NIC per PCIe switch, shared by GPUs 2j and 2j+1; {_PCIE_NOTE}; the PCIe tree between sockets is left out")
    return ports


# Bundles of NVLinks between the eight V100s of a DGX-1 or NDv2 box, from the published topology files of msccl-tools, TACCL and TE-CCL.
_V100_LINKS = ("02112000", "20120100", "11020020", "12200001", "20000211", "01002012", "00201102", "00011220")


def _v100_box(parts: Parts, gpus: Sequence[str], rate_Bps: int) -> None:
    for a, row in enumerate(_V100_LINKS):
        for b in range(a + 1, 8):
            if width := int(row[b]):
                parts.cable(gpus[a], gpus[b], width * rate_Bps, NVLINK_S, f"NV{width}", LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)


_PCIE3_Bps, _IB_EDR_Bps = 12 * GB, 12_500_000_000
_V100_NVLINK = "25 GB/s per link and direction, nominal; NCCL plans with 20.0, TACCL profiled 21.7 to 23"
_PCIE_NOTE = "NCCL's figure for PCIe gen 3 x16 is 12 GB/s"


def _dgx1(
    n: int, name: str, chosen: Chosen, device: str, rate_Bps: int, source: str, box_links: Callable[[Parts, Sequence[str], int], None]
) -> Fabric:
    """Boxes of eight GPUs with NVLinks between them and one IB port per two GPUs."""
    parts = Parts()
    rate = rate_note(parts, "NVLink rate", chosen.nvlink, rate_Bps, source)
    nic_rate = rate_note(parts, "NIC - network rate", chosen.nic, _IB_EDR_Bps, _NIC_NOTE) if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = devices_of(parts, f"box{box}", 8, device, chosen.memory)
        box_links(parts, gpus, rate)
        if n > 1:
            ports.append(_nic_per_pair(parts, box, gpus))
    if n > 1:
        network(parts, ports, nic_rate, chosen)
    device_notes(parts, chosen.memory, device)
    return parts.fabric(name)


def dgx1_v100(n: int, name: str, chosen: Chosen) -> Fabric:
    return _dgx1(n, name, chosen, "v100", 25 * GB, _V100_NVLINK, _v100_box)


def ndv2(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    rate = rate_note(parts, "NVLink rate", chosen.nvlink, 25 * GB, _V100_NVLINK)
    nic_rate = rate_note(parts, "NIC - network rate", chosen.nic, _IB_EDR_Bps, _NIC_NOTE) if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = devices_of(parts, f"box{box}", 8, "v100", chosen.memory)
        _v100_box(parts, gpus, rate)
        if n > 1:
            ports.append(nic_switches(parts, f"box{box}", 1))
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
    device_notes(parts, chosen.memory, "v100")
    return parts.fabric(name)


def dgx2(n: int, name: str, chosen: Chosen) -> Fabric:
    parts = Parts()
    source = "125 GB/s as TE-CCL models and TACCL profiled (8 us/MB); nominal is 6 x 25 = 150"
    rate = rate_note(parts, "GPU - NVSwitch rate", chosen.nvlink, 125 * GB, source)
    nic_rate = rate_note(parts, "NIC - network rate", chosen.nic, _IB_EDR_Bps, _NIC_NOTE) if n > 1 else 0
    ports: list[list[str]] = []
    for box in range(n):
        gpus = devices_of(parts, f"box{box}", 16, "v100", chosen.memory)
        nvswitch_box(parts, f"box{box}", gpus, rate, "NV6")
        if n > 1:
            ports.append(nic_switches(parts, f"box{box}", 8))
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
    device_notes(parts, chosen.memory, "v100")
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
        dies = devices_of(parts, f"box{box}", 16, "mi250", chosen.memory, "gcd")
        for a, partners in enumerate(_MI250_LINKS):
            for b, width in partners.items():
                if a < b:
                    parts.cable(dies[a], dies[b], width * rate, NVLINK_S, f"XGMI{width}", LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)
        if n > 1 and chosen.nics == "pair":
            ports.append(nic_switches(parts, f"box{box}", 8))
            for i, die in enumerate(dies):
                parts.cable(die, ports[-1][i // 2], nic_rate, 0.0, "PIX", LIBRARY_NET_S)
        elif n > 1:
            ports.append(dies)
    if n > 1:
        network(parts, ports, nic_rate, chosen, library_s=LIBRARY_NET_S if chosen.nics == "gcd" else 0.0)
    device_notes(parts, chosen.memory, "mi250")
    return parts.fabric(name)


# NVLinks between the eight P100s of a DGX-1: two quads, each fully connected, and one link between the quads per GPU.
_P100_LINKS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (4, 5), (4, 6), (4, 7), (5, 6), (5, 7), (6, 7), (0, 4), (1, 5), (2, 6), (3, 7))


def _p100_box(parts: Parts, gpus: Sequence[str], rate_Bps: int) -> None:
    for a, b in _P100_LINKS:
        parts.cable(gpus[a], gpus[b], rate_Bps, NVLINK_S, "NV1", LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)


def dgx1_p100(n: int, name: str, chosen: Chosen) -> Fabric:
    return _dgx1(n, name, chosen, "p100", 20 * GB, "20 GB/s per link and direction, nominal; NCCL plans with 18.0", _p100_box)


def h100_a100(n: int, name: str, chosen: Chosen) -> Fabric:
    """n H100 boxes and n A100 boxes on one network: unlike servers in one job."""
    parts = Parts()
    ports: list[list[str]] = []
    rates: dict[str, int] = {}
    for box in range(2 * n):
        box_of = MACHINES["dgx-h100" if box < n else "dgx-a100"]
        gpus = devices_of(parts, f"box{box}", box_of.devices, box_of.device, chosen.memory)
        nvswitch_box(parts, f"box{box}", gpus, box_of.link_Bps, box_of.link_kind, in_network=box_of.in_network)
        nic = box_of.nic_Bps if chosen.nic is None else chosen.nic
        ports.append(own_nics(parts, f"box{box}", gpus, nic))
        rates |= dict.fromkeys(ports[-1], nic)
    network(parts, ports, rates, chosen)
    parts.note("boxes", f"box0 to box{n - 1} as dgx-h100, the rest as dgx-a100; rates nominal as there")
    if chosen.nic is not None:
        parts.note("NIC rate", f"overridden: {chosen.nic} B/s instead of 50 GB/s and 25 GB/s")
    device_notes(parts, chosen.memory, "h100")
    return parts.fabric(name)
