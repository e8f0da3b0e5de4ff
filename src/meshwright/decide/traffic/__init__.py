"""What is sent smaller, and together: groups of gradients and the codec of each."""

from __future__ import annotations

from ..strategies import cites, found, named
from .cupcake import Cupcake
from .fixed import DdpBuckets, LayerWise, MergeComp, OneGroup
from .problem import Fusion, TrafficProblem, TrafficStrategy, groups_of, timeline

__all__ = [
    "CITES", "NAMES", "STRATEGIES", "Cupcake", "DdpBuckets", "Fusion", "TrafficProblem", "TrafficStrategy", "groups_of", "strategy", "timeline",
]  # fmt: skip

# The list: names, citations, the command line, comparisons and the contract battery follow from it, in this order.
STRATEGIES: tuple[type[TrafficStrategy], ...] = (Cupcake, MergeComp, DdpBuckets, OneGroup, LayerWise)
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[TrafficStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("traffic", STRATEGIES, name, where=where)
