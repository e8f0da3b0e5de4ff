"""The cluster decision: which jobs of a queue run, and which GPUs, cores and memory each of them gets."""

from __future__ import annotations

from typing import Any

from ..strategies import answering, cites, found, named
from .book import Book
from .opt import Opt
from .orders import Drf, Fifo, Ftf, Las, Srtf, Tetris
from .priced import Priced
from .problem import AllocationProblem, AllocationStrategy, Divided, OrderStrategy, Waiting
from .shares import Greedy, Proportional, Tune

__all__ = ["ALLOCATIONS", "CITES", "NAMES", "ORDERS", "STRATEGIES", "AllocationProblem", "Book", "Divided", "Waiting", "allocation", "order"]

# The list: names, citations, the command line and the contract battery follow from it. Orders say who runs, allocations who gets what.
STRATEGIES: tuple[type[Any], ...] = (Fifo, Srtf, Las, Ftf, Drf, Tetris, Proportional, Greedy, Tune, Opt, Priced)
ORDERS: tuple[type[OrderStrategy], ...] = answering(STRATEGIES, "order")
ALLOCATIONS: tuple[type[AllocationStrategy], ...] = answering(STRATEGIES, "allocation")
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def order(name: str, *, where: str = "") -> type[OrderStrategy]:
    """The order of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("cluster", STRATEGIES, name, question="order", where=where, what="order")


def allocation(name: str, *, where: str = "") -> type[AllocationStrategy]:
    """The allocation of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("cluster", STRATEGIES, name, question="allocation", where=where, what="allocation")
