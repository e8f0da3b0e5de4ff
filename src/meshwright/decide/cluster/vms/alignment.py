"""Lifetime alignment: LA and LA-binary of Azure, and aligned, ours, which weighs whole distributions.

Cite: Barbalho et al., "Virtual Machine Allocation with Lifetime Predictions", MLSys 2023.
Left open by the paper: buckets, the end of a host whose machines are overdue, ties. Our answer: extensions count alike up to half an hour, and in
doublings beyond; an overdue machine's end is predicted again; packing behind the bucket, then the lowest number.
Deviations: a guard watches the load that lives three times longer than predicted; above 40 % only packing counts, until it is below 30 %. `aligned`
weighs the extension over the machine's distribution, S(g) · E[T - g | T > g] for a host that is empty in g, instead of that of its mean. The paper
has neither.
Invariant: where no machine would extend a host, packing decides.
Cost: O(hosts · resources) per machine, O(machines of a host) where one comes or leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....cite import FOLKLORE, Cite
from ....kernels.vm_fleet import BINARY, EXPECTED, LA
from .problem import Forecasting, Placing, VmProblem, VmStrategy, guarded_rule

__all__ = ["CITE", "Aligned", "La", "LaBinary"]

CITE = Cite(key="barbalho2023lifetime", title="Virtual Machine Allocation with Lifetime Predictions", year=2023, venue="MLSys",
    authors="Hugo Barbalho et al.")


@dataclass(frozen=True, kw_only=True)
class La(VmStrategy):
    """Ends are predicted once, at arrival. packing: first or best, behind the bucket. bucket_s: the first bucket of extensions. guard: fall back
    when forecasts are bad."""

    name: ClassVar[str] = "la"
    cite: ClassVar[Cite] = CITE

    packing: str = "best"
    bucket_s: float = 1800.0
    guard: bool = True

    def plan(self, problem: VmProblem, *, rng: np.random.Generator) -> Placing:
        return Placing(rule=guarded_rule(LA, self.packing, self.bucket_s, self.guard, once=True))


@dataclass(frozen=True, kw_only=True)
class LaBinary(VmStrategy):
    """Machines are short or long, hosts long with one long machine. short_s: below it a machine is short. packing, guard: as of `la`."""

    name: ClassVar[str] = "la-binary"
    cite: ClassVar[Cite] = CITE

    short_s: float = 7200.0
    packing: str = "best"
    guard: bool = True

    def plan(self, problem: VmProblem, *, rng: np.random.Generator) -> Placing:
        return Placing(rule=guarded_rule(BINARY, self.packing, 1800.0, self.guard, short_s=self.short_s))


@dataclass(frozen=True, kw_only=True)
class Aligned(Forecasting):
    """Extensions are means over the machine's distribution, and predicted again. Options as of `la`."""

    name: ClassVar[str] = "aligned"
    cite: ClassVar[Cite] = FOLKLORE
    method: ClassVar[int] = EXPECTED

    bucket_s: float = 7200.0
