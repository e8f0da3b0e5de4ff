"""What a micro-batch's loss counts for: sums, and means over a number that differs by micro-batch, make the batch's loss as in one process.

The loss of a batch is read from its calls, backwards from the result through sums, differences and factors, down to its terms. A term is
- a mean over samples or elements: micro-batches weigh the same, nothing is to be done;
- a sum (`reduction="sum"`, `x.sum()`): micro-batches add up;
- a mean over what is counted: cross-entropy and negative log-likelihood divide by the (weighted) number of targets that are not ignored, masked
  losses by a sum over a mask (`division`). The count of the whole batch takes the place of the micro-batch's: it is known before the step, as it
  depends on the inputs alone, and the replicas add up what theirs count (`count_exchange`).
So a segment that computes the loss divides its sum by (count of the batch / number of micro-batches); the mean over micro-batches is the batch's.
Whatever is none of these is taken for a mean (`loss_understood` says that something was); the gate (`run.gate`) finds out whether it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ..steps.forward_graph import OPAQUE, ForwardGraph, ForwardNode, argument_of, operator_of

__all__ = ["IGNORED", "LossTerm", "argument", "counted_call", "loss_terms", "loss_understood"]

MEAN, SUM = 1, 2  # torch's reductions
COUNTED_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")
IGNORED = -100  # torch's default of `ignore_index`
SAME_NUMBER = ("neg", "clone", "alias", "to", "_to_copy", "view", "reshape", "squeeze", "contiguous", "float", "double", "mean", "sum", "detach_")
COUNTS, AVERAGES = ("sum", "count_nonzero"), ("mean",)  # what adds up over micro-batches, and what is averaged


@dataclass(frozen=True)
class LossTerm:
    """`how`: "sum", "loss" (a loss function's own mean over its targets), or "division" (by a number that depends on the inputs alone).

    `divisor`: of a division, computed from the `leaves`, values that add up over micro-batches (`averaged`: of which the batch's is the mean).
    """

    node: str
    how: str
    divisor: str = ""
    leaves: tuple[str, ...] = ()
    averaged: bool = False


def loss_terms(graph: ForwardGraph) -> dict[str, LossTerm]:
    """The terms that are not means over samples, by the node that is changed."""
    if any(n.target == OPAQUE for n in graph.nodes) or not graph.inputs:
        return {}
    return _Reader(graph).terms()


def loss_understood(graph: ForwardGraph, of_whole_batch: Collection[str] = ()) -> bool:
    """Whether every term of the loss was recognised, so that it is normalised for any batch, or is `of_whole_batch`; False for opaque models."""
    if any(n.target == OPAQUE for n in graph.nodes) or not graph.inputs:
        return False
    reader = _Reader(graph)
    reader.terms()
    return {*reader.unknown} <= {*of_whole_batch}


def _name(node: ForwardNode) -> str:
    return node.target.split(".")[1] if node.target.count(".") == 2 else node.target


def argument(node: ForwardNode, name: str, default: Any) -> Any:
    """An argument of a call by its name in the operator's schema, or the schema's own default; `default` where it has no such argument or value."""
    return argument_of(operator_of(node), node.args, node.kwargs, name, default)


class _Reader:
    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = graph
        self.rows = graph.inputs[0].shape[0]
        self.unknown: list[str] = []  # nodes that were taken for means
        self.given: set[str] = set()  # nodes that depend on inputs and constants, not on what is trained
        self.of_samples: set[str] = set()  # nodes that depend on inputs
        for n in graph.nodes:
            if any(v.startswith("input:") or v in self.of_samples for v in n.inputs):
                self.of_samples.add(n.name)
            if all(self.is_given(v) for v in n.inputs) and not _random(n):
                self.given.add(n.name)

    def is_given(self, value: str) -> bool:
        return value.startswith(("input:", "constant:", "buffer:")) or value in self.given

    def terms(self) -> dict[str, LossTerm]:
        found: dict[str, LossTerm] = {}
        self.walk(self.graph.outputs[0], found, 1.0)
        return found

    def scalar(self, value: Any) -> bool:
        node = self.graph.by_name.get(value["value"]) if isinstance(value, dict) and "value" in value else None
        return node is not None and not node.many and node.outputs[0] is not None and node.outputs[0].shape == ()

    def walk(self, value: str, found: dict[str, LossTerm], divided: float) -> None:
        """`divided`: what the value is divided by on the way to the loss, as far as it is a number."""
        node = self.graph.by_name.get(value)
        if node is None or value in self.given or value not in self.of_samples:
            return
        name = _name(node)
        tensors = [a for a in node.args if self.scalar(a)]
        if name in ("add", "sub", "rsub"):
            for a in tensors:
                self.walk(a["value"], found, divided)
        elif name in ("mul", "div", "true_divide") and len(node.args) > 1:
            self.product(node, name, found, divided)
        elif name == "stack" and isinstance(node.args[0], list):
            for a in node.args[0]:
                if self.scalar(a):
                    self.walk(a["value"], found, divided)
        elif name in SAME_NUMBER and self.one_number(node):
            inner = node.args[0]["value"]
            self.walk(inner, found, divided)
        elif self.is_sum(node) and not self.mean_by_hand(divided):
            found[value] = LossTerm(value, "sum")
        elif name in COUNTED_LOSSES and argument(node, "reduction", MEAN) == MEAN and self.counts_targets(node):
            found[value] = LossTerm(value, "loss")
        elif name != "mean" and not self.mean_by_hand(divided) and argument(node, "reduction", 0) != MEAN:
            self.unknown.append(value)

    def product(self, node: ForwardNode, name: str, found: dict[str, LossTerm], divided: float) -> None:
        first, second = node.args[:2]
        if isinstance(second, (int, float)):
            self.walk(node.inputs[0], found, divided * (second if name != "mul" else 1.0))
            return
        a, b = (x.get("value", "") if isinstance(x, dict) else "" for x in (first, second))
        if name == "mul" and self.is_given(a) != self.is_given(b):
            self.walk(b if self.is_given(a) else a, found, divided)
        elif name != "mul" and b in self.given and (leaves := self.leaves(b)):
            kinds = {_name(self.graph.by_name[x]) for x in leaves}
            if self.scalar(second) and (kinds <= set(COUNTS) or kinds <= set(AVERAGES)):
                found[node.name] = LossTerm(node.name, "division", b, leaves, kinds <= set(AVERAGES))
            else:
                self.unknown.append(node.name)
        elif name != "mul" and self.is_given(b):  # a constant
            self.walk(a, found, divided)
        else:
            self.unknown.append(node.name)

    def one_number(self, node: ForwardNode) -> bool:
        """A call on one number, or on a row of them that were stacked."""
        first = node.args[0] if node.args else None
        if not isinstance(first, dict) or "value" not in first:
            return False
        made = self.graph.by_name.get(first["value"])
        return self.scalar(first) or (made is not None and _name(made) == "stack" and _name(node) in ("sum", "mean"))

    def is_sum(self, node: ForwardNode) -> bool:
        return (_name(node) == "sum" and self.over_samples(node)) or argument(node, "reduction", MEAN) == SUM

    def over_samples(self, node: ForwardNode) -> bool:
        """Whether a sum still runs over samples: not where they were summed or averaged just before, as penalties on a batch's mean are."""
        while len(node.inputs) == 1 and (made := self.graph.by_name.get(node.inputs[0])) is not None:
            dims = argument(made, "dim", None) if _name(made) in (*COUNTS, *AVERAGES) else []
            if dims is None or 0 in (dims if isinstance(dims, list) else [dims]):
                return False
            node = made
        return True

    def mean_by_hand(self, divided: float) -> bool:
        """A sum that is divided by a number which grows with the batch, as far as can be seen, is a mean."""
        return divided != 1.0 and divided >= self.rows and float(divided).is_integer() and int(divided) % self.rows == 0

    def counts_targets(self, node: ForwardNode) -> bool:
        """Whether the loss counts targets (not: probabilities of classes), and they are known before the step."""
        target = node.inputs[1]
        info = self.info(target)
        weight = argument(node, "weight", None)
        known = self.is_given(target) and (weight is None or self.is_given(weight["value"]))
        return known and info is not None and not info.dtype.startswith(("float", "bfloat"))

    def info(self, value: str) -> Any:
        if value.startswith("input:"):
            return self.graph.inputs[int(value[6:])]
        node = self.graph.by_name.get(value)
        return node.outputs[0] if node is not None else self.graph.constants.get(value.removeprefix("constant:"))

    def leaves(self, divisor: str) -> tuple[str, ...]:
        """The numbers that a divisor is computed from, each made of something that is more than a number; () where it is a constant."""
        found: dict[str, None] = {}

        def look(value: str) -> None:
            node = self.graph.by_name.get(value)
            if node is None:
                return
            if all(self.scalar({"value": v}) or v.startswith(("constant:", "buffer:")) for v in node.inputs):
                for v in node.inputs:
                    look(v)
            else:
                found[value] = None

        look(divisor)
        return tuple(found)


def _random(node: ForwardNode) -> bool:
    """Whether a call may give something else the next time."""
    operator = operator_of(node)
    return operator is None or torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def counted_call(
    term: LossTerm, node: ForwardNode, args: tuple[Any, ...], kwargs: dict[str, Any], count: Any
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """(arguments, keyword arguments, whether the result is still to be divided by `count`) of the call that makes the term."""
    if term.how == "division":
        return (args[0], count, *args[2:]), kwargs, False
    if term.how == "loss":
        if "reduction" in kwargs:
            return args, {**kwargs, "reduction": SUM}, True
        names = [a.name for a in operator_of(node)._schema.arguments]
        at = names.index("reduction")
        if at < len(args):
            return (*args[:at], SUM, *args[at + 1 :]), kwargs, True
        return args, {**kwargs, "reduction": SUM}, True
    return args, kwargs, True
