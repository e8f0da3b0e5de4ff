"""Sparse all-reduces: what is sent when every rank selects k of n elements. Executed by `run.sparse`, of the same names."""

from __future__ import annotations

from ....cite import Cite
from ....errors import UnknownName
from .gtopk import CITE as GTOPK_CITE
from .gtopk import GTopk
from .oktopk import CITE as OKTOPK_CITE
from .oktopk import OkTopk
from .problem import SparsePlan, SparseProblem, SparseStrategy
from .topka import CITE as TOPKA_CITE
from .topka import TopkA
from .topkdsa import CITE as TOPKDSA_CITE
from .topkdsa import TopkDsa
from .zen import CITE as ZEN_CITE
from .zen import Zen

__all__ = ["CITES", "NAMES", "SparsePlan", "SparseProblem", "SparseStrategy", "strategy"]

# name -> (strategy, where it comes from)
LISTED: dict[str, tuple[type[SparseStrategy], Cite]] = {
    "oktopk": (OkTopk, OKTOPK_CITE), "topka": (TopkA, TOPKA_CITE), "topkdsa": (TopkDsa, TOPKDSA_CITE), "gtopk": (GTopk, GTOPK_CITE),
    "zen": (Zen, ZEN_CITE),
}  # fmt: skip
NAMES: dict[str, type[SparseStrategy]] = {name: kind for name, (kind, _) in LISTED.items()}
CITES: dict[str, Cite] = {name: cite for name, (_, cite) in LISTED.items()}


def strategy(name: str) -> type[SparseStrategy]:
    """The strategy of that name; raises UnknownName."""
    if name not in NAMES:
        raise UnknownName(f"no sparse all-reduce {name!r}", hint=f"one of {', '.join(NAMES)}")
    return NAMES[name]
