"""Which fabric to build: wirings of accelerators without switches, and networks with them, with costs, bounds and prices."""

from __future__ import annotations

from ..strategies import found, named
from .directconnect.strategy import DirectConnect
from .hammingmesh.rivals import Dragonfly, FatTree, HyperX, Torus
from .hammingmesh.strategy import HammingMesh
from .problem import Design, Question, TopologyProblem, TopologyStrategy

__all__ = ["NAMES", "STRATEGIES", "Design", "DirectConnect", "TopologyProblem", "TopologyStrategy", "strategy"]

# The list, for both questions (`TopologyStrategy.answers`): names, citations, the command line and the contract battery follow from it.
STRATEGIES: tuple[type[TopologyStrategy], ...] = (DirectConnect, HammingMesh, FatTree, Dragonfly, HyperX, Torus)
NAMES = named(STRATEGIES)


def strategy(name: str, question: Question, *, where: str = "") -> type[TopologyStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("topology", STRATEGIES, name, question=question, where=where)
