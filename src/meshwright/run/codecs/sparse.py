"""Codecs that send some elements: values in float32 and their indices in int32 (int64 from 2^31 elements on), never packed into floats.

The common form of a payload is [indices if 8 bytes][values][indices if 4 bytes]; its length tells how many there are, so no count is sent.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ...codec.kinds import index_bytes
from ...errors import RunError
from .base import At, Codec, Payload, State
from .devices import kernels_of

__all__ = ["Sparse"]


class Sparse(Codec):
    """Sends the elements that `select` chooses."""

    def layout(self, count: int) -> list[tuple[torch.dtype, int]]:
        if index_bytes(self.elements) == 8:
            return [(torch.int64, count), (torch.float32, count)]
        return [(torch.float32, count), (torch.int32, count)]

    def indices(self, payload: Payload) -> torch.Tensor:
        return next(p for p in payload.parts if not p.dtype.is_floating_point)

    def values(self, payload: Payload) -> torch.Tensor:
        return next(p for p in payload.parts if p.dtype.is_floating_point)

    @abstractmethod
    def select(self, x: torch.Tensor, state: State, at: At) -> torch.Tensor:
        """Ascending indices of what is sent."""

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        return self.chosen(x, self.select(x, state, at))

    def chosen(self, x: torch.Tensor, indices: torch.Tensor) -> Payload:
        """The payload of these elements of `x`."""
        payload = Payload.of(self.layout(indices.numel()), device=x.device)
        kernels_of(x).gather(x, indices, self.values(payload), self.indices(payload))
        return payload

    def unpack(self, wire: torch.Tensor) -> Payload:
        entry = 4 + index_bytes(self.elements)
        if wire.dtype != torch.uint8 or wire.numel() % entry:
            what = f"{wire.numel()} elements of {wire.dtype}"
            raise RunError(f"{what} are no list of {entry}-byte entries", where=self.name, hint="ranks use different codecs")
        payload = Payload.of(self.layout(wire.numel() // entry), wire)
        indices = self.indices(payload)
        if not kernels_of(indices).within(indices, self.elements):
            raise RunError(
                f"an index between {int(indices.min())} and {int(indices.max())} is outside the {self.elements} elements", where=self.name,
                hint="ranks hold different groups, or the message was damaged",
            )  # fmt: skip
        return payload

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        if not accumulate:
            out.zero_()
        kernels_of(out).add_at(out, self.indices(payload), self.values(payload))

    def remove(self, payload: Payload, x: torch.Tensor, at: At) -> None:
        kernels_of(x).put_at(x, self.indices(payload), 0.0)
