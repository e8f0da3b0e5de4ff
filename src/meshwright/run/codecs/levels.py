"""Few levels per element, rounded at random so that the expectation is the gradient: TernGrad, QSGD; and 8-bit integers with a scale per block.

Cite: W. Wen et al., TernGrad (NeurIPS 2017); D. Alistarh et al., QSGD (NeurIPS 2017); T. Dettmers, 8-Bit Approximations (ICLR 2016).
Left open by the papers: fused tensors, where one norm drowns small layers. Our answer: scales per block of 512 (256 for int8). Random numbers
are a function of (seed, group, step, rank, position): ranks round independently,
a repeated step rounds equally. TernGrad's scale is each rank's own, not
the largest of all ranks: one exchange less, and unbiased all the same; its clipping at 2.5 sigma, which is biased, is left out.
Invariant: E decoded = x (int8 only when `stochastic`); |decoded - x| < scale / levels in every element.
A block whose scale is denormal (below about 1e-36) is sent as 0. Cost: two passes to encode, one per rank to decode.
"""

from __future__ import annotations

import torch

from ...kernels.quantise import blocks_of
from .base import At, Codec, Payload, State
from .devices import kernels_of

__all__ = ["QSGD", "BlockInt8", "TernGrad"]


class TernGrad(Codec):
    """scale = max|x| of the block; sign(x) with probability |x| / scale, else 0. Payload: [scales][codes of 2 bits]."""

    width = 2  # bits of a code
    random = True

    @property
    def levels(self) -> int:
        """Of each sign; codes run from 0 to twice that."""
        return int(2 ** (self.width - 1) - 1)

    @property
    def block(self) -> int:
        return self.spec.integer("block")

    def layout(self) -> list[tuple[torch.dtype, int]]:
        return [(torch.float32, blocks_of(self.elements, self.block)), (torch.uint8, blocks_of(self.elements * self.width, 8))]

    def measure(self, x: torch.Tensor, scales: torch.Tensor) -> None:
        kernels_of(x).block_maxima(x, self.block, scales)

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        payload, kernels = Payload.of(self.layout(), device=x.device), kernels_of(x)
        scales, packed = payload.parts
        self.measure(x, scales)
        codes = packed if self.width == 8 else torch.empty(self.elements, dtype=torch.uint8, device=x.device)
        if self.random:
            kernels.round_levels(x, self.block, scales, self.levels, self.key(at.step, at.rank), codes)
        else:
            kernels.round_nearest(x, self.block, scales, self.levels, codes)
        if self.width < 8:
            kernels.pack_codes(codes, self.width, packed)
        return payload

    def unpack(self, wire: torch.Tensor) -> Payload:
        return Payload.of(self.layout(), wire)

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        scales, packed = payload.parts
        kernels_of(out).add_levels(packed, self.width, self.levels, self.block, scales, out, accumulate)


class QSGD(TernGrad):
    """scale = max|x| of the block (as in the paper's own experiments) or its 2-norm (as in its proofs, far noisier);
    level = |x| s / scale, rounded at random, s = 2^(bits - 1) - 1. Payload: [scales][codes]."""

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.spec.integer("bits")

    def measure(self, x: torch.Tensor, scales: torch.Tensor) -> None:
        if self.spec["norm"] == "max":
            super().measure(x, scales)
        else:
            kernels_of(x).block_norms(x, self.block, scales)


class BlockInt8(TernGrad):
    """scale = max|x| of the block, 127 levels of each sign, to the nearest or at random."""

    width = 8

    @property
    def random(self) -> bool:  # type: ignore[override]
        return bool(self.spec["stochastic"])
