"""Where machines go that come and leave: hosts for VMs, notebooks and services, packed by how long they will live."""

from __future__ import annotations

from ...strategies import cites, found, named
from .alignment import Aligned, La, LaBinary
from .bound import used_hosts_bound
from .lava import Lars, Lava, Nilas
from .packing import BestFit, FirstFit, LeastAllocated, MostAllocated
from .predict import PREDICTORS, forecast
from .problem import Placing, VmProblem, VmStrategy

__all__ = ["CITES", "NAMES", "PREDICTORS", "STRATEGIES", "Placing", "VmProblem", "VmStrategy", "forecast", "strategy", "used_hosts_bound"]

STRATEGIES: tuple[type[VmStrategy], ...] = (FirstFit, BestFit, MostAllocated, LeastAllocated, La, LaBinary, Aligned, Nilas, Lava, Lars)
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[VmStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("cluster.vms", STRATEGIES, name, where=where)
