"""What a rank divides the terms of its loss by: counts of the whole batch, from the inputs of all its micro-batches (`loss_terms`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import Unsupported
from ...plan.plan import Segment
from ..steps.forward_graph import ForwardGraph, ForwardNode, decode_argument, resolve
from .loss_terms import IGNORED, LossTerm, argument

__all__ = ["Awaited", "GivenValues", "LossCounts", "counted_values", "divisors_of"]


class Awaited:
    """What still has to happen before divisors are read: calls of the graph ask for them through `function`."""

    def __init__(self) -> None:
        self.pending: Callable[[], None] | None = None

    def settle(self) -> None:
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending()

    def function(self) -> Callable[[torch.Tensor], torch.Tensor]:
        def awaited(divisor: torch.Tensor) -> torch.Tensor:
            self.settle()
            return divisor

        return awaited


def counted_values(terms: Mapping[str, LossTerm]) -> tuple[str, ...]:
    """The values whose counts a step needs, in one order on all ranks."""
    return tuple(sorted({x for t in terms.values() if t.how != "sum" for x in (t.leaves if t.how == "division" else (t.node,))}))


def divisors_of(
    segments: Iterable[Segment], graph: ForwardGraph, terms: Mapping[str, LossTerm], device: torch.device
) -> tuple[dict[str, torch.Tensor], bool]:
    """(a divisor for every term that these segments make, whether the loss itself is weighted instead: a planned step is run as it was traced).

    Raises: Unsupported for a planned step that makes one of several terms.
    """
    divisors, weighted = dict[str, torch.Tensor](), False
    for segment in segments:
        for name in terms.keys() & set(segment.nodes):
            if segment.step is not None and [*terms] != [*graph.outputs[:1]]:
                raise Unsupported(
                    "a part of the loss is not a mean over samples, and the plan of this segment's step has no place for its count",
                    where=f"segment {segment.key}", hint="plan without --memory and --recompute steps",
                )  # fmt: skip
            weighted = weighted or segment.step is not None
            info = graph.by_name[name].outputs[0]
            divisors[name] = torch.ones((), dtype=getattr(torch, info.dtype) if info else torch.float32, device=device)
    return divisors, weighted


@dataclass
class LossCounts:
    """`divisors[node]`: what the term's sum is divided by on this rank, a tensor of one number, set before every step (`fill`)."""

    graph: ForwardGraph
    terms: Mapping[str, LossTerm]
    divisors: dict[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    awaited: Awaited = field(default_factory=Awaited)

    def of(self, inputs: Sequence[torch.Tensor]) -> dict[str, float]:
        """What a micro-batch adds to every count, by the value that is counted."""
        found: dict[str, float] = {}
        known = GivenValues(self.graph, inputs, self.constants, self.buffers)
        for term in self.terms.values():
            if term.how == "division":
                found |= {leaf: float(known(leaf)) for leaf in term.leaves}
            elif term.how == "loss":
                found[term.node] = _targets(self.graph.by_name[term.node], known)
        return found

    def total(self, term: LossTerm, sums: Mapping[str, float], microbatches: int) -> float:
        """What a micro-batch's sum is divided by, so that the mean over micro-batches is the batch's.

        Raises: Unsupported where nothing is counted.
        """
        if term.how == "sum":
            return 1.0 / microbatches
        if term.how == "loss":
            whole = sums[term.node]
        else:
            known = GivenValues(self.graph, (), self.constants, self.buffers)
            of = {leaf: sums[leaf] / microbatches if term.averaged else sums[leaf] for leaf in term.leaves}
            known.values |= {leaf: torch.tensor(x, dtype=self.divisors[term.node].dtype) for leaf, x in of.items()}
            whole = float(known(term.divisor))
        if not whole:
            raise Unsupported(
                "all targets of the batch are ignored, so the loss is a mean over nothing", where=f"node {term.node}",
                hint="a batch needs at least one target that is not ignored",
            )  # fmt: skip
        return whole if term.averaged else whole / microbatches

    def weight(self, inputs: Sequence[torch.Tensor], microbatches: int) -> float:
        """What a micro-batch's own loss counts for in the batch's, where it is one term and `fill` was called.

        Raises: Unsupported for a micro-batch whose own loss is a mean over nothing.
        """
        (term,) = self.terms.values()
        if term.how == "sum":
            return 1.0
        own = self.total(term, self.of(inputs), 1) if any(self.of(inputs).values()) else 0.0
        if not own:
            raise Unsupported(
                "all targets of a micro-batch are ignored, so its loss is a mean over nothing", where=f"node {term.node}",
                hint="larger micro-batches, or a plan without --memory and --recompute steps",
            )  # fmt: skip
        return own / (float(self.divisors[term.node]) * microbatches)

    def sums(self, batches: Iterable[Sequence[torch.Tensor]]) -> dict[str, float]:
        """Every count of these micro-batches together."""
        found: dict[str, float] = {}
        if any(t.how != "sum" for t in self.terms.values()):
            for inputs in batches:
                for key, count in self.of(inputs).items():
                    found[key] = found.get(key, 0.0) + count
        return found

    def fill(self, sums: Mapping[str, float], microbatches: int) -> None:
        """Set the divisors for a step whose micro-batches, of all replicas, have these counts."""
        for node, term in self.terms.items():
            self.divisors[node].fill_(self.total(term, sums, microbatches))


class GivenValues:
    """Values of a graph that depend on inputs and constants alone, computed where they are asked for."""

    def __init__(
        self, graph: ForwardGraph, inputs: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self.graph = graph
        self.device = next((x.device for x in inputs), torch.device("cpu"))
        self.values: dict[str, Any] = {f"input:{i}": x for i, x in enumerate(inputs)}
        self.values |= {f"constant:{k}": x for k, x in constants.items()} | {f"buffer:{k}": x for k, x in buffers.items()}

    def __call__(self, value: str) -> Any:
        if value not in self.values:
            node = self.graph.by_name[value]
            for v in node.inputs:
                self(v)
            args = decode_argument(node.args, self.values.__getitem__, self.device)
            kwargs = {k: decode_argument(v, self.values.__getitem__, self.device) for k, v in node.kwargs.items()}
            with torch.no_grad():
                self.values[value] = resolve(node.target)(*args, **kwargs)
        return self.values[value]


def _targets(node: ForwardNode, known: Callable[[str], Any]) -> float:
    """The (weighted) number of targets that a loss does not ignore."""
    target, weight = known(node.inputs[1]), argument(node, "weight", None)
    valid = target != argument(node, "ignore_index", IGNORED)
    if weight is None:
        return float(valid.sum())
    of_class = known(weight["value"])
    return float(torch.where(valid, of_class[torch.where(valid, target, 0)], 0).sum(dtype=torch.float64))
