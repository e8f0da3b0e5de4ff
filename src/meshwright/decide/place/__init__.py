"""The placement decision: which task of a graph runs on which device, and in which order."""

from __future__ import annotations

from ..strategies import cites, found, named
from .bound import place_bound
from .exact import Exact
from .giph.strategy import Giph
from .lists import Cpop, Heft, RandomEft
from .problem import Placement, PlaceProblem, PlaceStrategy
from .search import Search

__all__ = ["CITES", "NAMES", "STRATEGIES", "PlaceProblem", "PlaceStrategy", "Placement", "place_bound", "strategy"]

# The list: names, citations, the command line, `auto` and the contract battery follow from it.
STRATEGIES: tuple[type[PlaceStrategy], ...] = (Heft, Cpop, RandomEft, Search, Exact, Giph)
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[PlaceStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("place", STRATEGIES, name, where=where)
