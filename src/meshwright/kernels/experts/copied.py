"""Operators of expert layers with copies of hot experts (`plan.copies`): which slot a choice goes to, and the weights that a rank gives to others.

Cite: `plan.copies`. Left open there: which of an expert's rows go where. Our answer: its rows in the order of choices are cut at whole shares, so
every rank knows without a word what goes where. Deviations: none.
Invariant: a choice goes to one slot, which has its expert; the gradient of given weights is added to that of the expert they are of.
Cost: O(T k) per expert with copies; a copy of the weights that are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from .routing import locations_of

__all__ = ["expert_given", "expert_slots"]


@torch.library.custom_op("meshwright::expert_slots", mutates_args=())  # type: ignore[untyped-decorator]
def expert_slots(experts: torch.Tensor, first: Sequence[int], cut: Sequence[int], slots: Sequence[int], shares: Sequence[int]) -> torch.Tensor:
    """The slot of every choice [T, k]. first [E]: of every expert, that of all its rows, or of those before the first cut. cut: experts with
    several slots, one entry per slot, in order; slots, shares: of each entry, and up to which share of the expert's rows."""
    found = torch.tensor(first, device=experts.device)[experts]
    if not cut:
        return found
    locations, counts = locations_of(experts, len(first))
    for expert in dict.fromkeys(cut):
        mine = [i for i, e in enumerate(cut) if e == expert]
        ends = torch.tensor([int(counts[expert]) * shares[i] // shares[mine[-1]] for i in mine], device=experts.device)
        at = torch.bucketize(locations, ends, right=True).clamp(max=len(mine) - 1)
        found = torch.where(experts == expert, torch.tensor([slots[i] for i in mine], device=experts.device)[at], found)
    return found


@torch.library.custom_op("meshwright::expert_given", mutates_args=())  # type: ignore[untyped-decorator]
def expert_given(gate_up: torch.Tensor, down: torch.Tensor, experts: Sequence[int], blocks: int) -> torch.Tensor:
    """Weights [blocks, 3 F H] of own `experts`, gates over ups over downs, one after the other; zero after them."""
    size = prod(gate_up.shape[1:])
    out = gate_up.new_zeros(blocks, size + prod(down.shape[1:]))
    for row, e in zip(out, experts, strict=False):
        row[:size], row[size:] = gate_up[e].reshape(-1), down[e].reshape(-1)
    return out


@torch.library.custom_op("meshwright::expert_given_backward", mutates_args=())  # type: ignore[untyped-decorator]
def _expert_given_backward(grad: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: Sequence[int]) -> list[torch.Tensor]:
    of_gate_up, of_down = torch.zeros_like(gate_up), torch.zeros_like(down)
    for row, e in zip(grad, experts, strict=False):
        of_gate_up[e] += row[: gate_up[0].numel()].view_as(gate_up[e])
        of_down[e] += row[gate_up[0].numel() :].view_as(down[e])
    return [of_gate_up, of_down]


@expert_slots.register_fake  # type: ignore[untyped-decorator]
def _(experts: torch.Tensor, first: Sequence[int], cut: Sequence[int], slots: Sequence[int], shares: Sequence[int]) -> torch.Tensor:
    return experts.new_empty(experts.shape, dtype=torch.int64)


@expert_given.register_fake  # type: ignore[untyped-decorator]
def _(gate_up: torch.Tensor, down: torch.Tensor, experts: Sequence[int], blocks: int) -> torch.Tensor:
    return gate_up.new_empty(blocks, prod(gate_up.shape[1:]) + prod(down.shape[1:]))


@_expert_given_backward.register_fake  # type: ignore[untyped-decorator]
def _(grad: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty_like(gate_up), torch.empty_like(down)]


def _given_setup(ctx: Any, inputs: Any, output: Any) -> None:
    gate_up, down, ctx.experts, _ = inputs
    ctx.save_for_backward(gate_up, down)


def _given_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return *torch.ops.meshwright.expert_given_backward(grad, *ctx.saved_tensors, ctx.experts), None, None


expert_given.register_autograd(_given_backward, setup_context=_given_setup)
