"""Where the replicas of a profiled layout sit, and the fabric that carries their messages.

One actor is one replica of one stage: `tensor` GPUs of one server that do the same at the same time. Inside a server actors meet in a switch; between
servers a message leaves by its NIC and enters by another, and everything that uses a NIC shares it. A group of t GPUs on one NIC sends t copies
of what each of its ranks sends; with a NIC per GPU every copy has its own and one is simulated.

Measured rates depend on the message's size, links have one rate. So links have the curve's peak and a message of b bytes counts as b * peak / rate(b)
link bytes: alone it takes what was measured, and shared links are shared in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import UsageError
from ....fabric.fabric import Device, Fabric, Link, Switch
from ....profile.network import NetworkProfile, ProfiledLayout, Replica, TrainingRuntime

__all__ = ["Servers", "place"]

FREE_Bps = 10**15  # from a GPU to its NIC and back: the NIC is what limits


@dataclass(frozen=True)
class _Seat:
    server: str
    nic: int
    copies: int  # ranks of this actor that share its NIC
    node: tuple[str, str, int]  # zone, device, GPUs per server


@dataclass(frozen=True)
class Servers:
    """`fabric` has one device per (stage, replica), stage by stage. `link_bytes` gives what a message counts on its links."""

    fabric: Fabric
    seats: tuple[_Seat, ...]
    network: NetworkProfile
    slow: float  # of every measured rate, for error bars

    def link_bytes(self, src: int, dst: int, size_bytes: float) -> int:
        """Bytes on the links of a message of `size_bytes` per rank between two actors. Raises: UnknownName when that was not measured."""
        a, b = self.seats[src], self.seats[dst]
        if a.server == b.server:
            curve = self.network.inside_curve(a.node[1], a.node[2])
            return max(1, round(size_bytes * curve.peak_Bps / curve.rate_Bps(size_bytes) / self.slow))
        curve = self.network.between_curve(a.node, b.node)
        narrow = min(_nic_Bps(self.network, s.node, curve.peak_Bps) for s in (a, b))
        copies = max(a.copies, b.copies)
        return max(1, round(copies * size_bytes * narrow / curve.rate_Bps(size_bytes) / self.slow))


def _nic_Bps(network: NetworkProfile, node: tuple[str, str, int], default: float) -> float:
    """Peak of a NIC: the best of what was measured with it."""
    peaks = [c.peak_Bps for k, c in network.between.items() if node in (k[:3], k[3:])]
    return max(peaks, default=default)


def place(layout: ProfiledLayout, network: NetworkProfile, runtime: TrainingRuntime, *, slow: float = 1.0) -> Servers:
    """Fill servers in order (stage by stage, replica by replica) where the layout names none.

    Raises: UsageError when a replica does not fit a server, or servers named in the layout are overfull or mixed.
    """
    used: dict[str, int] = {}
    kind: dict[str, tuple[str, str, int]] = {}
    open_server: dict[tuple[str, str, int], str] = {}
    seats: list[_Seat] = []
    for s, stage in enumerate(layout.stages):
        for d, replica in enumerate(stage.replicas):
            where = f"stages[{s}].replicas[{d}]"
            gpus = _gpus(replica, runtime, where)
            node = (replica.zone, replica.device, gpus)
            name = replica.server or open_server.get(node, "")
            if not replica.server and (not name or used[name] + replica.tensor > gpus):
                name = open_server[node] = f"server{len(used)}"
            if kind.setdefault(name, node) != node or used.get(name, 0) + replica.tensor > gpus:
                message = f"server {name!r} holds {kind[name][2]} {kind[name][1]} and cannot take {replica.tensor} {replica.device} more"
                raise UsageError(message, where=where)
            slot = used.get(name, 0)
            used[name] = slot + replica.tensor
            nics = runtime.nics_by_device.get(replica.device, runtime.nics_per_server) or gpus
            per_nic = -(-gpus // nics)
            seats.append(_Seat(name, slot // per_nic, min(replica.tensor, per_nic), node))
    return Servers(_fabric(layout, seats, network), tuple(seats), network, slow)


def _gpus(replica: Replica, runtime: TrainingRuntime, where: str) -> int:
    gpus = runtime.gpus_per_server.get(replica.device)
    if gpus is None:
        known = ", ".join(sorted(runtime.gpus_per_server)) or "none"
        raise UsageError(f"the number of {replica.device} per server is missing", where=where, hint=f"set gpus_per_server; it has: {known}")
    if replica.tensor > gpus:
        raise UsageError(
            f"tensor degree {replica.tensor} is above the {gpus} {replica.device} of a server",
            where=where, hint="use a degree that fits into a server",
        )  # fmt: skip
    return gpus


def _fabric(layout: ProfiledLayout, seats: list[_Seat], network: NetworkProfile) -> Fabric:
    devices, switches, links = [], [Switch(name="core")], []
    for i, seat in enumerate(seats):
        devices.append(Device(name=f"stage{i // layout.data}.{i % layout.data}", group=seat.server))
    for server in dict.fromkeys(s.server for s in seats):
        members = [(d.name, s) for d, s in zip(devices, seats, strict=True) if s.server == server]
        node = members[0][1].node
        inside = network.inside.get((node[1], node[2]))
        if inside is not None:
            switches.append(Switch(name=f"{server}.inside", group=server))
            hub, speed = f"{server}.inside", round(inside.peak_Bps)
            for name, _ in members:
                links += [Link(src=name, dst=hub, rate_Bps=speed), Link(src=hub, dst=name, rate_Bps=speed)]
        rate = round(_nic_Bps(network, node, 0.0))
        if not rate:
            continue
        for nic in sorted({s.nic for _, s in members}):
            out, into = f"{server}.nic{nic}.out", f"{server}.nic{nic}.in"
            switches += [Switch(name=out, group=server), Switch(name=into, group=server)]
            links += [Link(src=out, dst="core", rate_Bps=rate), Link(src="core", dst=into, rate_Bps=rate)]
            for name, seat in members:
                if seat.nic == nic:
                    links += [Link(src=name, dst=out, rate_Bps=FREE_Bps), Link(src=into, dst=name, rate_Bps=FREE_Bps)]
    return Fabric(name=layout.name or "profiled", devices=tuple(devices), switches=tuple(switches), links=tuple(links))
