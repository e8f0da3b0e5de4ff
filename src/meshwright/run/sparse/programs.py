"""The programs that sparse all-reduces run: those of `decide.collective.sparse`, which are proved and simulated, for a number of ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from ...decide.collective.sparse import NAMES, SparseSizes
from ...decide.collective.sparse.phases import Phased, greeting
from ...program.program import Program

__all__ = ["program_of"]


@lru_cache(maxsize=8)
def program_of(method: str, kind: str, *, ranks: int, elements: int, k: int, wide: bool = False, reach: int = 0) -> Program:
    """Of a method and a kind of its steps; "dense" is any method's warm-up."""
    sizes = SparseSizes(ranks=ranks, elements=elements, k=k, wide=wide, reach=reach)
    if kind == "dense":
        return greeting(sizes)
    strategy: Any = NAMES[method]
    return cast(Phased, strategy()).phases(sizes, kind).b.build()
