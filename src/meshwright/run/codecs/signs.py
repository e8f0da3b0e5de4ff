"""One bit per element: signs with a mean magnitude (EF-SignSGD), with the means of both sides (1-bit SGD), or bare, for a majority vote.

Cite: S. P. Karimireddy et al., Error Feedback Fixes SignSGD (ICML 2019); F. Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014);
J. Bernstein et al., signSGD (ICML 2018) and signSGD with Majority Vote (ICLR 2019: Signum sends the signs of a momentum).
Left open by the papers: fused tensors (they scale each layer or column). Our answer: means per block of 64 elements. That is half as many bytes
again, but where most of a block is zero (rows of an embedding) a sign says something wrong of every zero, and large blocks diverge
(benchmarks/codec_convergence.py). A zero counts as positive (its sign bit is clear). A tied vote gives 0.
Invariant: EF-SignSGD leaves |x|^2 - |x|_1^2 / n of every block, 1-bit no more than that; both >= the contraction of 1/block.
Bare signs cannot say "not finite": such gradients are always refused.
Cost: one pass to encode, one over the result per rank to decode.
"""

from __future__ import annotations

import torch

from ...kernels.quantise import blocks_of
from .base import At, Codec, Payload, State
from .devices import kernels_of

__all__ = ["EFSign", "OneBit", "SignSGD", "Signum"]


class EFSign(Codec):
    """Payload: [mean |x| of each block, float32][sign bits]."""

    means = 1  # per block

    @property
    def block(self) -> int:
        return self.spec.integer("block")

    def layout(self) -> list[tuple[torch.dtype, int]]:
        return [(torch.float32, self.means * blocks_of(self.elements, self.block)), (torch.uint8, blocks_of(self.elements, 8))]

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        payload = Payload.of(self.layout(), device=x.device)
        self.measure(x, payload.parts[0])
        kernels_of(x).pack_signs(x, payload.parts[1])
        return payload

    def measure(self, x: torch.Tensor, means: torch.Tensor) -> None:
        kernels_of(x).block_means(x, self.block, means)

    def both_values(self, means: torch.Tensor) -> torch.Tensor:
        """[what a clear bit means, what a set bit means] of each block, flat."""
        return torch.stack((means, -means), 1).reshape(-1)

    def unpack(self, wire: torch.Tensor) -> Payload:
        return Payload.of(self.layout(), wire)

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        kernels_of(out).add_two_values(payload.parts[1], self.block, self.both_values(payload.parts[0]), out, accumulate)


class OneBit(EFSign):
    """Payload: [mean of the positive, mean of the negative elements of each block][sign bits]."""

    means = 2

    def measure(self, x: torch.Tensor, means: torch.Tensor) -> None:
        kernels_of(x).block_sides(x, self.block, means)

    def both_values(self, means: torch.Tensor) -> torch.Tensor:
        return means


class SignSGD(Codec):
    """Payload: [sign bits]. Decoding adds votes; `finish` gives the majority: -1, 0 or 1."""

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        payload = Payload.of([(torch.uint8, blocks_of(self.elements, 8))], device=x.device)
        kernels_of(x).pack_signs(x, payload.wire)
        return payload

    def finite(self, x: torch.Tensor, at: At) -> bool:
        return super().finite(x, at) or self.refuse(x, at)

    def unpack(self, wire: torch.Tensor) -> Payload:
        return Payload.of([(torch.uint8, blocks_of(self.elements, 8))], wire)

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        whole = max(8, blocks_of(self.elements, 8) * 8)
        kernels_of(out).add_two_values(payload.wire, whole, torch.tensor([1.0, -1.0], device=out.device), out, accumulate)

    def finish(self, out: torch.Tensor, world: int) -> None:
        torch.sign(out, out=out)


class Signum(SignSGD):
    """State: `momentum`, m = momentum m + (1 - momentum) g, whose signs are sent."""

    def state_sizes(self) -> dict[str, int]:
        return {"momentum": self.elements}

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        return super().pack(state["momentum"].lerp_(x, 1 - self.spec.number("momentum")), state, at)
