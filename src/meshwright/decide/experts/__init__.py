"""How tokens reach experts: degree of parallelism, overlap and exchange of an expert layer."""

from __future__ import annotations

from ..strategies import found, named
from .problem import Choice, Exchanges, ExpertPlan, ExpertProblem, ExpertShape, ExpertStrategy, degrees_of
from .program import layer_program
from .search import DictionarySearch
from .tutel import Tutel

__all__ = [
    "NAMES", "STRATEGIES", "Choice", "DictionarySearch", "Exchanges", "ExpertPlan", "ExpertProblem", "ExpertShape", "Tutel", "degrees_of",
    "layer_program", "strategy",
]  # fmt: skip

STRATEGIES: tuple[type[ExpertStrategy], ...] = (Tutel,)
NAMES = named(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[ExpertStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("experts", STRATEGIES, name, where=where, what="strategy of expert layers")
