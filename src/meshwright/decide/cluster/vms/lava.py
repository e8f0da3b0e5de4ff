"""NILAS, LAVA and LARS of Google: predictions made again, hosts with classes of lifetimes, and moves that empty hosts.

Cite: Ling et al., "LAVA: Lifetime-Aware VM Allocation with Learned Distributions and Adaptation to Mispredictions", MLSys 2025.
Left open by the paper: constants, which host is emptied, when classes are no help. Our answer: a host is recycled from 90 % in any resource on;
deadlines are 1.1 times a class's upper limit (1, 10, 100 hours); LARS empties the host with the fewest machines that outlive its horizon, one at a
time.
Deviations: a guard of our own watches the load that lives three times longer than predicted: above 20 % LAVA chooses as NILAS, above 40 % all as
packing alone; it trusts again below three quarters of that. Forecasts are read again at every change of a host and every ten minutes, not at every
decision.
Invariant: with the guard at its highest, hosts are chosen as best (or first) fit chooses them.
Cost: O(hosts · resources) per machine, O(machines of a host) where one comes or leaves, O(machines) every ten minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....cite import Cite
from ....errors import UsageError
from ....kernels.vm_fleet import LAVA, NILAS
from .problem import Forecasting, Placing, VmProblem, VmStrategy, guarded_rule

__all__ = ["CITE", "Lars", "Lava", "Nilas"]

CITE = Cite(key="ling2025lava", title="LAVA: Lifetime-Aware VM Allocation with Learned Distributions and Adaptation to Mispredictions", year=2025,
    venue="MLSys", authors="Jianheng Ling et al.")
MAX_MOVES = 100_000  # a day


@dataclass(frozen=True, kw_only=True)
class Nilas(Forecasting):
    """The host that the machine extends least, ends predicted again. packing: best or first, behind the bucket. bucket_s: the first bucket of
    extensions. guard: fall back when forecasts are bad."""

    name: ClassVar[str] = "nilas"
    cite: ClassVar[Cite] = CITE
    method: ClassVar[int] = NILAS


@dataclass(frozen=True, kw_only=True)
class Lava(Forecasting):
    """Recycled hosts of a higher class first, then open ones of the same, then as NILAS. Options as of `nilas`."""

    name: ClassVar[str] = "lava"
    cite: ClassVar[Cite] = CITE
    method: ClassVar[int] = LAVA


@dataclass(frozen=True, kw_only=True)
class Lars(VmStrategy):
    """NILAS, and moves. moves_per_day: their budget. horizon_s: a machine whose end is nearer is not moved. Others as of `nilas`."""

    name: ClassVar[str] = "lars"
    cite: ClassVar[Cite] = CITE

    moves_per_day: float = 100.0
    horizon_s: float = 21_600.0
    packing: str = "first"
    bucket_s: float = 1800.0
    guard: bool = True

    def plan(self, problem: VmProblem, *, rng: np.random.Generator) -> Placing:
        if not 0 < self.moves_per_day <= MAX_MOVES or not 0 < self.horizon_s < float("inf"):
            raise UsageError(f"{self.moves_per_day} moves a day, a horizon of {self.horizon_s} s", where="lars",
                hint=f"above 0, at most {MAX_MOVES} moves")
        rule = guarded_rule(NILAS, self.packing, self.bucket_s, self.guard)
        return Placing(rule=rule, moves_per_day=float(self.moves_per_day), horizon_s=float(self.horizon_s))
