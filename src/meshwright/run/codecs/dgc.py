"""Deep gradient compression: momentum before sparsification, with its own memory, and a warm-up of the density.

Cite: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, Deep Gradient Compression (ICLR 2018). Per step: clip the gradient to `clip` / sqrt(ranks)
(section 3.2); momentum correction u = m u + g, v = v + u (3.1); send the k largest of v; factor masking: u and v are zeroed where v was sent (3.3);
in warm-up the density is 1/4, 1/16, 1/64, 1/256 (3.3).
Left open by the paper: what happens when the sampled threshold yields too few or too many elements. Our answer: the sample only speeds up
the search, exactly k are sent (`kernels.select`); never random ones. Clipping is of the group's norm, since a group does not see the others.
The optimizer must have no momentum of its own. Weight decay belongs to the optimizer, after the exchange.
Invariant: sent + v_new == v_old + u, bit for bit; velocity is zero wherever something was sent.
Cost: one pass over three vectors and one over v; 2n float32 of state.
"""

from __future__ import annotations

import torch

from ...codec.kinds import kept_elements, warm_density
from ...kernels.select import INFINITE
from .base import RESIDUAL, At, Payload, State
from .devices import kernels_of
from .sparse import Sparse

__all__ = ["DGC"]

VELOCITY = "velocity"


class DGC(Sparse):
    """State: `velocity` (u) and `residual` (v)."""

    def state_sizes(self) -> dict[str, int]:
        return {VELOCITY: self.elements, RESIDUAL: self.elements}

    def select(self, x: torch.Tensor, state: State, at: At) -> torch.Tensor:
        found: torch.Tensor = kernels_of(x).top_k(x, kept_elements(warm_density(self.spec, at.step), self.elements))
        return found

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        kernels, velocity, residual = kernels_of(x), state[VELOCITY], state[RESIDUAL]
        factor, clip = 1.0, self.spec.number("clip")
        if clip:
            norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
            factor = min(1.0, clip / at.world**0.5 / norm) if norm else 1.0
        largest = kernels.add_momentum(velocity, residual, x, self.spec.number("momentum"), factor)
        if largest >= INFINITE and torch.isfinite(x).all():
            self.overflow()
        payload = self.chosen(residual, self.select(residual, state, at))
        for memory in (velocity, residual):
            kernels.put_at(memory, self.indices(payload), 0.0)
        return payload

    def take_back(self, payload: Payload, state: State) -> None:
        """Return what was to be sent to the residual; its momentum is not restored."""
        self.expand(payload, state[RESIDUAL], True)
