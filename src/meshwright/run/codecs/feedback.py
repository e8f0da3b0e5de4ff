"""Error feedback around any codec: what a step did not send is added to the next step's gradient.

Cite: F. Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014); S. P. Karimireddy et al., Error Feedback Fixes SignSGD (ICML 2019).
Left open by the papers: when the residual changes. Our answer: at the encoding, so that overlapping steps see it; if the exchange then fails and the
process goes on, `take_back` returns the payload's content to the residual. A process that dies goes back to its checkpoint, which holds both.
Invariant: decoded + new residual == x + old residual: bit for bit for codecs that send elements, to one rounding of the subtraction for others;
a gradient that is not finite leaves the residual as it was.
Cost: one more pass over memory, and n float32 of state.
"""

from __future__ import annotations

import torch

from ...errors import Unsupported
from ...kernels.select import INFINITE
from .base import RESIDUAL, At, Codec, Payload, State
from .devices import kernels_of

__all__ = ["ErrorFeedback"]


class ErrorFeedback(Codec):
    """`codec` with a residual; used like any other codec."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec.spec, codec.shapes, name=codec.name, nonfinite=codec.nonfinite)
        self.codec = codec

    def state_sizes(self) -> dict[str, int]:
        return {**self.codec.state_sizes(), RESIDUAL: self.elements}

    def new_state(self, device: torch.device | None = None) -> State:
        return {**self.codec.new_state(device), RESIDUAL: torch.zeros(self.elements, device=device)}

    def encode(self, x: torch.Tensor, state: State, at: At) -> Payload:
        values = self.flat(x)
        if not self.finite(values, at):
            return self.codec.encode(values, state, at)
        return self.pack(values, state, at)

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        total = state[RESIDUAL]
        if kernels_of(x).accumulate(total, x) >= INFINITE:
            self.overflow()
        payload = self.codec.pack(total, state, at)
        self.codec.remove(payload, total, at)
        return payload

    def advance(self, payload: Payload, state: State, at: At) -> Payload | None:
        following = self.codec.advance(payload, state, at)
        if following is not None:
            self.codec.remove(following, state[RESIDUAL], at)
        return following

    def take_back(self, payload: Payload, state: State) -> None:
        """Return to the residual what the payload was to send. Raises: Unsupported for codecs whose payloads are summed in place: they are gone."""
        if self.spec.aggregation == "all-reduce":
            raise Unsupported(
                f"codec {self.spec.name} sums its payloads in place: what was to be sent cannot be told from the sum", where=self.name,
                hint="go on from a checkpoint, which holds the residual",
            )  # fmt: skip
        self.codec.expand(payload, state[RESIDUAL], True)

    def unpack(self, wire: torch.Tensor) -> Payload:
        return self.codec.unpack(wire)

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        self.codec.expand(payload, out, accumulate)

    def finish(self, out: torch.Tensor, world: int) -> None:
        self.codec.finish(out, world)
