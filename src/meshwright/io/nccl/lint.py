"""What is wrong or unlikely in an NCCL topology file, by line; the rules come from issues that its users report.

A placeholder bridge of 2.5 GT/s x1 above GPUs makes NCCL plan with 0.2 GB/s; a dump lacks NICs unless the network was used; a GPU whose
NVLinks the driver did not report is silently planned around; a speed of 0 counts as 10 Gbit/s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy

from ...fabric.lint import MAX_OF_A_KIND, SEVERITIES, Finding
from .fabric import bus_id
from .topology import NcclPci, NcclSystem

__all__ = ["NCCL_RULES", "lint_nccl", "repaired_nccl"]

NCCL_RULES = {  # what each looks for; docs/clusters.md lists them
    "slow-pcie": "a bridge, GPU or NIC below 3 GB/s, such as the placeholder of 2.5 GT/s x1 above a virtual machine's GPUs",
    "unknown-speed": "a link_speed that NCCL does not know: it plans with gen 3",
    "no-speed": "no link_speed: NCCL plans with gen 3",
    "no-nic": "a file without a NIC: dumps hold NICs only where the network was used",
    "no-net-speed": "a NIC of speed 0: NCCL counts 10 Gbit/s",
    "pcie-only": "NICs or GPUs of which a cloud's file says only where they are on PCIe: no rate of a port, no NVLinks",
    "net-twice": "a NIC that is there twice",
    "no-nvlink": "GPUs that could have NVLinks and have none",
    "uneven-nvlinks": "a GPU with more or fewer NVLinks than most",
    "one-way-nvlink": "more NVLinks from one GPU to another than back",
    "far-nic": "GPUs without a NIC under their own CPU, where others have one",
    "no-gdr": "a NIC that cannot read a GPU's memory directly",
}
SLOW_Bps = 3_000_000_000


def lint_nccl(system: NcclSystem) -> list[Finding]:
    """All findings, errors first."""
    found: list[Finding] = []
    for rule in (_speeds, _nics, _nvlinks, _back_links, _placement, _direct):
        some = list(rule(system))
        found += some[:MAX_OF_A_KIND]
        if len(some) > MAX_OF_A_KIND:
            found.append(Finding(some[0].severity, some[0].rule, system.where, f"and {len(some) - MAX_OF_A_KIND} more like this", some[0].hint))
    return sorted(found, key=lambda f: SEVERITIES.index(f.severity))


def repaired_nccl(system: NcclSystem, rule: str) -> NcclSystem | None:
    """The file with every finding of this rule put right, for saying what it costs; None for rules without a repair.

    slow-pcie: as fast as the fastest PCIe device of the file, or gen 3 x16 where all are slow.
    """
    slow = [number for number, (_, pci) in enumerate(system.devices()) if pci.rate_Bps < SLOW_Bps and _behind(pci)]
    if rule != "slow-pcie" or not slow:
        return None
    changed = deepcopy(system)
    devices = [pci for _, pci in changed.devices()]
    best = max(devices, key=lambda pci: pci.rate_Bps)
    speed, width = (best.speed, best.width) if best.rate_Bps >= SLOW_Bps else ("8.0 GT/s PCIe", 16)
    for number in slow:
        devices[number].speed, devices[number].width = speed, width
    return changed


def _behind(pci: NcclPci) -> list[NcclPci]:
    return [p for p in pci.walk() if p.is_gpu or p.is_nic]


def _at(system: NcclSystem, line: int, what: str) -> str:
    return f"{system.where}: line {line}: {what}"


def _speeds(system: NcclSystem) -> Iterator[Finding]:
    for _, pci in system.devices():
        where = _at(system, pci.line, f"<pci {pci.busid}>")
        behind = _behind(pci)
        if not behind:
            continue
        if pci.lane is None and pci.speed:
            yield Finding(
                "warning",
                "unknown-speed",
                where,
                f"link_speed {pci.speed[:32]!r} is not one NCCL knows; it plans with gen 3",
                'write it as "16.0 GT/s PCIe"',
            )
        elif pci.lane is None:
            yield Finding("note", "no-speed", where, "no link_speed; NCCL plans with PCIe gen 3", 'add link_speed="16.0 GT/s PCIe" link_width="16"')
        if pci.rate_Bps < SLOW_Bps:
            many = f"{len(behind)} devices" if len(behind) > 1 else "the device"
            what = "bridge" if pci.below else "GPU" if pci.is_gpu else "NIC"
            yield Finding(
                "error",
                "slow-pcie",
                where,
                f"{what} at {pci.speed or 'no speed'} x{pci.width}: {pci.rate_Bps / 1e9:.2g} GB/s for {many} {'behind' if pci.below else 'on'} it",
                "a virtual machine's placeholder, or a card that trained down: write the real link_speed and link_width, or reseat the card",
            )


def _nics(system: NcclSystem) -> Iterator[Finding]:
    nets = [(pci.line, net) for _, pci in system.devices() for net in pci.nets] + [(cpu.line, net) for cpu in system.cpus for net in cpu.nets]
    bare = [pci for _, pci in system.devices() if pci.is_nic and not pci.nets]
    if not nets and not bare:
        yield Finding("warning", "no-nic", system.where, "no NIC in the file", "a dump holds NICs only if the network was used: dump with two nodes")
    for line, net in nets:
        if net.speed_Mbitps <= 0:
            yield Finding(
                "warning", "no-net-speed", _at(system, line, f"<net {net.name[:32]}>"), "speed is 0; NCCL counts 10 Gbit/s", "write the port's Mbit/s"
            )
    dark = [pci for _, pci in system.devices() if pci.is_gpu and pci.gpu is None]
    if bare or dark:
        said = [f"the file says no rate of {len(bare)} NICs: NCCL counts 10 Gbit/s each"] if bare else []
        said += [f"it says no NVLinks of {len(dark)} GPUs"] if dark else []
        hint = "a cloud's file of the PCIe tree: import it with what it leaves out, e.g. --nic 25GB/s --nvswitch 300GB/s --gpu a100"
        yield Finding("warning", "pcie-only", system.where, "; ".join(said), hint)
    names = Counter(net.name for _, net in nets if net.name)
    for name, count in names.items():
        if count > 1 and len({net.port for _, net in nets if net.name == name}) < count and len(system.hosts) == 1:
            yield Finding("warning", "net-twice", system.where, f"the NIC {name[:32]} is there {count} times", "give each port its own name or port")


def _nvlinks(system: NcclSystem) -> Iterator[Finding]:
    gpus = [(pci, sum(link.count for link in pci.gpu.links if link.kind != "c2c")) for _, pci in system.devices() if pci.gpu is not None]
    if len(gpus) > 1 and not any(total for _, total in gpus) and any(pci.gpu is not None and pci.gpu.sm >= 70 for pci, _ in gpus):
        hint = "right for PCIe cards; else dump it on the machine, or import with --nvswitch"
        yield Finding("note", "no-nvlink", system.where, "no GPU has NVLinks", hint)
    if not gpus:
        return
    usual, how_many = Counter(total for _, total in gpus).most_common(1)[0]
    for pci, total in gpus if 2 * how_many > len(gpus) else []:
        if total != usual:
            message = f"GPU with {total} NVLinks, most have {usual}"
            hint = "`nvidia-smi nvlink --status` on that GPU; reset it or the fabric manager"
            where = _at(system, pci.line, f"<pci {pci.busid}>")
            yield Finding("warning" if total else "error", "uneven-nvlinks", where, message, hint)


def _back_links(system: NcclSystem) -> Iterator[Finding]:
    """GPU to GPU: as many links back."""
    firsts: dict[tuple[str, str], tuple[int, str, str]] = {}  # line and ids as they are written
    counts: dict[tuple[str, str], int] = {}
    for _, pci in system.devices():
        for link in pci.gpu.links if pci.gpu is not None else ():
            if (
                link.kind in ("nvlink", "xgmi")
                and link.target_class not in ("0x068000", "0x068001")
                and not link.target.lower().startswith("fffffff")
            ):
                pair = bus_id(pci.busid), bus_id(link.target)
                counts[pair] = counts.get(pair, 0) + link.count
                firsts.setdefault(pair, (link.line, pci.busid, link.target))
    for (a, b), count in counts.items():
        if counts.get((b, a), 0) != count and (a < b or (b, a) not in counts):
            line, here, there = firsts[a, b]
            message = f"{count} links to {there}, {counts.get((b, a), 0)} back"
            hint = "links carry both directions: give both the same count"
            yield Finding("warning", "one-way-nvlink", _at(system, line, f"<pci {here}>"), message, hint)


def _placement(system: NcclSystem) -> Iterator[Finding]:
    """GPUs without a NIC under their own CPU, while others have one."""
    near: dict[str, bool] = {}
    line: dict[str, int] = {}
    for cpu in system.cpus:
        devices: list[NcclPci] = [pci for top in cpu.below for pci in top.walk()]
        has = any(pci.is_nic for pci in devices) or bool(cpu.nets)
        for pci in devices:
            if pci.is_gpu:
                near[pci.busid], line[pci.busid] = has, pci.line
    if any(near.values()):
        for bus, has in near.items():
            if not has:
                yield Finding(
                    "warning",
                    "far-nic",
                    _at(system, line[bus], f"<pci {bus}>"),
                    "no NIC under the GPU's own CPU: its traffic crosses sockets",
                    "right if the machine is built so; else the dump lacks NICs",
                )


def _direct(system: NcclSystem) -> Iterator[Finding]:
    for _, pci in system.devices():
        if pci.gpu is not None and pci.gpu.gdr == 0:
            yield Finding(
                "note",
                "no-gdr",
                _at(system, pci.line, f"<pci {pci.busid}>"),
                "gdr is 0: the NIC cannot read this GPU's memory directly",
                "load nvidia-peermem, or use dma-buf",
            )
