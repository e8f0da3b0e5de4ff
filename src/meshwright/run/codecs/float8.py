"""8-bit floats (e4m3 or e5m2) with a float32 scale per block.

Cite: P. Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433).
Left open by the paper: scales (it leaves them to the framework). Our answer: max|x| of each block of 256 goes to the largest finite number,
rounding is to
the nearest, so nothing saturates.
Invariant: |decoded - x| <= 2^-4 |x| (e4m3) or 2^-3 |x| (e5m2), or half the smallest step of the block.
Cost: two passes to encode; a table of 256 values to decode. A block whose scale is denormal is sent as 0.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ...kernels.quantise import blocks_of
from .base import At, Codec, Payload, State
from .devices import kernels_of

__all__ = ["BlockFloat8"]

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@lru_cache
def values_of(dtype: torch.dtype) -> torch.Tensor:
    """What each byte means."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


class BlockFloat8(Codec):
    """Payload: [scales][bytes]; an element is its byte's value times its block's scale."""

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[str(self.spec["format"])]

    @property
    def block(self) -> int:
        return self.spec.integer("block")

    def layout(self) -> list[tuple[torch.dtype, int]]:
        return [(torch.float32, blocks_of(self.elements, self.block)), (torch.uint8, self.elements)]

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        payload, kernels = Payload.of(self.layout(), device=x.device), kernels_of(x)
        scales, packed = payload.parts
        kernels.block_maxima(x, self.block, scales)
        scales /= torch.full((1,), torch.finfo(self.dtype).max, device=x.device)  # of a number CUDA would multiply by the inverse: other bits
        scaled = torch.empty_like(x)
        kernels.scale_blocks(x, self.block, scales, scaled)
        packed.view(self.dtype).copy_(scaled)
        return payload

    def unpack(self, wire: torch.Tensor) -> Payload:
        return Payload.of(self.layout(), wire)

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        scales, packed = payload.parts
        kernels_of(out).add_looked_up(packed, values_of(self.dtype), self.block, scales, out, accumulate)
