"""Which losses are normalised, read from their calls; and what a rank divides by."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.capture.forward import trace_objective
from meshwright.capture.losses import Objective
from meshwright.capture.resolve import ModelSource
from meshwright.errors import Unsupported
from meshwright.run.steps.forward_graph import OPAQUE, ForwardGraph, ForwardNode, TensorInfo, argument_of, from_traced, operator_of
from meshwright.run.train.loss_counts import LossCounts, divisors_of
from meshwright.run.train.loss_terms import loss_terms, loss_understood

ROWS, CLASSES = 4, 5
X = {"value": "x"}


def traced(loss: Callable[[Any, torch.Tensor], torch.Tensor], rows: int = ROWS, *, classes: bool = True) -> ForwardGraph:
    model = nn.Linear(3, CLASSES)
    target = torch.randint(CLASSES, (rows,)) if classes else torch.randn(rows, CLASSES)
    objective = Objective(model, "mse")
    objective.loss.function = loss
    source = ModelSource(name="linear", module=model, inputs=(torch.randn(rows, 3), target))
    return from_traced(trace_objective(objective, source, loss="mse", mode=None))


def hows(graph: ForwardGraph) -> list[str]:
    return sorted(t.how for t in loss_terms(graph).values())


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (F.cross_entropy, ["loss"]), (lambda y, t: 0.5 * F.cross_entropy(y, t) - 1, ["loss"]),
        (lambda y, t: F.cross_entropy(y, t, reduction="sum"), ["sum"]),
        (lambda y, t: F.cross_entropy(y, t) + F.cross_entropy(y * 2, t, reduction="sum"), ["loss", "sum"]),
        (lambda y, t: F.nll_loss(y.log_softmax(-1), t), ["loss"]), (lambda y, t: y.square().sum(), ["sum"]), (lambda y, t: y.square().mean(), []),
        (lambda y, t: y.square().sum() / ROWS, []), (lambda y, t: y.square().sum() / 7, ["sum"]), (lambda y, t: y.mean(0).square().sum(), []),
        (lambda y, t: (y.sum(1) * (t > 1)).sum() / (t > 1).sum(), ["division"]), (lambda y, t: y.square().mean() / y.detach().std(), []),
        (lambda y, t: torch.stack([F.cross_entropy(y, t), y.square().mean()]).sum(), ["loss"]),
        (lambda y, t: (F.cross_entropy(y, t, reduction="none")).mean(), []), (lambda y, t: F.cross_entropy(y, y.softmax(-1).detach()), []),
        (lambda y, t: -(-F.cross_entropy(y, t)), ["loss"]),
    ],
)  # fmt: skip
def test_terms(loss: Callable[[Any, torch.Tensor], torch.Tensor], expected: list[str]) -> None:
    assert hows(traced(loss)) == expected


@pytest.mark.parametrize(
    ("loss", "understood"),
    [
        (F.cross_entropy, True), (lambda y, t: y.square().mean() + 2 * F.cross_entropy(y, t), True),
        (lambda y, t: y.square().mean().sqrt(), False),
        (lambda y, t: y.mean(0).square().sum(), False), (lambda y, t: y.square().sum() / ROWS, True),
        (lambda y, t: y.square().mean() * y.std(), False),
        (lambda y, t: torch.stack([F.cross_entropy(y, t), y.square().mean()]).mean(), True),
        (lambda y, t: y.square().mean() / (t > 1).sum().exp(), True),
        (lambda y, t: y.square().mean() / (t > 1).to(y.dtype).std(), False),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_known(loss: Callable[[Any, torch.Tensor], torch.Tensor], understood: bool) -> None:
    assert loss_understood(traced(loss)) == understood


def test_opaque_models_have_no_terms_and_are_not_understood() -> None:
    graph = ForwardGraph((ForwardNode("loss", OPAQUE, [], {}, (TensorInfo((), "float32"),)),), (TensorInfo((ROWS, 3), "float32"),), ("loss",), {})
    assert loss_terms(graph) == {} and not loss_understood(graph)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "name", "expected"),
    [
        ("aten.topk.default", [X, 2], {}, "dim", -1), ("aten.topk.default", [X, 2, 0], {}, "dim", 0),
        ("aten.norm.ScalarOpt_dim", [X, 2, [1]], {}, "dim", [1]), (OPAQUE, [X], {}, "dim", "none"),
        ("aten.sum.default", [X], {}, "dim", "none"), ("aten.huber_loss.default", [X, X], {}, "reduction", 1),
        ("aten.huber_loss.default", [X, X], {"reduction": 2}, "reduction", 2), ("aten.softmax.int", [X], {}, "dim", "none"),
    ],
)  # fmt: skip
def test_arguments_are_found_by_the_operators_own_names(target: str, args: list[Any], kwargs: dict[str, Any], name: str, expected: Any) -> None:
    node = ForwardNode("y", target, args, kwargs, (TensorInfo((2,), "float32"),))
    assert argument_of(operator_of(node), node.args, node.kwargs, name, "none") == expected


def test_probabilities_are_not_counted() -> None:
    assert hows(traced(lambda y, t: F.cross_entropy(y, t.softmax(-1)), classes=False)) == []


def counts_of(graph: ForwardGraph) -> LossCounts:
    terms = loss_terms(graph)
    return LossCounts(graph, terms, {n: torch.ones((), dtype=torch.float64) for n in terms}, {}, {})


def test_counts_of_all_micro_batches_make_the_divisor() -> None:
    counts = counts_of(traced(lambda y, t: F.cross_entropy(y, t, ignore_index=0)))
    targets = [torch.tensor([0, 0, 0, 0]), torch.tensor([1, 2, 0, 3]), torch.tensor([1, 1, 1, 1])]
    counts.fill(counts.sums([torch.zeros(ROWS, 3), t] for t in targets), 3)
    (divisor,) = counts.divisors.values()
    assert float(divisor) == pytest.approx(7 / 3)
    assert counts.weight([torch.zeros(ROWS, 3), targets[1]], 3) == pytest.approx(3 / 7)
    with pytest.raises(Unsupported, match="all targets of a micro-batch are ignored"):
        counts.weight([torch.zeros(ROWS, 3), targets[0]], 3)
    with pytest.raises(Unsupported, match="all targets of the batch are ignored"):
        counts.fill(counts.sums([[torch.zeros(ROWS, 3), targets[0]]] * 2), 2)


def test_a_divisor_is_computed_from_the_sums() -> None:
    """A clamp is of the whole batch's count, not of each micro-batch's."""
    counts = counts_of(traced(lambda y, t: (y.sum(1) * (t > 3)).sum() / (t > 3).sum().clamp(min=2)))
    targets = [torch.tensor([4, 0, 0, 0]), torch.tensor([4, 4, 0, 0]), torch.zeros(4, dtype=torch.int64)]
    counts.fill(counts.sums([torch.zeros(ROWS, 3), t] for t in targets), 3)
    assert [float(d) for d in counts.divisors.values()] == [pytest.approx(3 / 3)]
    counts.fill(counts.sums([torch.zeros(ROWS, 3), targets[2]] for _ in range(3)), 3)
    assert [float(d) for d in counts.divisors.values()] == [pytest.approx(2 / 3)]


def test_the_loss_is_weighted_where_a_planned_step_makes_its_only_term() -> None:
    one, two = traced(F.cross_entropy), traced(lambda y, t: F.cross_entropy(y, t) + F.cross_entropy(y * 2, t, reduction="sum"))
    for graph in (one, two):
        terms, made = loss_terms(graph), SimpleNamespace(key="s", nodes=[n.name for n in graph.nodes], step=None)
        divisors, weighted = divisors_of([SimpleNamespace(key="r", nodes=[], step=object()), made], graph, terms, torch.device("cpu"))
        assert {*divisors} == {*terms} and all(float(x) == 1.0 for x in divisors.values()) and not weighted
        made.step = object()
        if graph is one:
            assert divisors_of([made], graph, terms, torch.device("cpu"))[1]
        else:
            with pytest.raises(Unsupported, match="no place for its count"):
                divisors_of([made], graph, terms, torch.device("cpu"))
