"""Bits of messages: at how many each row of a distributed graph training is sent, and who owns which node."""

from __future__ import annotations

from ...strategies import cites, found, named
from .bound import epoch_bound
from .partition import Parts, partition
from .problem import Assignment, Channel, Exchange, HaloProblem, HaloStrategy
from .strategy import AdaQP, Uniform

__all__ = [
    "CITES", "NAMES", "STRATEGIES", "Assignment", "Channel", "Exchange", "HaloProblem", "HaloStrategy", "Parts", "epoch_bound", "partition",
    "strategy", ]  # fmt: skip

STRATEGIES: tuple[type[HaloStrategy], ...] = (AdaQP, Uniform)
NAMES = named(STRATEGIES)
CITES = cites(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[HaloStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("traffic.halo", STRATEGIES, name, where=where)
