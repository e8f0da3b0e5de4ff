"""HammingMesh: boards of accelerators in a mesh, joined by one network per row and one per column of boards.

Cite: T. Hoefler and others, "HammingMesh: A Network Topology for Large-Scale Deep Learning" (SC 2022, arXiv 2209.01346).
Left open by the paper: how many boards a row has for a number of accelerators. Our answer: the smallest grid whose sides are within twice each other.
Deviations: none known in construction and cost; the share of all-to-all traffic is an exact cut beside its linear program (`bandwidth`).
Invariant: every accelerator has four ports a plane (north, south, east, west); those at a board's edge go to its row's or column's network.
Cost: closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil
from typing import ClassVar

import numpy as np

from ....cite import Cite
from ....errors import UsageError
from ..problem import MAX_NODES, Question, TopologyProblem, TopologyStrategy
from .network import Builder, NetworkDesign, fat_tree_parts, grid_sides, made

__all__ = ["CITE", "DEVIATIONS", "HammingMesh", "Mesh", "mesh_design"]

CITE = Cite(
    key="hoefler2022hammingmesh", title="HammingMesh: A Network Topology for Large-Scale Deep Learning", authors="T. Hoefler and others", year=2022,
    venue="SC", url="https://arxiv.org/abs/2209.01346",
)  # fmt: skip
DEVIATIONS = ("the number of boards in a row is chosen", "shares of all-to-all traffic by cut and linear program, not by packet simulation")
BOARDS = (2, 4)  # sides of boards that are tried: Hx2Mesh and Hx4Mesh
LINKS = 4  # of one accelerator in a plane


@dataclass(frozen=True)
class Mesh:
    """`rows` x `columns` boards of `a` x `b` accelerators; board (R, C) holds accelerators (r, c)."""

    a: int
    b: int
    rows: int
    columns: int

    @property
    def nodes(self) -> int:
        return self.a * self.b * self.rows * self.columns

    @property
    def name(self) -> str:
        board = f"Hx{self.a}Mesh" if self.a == self.b else f"H{self.a}x{self.b}Mesh"
        return f"{board} {self.rows}x{self.columns}"

    def accelerator(self, row: int, column: int) -> str:
        """Name of the one at that place of the whole grid of accelerators."""
        return f"b{row // self.a}.{column // self.b}/{row % self.a}.{column % self.b}"

    def global_bound(self) -> Fraction:
        """Share of the injection: a board has 2a ports into its rows and 2b into its columns for the traffic that changes its column or row."""
        bound = Fraction(1)
        for ports, boards in ((2 * self.a, self.columns), (2 * self.b, self.rows)):
            if boards > 1:
                leaving = Fraction(self.nodes, self.nodes - 1) * (1 - Fraction(1, boards))
                bound = min(bound, Fraction(ports, LINKS * self.a * self.b) / leaving)
        return bound

    def build(self, builder: Builder) -> None:
        rows, columns = self.a * self.rows, self.b * self.columns
        for i in range(rows):
            for j in range(columns):
                builder.device(self.accelerator(i, j), f"b{i // self.a}.{j // self.b}")
        along = [builder.switch(f"row{i // self.a}.{i % self.a}") for i in range(rows)]
        across = [builder.switch(f"column{j // self.b}.{j % self.b}") for j in range(columns)]
        places = [(i, j, self.accelerator(i, j)) for i in range(rows) for j in range(columns)]
        for i, j, here in places:  # links along rows come first, so routes follow rows, then columns
            if j % self.b < self.b - 1:
                builder.cable(here, self.accelerator(i, j + 1))
            if east_west := (j % self.b == 0) + (j % self.b == self.b - 1):
                builder.cable(here, along[i], east_west)
        for i, j, here in places:
            if i % self.a < self.a - 1:
                builder.cable(here, self.accelerator(i + 1, j))
            if north_south := (i % self.a == 0) + (i % self.a == self.a - 1):
                builder.cable(here, across[j], north_south)


def _networks(boards: int, side: int, groups: int, radix: int) -> tuple[int, int, int]:
    """(switches, cables to boards, cables between switches) of one dimension: `groups` rows of boards, each of `side` rows of accelerators with two
    ports a board. Rows share a switch where several fit."""
    ports = 2 * boards
    if ports <= radix:
        return groups * ceil(side / (radix // ports)), groups * side * ports, 0
    tree = fat_tree_parts(ports, radix)
    return groups * side * tree.switches, groups * side * ports, groups * side * tree.uplinks


def mesh_design(mesh: Mesh, planes: int, radix: int, strategy: str) -> NetworkDesign:
    """Rows are joined by copper, columns by fibre, switches by fibre."""
    x = _networks(mesh.columns, mesh.a, mesh.rows, radix)
    y = _networks(mesh.rows, mesh.b, mesh.columns, radix)
    parts = {
        "switch": planes * (x[0] + y[0]), "copper cable": planes * x[1], "optical cable": planes * (y[1] + x[2] + y[2]),
    }  # fmt: skip
    inside = 2 * ((mesh.a - 1) // 2 + (mesh.b - 1) // 2)  # to the nearest edge, and from it
    across = sum(2 * _levels(2 * boards, radix) for boards in (mesh.rows, mesh.columns))
    return NetworkDesign(
        name=mesh.name, strategy=strategy, nodes=mesh.nodes, planes=planes, links=LINKS, parts=parts, global_bound=mesh.global_bound(),
        diameter=inside + across, grid=(mesh.a * mesh.rows, mesh.b * mesh.columns), build=mesh.build,
    )  # fmt: skip


def _levels(ports: int, radix: int) -> int:
    return 1 if ports <= radix else fat_tree_parts(ports, radix).levels


@dataclass(frozen=True, kw_only=True)
class HammingMesh(TopologyStrategy):
    """Options.

    board: accelerators along a board's side; 0 = those of `BOARDS` that the number of accelerators fills.
    planes: alike networks beside each other.
    """

    name: ClassVar[str] = "hammingmesh"
    cite: ClassVar[Cite] = CITE
    answers: ClassVar[Question] = "network"

    board: int = 0
    planes: int = 4

    def plan(self, problem: TopologyProblem, *, rng: np.random.Generator) -> tuple[NetworkDesign, ...]:
        """One design per board. Raises: UsageError, Unsupported."""
        if not 0 <= self.board <= 64 or not 1 <= self.planes <= 64:
            raise UsageError(f"board must be 0..64 and planes 1..64, got {self.board} and {self.planes}", where=self.name)
        designs = []
        for side in (self.board,) if self.board else BOARDS:
            rows, columns = grid_sides(ceil(problem.nodes / side**2))
            mesh = Mesh(side, side, rows, columns)
            if self.board or (rows > 1 and mesh.nodes <= MAX_NODES) or side == BOARDS[0]:
                designs.append(partial(mesh_design, mesh, self.planes, problem.prices.switch_ports, self.name))
        return made(designs)
