"""k uniformly chosen elements, the same on every rank, so that their values add up in an all-reduce and no index is sent.

Cite: J. Wangni, J. Wang, J. Liu, T. Zhang, Gradient Sparsification for Communication-Efficient Distributed Optimization (NeurIPS 2018); with memory:
S. U. Stich et al., Sparsified SGD with Memory (NeurIPS 2018).
Left open by the papers: how ranks agree. Our answer: a permutation keyed by (seed, group, step), walked for k places: no communication, O(k).
Invariant: E|x - decoded|^2 = (1 - k/n) |x|^2, or, `scaled` by n/k, E decoded = x and E|decoded - x|^2 = (n/k - 1) |x|^2.
Cost: O(k) random reads each way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...codec_kinds import kept_elements
from ...kernels.counter_random import permuted
from ...kernels.select import Positions
from ...kernels.sparse import add_at, gather, put_at
from .base import At, Codec, Payload, State, as_floats

__all__ = ["RandomK"]


@dataclass(frozen=True)
class Drawn(Payload):
    """Values, and where they belong (not sent)."""

    indices: Positions


class RandomK(Codec):
    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        k = kept_elements(self.spec.number("density"), self.elements)
        indices = permuted(self.elements, k, self.key(at.step))
        payload = Payload.of([(torch.float32, k)])
        gather(as_floats(x), indices, payload.summand.numpy(), np.empty(k, np.int64))
        if self.spec["scaled"] and k:
            payload.summand.mul_(self.elements / k)
        return Drawn(payload.wire, payload.parts, indices)

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        assert isinstance(payload, Drawn)
        if not accumulate:
            out.zero_()
        add_at(as_floats(out), payload.indices, payload.summand.numpy())

    def remove(self, payload: Payload, x: torch.Tensor, at: At) -> None:
        assert isinstance(payload, Drawn)
        put_at(as_floats(x), payload.indices, np.float32(0))
