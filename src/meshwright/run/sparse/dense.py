"""The dense all-reduce of residual + gradient: Ok-Topk's warm-up, and what a sparse exchange is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.entries import add_select
from ...kernels.select import INFINITE
from .exchange import Exchange
from .selection import Selected
from .state import Update

__all__ = ["Dense"]


@dataclass(kw_only=True)
class Dense(Exchange):
    """The backend's own all-reduce of `vector`, after headers. The result's `dense` is the reducer's own array, true until the next step; no residual
    is left."""

    code = 6
    kinds = ("dense",)

    def kind(self, sparse_step: int) -> str:
        return "dense"

    def picked(self) -> Selected:
        state, none = self.state, self.state.entries("selected", 0)
        _, _, wrong = add_select(state.residual, self.gradient, state.sums, state.bits, np.int32(INFINITE), none)
        return Selected(none, wrong)

    def vector(self) -> Any:
        out = self.state.room("dense", self.state.elements, np.float32)
        np.copyto(out, self.state.sums)
        return out

    def end_with(self, summed: Any) -> Update:
        state, stats = self.state, self.stats
        stats.words_sent = stats.words_received = 2 * state.elements * (state.ranks - 1) // state.ranks
        stats.selected = stats.result = state.elements
        state.sums[:] = 0
        state.given = state.given_size = state.total = 0.0
        state.commit()
        return Update(elements=state.elements, ranks=state.ranks, entries=self.entries[:0].copy(), stats=stats, dense=summed)
