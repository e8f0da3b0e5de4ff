"""Magnitudes above a threshold that is found exactly every so many steps and reused in between.

Cite: S. Li, T. Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (PPoPP 2022), section 3.1; the factors are those of the authors'
code: above 4k/3 elements the threshold rises by 1.03 up to five times at once; afterwards it falls by 1.012 below 2k/3 elements and rises by
1.012 above 5k/4.
Left open by the paper: what bounds a message when gradients jump. Our answer: never more than 2k elements, the largest.
Invariant: at most 2k elements; at an exact step those at or above the k-th magnitude. What is sent and what is left add up to x, bit for bit.
Cost: one pass over memory, and O(k) at an exact step.
"""

from __future__ import annotations

import numpy as np
import torch

from ...codec_kinds import kept_elements
from ...kernels.select import Positions, kth_magnitude, magnitude, magnitude_of, select_above, top_k
from .base import At, State, as_floats
from .sparse import Sparse

__all__ = ["Threshold"]

UP, DOWN, MOST_RISES = 1.03, 1.012, 5


class Threshold(Sparse):
    """State: `threshold`, one float32; negative before the first step."""

    def state_sizes(self) -> dict[str, int]:
        return {"threshold": 1}

    def new_state(self) -> State:
        return {"threshold": torch.full((1,), -1.0)}

    def select(self, x: torch.Tensor, state: State, at: At) -> Positions:
        if not self.elements:
            return np.empty(0, np.int64)
        values, k = as_floats(x), kept_elements(self.spec.number("density"), self.elements)
        threshold = float(state["threshold"][0])
        if threshold < 0 or at.step % self.spec.integer("every") == 0:
            kth = kth_magnitude(values, k)
            threshold = magnitude(kth)
            found = select_above(values, kth - 1, expected=k)
        else:
            found = select_above(values, magnitude_of(threshold), expected=k)
            for _ in range(MOST_RISES):
                if 3 * found.size <= 4 * k:
                    break
                threshold *= UP
                found = found[select_above(values[found], magnitude_of(threshold), expected=found.size)]
            if 3 * found.size < 2 * k:
                threshold /= DOWN
            elif 4 * found.size > 5 * k:
                threshold *= DOWN
        state["threshold"][0] = threshold
        return found if found.size <= 2 * k else found[top_k(values[found], 2 * k)]
