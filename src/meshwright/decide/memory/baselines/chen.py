"""Chen's sub-linear memory: cut the chain into segments, keep what crosses the cuts, run every segment's forward again before its backward.

Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, sections 3 and 4 (the square-root rule, and
Algorithm 3: segments filled up to a size, over sizes). Deviations: a segment is filled up to total / k bytes for every number of segments k, and
the fastest that fits is taken; k nearest to the square root without a budget's help is among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ....cite import Cite
from ....graph.step_graph import StepGraph, StepPlan
from ..lifetimes import Lifetimes, lifetimes_of
from ..problem import StepStrategy
from .chain import Chain, chain_of
from .choice import Schedule, chosen, measured

__all__ = ["CITE", "Chen"]

CITE = Cite(key="chen", title="Training Deep Nets with Sublinear Memory Cost", authors="Chen, Xu, Zhang, Guestrin", year=2016, venue="arXiv", url="https://arxiv.org/abs/1604.06174")


@dataclass(frozen=True, kw_only=True)
class Chen(StepStrategy):
    """`segments`: exactly so many (None: whatever is fastest within the budget; 0: the square root of the number of stages)."""

    name: ClassVar[str] = "chen"
    cite: ClassVar[Cite] = CITE
    in_frontier: ClassVar[bool] = True

    segments: int | None = None

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible with the least peak of its segmentations."""
        lives, chain, schedules = _schedules(graph)
        if self.segments is not None:
            wanted = max(1, min(self.segments or round(len(chain) ** 0.5), len(chain)))
            nearest = min(abs(s.options["segments"] - wanted) for s in schedules)
            schedules = tuple(s for s in schedules if abs(s.options["segments"] - wanted) == nearest)
        return chosen(lives, schedules, budget_bytes, strategy=self.name)


@lru_cache(maxsize=8)
def _schedules(graph: StepGraph) -> tuple[Lifetimes, Chain, tuple[Schedule, ...]]:
    lives = lifetimes_of(graph)
    chain = chain_of(lives)
    return lives, chain, measured(chain, tried(chain))


def tried(chain: Chain) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], dict[str, Any]]]:
    seen: set[tuple[int, ...]] = set()
    for k in range(1, len(chain) + 1):
        starts = segments_of(chain, k)
        if starts not in seen:
            seen.add(starts)
            hold, ahead = _held(chain, starts)
            yield hold, ahead, {"segments": len(starts)}


def segments_of(chain: Chain, k: int) -> tuple[int, ...]:
    """First stages of the segments: a new one begins when the current holds total / k bytes or more."""
    sizes = [max(a, 1) for a in chain.all_bytes]
    limit = sum(sizes) / k
    starts, filled = [0], 0
    for i, size in enumerate(sizes):
        if filled >= limit and i > starts[-1]:
            starts.append(i)
            filled = 0
        filled += size
    return tuple(starts)


def _held(chain: Chain, starts: tuple[int, ...]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    held = chain.nothing_held()
    ahead = chain.lives.lazy()
    for start, after in zip(starts, [*starts[1:], len(chain)], strict=True):
        last = after == len(chain)
        # the last segment is followed by its own backward, so it keeps everything; the others run again when backward begins
        for i in range(start, after):
            held[list(chain.needed[i])] = 0 if last else 1
        begin, end = chain.first_backward[after - 1], chain.first_backward[start - 1] if start else chain.lives.stages + 1
        if begin < end:
            ahead[begin] = end - 1
    for start in starts:
        held[list(chain.crossing[start])] = 0
    return held, ahead
