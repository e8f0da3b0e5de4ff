"""A network as a design: its parts, its bandwidth shares and its fabric; what HammingMesh and its rivals have in common.

All have the same injection, so that they can be compared: an accelerator has `planes` x `links` ports of one rate. Planes are alike and carry equal
shares; in `fabric()` they are one plane whose links have the rate of all planes together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from ....errors import Unsupported
from ....fabric.fabric import Device, Fabric, Link, Provenance, Switch
from ..problem import TopologyProblem

__all__ = ["Builder", "NetworkDesign", "Tree", "fat_tree_parts", "grid_sides", "made"]


@dataclass(frozen=True, kw_only=True)
class NetworkDesign:
    """`links`: of one accelerator in one plane. `parts`: of all planes. `global_bound`: no more of the injection can be all-to-all traffic, by a cut.

    all_reduce_share: of the injection that rings keep busy. diameter: most links between two accelerators. grid: rows and columns of accelerators,
    in the fabric's order, whose neighbours are joined as on a torus; None where they are no grid.
    """

    name: str
    strategy: str
    nodes: int
    planes: int
    links: int
    parts: Mapping[str, int]
    global_bound: Fraction
    diameter: int
    all_reduce_share: Fraction = Fraction(1)
    grid: tuple[int, int] | None = None
    build: Callable[[Builder], None]

    @property
    def ports(self) -> int:
        return self.planes * self.links

    def fabric(self, problem: TopologyProblem) -> Fabric:
        builder = Builder(self.planes * problem.rate_Bps, problem.latency_s)
        self.build(builder)
        return builder.fabric(self.name.replace(" ", "-"), f"{self.name}, {self.planes} planes of {problem.rate_Bps} B/s as one")


class Builder:
    """A fabric in the making. Cables between the same two ends add up to one link."""

    def __init__(self, rate_Bps: int, latency_s: float) -> None:
        self.rate_Bps, self.latency_s = rate_Bps, latency_s
        self.devices: list[Device] = []
        self.switches: list[Switch] = []
        self.rates: dict[tuple[str, str], int] = {}

    def device(self, name: str, group: str) -> str:
        self.devices.append(Device(name=name, kind="gpu", group=group))
        return name

    def switch(self, name: str) -> str:
        self.switches.append(Switch(name=name))
        return name

    def cable(self, a: str, b: str, count: int = 1) -> None:
        """Both ways, `count` cables of one port's rate in every plane."""
        self.link(a, b, count)
        self.link(b, a, count)

    def link(self, a: str, b: str, count: int = 1) -> None:
        """One way of such cables. Of links out of one place the earlier ones are preferred by routes."""
        self.rates[a, b] = self.rates.get((a, b), 0) + count * self.rate_Bps

    def fabric(self, name: str, source: str) -> Fabric:
        links = tuple(Link(src=a, dst=b, rate_Bps=rate, latency_s=self.latency_s) for (a, b), rate in self.rates.items())
        note = Provenance(what="network", source=source)
        return Fabric(name=name, devices=tuple(self.devices), switches=tuple(self.switches), links=links, provenance=(note,))


@dataclass(frozen=True)
class Tree:
    """Parts of a fat tree: `uplinks` are cables between switches, `leaves` the switches below."""

    leaves: int
    switches: int
    uplinks: int
    levels: int


def fat_tree_parts(ends: int, radix: int, down: int | None = None) -> Tree:
    """Over `ends` ports of switches with `radix` ports; a leaf has `down` ports below (half of them: non-blocking), the rest above.

    Only leaves are tapered: what is above them is non-blocking. One switch where it is enough, two levels while spines reach all leaves, else three.
    Raises: Unsupported for more ends than three levels reach: a switch at the top has a port for each group of `radix // 2` leaves.
    """
    half = radix // 2
    down = half if down is None else down
    if ends <= radix:
        return Tree(1, 1, 0, 1)
    leaves = ceil(ends / down)
    uplinks = leaves * (radix - down)
    if leaves <= radix:
        return Tree(leaves, leaves + ceil(uplinks / radix), uplinks, 2)
    if leaves > radix * half:
        text = f"{ends} ends are more than {radix * half * down}, which three levels of switches with {radix} ports reach"
        raise Unsupported(text, where="fat tree", hint="larger switches (switch_ports in the price file)")
    middle = ceil(uplinks / half)
    return Tree(leaves, leaves + middle + ceil(middle * half / radix), uplinks + middle * half, 3)


def grid_sides(count: int) -> tuple[int, int]:
    """(rows, columns) of the smallest grid with at least `count` cells, sides at most twice each other; of equals the squarest."""
    best: tuple[int, int, int] | None = None
    for rows in range(1, int(count**0.5) + 2):
        columns = max(rows, ceil(count / rows))
        if columns <= 2 * rows and (best is None or (rows * columns, columns) < (best[0], best[2])):
            best = rows * columns, rows, columns
    assert best is not None, "rows near the square root are always tried"
    return best[1], best[2]


def made(designs: Sequence[Callable[[], NetworkDesign]]) -> tuple[NetworkDesign, ...]:
    """Those that can be built. Raises: Unsupported, as the last one does, where none can."""
    found = []
    for design in designs:
        try:
            found.append(design())
        except Unsupported as error:
            refused = error
    if not found:
        raise refused
    return tuple(found)
