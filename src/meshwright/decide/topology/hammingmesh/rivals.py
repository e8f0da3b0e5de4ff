"""What HammingMesh is compared with: fat trees, tapered too, Dragonfly, HyperX and the torus, with the same injection per accelerator.

Cite: C. Leiserson, "Fat-trees" (IEEE Transactions on Computers, 1985); J. Kim and others, "Technology-Driven, Highly-Scalable Dragonfly Topology"
(ISCA 2008); J. Ahn and others, "HyperX" (SC 2009).
Left open by the papers: sizes. Our answer: fat trees of as few levels as reach all, leaves tapered to 32, 42 or 51 of 64 ports below; balanced
Dragonflies (a = 2p = 2h); HyperX in two dimensions; a torus of boards of 2 x 2.
Deviations: cables inside a Dragonfly's group are copper.
Invariant: 16 ports of one rate per accelerator. Cost: closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil
from typing import ClassVar

import numpy as np

from ....cite import FOLKLORE, Cite
from ....errors import UsageError
from ..problem import Question, TopologyProblem, TopologyStrategy
from .network import Builder, NetworkDesign, fat_tree_parts, grid_sides, made
from .strategy import LINKS, Mesh, mesh_design

__all__ = ["Dragonfly", "FatTree", "HyperX", "Torus"]

FAT_TREE_CITE = Cite(
    key="leiserson1985fattrees", title="Fat-trees: Universal networks for hardware-efficient supercomputing", authors="C. Leiserson", year=1985,
    venue="IEEE Transactions on Computers C-34(10)",
)  # fmt: skip
DRAGONFLY_CITE = Cite(
    key="kim2008dragonfly", title="Technology-Driven, Highly-Scalable Dragonfly Topology", authors="J. Kim, W. Dally, S. Scott, D. Abts", year=2008,
    venue="ISCA",
)  # fmt: skip
HYPERX_CITE = Cite(
    key="ahn2009hyperx", title="HyperX: topology, routing, and packaging of efficient large-scale networks", authors="J. Ahn and others", year=2009,
    venue="SC",
)  # fmt: skip
PORTS = 16  # of an accelerator, as four planes of HammingMesh have
TAPERS = {0: Fraction(1, 2), 50: Fraction(42, 64), 75: Fraction(51, 64)}  # per cent of the uplinks that are saved -> share of a leaf's ports below


@dataclass(frozen=True, kw_only=True)
class FatTree(TopologyStrategy):
    """Options. taper: per cent of the leaves' uplinks that are saved, 0, 50 or 75; -1 = all three."""

    name: ClassVar[str] = "fat-tree"
    cite: ClassVar[Cite] = FAT_TREE_CITE
    answers: ClassVar[Question] = "network"

    taper: int = -1

    def plan(self, problem: TopologyProblem, *, rng: np.random.Generator) -> tuple[NetworkDesign, ...]:
        """Those that so few levels reach. Raises: UsageError, Unsupported where that is none."""
        if self.taper not in (-1, *TAPERS):
            raise UsageError(f"taper must be {', '.join(map(str, TAPERS))} or -1, got {self.taper}", where=self.name)
        radix = problem.prices.switch_ports
        tapers = [0] if problem.nodes <= radix else list(TAPERS)
        return made([partial(self._design, problem.nodes, radix, t) for t in (tapers if self.taper < 0 else [self.taper])])

    def _design(self, nodes: int, radix: int, taper: int) -> NetworkDesign:
        down = max(1, int(TAPERS[taper] * radix))
        tree = fat_tree_parts(nodes, radix, down)
        parts = {"switch": PORTS * tree.switches, "copper cable": PORTS * nodes, "optical cable": PORTS * tree.uplinks}
        leaf = nodes if tree.levels == 1 else min(down, nodes)
        share = min(Fraction(1), Fraction(radix - down, leaf) * Fraction(nodes - 1, nodes - leaf)) if leaf < nodes else Fraction(1)

        def build(builder: Builder) -> None:
            names = [builder.device(f"d{i}", f"leaf{i // leaf}") for i in range(nodes)]
            leaves = [builder.switch(f"leaf{i}") for i in range(ceil(nodes / leaf))]
            for i, name in enumerate(names):
                builder.cable(name, leaves[i // leaf])
            if len(leaves) > 1:
                spine = builder.switch("spine")
                for one in leaves:
                    builder.cable(one, spine, radix - down)

        name = f"fat tree {nodes}" + (f" tapered {taper} %" if taper else "")
        return NetworkDesign(
            name=name, strategy=self.name, nodes=nodes, planes=PORTS, links=1, parts=parts, global_bound=share, build=build, diameter=2 * tree.levels,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dragonfly(TopologyStrategy):
    """Options. accelerators: of one switch, p; a group has 2p switches with p cables to other groups each; 0 = chosen."""

    name: ClassVar[str] = "dragonfly"
    cite: ClassVar[Cite] = DRAGONFLY_CITE
    answers: ClassVar[Question] = "network"

    accelerators: int = 0

    def plan(self, problem: TopologyProblem, *, rng: np.random.Generator) -> tuple[NetworkDesign, ...]:
        """Raises: UsageError."""
        radix = problem.prices.switch_ports
        p = self.accelerators or max(1, radix // 4)
        if not 1 <= p <= radix // 4:
            raise UsageError(f"accelerators must be 1..{radix // 4} with switches of {radix} ports, got {p}", where=self.name)
        if not self.accelerators:  # groups as large as there are accelerators for, and switches that reach all groups
            p = max([1, *(q for q in range(1, p + 1) if 2 * q * q <= problem.nodes)])
            p += ceil(problem.nodes / (2 * p * p)) > 2 * p * p + 1 and p < radix // 4
        a = 2 * p
        groups = ceil(problem.nodes / (p * a))
        if groups > a * p + 1:
            raise UsageError(f"{groups} groups have no cable to each other", where=self.name, hint="more accelerators on a switch")
        nodes, outward = p * a * groups, a * p if groups > 1 else 0
        parts = {
            "switch": PORTS * a * groups, "copper cable": PORTS * (nodes + groups * a * (a - 1) // 2),
            "optical cable": PORTS * (groups * outward // 2),
        }  # fmt: skip
        share = min(Fraction(1), Fraction(outward, a * p) * Fraction(nodes - 1, nodes - a * p)) if groups > 1 else Fraction(1)

        def build(builder: Builder) -> None:
            routers = [[builder.switch(f"group{g}/router{i}") for i in range(a)] for g in range(groups)]
            for i in range(nodes):
                builder.cable(builder.device(f"d{i}", f"group{i // (a * p)}"), routers[i // (a * p)][i % (a * p) // p])
            for row in routers:
                for i in range(a):
                    for j in range(i + 1, a):
                        builder.cable(row[i], row[j])
            used = [0] * groups
            for _ in range(outward // max(1, groups - 1)):  # as many cables between any two groups
                for g in range(groups):
                    for h in range(g + 1, groups):
                        builder.cable(routers[g][used[g] % a], routers[h][used[h] % a])
                        used[g], used[h] = used[g] + 1, used[h] + 1

        return (
            NetworkDesign(name=f"Dragonfly {groups} groups", strategy=self.name, nodes=nodes, planes=PORTS, links=1, parts=parts, build=build,
                          global_bound=share, diameter=5 if groups > 1 else 3),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HyperX(TopologyStrategy):
    """No options. Two dimensions: a HammingMesh with boards of one accelerator."""

    name: ClassVar[str] = "hyperx"
    cite: ClassVar[Cite] = HYPERX_CITE
    answers: ClassVar[Question] = "network"

    def plan(self, problem: TopologyProblem, *, rng: np.random.Generator) -> tuple[NetworkDesign, ...]:
        mesh = Mesh(1, 1, *grid_sides(problem.nodes))
        design = mesh_design(mesh, PORTS // LINKS, problem.prices.switch_ports, self.name)
        return (NetworkDesign(**{**vars(design), "name": f"HyperX {mesh.rows}x{mesh.columns}"}),)


@dataclass(frozen=True, kw_only=True)
class Torus(TopologyStrategy):
    """No options. Boards of 2 x 2 accelerators with two cables to the right and two downwards in every plane."""

    name: ClassVar[str] = "torus"
    cite: ClassVar[Cite] = FOLKLORE
    answers: ClassVar[Question] = "network"

    def plan(self, problem: TopologyProblem, *, rng: np.random.Generator) -> tuple[NetworkDesign, ...]:
        rows, columns = (2 * side for side in grid_sides(ceil(problem.nodes / 4)))
        planes, nodes = PORTS // LINKS, rows * columns

        def build(builder: Builder) -> None:
            names = [[builder.device(f"d{i}.{j}", f"b{i // 2}.{j // 2}") for j in range(columns)] for i in range(rows)]
            # Links along rows come first, so routes follow rows, then columns. Of two equally short ways half of the accelerators take each.
            for down, right in ((0, 1), (1, 0)):
                for i in range(rows):
                    for j in range(columns):
                        for way in (1, -1) if (i + j) % 2 else (-1, 1):
                            builder.link(names[i][j], names[(i + way * down) % rows][(j + way * right) % columns])

        hops = Fraction(rows + columns, 4) * Fraction(nodes, nodes - 1)  # on average, to another accelerator; sides are even
        return (
            NetworkDesign(
                name=f"torus {rows}x{columns}", strategy=self.name, nodes=nodes, planes=planes, links=LINKS, parts={"optical cable": planes * nodes},
                global_bound=min(Fraction(1), 1 / hops), diameter=(rows + columns) // 2, grid=(rows, columns), build=build,
            ),
        )  # fmt: skip
