"""The table decision: which part of which embedding table lies on which device."""

from __future__ import annotations

from ..strategies import cites, found, named
from .bound import table_bound
from .classic import DimGreedy, LookupGreedy, RandomTables, SizeGreedy, SizeLookupGreedy
from .neuroshard import NeuroShard
from .problem import TablePlan, TableProblem, TableStrategy
from .refine import FewestMoves

__all__ = ["CITES", "NAMES", "STRATEGIES", "TablePlan", "TableProblem", "TableStrategy", "strategy", "table_bound"]

# The list: names, citations, the command line, `auto` and the contract battery follow from it.
STRATEGIES: tuple[type[TableStrategy], ...] = (NeuroShard, DimGreedy, SizeGreedy, LookupGreedy, SizeLookupGreedy, RandomTables, FewestMoves)
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[TableStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("tables", STRATEGIES, name, where=where)
