"""One segment as a function of real tensors, forward under autograd and backward; what it keeps in between is the plan's affair.

Values enter through `_Entry`, so that autograd does not hold them for the sake of their gradient; results leave as gradient edges. A value that was
gathered along the sequence is not kept (`gathered_later`); what calls make that run again is not kept either (`replay`).
A backward may be split: `backward_input` gives the gradients of the reads, `backward_weight` later adds those of the parameters (`split_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ...capture.torch_private import run_backward, storage_key
from ..steps.replay import ReplayedForward, Replays
from ..steps.split_backward import WeightWork, input_gradients
from ..steps.stand_in import StandIn, as_they_are, opened
from .dropout import Draws

__all__ = ["SegmentModule", "gathered_later"]


class _Entry(torch.autograd.Function):  # type: ignore[misc]
    """Identity whose backward puts the gradient into `holder[index]`; `token` only makes autograd record it."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, value: torch.Tensor, holder: dict[int, torch.Tensor], index: int) -> torch.Tensor:
        ctx.holder, ctx.index = holder, index
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.holder[ctx.index] = gradient
        return None, None, None, None


_TOKEN = torch.empty((), requires_grad=True)


@dataclass(frozen=True)
class _Later(StandIn):
    """A tensor that lies in a read which is gathered again before backward: taken from `found` then."""

    found: Mapping[int, torch.Tensor]
    read: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return self.found[self.read].as_strided(self.size, self.stride, self.offset)


def gathered_later(
    reads: Sequence[torch.Tensor], again: Container[int], found: Mapping[int, torch.Tensor], refer: Callable[[torch.Tensor], Any]
) -> Callable[[torch.Tensor], Any]:
    """What to keep instead of a tensor that lies in one of the reads of `again`; of others `refer` says."""
    where = {x.untyped_storage().data_ptr(): i for i, x in enumerate(reads) if i in again}
    if not where:
        return refer

    def keep(x: torch.Tensor) -> Any:
        i = where.get(x.untyped_storage().data_ptr())
        return refer(x) if i is None else _Later(found, i, tuple(x.shape), x.stride(), int(x.storage_offset()))

    return keep


def _keeping(refer: Callable[[torch.Tensor], Any]) -> AbstractContextManager[None]:
    """While a segment runs forward, autograd keeps what `refer` says."""
    if refer is as_they_are:
        return nullcontext()
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(refer, opened)
    return hooks


@dataclass
class SegmentModule:
    """One segment. `reads`, `writes`: value names in call order; `inputs`: numbers of the example inputs it takes."""

    key: str
    function: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inputs: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    differentiable: tuple[bool, ...]
    random: bool
    split: bool
    twice: bool = False  # backward comes in two parts
    draws: Draws | None = None  # of its dropout, whose bits come by place
    sum_grads: frozenset[str] = frozenset()
    sum_writes: frozenset[str] = frozenset()
    gathers: frozenset[str] = frozenset()
    replays: Replays = field(default_factory=lambda: Replays(()))
    meter: Callable[[str, int], None] | None = None  # told the bytes that each forward pass keeps beyond what it reads and writes
    refer: Callable[[torch.Tensor], Any] = as_they_are  # what to keep instead of weights that are gathered for a while
    _saved: dict[int, tuple[list[Any], dict[int, torch.Tensor], dict[int, torch.Tensor]]] = field(default_factory=dict)

    _entries: dict[int, dict[int, Any]] = field(default_factory=dict)  # micro-batch -> read -> where its gradient arrives
    _left: dict[int, WeightWork] = field(default_factory=dict)
    _replayed: dict[int, ReplayedForward] = field(default_factory=dict)  # whose results `backward_weight` may ask for

    def forward_only(self, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the calls and keep nothing: a second `forward` comes before backward."""
        with torch.no_grad():
            return list(self.function(*reads, *inputs, *self.constants))

    def forward(
        self, microbatch: int, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], again: Container[int] = ()
    ) -> list[torch.Tensor]:
        """Run the calls on this micro-batch; returns the written values, detached. What backward needs is kept until `backward`, but not
        the reads numbered in `again`: `backward` is given these."""
        holder: dict[int, torch.Tensor] = {}
        later: dict[int, torch.Tensor] = {}
        entries = [_Entry.apply(_TOKEN, x, holder, i) if d else x for i, (x, d) in enumerate(zip(reads, self.differentiable, strict=True))]
        refer = gathered_later(reads, again, later, self.refer)
        if self.replays.count or self.meter is not None:
            outputs = self._noted(microbatch, entries, inputs, again, refer)
        else:
            with _keeping(refer):
                outputs = self.function(*entries, *inputs, *self.constants)
        self._entries[microbatch] = {  # an edge that keeps nothing: whatever depends on the entry keeps it, and else nobody asks for its gradient
            i: GradientEdge(x.grad_fn, 0) for i, (x, d) in enumerate(zip(entries, self.differentiable, strict=True)) if d and x.requires_grad
        }
        del entries
        edges = [torch.autograd.graph.get_gradient_edge(y) if y.requires_grad else None for y in outputs]
        self._saved[microbatch] = (edges, holder, later)
        return [y.detach() for y in outputs]

    def _noted(
        self, microbatch: int, entries: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], again: Container[int],
        refer: Callable[[torch.Tensor], Any],
    ) -> Sequence[torch.Tensor]:
        """The calls with the chosen ones noted for running again in backward."""
        outside = {storage_key(x) for x in self.constants if isinstance(x, torch.nn.Parameter) or not x.dim()}  # numbers: counts of the loss
        outside |= {storage_key(x) for i, x in enumerate(entries) if i in again}
        with ReplayedForward(self.replays.count, outside, refer, twice=self.twice) as noted:
            self.replays.current = noted
            try:
                outputs: Sequence[torch.Tensor] = self.function(*entries, *inputs, *self.constants)
            finally:
                self.replays.current = None
        if self.twice:
            self._replayed[microbatch] = noted
        if self.meter is not None:
            self.meter(self.key, noted.kept_bytes({storage_key(x) for x in (*entries, *outputs)}))
        return outputs

    def backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None], again: Mapping[int, torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """Gradients of the written values in, of the read values out (by position); parameter gradients are added in place."""
        edges, holder, later = self._saved.pop(microbatch)
        del self._entries[microbatch]
        later.update(again or {})
        pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]
        if pairs:
            run_backward([e for e, _ in pairs], [g for _, g in pairs])
        return holder

    def backward_input(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None], again: Mapping[int, torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """As `backward`, for the read values alone. What calls make again, and reads given here, stay for `backward_weight`."""
        edges, _, later = self._saved.pop(microbatch)
        entries = self._entries.pop(microbatch)
        later.update(again or {})
        pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]
        found, self._left[microbatch] = input_gradients([e for e, _ in pairs], [g for _, g in pairs], list(entries.values()))
        return {i: g for i, g in zip(entries, found, strict=True) if g is not None}

    def backward_weight(self, microbatch: int) -> None:
        """What `backward_input` left: parameter gradients are added in place."""
        self._left.pop(microbatch).run()
        if (noted := self._replayed.pop(microbatch, None)) is not None:
            noted.release()

    def forget(self) -> None:
        """Drop what interrupted micro-batches left."""
        for kept in (self._saved, self._entries, self._left, self._replayed):
            kept.clear()
