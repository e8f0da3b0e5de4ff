"""Magnitudes above a threshold that is found exactly every so many steps and reused in between.

Cite: S. Li, T. Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (PPoPP 2022), section 3.1; the factors are those of the authors'
code: above 4k/3 elements the threshold rises by 1.03 up to five times at once; afterwards it falls by 1.012 below 2k/3 elements and rises by
1.012 above 5k/4.
Left open by the paper: what bounds a message when gradients jump. Our answer: never more than 2k elements, the largest.
Invariant: at most 2k elements; at an exact step those at or above the k-th magnitude. What is sent and what is left add up to x, bit for bit.
Cost: one pass over memory, and O(k) at an exact step.
"""

from __future__ import annotations

import torch

from ...codec.kinds import kept_elements
from ...kernels.select import magnitude, magnitude_of
from .base import At, State
from .devices import kernels_of
from .sparse import Sparse

__all__ = ["Threshold"]

RISE_FACTOR, FALL_FACTOR, MAX_RISES = 1.03, 1.012, 5


class Threshold(Sparse):
    """State: `threshold`, one float32; negative before the first step."""

    def state_sizes(self) -> dict[str, int]:
        return {"threshold": 1}

    def new_state(self, device: torch.device | None = None) -> State:
        return {"threshold": torch.full((1,), -1.0, device=device)}

    def select(self, x: torch.Tensor, state: State, at: At) -> torch.Tensor:
        if not self.elements:
            return torch.empty(0, dtype=torch.int64, device=x.device)
        kernels, k = kernels_of(x), kept_elements(self.spec.number("density"), self.elements)
        threshold = float(state["threshold"][0])
        if threshold < 0 or at.step % self.spec.integer("every") == 0:
            kth = kernels.kth_magnitude(x, k)
            threshold = magnitude(kth)
            found: torch.Tensor = kernels.select_above(x, kth - 1, expected=k)
        else:
            found = kernels.select_above(x, magnitude_of(threshold), expected=k)
            for _ in range(MAX_RISES):
                if 3 * found.numel() <= 4 * k:
                    break
                threshold *= RISE_FACTOR
                found = found[kernels.select_above(x[found], magnitude_of(threshold), expected=found.numel())]
            if 3 * found.numel() < 2 * k:
                threshold /= FALL_FACTOR
            elif 4 * found.numel() > 5 * k:
                threshold *= FALL_FACTOR
        state["threshold"][0] = threshold
        return found if found.numel() <= 2 * k else found[kernels.top_k(x[found], 2 * k)]
