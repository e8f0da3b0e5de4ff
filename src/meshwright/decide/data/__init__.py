"""The data decision: which files are kept where, who prepares batches, and with how many workers, so that training waits least."""

from __future__ import annotations

from ..strategies import cites, found, named
from .coordl import Coordl
from .problem import FeedProblem, FeedStrategy
from .ways import Way, epoch_bound, least_item_s, ways

__all__ = ["CITES", "NAMES", "STRATEGIES", "FeedProblem", "FeedStrategy", "Way", "epoch_bound", "least_item_s", "strategy", "ways"]

STRATEGIES: tuple[type[FeedStrategy], ...] = (Coordl,)
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[FeedStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("data", STRATEGIES, name, where=where)
