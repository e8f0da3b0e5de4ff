"""An expert layer as operators of fixed shapes: what a captured graph holds of it, so that it can be planned, cut, and spread over ranks.

Cite: D. Lepikhin and others, "GShard" (arXiv 2006.16668), section 2.2, for buffers of a fixed capacity; Tutel (arXiv 2206.03382), section 3.4, for
their sparse form. Left open by the papers: experts' time follows the capacity. Our answer: the filled rows are counted and the counts travel too, so
only filled rows are multiplied. Deviations: what goes into the activation is computed again in backward (MegaBlocks, arXiv 2211.15841, section 5).
Invariant: `expert_rows` and `expert_sums` are each other's adjoints; a choice without a place adds nothing and gets no gradient.
Cost: O(T k H) to place and to take; the products of the filled rows, one after the other expert.

Buffers are [E, C, H]. With n ranks, each of which has E / n experts, block i of what came is rank i's rows for these. Where ranks have the same
tokens and divide their experts (tensor ranks), each places and takes the rows of its own: `places` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.nn import functional

from ...errors import NotFinite
from .dispatch import _dots, _put, _take, slots_of
from .routing import locations_of

__all__ = ["ACTIVATIONS", "expert_counts", "expert_mlp", "expert_rows", "expert_sums", "mlp_flops"]

_Derivative = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# name -> (function, (gradient of its result, its argument) -> gradient of the argument)
ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], _Derivative]] = {
    "silu": (functional.silu, torch.ops.aten.silu_backward.default),
    "gelu": (functional.gelu, torch.ops.aten.gelu_backward.default),
    "gelu-tanh": (partial(functional.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward.default, approximate="tanh")),
    "relu": (functional.relu, lambda grad, x: torch.ops.aten.threshold_backward.default(grad, x, 0)),
}


Places = Sequence[int] | None  # of every expert its buffer here, -1 for one whose buffer others have; None: all of them, in order


def _slots(experts: torch.Tensor, n: int, capacity: int, places: Places = None) -> torch.Tensor:
    slots = slots_of(experts, locations_of(experts, n)[0], capacity)
    if places is None:
        return slots
    here = torch.tensor(places, device=experts.device)[experts]
    return torch.where((slots >= 0) & (here >= 0), slots + (here - experts) * capacity, -1)


def _held(n: int, places: Places) -> int:
    return n if places is None else sum(p >= 0 for p in places)


# ---- tokens to rows and back -------------------------------------------------------------------------------------
@torch.library.custom_op("meshwright::expert_rows", mutates_args=())  # type: ignore[untyped-decorator]
def expert_rows(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor | None, n: int, capacity: int, places: Sequence[int] | None = None
) -> torch.Tensor:
    """Tokens [T, H] (times `weights` [T, k]) in the buffers [n, capacity, H] of their `experts` [T, k], first choices first; zero elsewhere.

    places [n]: of every expert its buffer here, -1 for one whose buffer others have; None: all of them, in order."""
    held = _held(n, places)
    return _put(held * capacity, x, _slots(experts, n, capacity, places), weights).view(held, capacity, x.shape[1])


@torch.library.custom_op("meshwright::expert_sums", mutates_args=())  # type: ignore[untyped-decorator]
def expert_sums(
    rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor | None, places: Sequence[int] | None = None
) -> torch.Tensor:
    """Buffers [n, C, H] -> tokens [T, H]: the sum of a token's rows, times its `weights`. Raises: NotFinite for weights that are NaN or infinite."""
    n, capacity, width = rows.shape
    if weights is not None and not bool((fine := torch.isfinite(weights).all(1)).all()):
        text = f"the router's weights of {int((~fine).sum())} of {len(fine)} tokens hold NaN or infinity"
        raise NotFinite(text, where="experts", hint="look at what comes into the router, and at the learning rate")
    return _take(rows.reshape(n * capacity, width), _slots(experts, n if places is None else len(places), capacity, places), weights)


@torch.library.custom_op("meshwright::expert_dots", mutates_args=())  # type: ignore[untyped-decorator]
def _expert_dots(
    rows: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, like: torch.Tensor, places: Sequence[int] | None = None
) -> torch.Tensor:
    """<row of the choice, x of its token> [T, k], in the type of `like`: gradients of weights."""
    n, capacity, width = rows.shape
    slots = _slots(experts, n if places is None else len(places), capacity, places)
    return _dots(rows.reshape(n * capacity, width), x, slots).to(like.dtype)


@torch.library.custom_op("meshwright::expert_counts", mutates_args=())  # type: ignore[untyped-decorator]
def expert_counts(experts: torch.Tensor, n: int, capacity: int, places: Sequence[int] | None = None) -> torch.Tensor:
    """Filled rows of every buffer, [n], int64."""
    counts = torch.bincount(experts.reshape(-1), minlength=n).clamp(max=capacity)
    if places is None:
        return counts
    return counts[torch.tensor(sorted((e for e in range(n) if places[e] >= 0), key=places.__getitem__), dtype=torch.int64, device=counts.device)]


@expert_rows.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor | None, n: int, capacity: int, places: Places = None) -> torch.Tensor:
    return x.new_empty(_held(n, places), capacity, x.shape[1])


@expert_sums.register_fake  # type: ignore[untyped-decorator]
def _(rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor | None, places: Places = None) -> torch.Tensor:
    return rows.new_empty(experts.shape[0], rows.shape[2])


@_expert_dots.register_fake  # type: ignore[untyped-decorator]
def _(rows: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, like: torch.Tensor, places: Places = None) -> torch.Tensor:
    return like.new_empty(experts.shape)


@expert_counts.register_fake  # type: ignore[untyped-decorator]
def _(experts: torch.Tensor, n: int, capacity: int, places: Places = None) -> torch.Tensor:
    return experts.new_empty(_held(n, places), dtype=torch.int64)


def _rows_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, experts, weights, _, _, ctx.places = inputs
    ctx.weighted = weights is not None
    ctx.save_for_backward(experts, *((x, weights) if ctx.weighted else ()))


def _rows_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    experts, *rest = ctx.saved_tensors
    of_weights = torch.ops.meshwright.expert_dots(grad, rest[0], experts, rest[1], ctx.places) if ctx.weighted else None
    return torch.ops.meshwright.expert_sums(grad, experts, rest[1] if ctx.weighted else None, ctx.places), None, of_weights, None, None, None


def _sums_setup(ctx: Any, inputs: Any, output: Any) -> None:
    rows, experts, weights, ctx.places = inputs
    ctx.weighted, ctx.size = weights is not None, (rows.shape[0] if ctx.places is None else len(ctx.places), rows.shape[1])
    ctx.save_for_backward(experts, *((rows, weights) if ctx.weighted else ()))


def _sums_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    experts, *rest = ctx.saved_tensors
    of_rows = torch.ops.meshwright.expert_rows(grad, experts, rest[1] if ctx.weighted else None, *ctx.size, ctx.places)
    of_weights = torch.ops.meshwright.expert_dots(rest[0], grad, experts, rest[1], ctx.places) if ctx.weighted else None
    return of_rows, None, of_weights, None


expert_rows.register_autograd(_rows_backward, setup_context=_rows_setup)
expert_sums.register_autograd(_sums_backward, setup_context=_sums_setup)


# ---- the experts -------------------------------------------------------------------------------------------------
def _of_experts(rows: torch.Tensor, counts: torch.Tensor, local: int) -> Iterator[tuple[int, torch.Tensor, list[tuple[int, int]]]]:
    """(expert, its filled rows of all blocks, one after the other, (place in the buffers, rows) of each block)."""
    filled = counts.tolist()
    for e in range(local):
        parts = [(i, filled[i]) for i in range(e, len(filled), local) if filled[i]]
        if parts:
            yield e, torch.cat([rows[i, :n] for i, n in parts]), parts


def _scatter(into: torch.Tensor, values: torch.Tensor, parts: list[tuple[int, int]]) -> None:
    for (i, n), part in zip(parts, values.split([n for _, n in parts]), strict=True):
        into[i, :n] = part


def _weights(gate_up: torch.Tensor, down: torch.Tensor, copies: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gates over ups [2F, H], downs [H, F]) of own experts, then of copies of others' [n, 3 F H]: views."""
    size, others = prod(gate_up.shape[1:]), () if copies is None else copies
    return [*zip(gate_up, down, strict=True), *((x[:size].view(gate_up.shape[1:]), x[size:].view(down.shape[1:])) for x in others)]


@torch.library.custom_op("meshwright::expert_mlp", mutates_args=())  # type: ignore[untyped-decorator]
def expert_mlp(
    rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: str, expected: int,
    copies: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Filled rows of the buffers [E, C, H] through gated experts: (act(x Gᵀ) * (x Uᵀ)) Dᵀ, zero elsewhere.

    counts: [E], filled rows. gate_up: [e, 2F, H], G over U; down: [e, H, F]; e, and the number of `copies` of others' experts [n, 3 F H] after them,
    divide E. expected: filled rows in all, for prices.
    """
    act, out, weights = ACTIVATIONS[activation][0], rows.new_zeros(*rows.shape[:2], down.shape[1]), _weights(gate_up, down, copies)
    for e, x, parts in _of_experts(rows, counts, len(weights)):
        g, u = (x @ weights[e][0].t()).chunk(2, dim=-1)
        _scatter(out, (act(g) * u) @ weights[e][1].t(), parts)
    return out


@torch.library.custom_op("meshwright::expert_mlp_backward", mutates_args=())  # type: ignore[untyped-decorator]
def _expert_mlp_backward(
    grad: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: str, expected: int,
    copies: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of rows, gate_up and down; of copies, where there are any."""
    act, derivative = ACTIVATIONS[activation]
    found = [torch.zeros_like(x) for x in (rows, gate_up, down, copies) if x is not None]
    weights, of_weights = _weights(gate_up, down, copies), _weights(found[1], found[2], None if copies is None else found[3])
    for e, x, parts in _of_experts(rows, counts, len(weights)):
        g, u = (x @ weights[e][0].t()).chunk(2, dim=-1)
        y, a = torch.cat([grad[i, :n] for i, n in parts]), act(g)
        of_a = y @ weights[e][1]
        of_h = torch.cat([derivative(of_a * u, g.contiguous()), of_a * a], dim=-1)
        of_weights[e][1].copy_(y.t() @ (a * u))
        of_weights[e][0].copy_(of_h.t() @ x)
        _scatter(found[0], of_h @ weights[e][0], parts)
    return found


@expert_mlp.register_fake  # type: ignore[untyped-decorator]
def _(
    rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: str, expected: int,
    copies: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return rows.new_empty(*rows.shape[:2], down.shape[1])


@_expert_mlp_backward.register_fake  # type: ignore[untyped-decorator]
def _(
    grad: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: str, expected: int,
    copies: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x in (rows, gate_up, down, copies) if x is not None]


def _mlp_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation, ctx.expected, copies = inputs
    ctx.save_for_backward(*tensors, *(() if copies is None else (copies,)))


def _mlp_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    tensors, copies = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    of_rows, of_gate_up, of_down, *of_copies = torch.ops.meshwright.expert_mlp_backward(grad, *tensors, ctx.activation, ctx.expected, *copies)
    return of_rows, None, of_gate_up, of_down, None, None, of_copies[0] if of_copies else None


expert_mlp.register_autograd(_mlp_backward, setup_context=_mlp_setup)


def mlp_flops(gate_up: torch.Size, expected: int, passes: int) -> int:
    """Of `expected` rows, each `passes` times through matrices of [2F, H] and [F, H]; a multiply-add counts as two."""
    return passes * expected * 3 * int(gate_up[1]) * int(gate_up[2])
