"""How GPUs and NICs of one server reach each other, pair by pair, and the fabric that this stands for.

`nvidia-smi topo -m` and `dcgmi topo` state, for each pair, a bundle of NVLinks or how far up the PCIe tree their path goes: PIX (one switch),
PXB (several), PHB (a host bridge), NODE (bridges of one NUMA node), SYS (between NUMA nodes). From that the tree is rebuilt: what is joined
at a level hangs below one switch of that level. They state no rates; those are assumed, said in the provenance, and can be given.

NVLinks between every pair, equally many, more than a GPU has room for: an NVSwitch. Otherwise they are direct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...errors import FormatError, UsageError
from ...fabric.fabric import Device, Fabric, Switch
from ...fabric.machines import GPUS, device_source
from ...fabric.preset_parts import LIBRARY_NET_S, LIBRARY_NVLINK_S, NVLINK_S, NVSWITCH_S, Chosen, Parts, network

__all__ = ["LEVELS", "Assumed", "TopoMatrix", "matrix_fabric"]

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
NVLINK_Bps = {"NV": 25 * 10**9, "XGMI": 64 * 10**9}  # assumed of one link: NVLink 3 and 4; MI300X
MAX_NVLINKS = 18  # of one GPU, in any generation so far
MAX_ENTRIES = 1024  # rows of a matrix: GPUs and NICs of one server
_NAME = {"PIX": "pcie", "PXB": "pcie-tree", "PHB": "bridge", "NODE": "numa", "SYS": "socket"}


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What a matrix does not say; rates in bytes/s.

    nvlink: one NVLink or XGMI link; pcie: a GPU's or NIC's link; sys: between NUMA nodes; nic: a NIC's port.
    """

    nvlink: int | None = None  # default: 25 GB/s, of XGMI 64 GB/s
    pcie: int = 24 * 10**9
    sys: int = 16 * 10**9
    nic: int | None = None
    net: str = "switch"
    oversubscription: int = 1
    trunk: int | None = None
    gpu: str | None = None
    copies: int = 1


@dataclass(frozen=True)
class TopoMatrix:
    """`names`: GPU0, ..., NIC0, ... in order; `cells[i, j]` for i != j: `NV4`, `PIX`, ..., `SYS`; missing = unknown. `numa`: of GPUs, where said."""

    where: str
    names: tuple[str, ...]
    cells: Mapping[tuple[int, int], str]
    numa: Mapping[int, str] = field(default_factory=dict)
    nic_names: Mapping[str, str] = field(default_factory=dict)  # NIC0 -> mlx5_0
    link: Literal["NV", "XGMI"] = "NV"  # what a cell `NV4` counts

    @property
    def gpus(self) -> list[int]:
        return [i for i, name in enumerate(self.names) if name.startswith("GPU")]

    def nvlinks(self, a: int, b: int) -> int:
        cell = self.cells.get((a, b), "")
        return int(cell[2:]) if cell.startswith("NV") else 0


def matrix_fabric(matrices: Sequence[TopoMatrix], name: str, assumed: Assumed | None = None) -> Fabric:
    """The fabric of these servers. Raises: FormatError where directions contradict each other; UsageError for what cannot be joined."""
    how = assumed or Assumed()
    if how.gpu is not None and how.gpu not in GPUS:
        raise UsageError(f"no GPU make {how.gpu!r}", where="--gpu", hint=f"one of: {', '.join(GPUS)}")
    servers = [m for m in matrices for _ in range(how.copies)]
    if not servers or len(servers) > 2048:
        raise UsageError(f"{len(servers)} servers", hint="between 1 and 2048")
    parts, ports = Parts(), []
    for number, matrix in enumerate(servers):
        ports.append(_server(parts, f"box{number}", matrix, how))
    if len(servers) > 1:
        for number, box in enumerate(ports):
            if not box:
                raise UsageError(f"box{number} has no NIC to join it by", hint="the matrix must have NIC rows")
        rate = how.pcie if how.nic is None else how.nic
        network(parts, ports, rate, Chosen(net=how.net, oversubscription=how.oversubscription, trunk=how.trunk))
        parts.note("NIC rates", f"{rate} B/s, " + ("assumed as PCIe" if how.nic is None else "given"))
    files = ", ".join(dict.fromkeys(m.where for m in matrices))
    parts.note("devices, switches, links", f"topology matrix {files[:1024]}; {len(servers)} servers; the PCIe tree is rebuilt from the matrix")
    rates = sorted({f"{how.nvlink or NVLINK_Bps[m.link]} B/s per {'NVLink' if m.link == 'NV' else 'XGMI link'}" for m in matrices})
    links = ", ".join(rates)
    parts.note("rates", f"not in a matrix; assumed or given: {links}, {how.pcie} B/s PCIe, {how.sys} B/s between NUMA nodes")
    if how.gpu is not None:
        parts.note("memory, FLOP/s", f"given; {device_source(how.gpu)}")
    return parts.fabric(name)


def _server(parts: Parts, box: str, matrix: TopoMatrix, how: Assumed) -> list[str]:
    from ..nccl.fabric import safe_name

    make = GPUS.get(how.gpu or "")
    actor: dict[int, str] = {}
    taken: set[str] = set()
    for i, label in enumerate(matrix.names):
        base = safe_name(matrix.nic_names.get(label, label.lower()))
        base = base if base not in taken else safe_name(label.lower())
        taken.add(base)
        actor[i] = f"{box}/{base}"
        if label.startswith("GPU"):
            facts = {} if make is None else {
                "memory_bytes": make.memory_bytes, "memory_bandwidth_Bps": make.bandwidth_Bps, "flops": dict(make.flops)}  # fmt: skip
            parts.devices.append(Device(name=actor[i], group=box, **facts))  # type: ignore[arg-type]
        else:
            parts.switches.append(Switch(name=actor[i], group=box))
    for (a, b), cell in matrix.cells.items():
        if matrix.cells.get((b, a), cell) != cell:
            said = f"{matrix.names[a]} - {matrix.names[b]} is {cell}, the other way {matrix.cells[b, a]}"
            raise FormatError(f"contradicts itself: {said}", where=matrix.where, hint="paste the table once more")
    _pcie_tree(parts, box, matrix, actor, how)
    _nvlinks(parts, box, matrix, actor, how)
    return [actor[i] for i, label in enumerate(matrix.names) if not label.startswith("GPU")]


def _level(matrix: TopoMatrix, a: int, b: int) -> str | None:
    """How far up the tree a pair meets; NVLink hides it, then the NUMA column is asked."""
    cell = matrix.cells.get((a, b), matrix.cells.get((b, a), ""))
    if cell in LEVELS:
        return cell
    if a in matrix.numa and b in matrix.numa:
        return "NODE" if matrix.numa[a] == matrix.numa[b] else "SYS"
    return None


def _pcie_tree(parts: Parts, box: str, matrix: TopoMatrix, actor: Mapping[int, str], how: Assumed) -> None:
    """Clusters by level; a cluster of two or more parts of the level below gets a switch."""
    label = list(range(len(matrix.names)))

    def find(i: int) -> int:
        while label[i] != i:
            label[i] = label[label[i]]
            i = label[i]
        return i

    top: dict[int, str] = dict(actor)  # root of a cluster -> what stands for it
    kind: dict[int, str] = dict.fromkeys(top, "")
    pairs = [(a, b, _level(matrix, a, b)) for a in range(len(label)) for b in range(a + 1, len(label))]
    for depth, level in enumerate(LEVELS):
        merged: dict[int, list[int]] = {}
        before = {i: find(i) for i in range(len(label))}
        for a, b, found in pairs:
            if found == level and find(a) != find(b):
                label[find(b)] = find(a)
        for root in dict.fromkeys(before.values()):
            merged.setdefault(find(root), []).append(root)
        for number, (root, children) in enumerate(merged.items()):
            if len(children) < 2:
                top[root], kind[root] = top[children[0]], kind[children[0]]
                continue
            switch = f"{box}/{_NAME[level]}{number}"
            parts.switches.append(Switch(name=switch, group=box))
            for child in children:
                rate = how.sys if level == "SYS" else how.pcie
                library = LIBRARY_NET_S if top[child] in {d.name for d in parts.devices[-len(matrix.names) :]} else 0.0
                parts.cable(top[child], switch, rate, 0.0, LEVELS[depth], library)
            top[root], kind[root] = switch, level


def _nvlinks(parts: Parts, box: str, matrix: TopoMatrix, actor: Mapping[int, str], how: Assumed) -> None:
    gpus = matrix.gpus
    counts = {matrix.nvlinks(a, b) for a in gpus for b in gpus if a != b}
    most, rate = max(counts, default=0), how.nvlink or NVLINK_Bps[matrix.link]
    if len(counts) == 1 and most and most * (len(gpus) - 1) > MAX_NVLINKS and len(gpus) > 2:
        parts.switches.append(Switch(name=f"{box}/nvswitch", group=box))
        for a in gpus:
            parts.cable(actor[a], f"{box}/nvswitch", most * rate, NVSWITCH_S, f"NV{most}", LIBRARY_NVLINK_S)
        return
    for a in gpus:
        for b in gpus:
            if count := matrix.nvlinks(a, b):
                parts.one_way(actor[a], actor[b], count * rate, NVLINK_S, f"{matrix.link}{count}", LIBRARY_NVLINK_S)
