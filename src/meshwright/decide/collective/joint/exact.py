"""From a solver's floats to a packing in whole numbers that is verified exactly.

Every load and share of a demand becomes a rational with one common denominator D; then all constraints of `lp` are tested again in whole
numbers: shares sum to D, switches and relays are balanced, and every member receives D units by an integer max-flow (each way). What passes
is a packing whatever the solver did; its time is the exact maximum of load over rate. Nothing is trusted, so nothing has to be proved
about the rounding: continued fractions with growing denominators are tried until one passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from ....kernels.maxflow import FlowNetwork
from ..trees.lp import Arc, Demand, Packing, PackingProblem

__all__ = ["ExactDemand", "exact_demand", "packing_time"]

DENOMINATORS = (32, 180, 1000, 10_000, 100_000, 1_000_000)  # largest denominators tried for single numbers
MAX_FLOAT_ERROR = 1e-8  # a float this close to a fraction may be meant as that fraction; the exact tests afterwards decide


@dataclass(frozen=True)
class ExactDemand:
    """`units` whole trees each way: `weight[i]` rooted at the demand's i-th member, `spread` and `collect` the units on every arc.

    `collect` is in the fabric's orientation: it points towards the roots.
    """

    demand: Demand
    units: int
    weight: tuple[int, ...]
    spread: dict[Arc, int]
    collect: dict[Arc, int]

    def load(self, arc: Arc) -> Fraction:
        """Share of the demand's size that an arc carries."""
        return Fraction(self.spread.get(arc, 0) + self.collect.get(arc, 0), self.units)


def packing_time(problem: PackingProblem, packed: Sequence[ExactDemand]) -> Fraction:
    """The exact time of packed demands together: the largest load over rate, background included."""
    none = Fraction(0)
    return max(sum((d.demand.size * d.load(arc) for d in packed), problem.background.get(arc, none)) / rate for arc, rate in problem.rate.items())


def exact_demand(problem: PackingProblem, packing: Packing, number: int, *, most_units: int) -> Iterator[ExactDemand]:
    """Verified whole-number forms of one demand's loads, with growing denominators; none where nothing passes."""
    demand = problem.demands[number]
    tried: set[int] = set()
    for limit in DENOMINATORS:
        found = _rounded(demand, packing, number, limit, most_units)
        if found is None or found.units in tried:
            continue
        tried.add(found.units)
        if _holds(problem, found):
            yield found


def _rounded(demand: Demand, packing: Packing, number: int, limit: int, most_units: int) -> ExactDemand | None:
    units = 1
    numbers: list[Fraction] = []
    weight: list[float] | list[Fraction] = list(demand.weight) if demand.weight is not None else list(packing.weight[number])
    spread, collect = packing.spread[number], packing.collect[number]
    for value in (*weight, *spread.values(), *collect.values()):
        # Optimal vertices have small denominators: the nearest simple fraction is then the number that the solver meant.
        near = Fraction(value).limit_denominator(limit)
        if abs(near - value) > MAX_FLOAT_ERROR:
            return None
        # One denominator for all of a demand, since its trees are cut from the same units.
        units = lcm(units, near.denominator)
        if units > most_units:
            return None
        numbers.append(near)
    whole = iter([int(x * units) for x in numbers])
    shares = tuple(next(whole) for _ in weight)
    out = {arc: next(whole) for arc in spread}
    back = {arc: next(whole) for arc in collect}
    # Fewest trees: what all numbers share is taken out.
    divisor = gcd(units, *shares, *out.values(), *back.values())
    return ExactDemand(
        demand, units // divisor, tuple(w // divisor for w in shares),
        {a: x // divisor for a, x in out.items() if x}, {a: x // divisor for a, x in back.items() if x},
    )  # fmt: skip


def _holds(problem: PackingProblem, found: ExactDemand) -> bool:
    if sum(found.weight) != found.units or min(found.weight) < 0:
        return False
    # Reduce trees are broadcast trees of the reversed graph: one test serves both.
    mirror = {(v, u): x for (u, v), x in found.collect.items()}
    for wanted, loads in ((found.demand.spread, found.spread), (found.demand.collect, mirror)):
        if wanted and not (_balanced(found.demand, loads) and _reaches_all(problem.nodes, found, loads)):
            return False
    return True


def _balanced(demand: Demand, loads: dict[Arc, int]) -> bool:
    surplus: dict[int, int] = {}
    for (u, v), x in loads.items():
        surplus[u] = surplus.get(u, 0) - x
        surplus[v] = surplus.get(v, 0) + x
    # Members may send more or less than they receive (they copy and add); all other nodes only forward.
    inside = set(demand.members)
    return all(not extra for node, extra in surplus.items() if node not in inside) and min(loads.values(), default=0) >= 0


def _reaches_all(nodes: int, found: ExactDemand, loads: dict[Arc, int]) -> bool:
    arcs = dict(loads) | {(nodes, r): w for r, w in zip(found.demand.members, found.weight, strict=True) if w}
    # Edmonds: `units` disjoint trees exist exactly if every member can receive that many units from the roots together.
    sinks = np.array(found.demand.members, np.int32)
    return FlowNetwork.of(nodes + 1, arcs).sweep(nodes, sinks, found.units).failed < 0
