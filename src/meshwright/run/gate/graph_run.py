"""The traced calls of a model, run one after the other on one process, and which of them bring samples together.

Two questions of the gate are answered by it. Whether the calls are the owner's module at all, micro-batch by micro-batch; and why a plan that runs
them on micro-batches is not the module on the whole batch: an element that changes with one sample, and with another one as well, mixes samples,
and the first call that makes such elements is the one to name. No dimension is taken for that of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...capture.regions import REGION, run_region
from ..steps.forward_graph import ForwardGraph, ForwardNode, decode_argument, resolve
from ..train.loss_terms import LossTerm, counted_call

__all__ = ["GraphRun", "first_mixing"]

CPU = torch.device("cpu")


class GraphRun:
    """A graph with the parameters and buffers of one module. Buffers change as the calls change them."""

    def __init__(self, graph: ForwardGraph, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.state: dict[str, Any] = {f"param:{n}": p for n, p in parameters.items()} | {f"buffer:{n}": b for n, b in buffers.items()}
        self.state |= {f"constant:{n}": c.tensor() for n, c in graph.constants.items()}

    def loss(
        self, inputs: Sequence[torch.Tensor], terms: Mapping[str, LossTerm] | None = None, divisors: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Of one micro-batch; `divisors`: what the terms are divided by in place of their own counts."""
        found: torch.Tensor = self.values(inputs, terms or {}, divisors or {})[self.graph.outputs[0]]
        return found

    def values(self, inputs: Sequence[torch.Tensor], terms: Mapping[str, LossTerm] = {}, divisors: Mapping[str, torch.Tensor] = {}) -> dict[str, Any]:
        known: dict[str, Any] = self.state | {f"input:{i}": x for i, x in enumerate(inputs)}
        for node in self.graph.nodes:
            args = tuple(decode_argument(a, known.__getitem__, CPU) for a in node.args)
            kwargs = {k: decode_argument(v, known.__getitem__, CPU) for k, v in node.kwargs.items()}
            divided = False
            if node.name in terms:
                args, kwargs, divided = counted_call(terms[node.name], node, args, kwargs, divisors[node.name])
            found = (run_region if node.target == REGION else resolve(node.target))(*args, **kwargs)
            known[node.name] = found / divisors[node.name] if divided else found
        return known


def first_mixing(run: GraphRun, inputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> ForwardNode | None:
    """The first call that brings two samples together; `others`: samples to put in their places. None where none is found.

    At least two rows. Random numbers are the same in every run.
    """
    buffers = {n: x.clone() for n, x in run.state.items() if n.startswith("buffer:")}

    def values(row: int | None) -> dict[str, Any]:
        given = [x.clone() for x in inputs]
        for x, other in zip(given, others, strict=True):
            if row is not None:
                x[row] = other[row]
        for n, x in buffers.items():
            run.state[n] = x.clone()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            return run.values(given)

    base, first, second = values(None), values(0), values(1)
    for node in run.graph.nodes:
        both = [
            (a != b) & (a != c)
            for a, b, c in zip(*(_tensors(x[node.name]) for x in (base, first, second)), strict=True) if a.shape == b.shape == c.shape
        ]  # fmt: skip
        if any(bool(x.any()) for x in both):
            return node
    return None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, torch.Tensor)]
