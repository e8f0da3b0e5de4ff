"""Inputs and output gradients of Linear layers, taken from the ordinary forward and backward (empirical Fisher: no extra pass).

A forward hook keeps the layer's input and puts a hook on its output, so that an input and its gradient always belong together: also when a module is
used several times, when micro-batches overlap in a pipeline, and when a split backward walks through a layer twice. A forward that is run again
inside the backward (activation recomputation) is recognised by its input and not counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch

from ..errors import UsageError
from .layer import LinearCurvature

__all__ = ["EXCLUDED", "Capture", "Conventions", "Record", "linear_layers"]

EXCLUDED = ("cls", "classifier", "pooler", "*head", "*embed*")


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """How the loss is made: what a gradient at a layer's output must be multiplied by to be that of one term of the loss.

    reduction: of the loss over the terms of one micro-batch.
    terms: what is averaged or summed: `rows` (all leading dimensions of the layer's input, e.g. every token has a loss) or `samples` (the first one:
        one loss per sequence).
    scale: what a micro-batch's loss is multiplied by before its backward: 1 / micro-batches to average them, times the scale of mixed precision.
    """

    reduction: Literal["mean", "sum"] = "mean"
    terms: Literal["rows", "samples"] = "rows"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f"no reduction {self.reduction!r}", where="reduction", hint="mean or sum")
        if self.terms not in ("rows", "samples"):
            raise UsageError(f"no terms {self.terms!r}", where="terms", hint="rows (a loss per token) or samples (a loss per sequence)")
        if not self.scale > 0:
            raise UsageError(f"must be > 0, got {self.scale}", where="scale")

    def count(self, e: torch.Tensor) -> int:
        """Terms of the loss in e [..., d_out]."""
        rows = e.numel() // max(1, e.shape[-1])
        return rows if self.terms == "rows" or e.dim() < 2 else int(e.shape[0])

    def per_term(self, e: torch.Tensor) -> torch.Tensor:
        """Gradients of single terms from those of the loss that was differentiated."""
        return e * ((self.count(e) if self.reduction == "mean" else 1) / self.scale)


@dataclass
class Record:
    """What one use of a layer left: its input from the forward on, the gradient of its output (of single terms) from the backward on."""

    microbatch: int
    x: torch.Tensor | None
    e: torch.Tensor | None = None
    terms: int = 0
    closed: bool = False


def linear_layers(module: torch.nn.Module, exclude: tuple[str, ...] = EXCLUDED) -> dict[str, torch.nn.Linear]:
    """Linear layers that K-FAC treats, by name: none with a part of its name that matches `exclude`, frozen, or with a weight shared with others.

    Raises: UsageError when none is left.
    """
    owners: dict[int, int] = {}
    for part in module.modules():
        for p in part.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    found = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, torch.nn.Linear) or not layer.weight.requires_grad or owners[id(layer.weight)] > 1:
            continue
        if layer.bias is not None and not layer.bias.requires_grad:
            continue
        if not any(fnmatchcase(part, pattern) for part in name.split(".") for pattern in exclude):
            found[name] = layer
    if not found:
        hint = f"excluded are names with {', '.join(exclude)}, frozen and shared ones"
        raise UsageError("no Linear layer is left for K-FAC", where="exclude", hint=hint)
    return found


class Capture:
    """Hooks on layers; `records[layer name]` in the order of the forwards. `microbatch` is what the next forward belongs to."""

    def __init__(self, layers: dict[str, LinearCurvature], conventions: Conventions) -> None:
        self.conventions = conventions
        self.on = True
        self.microbatch = 0
        self.records: dict[str, list[Record]] = {name: [] for name in layers}
        self._handles: list[Any] = [layer.module.register_forward_hook(partial(self._forward, name)) for name, layer in layers.items()]

    def _forward(self, name: str, module: torch.nn.Module, args: tuple[Any, ...], y: torch.Tensor) -> None:
        if not self.on or not torch.is_grad_enabled() or not y.requires_grad or not module.training:
            return
        x = args[0].detach()
        if torch._C._current_graph_task_id() != -1 and any(_same(r, x) for r in self.records[name]):
            return  # run again inside the backward: its first run was recorded and its output will get the gradient
        record = Record(self.microbatch, x)
        self.records[name].append(record)
        y.register_hook(partial(self._backward, record))

    def _backward(self, record: Record, e: torch.Tensor) -> None:
        if record.closed:
            return
        record.closed = True
        record.terms = self.conventions.count(e)
        record.e = self.conventions.per_term(e.detach())

    @contextmanager
    def paused(self) -> Iterator[None]:
        was, self.on = self.on, False
        try:
            yield
        finally:
            self.on = was

    def take(self, layer: LinearCurvature, what: Literal["input", "gradient"], microbatch: int | None = None) -> int:
        """Add the waiting inputs (or gradients) of a micro-batch, or of all, to the layer's sums, and let go of them. Returns: how many."""
        done = 0
        for record in self.records[layer.name]:
            if microbatch is not None and record.microbatch != microbatch:
                continue
            if what == "input" and record.x is not None:
                layer.add_input(record.x)
                record.x, done = None, done + 1
            elif what == "gradient" and record.e is not None:
                layer.add_gradient(record.e, terms=record.terms)
                record.e, done = None, done + 1
        self.records[layer.name] = [r for r in self.records[layer.name] if r.x is not None or not r.closed or r.e is not None]
        return done

    def drop_open(self) -> None:
        """Forget forwards that no backward came to."""
        self.records = {name: [r for r in rows if r.closed] for name, rows in self.records.items()}

    def clear(self) -> None:
        for rows in self.records.values():
            rows.clear()

    def held_bytes(self) -> int:
        """Bytes of inputs and gradients that wait for their curvature."""
        tensors: list[torch.Tensor] = [t for rows in self.records.values() for r in rows for t in (r.x, r.e) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()


def _same(record: Record, x: torch.Tensor) -> bool:
    return not record.closed and record.x is not None and record.x.shape == x.shape and torch.equal(record.x, x)


