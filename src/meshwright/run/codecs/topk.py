"""The k = max(1, floor(density n)) largest magnitudes of the whole group, exactly; of equal ones the first.

Cite: S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with Memory (NeurIPS 2018).
Left open by the paper: fused tensors. Our answer: one selection over the group: tensors with small gradients may wait long; the residual keeps what
they have.
Invariant: |x - decoded|^2 <= (1 - k/n) |x|^2; what is sent and what is left add up to x, bit for bit.
Cost: one pass over memory (`kernels.select`), O(k) to decode.
"""

from __future__ import annotations

import torch

from ...codec.kinds import kept_elements
from .base import At, State
from .devices import kernels_of
from .sparse import Sparse

__all__ = ["TopK"]


class TopK(Sparse):
    def select(self, x: torch.Tensor, state: State, at: At) -> torch.Tensor:
        found: torch.Tensor = kernels_of(x).top_k(x, kept_elements(self.spec.number("density"), self.elements))
        return found
