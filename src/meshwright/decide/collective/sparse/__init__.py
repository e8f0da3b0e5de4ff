"""Sparse all-reduces: what is sent when every rank selects k of n elements. Executed by `run.sparse`, of the same names."""

from __future__ import annotations

from ...strategies import found, named
from .gtopk import GTopk
from .oktopk import OkTopk
from .problem import SparsePlan, SparseProblem, SparseSizes, SparseStrategy
from .topka import TopkA
from .topkdsa import TopkDsa
from .zen import Zen

__all__ = ["NAMES", "STRATEGIES", "SparsePlan", "SparseProblem", "SparseSizes", "SparseStrategy", "strategy"]

STRATEGIES: tuple[type[SparseStrategy], ...] = (OkTopk, TopkA, TopkDsa, GTopk, Zen)
NAMES = named(STRATEGIES)


def strategy(name: str, *, where: str = "") -> type[SparseStrategy]:
    """The strategy of that name, ours or an installed package's. Raises: UnknownName, StrategyNotLoaded."""
    return found("collective.sparse", STRATEGIES, name, where=where, what="sparse all-reduce")
