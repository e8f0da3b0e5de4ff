"""Rows of any number each to the ranks that own their experts, and back: all-to-alls of unequal parts, with gradients.

Cite: MegaBlocks (arXiv 2211.15841), section 5, "expert parallelism". Left open by the paper: nothing here. Deviations: none.
Invariant: every row comes back to its place. Rows sent and received are compared before a step's rows move. Cost: two exchanges, and one of counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...errors import GroupFailed
from ..group.messages import end_waits

__all__ = ["END_TAG", "exchange_rows", "ragged_exchange"]


END_TAG = (1 << 31) - 11  # no message has it


def _exchanged(group: Any, x: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
    """Rows of x, sends[r] of them to rank r in order; what comes, by source."""
    out = x.new_empty(sum(receives), *x.shape[1:])
    try:
        group.alltoall_base(out, x.contiguous(), receives, sends).wait()
    except RuntimeError as error:
        raise GroupFailed(f"an exchange of rows was given up: {str(error)[:200]}", where="experts", data={"error": str(error)[:300]}) from error
    return out


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, sends: list[int], receives: list[int]) -> torch.Tensor:
        ctx.back = (group, receives, sends)
        return _exchanged(group, x, sends, receives)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        group, sends, receives = ctx.back
        return _exchanged(group, grad, sends, receives), None, None, None


def exchange_rows(group: Any, x: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
    """Rows of x, sends[r] of them to rank r in order; receives[r] rows from rank r, in their order. Gradients go back. Raises: GroupFailed."""
    out: torch.Tensor = _Exchange.apply(x, group, sends, receives)
    return out


def ragged_exchange(
    group: Any, ranks: int, x: torch.Tensor, counts: torch.Tensor, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Rows [n, H], sorted by expert, `counts` [E] of them for each, through the experts of all ranks: [n, output], in the same places.

    run: (rows, counts of this rank's experts) -> results, on rows sorted by local expert. Raises: GroupFailed.
    """
    local = len(counts) // ranks
    wanted = _exchanged(group, counts.view(ranks, local), [1] * ranks, [1] * ranks)  # by source
    sends, receives = counts.view(ranks, local).sum(1).tolist(), wanted.sum(1).tolist()
    arrived = _Exchange.apply(x, group, sends, receives)
    owner = torch.arange(local).repeat(ranks).repeat_interleave(wanted.reshape(-1))
    order = torch.argsort(owner, stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    try:
        done = run(arrived.index_select(0, order), wanted.sum(0))
    except BaseException:
        end_waits(group, group.rank(), ranks, END_TAG)  # so that no other rank waits for this one
        raise
    out: torch.Tensor = _Exchange.apply(done.index_select(0, back), group, receives, sends)
    return out
