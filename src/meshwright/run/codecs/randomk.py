"""k uniformly chosen elements, the same on every rank, so that their values add up in an all-reduce and no index is sent.

Cite: J. Wangni, J. Wang, J. Liu, T. Zhang, Gradient Sparsification for Communication-Efficient Distributed Optimization (NeurIPS 2018); with memory:
S. U. Stich et al., Sparsified SGD with Memory (NeurIPS 2018).
Left open by the papers: how ranks agree. Our answer: a permutation keyed by (seed, group, step), walked for k places: no communication, O(k).
Invariant: E|x - decoded|^2 = (1 - k/n) |x|^2, or, `scaled` by n/k, E decoded = x and E|decoded - x|^2 = (n/k - 1) |x|^2.
Cost: O(k) random reads each way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codec.kinds import kept_elements
from ...kernels.counter_random import permuted
from .base import At, Codec, Payload, State
from .devices import kernels_of

__all__ = ["RandomK"]


@dataclass(frozen=True)
class Drawn(Payload):
    """Values, and where they belong (not sent)."""

    indices: torch.Tensor


class RandomK(Codec):
    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        k = kept_elements(self.spec.number("density"), self.elements)
        indices = torch.from_numpy(permuted(self.elements, k, self.key(at.step))).to(x.device)
        payload = Payload.of([(torch.float32, k)], device=x.device)
        kernels_of(x).gather(x, indices, payload.summand, None)
        if self.spec["scaled"] and k:
            payload.summand.mul_(self.elements / k)
        return Drawn(payload.wire, payload.parts, indices)

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        assert isinstance(payload, Drawn)
        if not accumulate:
            out.zero_()
        kernels_of(out).add_at(out, payload.indices, payload.summand)

    def remove(self, payload: Payload, x: torch.Tensor, at: At) -> None:
        assert isinstance(payload, Drawn)
        kernels_of(x).put_at(x, payload.indices, 0.0)
