"""The memory decision: what a training step keeps for its backward pass, what it computes again, and where its storages lie."""

from __future__ import annotations

from typing import Any

from ..strategies import answering, cites, found, named
from .baselines import Chen, Revolve, Rotor
from .fusionaware import FusionAware, MinCut
from .monet import Monet
from .problem import MemoryStrategy, RecomputePlan, RecomputeProblem, StageBudget
from .rules import FullBlock, FullUniform, KeepAll, SelectiveAttention
from .selective import OptimalRecompute
from .static import FirstFit, StaticMemory
from .step import KeepEverything

__all__ = [
    "CITES", "NAMES", "STRATEGIES", "FullUniform", "MemoryStrategy", "OptimalRecompute", "RecomputePlan", "RecomputeProblem", "StageBudget",
    "strategies", "strategy",
]  # fmt: skip

# The list, for all three questions (`MemoryStrategy.answers`): names, citations, the command line, `auto` and the contract battery follow from it.
STRATEGIES: tuple[type[MemoryStrategy], ...] = (
    KeepAll, SelectiveAttention, FullUniform, FullBlock, OptimalRecompute,
    KeepEverything, Chen, Revolve, Rotor, MinCut, FusionAware, Monet,
    FirstFit, StaticMemory,
)  # fmt: skip
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategies(question: str) -> tuple[type[Any], ...]:
    """Ours that answer this question, in the order of the list."""
    return answering(STRATEGIES, question)


def strategy(name: str, question: str, *, where: str = "", also: tuple[str, ...] = ()) -> type[Any]:
    """The strategy of that name for that question, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("memory", STRATEGIES, name, question=question, where=where, also=also)
