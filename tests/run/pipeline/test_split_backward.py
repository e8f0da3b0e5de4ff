"""The split backward against autograd's own, on modules of many shapes; nothing runs more often than it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge

from meshwright.run.steps.split_backward import input_gradients


def both(make: Callable[[], nn.Module], x: torch.Tensor, *, differentiable: bool = True) -> tuple[nn.Module, nn.Module, Any, Any, Any]:
    """(split, whole, input gradients of each, the work left) of one module on one input."""
    torch.manual_seed(3)
    split = make().double()
    torch.manual_seed(3)
    whole = make().double()
    a, b = (x.detach().clone().requires_grad_(differentiable) for _ in range(2))
    y, z = split(a * 1 if differentiable else a), whole(b * 1 if differentiable else b)
    ys, zs = (y, z) if isinstance(y, tuple) else ((y,), (z,))
    torch.manual_seed(4)
    seeds = [torch.randn_like(t) for t in ys]
    live = [(t, s) for t, s in zip(ys, seeds, strict=True) if t.requires_grad]
    sources = [get_gradient_edge(a)] if differentiable else []
    own, work = input_gradients([get_gradient_edge(t) for t, _ in live], [s for _, s in live], sources)
    torch.autograd.backward([t for t in zs if t.requires_grad], [s for t, s in zip(zs, seeds, strict=True) if t.requires_grad])
    return split, whole, own, b.grad, work


def agree(make: Callable[[], nn.Module], x: torch.Tensor, *, deferred: set[str] | None = None, differentiable: bool = True) -> None:
    split, whole, own, expected, work = both(make, x, differentiable=differentiable)
    if differentiable:
        torch.testing.assert_close(own[0], expected, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for p in split.parameters())
    if deferred is not None:
        early = {id(e.node.variable) for e, _ in work.ready if hasattr(e.node, "variable")}
        assert {n for n, p in split.named_parameters() if id(p) not in early} == deferred
    work.run()
    for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x) * self.scale


class Tied(nn.Module):
    """One linear used twice, its weight once more through a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * self.gain
        y = self.linear(y) * self.gain
        normal = self.linear.weight / self.linear.weight.norm()
        return y @ normal + y @ normal


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


class Outputs(nn.Module):
    """Several outputs: of the input, of weights alone, of both, and one that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = (self.b * self.c).exp()
        return self.a(x), made, x + made.sum(0), x.detach() * 2


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y += self.bias
        y[:, 0].mul_(2)
        return torch.relu_(y)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


IMAGE = torch.randn(2, 3, 6, 6, dtype=torch.float64)
TEXT = torch.randn(2, 4, 8, dtype=torch.float64)
ROWS = torch.randn(2, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Block, TEXT), (lambda: nn.Sequential(Block(), Block()), TEXT), (Tied, ROWS), (Recurrent, TEXT), (Outputs, ROWS),
        (Inplace, ROWS), (Frozen, ROWS),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 5)), IMAGE),
        (lambda: nn.Sequential(nn.ReLU(), nn.Flatten(0)), ROWS), (lambda: nn.LSTM(8, 8), TEXT[0]), (nn.Identity, ROWS),
    ],
)  # fmt: skip
def test_gradients_are_autograds_own(make: Callable[[], nn.Module], x: torch.Tensor) -> None:
    if make is nn.Identity:
        agree(make, x)
        return
    agree(lambda: _First(make()), x)


class _First(nn.Module):
    """Leaves out what is nested deeper than a tuple of tensors."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        return (y[0], *y[1]) if isinstance(self.inner, nn.LSTM) else y


def test_every_weight_of_a_transformer_block_is_deferred() -> None:
    agree(Block, TEXT, deferred={n for n, _ in Block().named_parameters()})


def test_only_what_the_spine_passes_twice_is_not_deferred() -> None:
    # the weight used bare meets the spine through a transpose of its own each time; bias and gain are met twice, and with the weight's quotient
    # its group has a branch (the quotient) with two ways to it
    agree(Tied, ROWS, deferred=set())
    agree(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), ROWS, deferred={"0.weight", "0.bias", "1.weight", "1.bias"})


def test_without_a_differentiable_input_everything_is_left_for_later() -> None:
    agree(Block, TEXT, differentiable=False)
    agree(lambda: nn.Sequential(nn.Embedding(9, 8), Block()), torch.arange(8).reshape(2, 4), differentiable=False)


def test_nothing_runs_twice_for_the_same_result() -> None:
    """Products in the two passes together are those of a whole backward: one per input and one per weight of every linear."""
    from torch.utils.flop_counter import FlopCounterMode

    module, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))), torch.randn(4, 16, requires_grad=True)
    y = module(x)
    with FlopCounterMode(display=False) as first:
        _, work = input_gradients([get_gradient_edge(y)], [torch.ones_like(y)], [get_gradient_edge(x)])
    with FlopCounterMode(display=False) as second:
        work.run()
    assert first.get_total_flops() == second.get_total_flops() == 5 * 2 * 4 * 16 * 16


def test_the_graph_is_freed_when_the_work_has_run() -> None:
    import gc
    import weakref

    module, x = nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    inner = torch.tanh(x)
    seen = weakref.ref(inner.untyped_storage())
    y = module(inner)
    edges = [get_gradient_edge(y)]
    _, work = input_gradients(edges, [torch.ones_like(y)], [get_gradient_edge(x)])
    work.run()
    del y, inner, edges
    gc.collect()
    assert seen() is None
    assert not work.meetings


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_graphs_of_shared_weights(data: st.DataObject) -> None:
    """Any mixture of operators over activations and weights, weights of weights included."""
    weights = data.draw(st.integers(1, 4))
    plan = data.draw(st.lists(st.tuples(st.sampled_from("mwats"), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4) / 4) for _ in range(weights)])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values, derived = [x], list(self.weights)
            for kind, i, j in plan:
                v, w = values[i % len(values)], derived[j % len(derived)]
                if kind == "m":
                    values.append(v @ w)
                elif kind == "a":
                    values.append(v + values[j % len(values)])
                elif kind == "t":
                    values.append(torch.tanh(v) * w)
                elif kind == "s":
                    values.append(v @ w.t() + w)
                else:
                    derived.append(torch.sin(w) + derived[i % len(derived)])
            return values[-1], values[len(values) // 2], derived[-1] * 1

    agree(Random, torch.randn(4, 4, dtype=torch.float64))


def test_what_a_segment_made_again_serves_both_parts_and_is_let_go() -> None:
    """The chosen call runs again once, for the gradient of the read and for that of the weight."""
    from meshwright.run.steps.replay import Replays
    from meshwright.run.train.segment_module import SegmentModule

    weight, replays = torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float64)), Replays([["tanh"]])
    tanh = replays.wrap("tanh", torch.tanh)
    segment = SegmentModule(
        key="s0", function=lambda x, w: (torch.sin(tanh(x) @ w),), reads=("x",), writes=("y",), inputs=(), constants=(weight,),
        differentiable=(True,), random=False, split=False, twice=True, replays=replays,
    )  # fmt: skip
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    segment.forward(0, [x.detach()], [])
    found = segment.backward_input(0, [torch.ones(2, 3, dtype=torch.float64)])
    made = segment._replayed[0]
    assert made.replayed == 1 and made.regions[0].values and weight.grad is None
    segment.backward_weight(0)
    assert made.replayed == 1 and not made.regions and not segment._replayed
    expected = torch.autograd.grad(torch.sin(torch.tanh(x) @ weight).sum(), [x, weight])
    assert torch.equal(found[0], expected[0]) and torch.equal(weight.grad, expected[1])
    segment.forward(0, [x.detach()], [])
    segment.forget()
    assert not segment._entries and not segment._replayed
