"""Fabrics of the machines in `machines.toml`: one builder for servers, whose insides are one of five shapes, and one for TPU slices.

Inside a server: all devices on an NVSwitch; every pair linked; a PCIe tree of switches under sockets; a torus; or one device alone. Outside: its
ports, each for one device or for several in order, on the network that `?net=` chooses. A slice is a torus of any size, its hosts' ports the
network between slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from ..errors import UsageError
from .fabric import Fabric, Switch
from .machines import MACHINES, SOURCES, Machine
from .preset_parts import (
    LIBRARY_NET_S,
    LIBRARY_NVLINK_S,
    MEMORY,
    NETWORK,
    NVLINK_S,
    Chosen,
    Option,
    Parts,
    Preset,
    device_notes,
    devices_of,
    network,
    nic_switches,
    nvswitch_box,
    own_nics,
    rate_note,
)

__all__ = ["machine_presets", "slice_sides"]

_LINK = {
    "nvswitch": ("nvlink", "GPU - NVSwitch rate", Option("rate", "NVLink rate of one GPU to NVSwitch")),
    "mesh": ("xgmi", "xGMI rate", Option("rate", "rate of one xGMI link")),
    "torus": ("link", "rate of a link between devices", Option("rate", "rate of one link between devices")),
    "slice": ("link", "rate of a link between chips", Option("rate", "rate of one link between chips")),
    "pcie": ("link", "rate of a device's PCIe link", Option("rate", "rate of one device's PCIe link")),
}
_OTHERS_LATENCY = "not published by the maker; as of NVLink and InfiniBand in TE-CCL's models (0.7 us, 1.3 us) and NCCL's constants"


def machine_presets() -> list[Preset]:
    """A preset for each machine, in the table's order."""
    return [_slice_preset(m) if m.shape == "slice" else _server_preset(m) for m in MACHINES.values()]


def _note_machine(parts: Parts, machine: Machine) -> None:
    parts.note("machine", "; ".join(str(SOURCES[s]) for s in machine.sources))
    if machine.assumed:
        parts.note("assumed", machine.assumed)


def _latency(machine: Machine) -> dict[str, str]:
    return {"latency": _OTHERS_LATENCY} if machine.shape in ("torus", "slice") else {}


# ---- servers -----------------------------------------------------------------------------------------------------------
def _server_preset(machine: Machine) -> Preset:
    options = dict(NETWORK)
    if machine.shape in _LINK:
        name, _, option = _LINK[machine.shape]
        options[name] = option
    if machine.choices:
        options |= {"gpu": Option("choice", "its GPUs", machine.choices), "gpus": Option("count", f"GPUs in a box (default {machine.devices})")}
    count = (lambda n, chosen: n * (chosen.gpus or machine.devices)) if machine.choices else None
    return Preset(
        machine.name, machine.summary, machine.unit, 1, machine.devices, options, _server(machine), count, aliases=machine.aliases,
        sources=tuple(str(SOURCES[s]) for s in machine.sources),
    )  # fmt: skip


def _server(machine: Machine) -> Callable[[int, str, Chosen], Fabric]:
    def build(n: int, name: str, chosen: Chosen) -> Fabric:
        parts = Parts()
        made = replace(machine, device=chosen.gpu or machine.device, devices=chosen.gpus or machine.devices)
        rate = _link_rate(parts, made, chosen)
        what = "GPU - NIC - network rate" if made.nics == made.devices and made.shape != "pcie" else "NIC - network rate"
        nic_rate = rate_note(parts, what, chosen.nic, made.nic_Bps, made.took["nic"]) if n > 1 else 0
        ports = []
        for box in range(n):
            devices = devices_of(parts, f"box{box}", made.devices, made.device, chosen.memory, "gpu" if made.shape != "torus" else "chip")
            hangs_on = _inside(parts, f"box{box}", devices, made, rate)
            if n > 1:
                ports.append(_ports(parts, f"box{box}", devices, hangs_on, made, nic_rate))
        if n > 1:
            network(parts, ports, nic_rate, chosen, default=made.net)
        device_notes(parts, chosen.memory, made.device, **_latency(made))
        _note_machine(parts, made)
        return parts.fabric(name)

    return build


def _link_rate(parts: Parts, machine: Machine, chosen: Chosen) -> int:
    """The rate inside a server, given or the machine's own, noted."""
    if machine.shape not in _LINK:
        return 0
    option, what, _ = _LINK[machine.shape]
    default, source = (machine.pcie_Bps, machine.took["pcie"]) if machine.shape == "pcie" else (machine.link_Bps, machine.took["link"])
    return rate_note(parts, what, getattr(chosen, option), default, source)


def _inside(parts: Parts, group: str, devices: Sequence[str], machine: Machine, rate_Bps: int) -> list[str]:
    """Links the devices of one server; returns for each the actor that its network port hangs on."""
    if machine.shape == "nvswitch":
        nvswitch_box(parts, group, devices, rate_Bps, machine.link_kind, in_network=machine.in_network)
    elif machine.shape == "mesh":
        for i, a in enumerate(devices):
            for b in devices[i + 1 :]:
                parts.cable(a, b, rate_Bps, NVLINK_S, machine.link_kind, LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)
    elif machine.shape == "torus":
        _torus(parts, devices, machine.torus, (True,) * len(machine.torus), rate_Bps, machine.link_kind)
    elif machine.shape == "pcie":
        return _pcie_tree(parts, group, devices, machine, rate_Bps)
    return list(devices)


def _pcie_tree(parts: Parts, group: str, devices: Sequence[str], machine: Machine, rate_Bps: int) -> list[str]:
    """GPUs under PCIe switches (left out where each has its own way) under sockets, sockets joined; the point above each GPU."""
    sockets = [f"{group}/cpu{i}" for i in range(-(-len(devices) // machine.per_socket))]
    above: list[str] = []
    for i, device in enumerate(devices):
        socket = sockets[i // machine.per_socket]
        if machine.per_switch == 1:
            point, kind = socket, "PHB"
        else:
            point, kind = f"{group}/pcie{i // machine.per_switch}", "PIX"
            if point not in above:
                parts.switches.append(Switch(name=point, group=group))
                parts.cable(point, socket, rate_Bps, 0.0, "PHB")
        parts.cable(device, point, rate_Bps, 0.0, kind, LIBRARY_NET_S)
        above.append(point)
    parts.switches += [Switch(name=socket, group=group) for socket in sockets]
    for i, a in enumerate(sockets):
        for b in sockets[i + 1 :]:
            parts.cable(a, b, machine.socket_Bps, 0.0, "SYS")
    return above


def _ports(parts: Parts, group: str, devices: Sequence[str], hangs_on: Sequence[str], machine: Machine, nic_rate_Bps: int) -> list[str]:
    """A NIC for each device, or NICs that several devices share in order; on a PCIe tree, spread over its switches."""
    if machine.shape != "pcie" and machine.nics == len(devices):
        return own_nics(parts, group, devices, nic_rate_Bps)
    names = nic_switches(parts, group, machine.nics)
    if machine.shape == "pcie":
        points = list(dict.fromkeys(hangs_on))
        for j, nic in enumerate(names):
            parts.cable(points[j * len(points) // len(names)], nic, machine.pcie_Bps, 0.0, "PIX")
        return names
    per_nic = -(-len(devices) // len(names))
    for i, device in enumerate(devices):
        parts.cable(device, names[i // per_nic], machine.pcie_Bps, 0.0, "PIX" if per_nic <= 2 else "PHB", LIBRARY_NET_S)
    return names


# ---- tori --------------------------------------------------------------------------------------------------------------
def _torus(parts: Parts, names: Sequence[str], sides: Sequence[int], wrap: Sequence[bool], rate_Bps: int, kind: str) -> None:
    """Cables between neighbours; `names` by coordinates, the last fastest. An axis of side 2 has one cable, wrapped or not."""
    strides = [prod(sides[axis + 1 :]) for axis in range(len(sides))]
    for number, at in enumerate(product(*map(range, sides))):
        for axis, stride in enumerate(strides):
            step = at[axis] + 1
            if step < sides[axis] or (wrap[axis] and sides[axis] > 2):
                there = number + stride * (step % sides[axis] - at[axis])
                parts.cable(names[number], names[there], rate_Bps, NVLINK_S, kind, LIBRARY_NVLINK_S, LIBRARY_NVLINK_S)


def slice_sides(machine: Machine, chips: int, topology: Sequence[int] | None) -> tuple[int, ...]:
    """The sides of a slice: those given, or the provider's usual ones for so many chips, which are powers of two as equal as can be.

    Raises: UsageError where the sides do not make so many chips, or no slice has so many.
    """
    where = f"{machine.name}:{chips}"
    if chips > machine.most:
        raise UsageError(f"at most {machine.most} chips in a slice, got {chips}", where=where, hint="several slices: ?slices=2")
    if topology is not None:
        if prod(topology) != chips or len(topology) != machine.axes:
            shown = "x".join(map(str, topology))
            raise UsageError(f"topology={shown} does not have {machine.axes} sides that make {chips} chips", where=where)
        return tuple(topology)
    power = chips.bit_length() - 1
    if chips != 1 << power or chips == 2 or (chips == 1 and machine.axes == 3):
        raise UsageError(f"no usual slice has {chips} chips", where=where, hint="4, 8, 16, 32, ...; or give the sides: ?topology=4x4x12")
    return tuple(sorted((1 << (power + axis) // machine.axes for axis in range(machine.axes)), key=lambda side: (side == 1, side)))


def _slice_preset(machine: Machine) -> Preset:
    option, _, link = _LINK["slice"]
    options = {**NETWORK, "memory": MEMORY, option: link, "topology": Option("sides", "sides of the torus, such as 4x4x8"),
               "slices": Option("count", "equal slices, joined by their hosts' ports (default 1)")}  # fmt: skip
    return Preset(
        machine.name, machine.summary, "chips of a slice", 16, 0, options, _slices(machine), lambda n, chosen: n * chosen.slices,
        sources=tuple(str(SOURCES[s]) for s in machine.sources), aliases=machine.aliases,
    )  # fmt: skip


def _slices(machine: Machine) -> Callable[[int, str, Chosen], Fabric]:
    def build(n: int, name: str, chosen: Chosen) -> Fabric:
        sides = slice_sides(machine, n, chosen.topology)
        whole = machine.wrap == "multiples of 4" and all(side % 4 == 0 for side in sides)
        wrap = [whole or (machine.wrap == "axes of 16" and side == 16) for side in sides]
        parts = Parts()
        rate = _link_rate(parts, machine, chosen)
        nic_rate = rate_note(parts, "host's port, between slices", chosen.nic, machine.nic_Bps, machine.took["nic"]) if chosen.slices > 1 else 0
        ports = [port for s in range(chosen.slices) for port in _slice(parts, f"slice{s}", machine, chosen, sides, wrap, rate, nic_rate)]
        if chosen.slices > 1:
            network(parts, ports, nic_rate, chosen)
        closed = [axis for axis, closes in enumerate(wrap) if closes and sides[axis] > 2]
        parts.note("shape", f"{'x'.join(map(str, sides))} chips; " + (f"axes {closed} closed to rings" if closed else "no axis closed: a mesh"))
        device_notes(parts, chosen.memory, machine.device, **_latency(machine))
        _note_machine(parts, machine)
        return parts.fabric(name)

    return build


def _slice(
    parts: Parts, group: str, machine: Machine, chosen: Chosen, sides: Sequence[int], wrap: Sequence[bool], rate_Bps: int, nic_rate_Bps: int,
) -> list[list[str]]:  # fmt: skip
    """One slice, chips numbered host by host (a host is a block of 2x2 or 2x4 chips); a port per host where there are several slices."""
    block = [min(side, most) for side, most in zip(sides, (2, machine.per_host // 2, 1), strict=False)]
    hosts: dict[tuple[int, ...], list[int]] = {}
    for number, at in enumerate(product(*map(range, sides))):
        hosts.setdefault(tuple(x // b for x, b in zip(at, block, strict=True)), []).append(number)
    names = [""] * prod(sides)
    ports = []
    for h, key in enumerate(sorted(hosts)):
        made = devices_of(parts, f"{group}/host{h}", len(hosts[key]), machine.device, chosen.memory, "chip")
        for number, chip in zip(hosts[key], made, strict=True):
            names[number] = chip
        if nic_rate_Bps:
            (port,) = nic_switches(parts, f"{group}/host{h}", 1)
            for chip in made:
                parts.cable(chip, port, nic_rate_Bps, 0.0, "PHB", LIBRARY_NET_S)
            ports.append([port])
    _torus(parts, names, sides, wrap, rate_Bps, machine.link_kind)
    return ports
