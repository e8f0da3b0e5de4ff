"""Types of the decision where machines go: the problem, what a strategy answers, and the guard that all who look at forecasts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ....cluster.forecast import Forecast
from ....cluster.vms import VmHosts, VmTrace
from ....errors import UsageError
from ....kernels.vm_fleet import BEST, FIRST, Rule
from ...strategies import Listed

__all__ = ["DISTRUST", "DOUBT", "Forecasting", "PACKINGS", "Placing", "VmProblem", "VmStrategy", "guarded_rule"]

PACKINGS = {"first": FIRST, "best": BEST}
# Shares of the load that lives three times longer than predicted. On synthetic traces it is 0 with the truth, 0.02 to 0.06 with the owners'
# distributions and about 0.9 where forecasts are exchanged among machines.
DOUBT = 0.2
DISTRUST = 0.4


@dataclass(frozen=True, kw_only=True)
class VmProblem:
    """Machines that come one by one, hosts, and what is expected of lifetimes. A strategy sees no end that has not come."""

    trace: VmTrace
    hosts: VmHosts
    forecast: Forecast


@dataclass(frozen=True, kw_only=True)
class Placing:
    """`rule`: compiled. `moves_per_day`, `horizon_s`: moves that empty hosts, and within which time a machine's own end is waited for. `ask(vm,
    now_s, free)`: the host of each arrival, instead of the rule's, for strategies that are not compiled."""

    rule: Rule
    moves_per_day: float = 0.0
    horizon_s: float = 0.0
    ask: Callable[[int, float, NDArray[np.int64]], int] | None = None


class VmStrategy(Listed, Protocol):
    """A frozen dataclass of options. `forecasts`: it looks at lifetimes, so predictors make a difference."""

    forecasts: ClassVar[bool] = True

    def plan(self, problem: VmProblem, *, rng: np.random.Generator) -> Placing: ...


@dataclass(frozen=True, kw_only=True)
class Forecasting(VmStrategy):
    """One compiled rule on forecasts, behind the guard. packing: best or first, behind the bucket. bucket_s: the first bucket of extensions. guard:
    fall back when forecasts are bad."""

    method: ClassVar[int]

    packing: str = "best"
    bucket_s: float = 1800.0
    guard: bool = True

    def plan(self, problem: VmProblem, *, rng: np.random.Generator) -> Placing:
        return Placing(rule=guarded_rule(self.method, self.packing, self.bucket_s, self.guard))


def guarded_rule(method: int, packing: str, bucket_s: float, guard: bool, *, short_s: float = 7200.0, once: bool = False) -> Rule:
    """Raises: UsageError for a packing that does not exist and times that are not above 0."""
    if packing not in PACKINGS:
        raise UsageError(f"there is no packing {packing[:64]!r}", where="packing", hint=f"there are: {', '.join(PACKINGS)}")
    if not (0 < bucket_s < float("inf") and 0 < short_s < float("inf")):
        raise UsageError(f"a bucket of {bucket_s} s, short below {short_s} s", where="options", hint="times above 0")
    return Rule(method, PACKINGS[packing], float(bucket_s), float(short_s), once, DOUBT if guard else 2.0, DISTRUST if guard else 2.0)
