"""Encode and decode: tokens into the experts' buffers and back, by index, with exact gradients.

Cite: Tutel (arXiv 2206.03382), section 3.4, "fast encode and decode". Left open by the paper: nothing.
Deviations: the rows that a token's choices lie in are worked out once (`slots_of`) and used four times.
Invariant: equal to the products with the one-hot tensor [T, E, C] that GShard writes; what was dropped adds nothing and gets no gradient.
Cost: O(T k H) instead of O(T E C H).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..gpu.devices import usable

__all__ = ["decode", "encode", "slots_of"]


def slots_of(experts: torch.Tensor, locations: torch.Tensor, capacity: int) -> torch.Tensor:
    """Row of every choice [T, k] in the buffers [E · capacity]; -1 where it has no place, so the token is dropped there."""
    return torch.where(locations < capacity, experts * capacity + locations, -1)


def _put(rows: int, x: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
    """Buffers [rows, H] that hold x [T, H] (times the gate of the choice) where the slots [T, k] say, and zero elsewhere."""
    if _on_gpu(x):
        from ..gpu.experts import put

        return put(rows, x, slots, gates)
    out = x.new_zeros(rows, x.shape[1])
    for j in range(slots.shape[1]):
        slot = slots[:, j]
        kept = (slot >= 0).nonzero().view(-1)
        sent = x if len(kept) == len(slot) else x.index_select(0, kept)
        if gates is not None:
            sent = sent * gates[kept, j].unsqueeze(1).to(x.dtype)
        out.index_copy_(0, slot[kept], sent)
    return out


def _take(buffer: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
    """Sum over the choices of the rows that they lie in (times their gates), [T, H]. No atomics: equal bits every time."""
    if _on_gpu(buffer):
        from ..gpu.experts import take

        return take(buffer, slots, gates)
    out = buffer.new_zeros(slots.shape[0], buffer.shape[1])
    for j in range(slots.shape[1]):
        slot = slots[:, j]
        kept = slot >= 0
        weight = kept.to(buffer.dtype) if gates is None else torch.where(kept, gates[:, j], 0).to(buffer.dtype)
        if buffer.shape[0]:
            out.addcmul_(buffer.index_select(0, slot.clamp(min=0)), weight.unsqueeze(1))
    return out


def _on_gpu(x: torch.Tensor) -> bool:
    """Does the GPU's kernel take the rows? Its sums are float32, so float64 is left to torch."""
    return usable(x) and x.dtype != torch.float64


def _dots(buffer: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """<row of the choice, x of its token>, [T, k]: what the gates' gradients are."""
    columns = []
    for j in range(slots.shape[1]):
        slot = slots[:, j]
        if buffer.shape[0]:
            dot = (buffer.index_select(0, slot.clamp(min=0)) * x).sum(1)
            columns.append(torch.where(slot >= 0, dot, 0))
        else:
            columns.append(x.new_zeros(x.shape[0]))
    return torch.stack(columns, 1)


class _Encode(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None, rows: int) -> torch.Tensor:
        ctx.save_for_backward(x, slots, gates)
        return _put(rows, x, slots, gates)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, slots, gates = ctx.saved_tensors
        of_x = _take(grad, slots, gates) if ctx.needs_input_grad[0] else None
        of_gates = _dots(grad, x, slots).to(gates.dtype) if gates is not None and ctx.needs_input_grad[2] else None
        return of_x, None, of_gates, None


class _Decode(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(buffer, slots, gates)
        return _take(buffer, slots, gates)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        buffer, slots, gates = ctx.saved_tensors
        of_buffer = _put(buffer.shape[0], grad, slots, gates) if ctx.needs_input_grad[0] else None
        of_gates = _dots(buffer, grad, slots).to(gates.dtype) if gates is not None and ctx.needs_input_grad[2] else None
        return of_buffer, None, of_gates


def encode(x: torch.Tensor, slots: torch.Tensor, rows: int, gates: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens [T, H] into buffers [rows, H], where `slots` [T, k] (`slots_of`) say; times `gates` [T, k] where scores weigh the experts' inputs."""
    out: torch.Tensor = _Encode.apply(x, slots, gates, rows)
    return out


def decode(buffer: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens [T, H] out of buffers [rows, H]: the sum of their choices' rows, times `gates` [T, k] where scores weigh the experts' outputs."""
    out: torch.Tensor = _Decode.apply(buffer, slots, gates)
    return out
