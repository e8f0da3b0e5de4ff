"""Direct-connect topologies: wirings on the frontier of steps against bandwidth, from base graphs and expansions of them.

Cite: L. Zhao, S. Pal, T. Chugh, W. Wang, J. Fantl, P. Basu, J. Khoury, A. Krishnamurthy, "Efficient Direct-Connect Topologies for Collective
Communications" (NSDI 2025, arXiv 2202.03356).
Left open by the paper: which base graphs to begin with. Our answer: its families, and Cayley digraphs of semidirect products of cyclic groups,
searched at every size that an expansion can begin from.
Deviations: every design of up to `exact` nodes is costed on its explicit graph by breadth-first broadcasts, exactly; larger ones by the rule of their
expansion. A design counts with the worse of its two directions (all-gather on G, reduce-scatter on G reversed).
Invariant: a design's steps and T_B are reached, not estimated; the bounds hold for every wiring. The frontier is over what was searched: no proof is
known that nothing lies between it and the bounds.
Cost: per size `evaluations` breadth-first searches from one node, and some O(N² d) for each expansion that could still be on the frontier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Infeasible, UsageError
from ....fabric.fabric import Device, Fabric, Link, Provenance
from ....kernels.effort import time_is_up
from ..problem import Question, TopologyProblem, TopologyStrategy, factor_bound, nondominated, steps_bound
from .cayley import search
from .families import base_wirings
from .loads import Cost, gather_cost
from .wiring import Wiring, copies, line_graph, product, widened

__all__ = ["CITE", "DEVIATIONS", "DirectConnect", "WiringDesign"]

CITE = Cite(
    key="zhao2025directconnect", title="Efficient Direct-Connect Topologies for Collective Communications",
    authors="L. Zhao, S. Pal, T. Chugh, W. Wang, J. Fantl, P. Basu, J. Khoury, A. Krishnamurthy", year=2025, venue="NSDI",
    url="https://arxiv.org/abs/2202.03356",
)  # fmt: skip
DEVIATIONS = ("Cayley digraphs as base graphs", "every design costed on its explicit graph", "the worse of both directions counts")
MAX_EVALUATIONS = 10**6
MAX_EXACT = 8192  # nodes: two minutes and half a GiB a design with 4 ports
MAX_STEPS_FACTOR = 4  # a searched base graph may take so many times the least steps; slower ones are no part of a useful frontier


@dataclass(frozen=True)
class _Costed:
    """A wiring and the larger of its two directions' costs. exact: on the explicit graph; else by the expansion's rule, an upper bound."""

    wiring: Wiring
    steps: int
    load: Fraction
    exact: bool


@dataclass(frozen=True, kw_only=True)
class WiringDesign:
    """`gather`, `scatter`: costs of the two directions, with certificates; `steps`, `factor`: of the worse, T_B in M/B. Bounds: of any wiring."""

    wiring: Wiring
    gather: Cost | None
    scatter: Cost | None
    steps: int
    factor: Fraction
    steps_bound: int
    factor_bound: Fraction
    strategy: str = "directconnect"
    names: tuple[str, ...] = ()  # of the accelerators; default d0, d1, ...

    @property
    def name(self) -> str:
        return self.wiring.name

    @property
    def nodes(self) -> int:
        return self.wiring.nodes

    @property
    def exact(self) -> bool:
        return self.gather is not None

    @property
    def parts(self) -> Mapping[str, int]:
        """Two fibres of a cable may end at different accelerators; a loop needs no cable."""
        fibres = int((self.wiring.arcs[:, 0] != self.wiring.arcs[:, 1]).sum())
        return {"optical cable": -(-fibres // 2), "patch-panel port": 0 if self.wiring.paired else self.wiring.nodes * self.wiring.ports}

    def fabric(self, problem: TopologyProblem) -> Fabric:
        """Parallel arcs are one link of so many times the rate."""
        names = list(self.names) or [f"d{i}" for i in range(self.nodes)]
        links = tuple(
            Link(src=names[a], dst=names[b], rate_Bps=count * problem.rate_Bps, latency_s=problem.latency_s)
            for (a, b), count in sorted(self.wiring.links().items())
        )
        devices = tuple(Device(name=x, kind="gpu", group=f"host{i}") for i, x in enumerate(names))
        note = Provenance(what="wiring", source=f"{self.name}, {self.wiring.ports} ports, designed by `meshwright fabric design`")
        return Fabric(name=f"direct-{self.nodes}x{self.wiring.ports}", devices=devices, links=links, provenance=(note,))


@dataclass(frozen=True, kw_only=True)
class DirectConnect(TopologyStrategy):
    """Options.

    evaluations: Cayley digraphs tried at every size; 0 = none.
    exact: designs up to so many nodes are costed on their explicit graph; larger ones by the rule of their expansion.
    table: try the shipped base graphs too (`table`), which longer searches have found.
    """

    name: ClassVar[str] = "directconnect"
    cite: ClassVar[Cite] = CITE
    answers: ClassVar[Question] = "wiring"

    evaluations: int = 2000
    exact: int = 2048
    table: bool = True

    def plan(self, problem: TopologyProblem, *, rng: np.random.Generator) -> tuple[WiringDesign, ...]:
        """The frontier, fewest steps first. Raises: UsageError (options, one-port pairs), Infeasible where no family has that size."""
        for option, value, most in (("evaluations", self.evaluations, MAX_EVALUATIONS), ("exact", self.exact, MAX_EXACT)):
            if not 0 <= value <= most:
                raise UsageError(f"{option} must be 0..{most}, got {value}", where=self.name)
        least = steps_bound(problem.nodes, min(problem.ports, problem.most_peers or problem.ports), bidirectional=problem.bidirectional)
        found = firsts(_Synthesis(self, problem, rng).frontier(problem.nodes, problem.ports))
        if not found:
            capped = " within these limits" if problem.most_peers or problem.most_parallel else ""
            raise Infeasible(
                f"no wiring of {problem.nodes} accelerators with {problem.ports} ports was found{capped}", where=self.name,
                hint="an odd number of accelerators needs an even number of two-way ports",
                data={"nodes": problem.nodes, "ports": problem.ports, "bidirectional": problem.bidirectional},
            )  # fmt: skip
        designs = []
        for row in found:
            gather = gather_cost(row.wiring) if row.exact else None
            scatter = gather if row.wiring.paired else gather_cost(row.wiring.transposed()) if row.exact else None
            designs.append(
                WiringDesign(
                    wiring=row.wiring, gather=gather, scatter=scatter, steps=row.steps, factor=row.load * problem.ports / problem.nodes,
                    steps_bound=least, factor_bound=factor_bound(problem.nodes),
                )
            )  # fmt: skip
        return tuple(designs)


@dataclass
class _Synthesis:
    """The frontier of every (nodes, ports) that the asked one is made of, each found once."""

    options: DirectConnect
    problem: TopologyProblem
    rng: np.random.Generator
    known: dict[tuple[int, int], list[_Costed]] = field(default_factory=dict)

    def frontier(self, nodes: int, ports: int) -> list[_Costed]:
        """Nothing on it is beaten in both steps and load by anything that was costed. Of searched wirings equals are kept: their line graphs differ.
        Empty where there is no such wiring."""
        key = nodes, ports
        if key not in self.known:
            rows = self.known[key] = []
            least = Fraction(nodes - 1, ports)
            found = [row for row in self._bases(nodes, ports) if self._allowed(row.wiring)]
            if key == (self.problem.nodes, self.problem.ports) and self.problem.most_peers:
                found += self._widened(nodes, ports)
            for make, steps, load in sorted(self._expansions(nodes, ports), key=lambda row: row[1:]):
                if found and time_is_up():
                    break
                reachable = least if nodes <= self.options.exact else load  # on its explicit graph an expansion may be better than its rule
                if not any(row.steps <= steps and row.load <= reachable for row in found):
                    wiring = make()
                    found += [self._costed(wiring, steps, load)] if self._allowed(wiring) else []
            points = {(found[i].steps, found[i].load) for i in nondominated([(row.steps, row.load) for row in found])}
            rows += sorted((row for row in found if (row.steps, row.load) in points), key=lambda row: row.steps)
        return self.known[key]

    @property
    def paired(self) -> bool:
        return self.problem.bidirectional

    def _allowed(self, wiring: Wiring) -> bool:
        """The limits are of the wiring that is asked for, not of what it grows from."""
        limits, asked = self.problem, (self.problem.nodes, self.problem.ports)
        if (wiring.nodes, wiring.ports) != asked or not (limits.most_peers or limits.most_parallel):
            return True
        return wiring.peers <= (limits.most_peers or wiring.ports) and wiring.parallel <= (limits.most_parallel or wiring.ports)

    def _widened(self, nodes: int, ports: int) -> Iterator[_Costed]:
        """Wirings with fewer ports, their links made wider. Two-way cables are doubled whole."""
        for fewer in range(1, min(ports, self.problem.most_peers + 1)):
            if not (self.paired and ports % fewer) and (nodes <= self.options.exact or ports % fewer == 0):
                for base in firsts(self.frontier(nodes, fewer)):
                    wiring = widened(base.wiring, ports)
                    if self._allowed(wiring):
                        yield self._costed(wiring, base.steps, base.load * fewer / ports)

    def _costed(self, wiring: Wiring, steps: int = 0, load: Fraction = Fraction(0)) -> _Costed:
        if wiring.nodes > self.options.exact and not wiring.transitive:
            return _Costed(wiring, steps, load, False)
        gather = gather_cost(wiring)
        scatter = gather if wiring.paired else gather_cost(wiring.transposed())
        return _Costed(wiring, max(gather.steps, scatter.steps), max(gather.load, scatter.load), True)

    def _bases(self, nodes: int, ports: int) -> Iterator[_Costed]:
        for wiring in base_wirings(nodes, ports, paired=self.paired):
            if nodes <= self.options.exact or wiring.transitive:
                yield self._costed(wiring)
                if time_is_up():
                    return
        if ports > 1 and (self.options.evaluations or self.options.table):
            most, tried = MAX_STEPS_FACTOR * steps_bound(nodes, ports), self.options.evaluations
            found = search(nodes, ports, paired=self.paired, evaluations=tried, rng=self.rng, most_steps=most, shipped=self.options.table)
            yield from (_Costed(wiring, steps, load, True) for steps, load, wiring in found)

    def _expansions(self, nodes: int, ports: int) -> Iterator[tuple[Any, int, Fraction]]:
        """(makes it, least steps it can have, load by its rule)."""
        if not self.paired and ports > 1 and nodes % ports == 0 and nodes // ports > 1:
            for base in self.frontier(nodes // ports, ports):
                yield (lambda b=base: line_graph(b.wiring)), base.steps + 1, ports * base.load + 1
        for count in range(2, ports + 1):
            if ports % count == 0 and nodes % count == 0 and nodes // count > 1:
                for base in firsts(self.frontier(nodes // count, ports // count)):
                    yield (lambda b=base, c=count: copies(b.wiring, c)), base.steps, base.load + Fraction(count - 1, ports)
        for n in range(2, int(nodes**0.5) + 1):
            if nodes % n == 0:
                for d in range(1, ports):
                    for a in firsts(self.frontier(n, d)) if d < n else []:
                        for b in firsts(self.frontier(nodes // n, ports - d)) if ports - d < nodes // n else []:
                            yield (lambda a=a, b=b: product(a.wiring, b.wiring)), a.steps + b.steps, _product_load(a, b, ports)


def firsts(rows: list[_Costed]) -> list[_Costed]:
    """One of each point."""
    return [row for i, row in enumerate(rows) if i == 0 or (row.steps, row.load) != (rows[i - 1].steps, rows[i - 1].load)]


def _product_load(a: _Costed, b: _Costed, ports: int) -> Fraction:
    """Of breadth-first broadcasts where both factors have the least load; else of one factor after the other, of equal ones in two halves at once
    (`schedule.of_power`)."""
    n, m = a.wiring.nodes, b.wiring.nodes
    if a.load * a.wiring.ports == n - 1 and b.load * b.wiring.ports == m - 1:
        return Fraction(n * m - 1, ports)
    return min(a.load + n * b.load, b.load + m * a.load) / (2 if a.wiring is b.wiring else 1)
