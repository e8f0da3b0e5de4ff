"""Experts on rows of any number each, nothing dropped: four ways to multiply, with one result.

Cite: MegaBlocks (arXiv 2211.15841) for `sparse`, sections 4 and 5; grouped products are those of torch (`torch.nn.functional.grouped_mm`).
Left open by the paper: which way is fastest where. Our answer: `decide.experts.megablocks`, from measured rates.
Deviations: places come from the routing, so there is no sort; `sparse` keeps what goes into the activation and computes the activation again.
Invariant: the result and its gradients are those of a loop over the experts; rows that pad are zero, and so is what they add to gradients.
Cost: 2 q n F H per pass for n rows (padded: of the largest expert times E; sparse: rounded up to blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...errors import Unsupported, UsageError
from .block_sparse import BlockMatrix, Topology, dsd, expert_topology, sdd

__all__ = ["WAYS", "first_rows", "grouped_applies", "multiply", "sparse_mlp"]

WAYS = ("loop", "padded", "grouped", "sparse")
ALIGNED_BYTES = 16  # grouped_mm wants rows of this multiple
MAX_ROWS = (1 << 31) - 1  # grouped_mm's offsets are int32
Activation = Callable[[torch.Tensor], torch.Tensor]


def first_rows(counts: torch.Tensor) -> torch.Tensor:
    """First row of every expert [E] where rows follow each other without padding."""
    return torch.cumsum(counts, 0) - counts


def grouped_applies(rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Can grouped_mm do it: float32 or bfloat16, rows of whole 16 bytes, few enough of them?"""
    sized = all(w * dtype.itemsize % ALIGNED_BYTES == 0 for w in widths)
    return dtype in (torch.float32, torch.bfloat16) and sized and 0 < rows <= MAX_ROWS


def multiply(x: torch.Tensor, weights: torch.Tensor, counts: list[int], way: str) -> torch.Tensor:
    """Rows [n, K], counts[e] of them for expert e in order, times weights [E, K, N]: [n, N], with gradients.

    way: "loop", "padded" (one batched product, all experts as long as the longest) or "grouped".
    Raises: UsageError for counts that are not the rows', Unsupported for sizes that grouped_mm does not take.
    """
    if sum(counts) != len(x) or len(counts) != len(weights):
        raise UsageError(f"{sum(counts)} rows for {len(counts)} experts, got {len(x)} and {len(weights)}", where="multiply")
    if way == "loop":
        return torch.cat([part @ w for part, w in zip(x.split(counts), weights, strict=True)])
    if way == "padded":
        most = max(counts, default=0)
        stacked = torch.stack([functional.pad(part, (0, 0, 0, most - len(part))) for part in x.split(counts)])
        return torch.cat([part[:n] for part, n in zip(torch.bmm(stacked, weights), counts, strict=True)])
    if way != "grouped":
        raise UsageError(f"no way {way!r}", where="way", hint=f"ways: {', '.join(WAYS)}")
    if not grouped_applies(len(x), (x.shape[1], weights.shape[2]), x.dtype):
        if not len(x):
            return x @ weights[0]
        raise Unsupported(f"grouped_mm does not take {x.dtype} rows of {x.shape[1]} and {weights.shape[2]}", where="grouped", hint="way='loop'")
    offsets = torch.cumsum(torch.tensor(counts, device=x.device), 0).int()
    out: torch.Tensor = functional.grouped_mm(x.contiguous(), weights.contiguous(), offs=offsets)
    return out


class _SparseMLP(torch.autograd.Function):  # type: ignore[misc]
    """act(x W1ᵀ) · W2 (times x V1ᵀ where there is one), matrices [E F, H]. Kept: x and the activation's inputs; its result is made again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w1: torch.Tensor, v1: torch.Tensor | None, w2: torch.Tensor, topology: Topology, activation: Activation
    ) -> torch.Tensor:
        h = sdd(x, w1.t(), topology).values
        g = sdd(x, v1.t(), topology).values if v1 is not None else None
        ctx.save_for_backward(x, w1, v1, w2, h, g)
        ctx.topology, ctx.activation = topology, activation
        return dsd(BlockMatrix(_acted(activation, h, g), topology), w2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, w1, v1, w2, h, g = ctx.saved_tensors
        topology = ctx.topology
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (h, g) if t is not None]
            a = _acted(ctx.activation, leaves[0], leaves[1] if g is not None else None)
        of_a = sdd(grad, w2.t(), topology).values
        of_w2 = dsd(BlockMatrix(a.detach(), topology), grad, transposed=True)
        found = [BlockMatrix(v, topology) for v in torch.autograd.grad(a, leaves, of_a)]
        of_x = dsd(found[0], w1)
        of_w1 = dsd(found[0], x, transposed=True)
        of_v1 = None
        if v1 is not None:
            of_x = of_x + dsd(found[1], v1)
            of_v1 = dsd(found[1], x, transposed=True)
        return of_x, of_w1, of_v1, of_w2, None, None


def _acted(activation: Activation, h: torch.Tensor, g: torch.Tensor | None) -> torch.Tensor:
    return activation(h) if g is None else activation(h) * g


def sparse_mlp(
    x: torch.Tensor, counts: torch.Tensor, w1: torch.Tensor, v1: torch.Tensor | None, w2: torch.Tensor, activation: Activation, block: int
) -> torch.Tensor:
    """All experts at once: rows [n, H], `counts` [E] of them for each expert in order; matrices [E, F, H], w2 [E, F, output]. [n, output].

    The activation must map zero to anything finite: rows that pad have zero inputs, and are left out of the result. Raises: as `expert_topology`.
    """
    experts, inner = w1.shape[:2]
    topology, first = expert_topology(counts, inner, block)
    owner = torch.repeat_interleave(torch.arange(experts, device=x.device), counts)
    at = torch.arange(len(x), device=x.device) - first_rows(counts)[owner] + first[owner]
    padded = x.new_zeros(topology.shape[0], x.shape[1]).index_copy(0, at, x)
    flat = [None if w is None else w.reshape(experts * inner, -1) for w in (w1, v1, w2)]
    out: torch.Tensor = _SparseMLP.apply(padded, *flat, topology, activation)
    return out.index_select(0, at)
