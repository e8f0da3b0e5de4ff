"""Revolve: the optimal schedule of a chain of equal steps with so many checkpoints.

Source: A. Griewank, A. Walther, "Algorithm 799: Revolve", ACM TOMS 26(1), 2000: with s checkpoints, the start included, reversing l steps
takes at least r l - C(s + r, r - 1) forward steps, where r is the least number with l <= C(s + r, s); the schedule below reaches it.
Deviations: steps are the stages of the linearised graph, which are not equal; the number of checkpoints is the one whose schedule is fastest
within the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ....cite import Cite
from ....graph.step_graph import StepGraph, StepPlan
from ..lifetimes import Lifetimes, lifetimes_of
from ..problem import StepStrategy
from .chain import Chain, chain_of
from .choice import Schedule, chosen, measured

__all__ = ["CITE", "Revolve", "fewest_steps"]

CITE = Cite(
    key="revolve", title="Algorithm 799: Revolve", authors="Griewank, Walther", year=2000, venue="ACM TOMS 26(1)",
    doi="10.1145/347837.347846",
)  # fmt: skip


def fewest_steps(steps: int, checkpoints: int) -> int:
    """Forward steps to reverse a chain (the one right before each reversal not counted); `checkpoints` >= 1 counts the start."""
    if steps <= 1:
        return 0
    r = 1
    while comb(checkpoints + r, checkpoints) < steps:
        r += 1
    return r * steps - comb(checkpoints + r, r - 1)


@dataclass(frozen=True, kw_only=True)
class Revolve(StepStrategy):
    """`checkpoints`: exactly so many, the start included (None: the fastest within the budget)."""

    name: ClassVar[str] = "revolve"
    cite: ClassVar[Cite] = CITE
    in_frontier: ClassVar[bool] = True

    checkpoints: int | None = None

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible with the least peak over all numbers of checkpoints."""
        lives, schedules = _schedules(graph)
        if self.checkpoints is not None:
            wanted = min(self.checkpoints, max(s.options["checkpoints"] for s in schedules))
            schedules = tuple(s for s in schedules if s.options["checkpoints"] <= wanted)
            most = max(s.options["checkpoints"] for s in schedules)
            schedules = tuple(s for s in schedules if s.options["checkpoints"] == most)
        return chosen(lives, schedules, budget_bytes, strategy=self.name)


@lru_cache(maxsize=8)
def _schedules(graph: StepGraph) -> tuple[Lifetimes, tuple[Schedule, ...]]:
    lives = lifetimes_of(graph)
    chain = chain_of(lives)
    return lives, measured(chain, tried(chain))


def tried(chain: Chain) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], dict[str, Any]]]:
    ahead = chain.together()
    for checkpoints in range(1, len(chain) + 1):
        held = chain.nothing_held()
        _reverse(chain, held, 0, len(chain), checkpoints, 0)
        yield held, ahead, {"checkpoints": checkpoints}


def _reverse(chain: Chain, held: NDArray[np.int32], start: int, end: int, checkpoints: int, now: int) -> None:
    """Stages start..end-1, whose start is a checkpoint, from schedule stage `now` on."""
    while end - start > 1:
        length = end - start
        # one checkpoint, the start: every stage is reached from it anew, the last one first
        if checkpoints == 1:
            split = end - 1
        else:
            split = start + min(
                # j steps ahead to the next checkpoint, the rest with one fewer, then these j with all of them again
                range(1, length), key=lambda j: (j + fewest_steps(length - j, checkpoints - 1) + fewest_steps(j, checkpoints), j)
            )
            _hold(held, chain.crossing[split], now)
        if checkpoints == 1:
            _hold(held, chain.needed[split], now)
        else:
            _reverse(chain, held, split, end, checkpoints - 1, now)
        end, now = split, chain.first_backward[split - 1]
    _hold(held, chain.needed[start], now)


def _hold(held: NDArray[np.int32], storages: tuple[int, ...], now: int) -> None:
    index = list(storages)
    held[index] = np.minimum(held[index], now)
