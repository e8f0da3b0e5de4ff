"""The dense all-reduce of residual + gradient: Ok-Topk's warm-up, and what a sparse exchange is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.entries import add_select
from ...kernels.select import INFINITE
from .exchange import greet
from .protocol import AllReduce, Protocol
from .state import RankState, StepStats, Update

__all__ = ["Dense", "dense_step"]


@dataclass(kw_only=True)
class Dense:
    """The backend's own all-reduce, every step."""

    code = 6

    def start(self, state: RankState) -> None:
        """Nothing is kept."""

    def kind(self, sparse_step: int) -> str:
        return "dense"

    def step(self, state: RankState, gradient: Any, stats: StepStats) -> Protocol[Update]:
        return (yield from dense_step(state, gradient, self.code, stats))


def dense_step(state: RankState, gradient: Any, code: int, stats: StepStats) -> Protocol[Update]:
    """The result's `dense` is the reducer's own array, true until the next step; no residual is left."""
    none = state.entries("selected", 0)
    _, _, wrong = add_select(state.residual, gradient, state.sums, state.bits, np.int32(INFINITE), none)
    yield from greet(state, code, wrong, np.zeros(state.ranks, np.int64), stats)
    out = state.room("dense", state.elements, np.float32)
    np.copyto(out, state.sums)
    yield AllReduce("dense", out)
    stats.words_sent = stats.words_received = 2 * state.elements * (state.ranks - 1) // state.ranks
    stats.selected = stats.result = state.elements
    state.sums[:] = 0
    state.given = state.given_size = state.total = 0.0
    state.commit()
    return Update(elements=state.elements, ranks=state.ranks, entries=none[:0].copy(), stats=stats, dense=out)
