"""Device meshes: which factorisations there are, and how fast each axis is on the fabric.

An axis is priced for what is executed: in every group of the axis at once, each device sends an equal share to each of the others. The traffic of
all groups is laid over the fabric's routes, so groups that share a NIC, a port or a trunk share its rate; the fullest link gives the
seconds per byte that a device sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ....cost import Cost
from ....errors import UsageError
from ....fabric.fabric import Fabric
from ....plan.sbp import coordinates

__all__ = ["Axis", "Mesh", "all_meshes", "factorisations", "make_mesh"]

MAX_DEVICES = 256  # of a search, which routes between all pairs of them
MAX_AXES = 3  # of a mesh: with more, meshes and the states on each become too many to search


@dataclass(frozen=True)
class Axis:
    """`s_per_byte`: seconds per byte that every device sends, all groups at once; `latency_s` per round; `per_message_s` per message."""

    size: int
    s_per_byte: float
    latency_s: float
    per_message_s: float


@dataclass(frozen=True)
class Mesh:
    """Ranks in row-major order: the last axis runs fastest. `devices` are the fabric's devices by rank."""

    axes: tuple[Axis, ...]
    devices: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    def groups(self, axis: int) -> list[list[int]]:
        """The ranks of every group of an axis, groups in order of their first rank."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(coordinates(self.sizes)):
            found.setdefault((*at[:axis], *at[axis + 1 :]), []).append(rank)
        return list(found.values())

    def __str__(self) -> str:
        return " x ".join(map(str, self.sizes))


def factorisations(n: int, *, most: int = MAX_AXES) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations of n into at most `most` factors >= 2, fewest factors first; (1,) for n = 1."""
    if n == 1:
        yield (1,)
        return

    def parts(rest: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (rest,)
            return
        for first in range(2, rest // 2 + 1):
            if rest % first == 0:
                for others in parts(rest // first, count - 1):
                    yield (first, *others)

    for count in range(1, most + 1):
        yield from (f for f in parts(n, count) if min(f) >= 2)


def all_meshes(fabric: Fabric, cost: Cost, *, most: int = MAX_AXES) -> list[Mesh]:
    """Every mesh over all devices in fabric order. A fabric of servers with equal numbers of GPUs has servers x GPUs among them."""
    return [make_mesh(fabric, cost, sizes) for sizes in factorisations(len(fabric.devices), most=most)]


def make_mesh(fabric: Fabric, cost: Cost, sizes: Sequence[int]) -> Mesh:
    """Raises: UsageError where the sizes do not multiply to the fabric's devices or these are too many to route."""
    n = len(fabric.devices)
    if prod(sizes) != n:
        raise UsageError(f"mesh {' x '.join(map(str, sizes))} is not {n} devices", hint="choose sizes that multiply to the number of devices")
    if n > MAX_DEVICES:
        raise UsageError(f"layouts are searched on at most {MAX_DEVICES} devices, the fabric has {n}", hint="name a part of it with --devices")
    unpriced = Mesh(tuple(Axis(p, 0.0, 0.0, 0.0) for p in sizes), tuple(d.name for d in fabric.devices))
    return Mesh(tuple(_axis(fabric, cost, unpriced, i) for i in range(len(sizes))), unpriced.devices)


def _axis(fabric: Fabric, cost: Cost, mesh: Mesh, index: int) -> Axis:
    size = mesh.sizes[index]
    if size == 1:
        return Axis(1, 0.0, 0.0, 0.0)
    groups = tuple(map(tuple, mesh.groups(index)))
    s_per_byte, latency = _loads(fabric, groups)
    transport = cost.transport
    return Axis(size, s_per_byte + 2 * transport.per_byte_s, latency, transport.per_message_s)


def _loads(fabric: Fabric, groups: Sequence[Sequence[int]]) -> tuple[float, float]:
    """(seconds per byte sent by each device, largest latency) when every device sends 1/(p-1) of a byte to each other one of its group."""
    load: Counter[int] = Counter()
    latency = 0.0
    for group in groups:
        for a in group:
            for b in group:
                route = fabric.route(a, b)  # of no link where they are one
                load.update(route)
                latency = max(latency, sum(fabric.links[x].latency_s + fabric.links[x].library_latency_s for x in route))
    parts = len(groups[0])
    fullest = max((count / fabric.links[x].rate_Bps for x, count in load.items()), default=0.0)
    return fullest / (parts - 1), latency
