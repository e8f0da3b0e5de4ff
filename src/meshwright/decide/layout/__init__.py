"""The layout decision: how operators, parameters and the batch are split over ranks."""

from __future__ import annotations

from typing import Any

from ..strategies import answering, found
from .autoddl import AutoDDL
from .autoddl.by_hand import BY_HAND
from .grid import Grid
from .mixed.fleet import Fleet
from .mixed.grid import LayerGrid
from .mixed.proposals import InterOperator, PerLayer
from .mixed.scheduled import Scheduled
from .problem import Degrees, LayoutCandidate, LayoutProblem, LayoutStrategy
from .profiled.search import ProfiledGrid

__all__ = ["STRATEGIES", "Degrees", "Grid", "LayoutCandidate", "LayoutProblem", "LayoutStrategy", "strategies", "strategy"]

# The list, for all four questions (`LayoutStrategy.answers`): names, citations, the command line, searches and the contract battery follow from it.
STRATEGIES: tuple[type[LayoutStrategy], ...] = (
    Grid,
    LayerGrid, InterOperator, PerLayer, Scheduled, Fleet,
    AutoDDL, *BY_HAND,
    ProfiledGrid,
)  # fmt: skip


def strategies(question: str) -> tuple[type[Any], ...]:
    """Ours that answer this question, in the order of the list."""
    return answering(STRATEGIES, question)


def strategy(name: str, question: str, *, where: str = "", what: str = "strategy") -> type[Any]:
    """The strategy of that name for that question, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("layout", STRATEGIES, name, question=question, where=where, what=what)
