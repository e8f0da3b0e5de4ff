"""Types of the topology decision: so many accelerators are to be joined; a design says how, at what cost, and how far from the best possible.

Two questions. `wiring`: accelerators with d ports each and no switches; designs are compared by steps and bandwidth of an all-gather and a
reduce-scatter, exactly. `network`: any number of ports, with or without switches; designs are compared by bandwidth shares, time and price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Literal, Protocol

import numpy as np

from ...errors import Infeasible, UsageError
from ...fabric.fabric import Fabric
from ...fabric.prices import Prices, shipped_prices
from ..strategies import Listed

__all__ = ["MAX_NODES", "Design", "TopologyProblem", "TopologyStrategy", "factor_bound", "nondominated", "steps_bound"]

MAX_NODES = 16_384  # of one design, as of one fabric
MAX_PORTS = 64
Question = Literal["wiring", "network"]


@dataclass(frozen=True, kw_only=True)
class TopologyProblem:
    """`ports`: of one accelerator, each one way in and one way out (question `wiring`). bidirectional: only cables that carry both ways between the
    same two accelerators. `rate_Bps`, `latency_s`: of one port. `most_peers`: each accelerator is joined to at most so many others, each way;
    `most_parallel`: by at most so many cables to the same one (0: no limit). Raises: UsageError, Infeasible (the limits leave ports over).
    """

    nodes: int
    ports: int = 4
    bidirectional: bool = False
    rate_Bps: int = 50 * 10**9
    latency_s: float = 1e-6
    most_peers: int = 0
    most_parallel: int = 0
    prices: Prices = field(default_factory=shipped_prices)

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= MAX_NODES:
            hint = "one accelerator needs no network" if self.nodes < 2 else "design one pod of so many, and join pods by a network of their own"
            raise UsageError(f"must be 2..{MAX_NODES}, got {self.nodes}", where="nodes", hint=hint)
        if not 1 <= self.ports <= MAX_PORTS:
            raise UsageError(f"must be 1..{MAX_PORTS}, got {self.ports}", where="ports")
        if self.ports >= self.nodes:
            hint = "with --ports N-1 every accelerator is joined to every other, which nothing beats; more ports only make links wider"
            raise UsageError(f"{self.nodes} accelerators cannot use {self.ports} ports each", where="ports", hint=hint)
        if self.rate_Bps < 1 or not 0 <= self.latency_s < float("inf"):
            raise UsageError("rate must be positive, latency finite and >= 0", where="rate, latency")
        if min(self.most_peers, self.most_parallel) < 0:
            raise UsageError("must be positive, or 0 for no limit", where="most_peers, most_parallel")
        if self.most_peers and self.most_parallel and self.most_peers * self.most_parallel < self.ports:
            most = self.most_peers * self.most_parallel
            raise Infeasible(
                f"of {self.ports} ports only {most} can be used: {self.most_peers} (neighbours) x {self.most_parallel} (cables to each)",
                where="ports", hint="allow more neighbours or more cables to each, or use fewer ports", data={"ports": self.ports, "most": most},
            )  # fmt: skip


class Design(Protocol):
    """What a strategy of either question returns. `parts`: of the price list, cables two-way. `fabric()`: to plan collectives on."""

    @property
    def name(self) -> str: ...
    @property
    def strategy(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def parts(self) -> Mapping[str, int]: ...
    def fabric(self, problem: TopologyProblem) -> Fabric: ...


class TopologyStrategy(Listed, Protocol):
    """A frozen dataclass of options."""

    answers: ClassVar[Question]

    def plan(self, problem: TopologyProblem, *, rng: np.random.Generator) -> tuple[Design, ...]: ...


def steps_bound(nodes: int, ports: int, *, bidirectional: bool = False) -> int:
    """The Moore bound: in fewer steps a shard cannot have reached everyone, whatever the wiring."""
    reached, front, steps = 1, ports, 0
    while reached < nodes:
        reached, steps = reached + front, steps + 1
        front *= ports - 1 if bidirectional else ports
        if front == 0 and reached < nodes:
            raise UsageError(f"two-way cables with one port each join pairs, not {nodes} accelerators", where="ports", hint="use --ports 2 or more")
    return steps


def factor_bound(nodes: int) -> Fraction:
    """T_B of any all-gather, in M/B: every accelerator receives all but its own shard at the rate of its ports."""
    return Fraction(nodes - 1, nodes)


def nondominated(points: list[tuple[int, Fraction]]) -> list[int]:
    """Positions that no other point equals or beats in both numbers (the first of equals stays), by the first number."""
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if not kept or points[i][1] < points[kept[-1]][1]:
            kept.append(i)
    return kept
