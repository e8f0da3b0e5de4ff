"""Resizing: how many cores and how much memory each running machine or job has in the next window."""

from __future__ import annotations

from typing import Any

from ...strategies import cites, found, named
from .baselines import Forecast, Oracle, Static, Threshold, Vpa
from .learners import DoublyRobust, LinUcb, SquareCb
from .problem import Policy, Prior, ResizeStrategy
from .rules import Resizer

__all__ = ["CITES", "NAMES", "STRATEGIES", "Policy", "Prior", "ResizeStrategy", "Resizer", "strategy"]

# The list: names, citations, the command line and the contract battery follow from it.
STRATEGIES: tuple[type[Any], ...] = (Static, Threshold, Vpa, Forecast, Oracle, LinUcb, SquareCb, DoublyRobust)
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[ResizeStrategy]:
    """Ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("cluster.resize", STRATEGIES, name, where=where)
