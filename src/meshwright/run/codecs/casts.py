"""The gradient itself, IEEE half precision or bfloat16: encoded forms that ranks can add up.

Left open: what becomes of sums beyond the type's range. Our answer, as in torch's own hooks: the half-size types carry x / world, so that the sum is
the mean and no larger than the largest gradient; `finish` then has nothing left to divide. A finite value beyond half precision's 65504 is refused,
or with `nonfinite="pass"` becomes infinity. Each addition on the way rounds once more.
Invariant: alone, |decoded - x| <= 2^-11 |x| (fp16, normal results) or 2^-8 |x| (bf16); `none` is exact in any float type.
Cost: one pass over memory each way.
"""

from __future__ import annotations

import torch

from ...errors import NotFinite
from ...kernels.select import magnitude
from .base import At, Codec, Payload, State
from .devices import kernels_of

__all__ = ["Half", "Plain"]


OVERFLOWS = {torch.float16: 65520.0, torch.bfloat16: magnitude(0x7F7F8000)}  # magnitudes from here on round to infinity


class Plain(Codec):
    """`none`: the summand is a copy of the gradient in its own type."""

    def encode(self, x: torch.Tensor, state: State, at: At) -> Payload:
        values = self.flat(x)
        self.finite(values, at)
        payload = Payload.of([(x.dtype, self.elements)], device=x.device)
        payload.summand.copy_(x.detach().reshape(-1))
        return payload

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        return self.encode(x, state, at)

    def decode(self, payload: Payload, out: torch.Tensor, *, accumulate: bool = False) -> None:
        values = payload.summand.view(out.shape)
        if accumulate:
            out += values
        else:
            out.copy_(values)

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        self.decode(payload, out, accumulate=accumulate)


class Half(Codec):
    """`fp16` and `bf16`."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.spec.name == "fp16" else torch.bfloat16

    def poisoned(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        largest = magnitude(kernels_of(x).largest_magnitude(x)) / at.world
        if self.nonfinite == "refuse" and largest >= OVERFLOWS[self.dtype]:
            self._refuse_overflow(x, at)
        payload = Payload.of([(self.dtype, self.elements)], device=x.device)
        payload.summand.copy_(x / at.world if at.world != 1 else x)
        return payload

    def _refuse_overflow(self, x: torch.Tensor, at: At) -> None:
        """Raises: NotFinite, for what is finite and has no number in the narrow type."""
        halves = (x / at.world).to(self.dtype)
        wrong = torch.nonzero(~torch.isfinite(halves))
        if len(wrong):
            first = int(wrong[0])
            raise NotFinite(
                f"element {first} is {float(x[first]):.6g}, of which its share for {at.world} ranks is beyond {self.spec.name} "
                f"(at most {torch.finfo(self.dtype).max:.6g}); the gradient itself is finite", where=self.name,
                hint="lower the loss scale, or use bf16, which reaches as far as float32",
                data={"group": self.name, "element": first, "step": at.step, "rank": at.rank, "overflow": self.spec.name},
            )  # fmt: skip

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        if accumulate:
            out += payload.summand
        else:
            out.copy_(payload.summand)

    def remove(self, payload: Payload, x: torch.Tensor, at: At) -> None:
        x.sub_(payload.summand, alpha=at.world)

    def finish(self, out: torch.Tensor, world: int) -> None:
        """Nothing: what was summed were shares of the mean."""
