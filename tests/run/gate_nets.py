"""Small nets nobody wrote: `net_17` is what the number 17 draws. For what the gate says of models that it was not made for.

A net of tokens or of vectors, from layers drawn one after the other, among them what makes plans differ: dropout, batch statistics, functions and
hooks with gradients of their own, noise, tied and frozen weights, buffers that change.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gate_models import BATCH, CLASSES, LENGTH, WIDTH, Model, _Reversed
from torch import nn

LOSSES_OF_TOKENS = (
    "cross-entropy", "ignoring", "ignoring_most", "class_weights", "summed", "negative_log", "masked", "masked_means", "two_terms", "shifted",
)  # fmt: skip
LOSSES_OF_VECTORS = ("mse", "sum_of_squares", "mean_by_hand", "huber", "contrast", "balance", "by_the_root")
OPTIMIZERS = ("sgd", "adamw", "momentum", "elementwise", "clipping", "lars", "rows", "orthogonal")


class Attention(nn.Module):
    def __init__(self, heads: int, causal: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.inside = nn.Linear(WIDTH, 3 * WIDTH) if fused else nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.outside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inside(x).chunk(3, -1) if self.fused else [f(x) for f in self.inside]
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.outside(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """All experts on every token, mixed by a gate."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1)
        return sum(share[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if x.dim() == 2 else self.norm(x.transpose(1, 2)).transpose(1, 2)


class Centred(nn.Module):
    """Subtracts a running mean that it updates: a buffer that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().reshape(-1, WIDTH).mean(0), 0.1)
        return x - 0.1 * x.mean(-1, keepdim=True)


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reversed.apply(x)


class Hooked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 1.0 * x
        if y.requires_grad:
            y.register_hook(lambda g: 2 * g)
        return y


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x)


class Residual(nn.Module):
    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.Sequential(*inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


class Net(nn.Module):
    def __init__(self, first: nn.Module, body: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = first, nn.ModuleList(body), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.body:
            x = layer(x)
        return self.last(x)


def of_tokens(number: int) -> bool:
    return number % 2 == 0


def draw_net(number: int) -> Model:
    """What the number draws; weights are torch's to draw."""
    r = random.Random(number)
    tokens = of_tokens(number)
    body = [_layer(r, tokens) for _ in range(r.randint(1, 4))]
    if r.random() < 0.35:
        body.insert(r.randrange(len(body) + 1), r.choice([nn.Dropout(0.2), BatchNormed(), Centred(), Own(), Hooked(), Noise()]))
    if tokens:
        first, last = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=r.random() < 0.5)
        if r.random() < 0.3:
            last.weight = first.weight
    else:
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    if r.random() < 0.2:
        first.weight.requires_grad_(False)
    net = Net(first, body, last)
    if r.random() < 0.08:
        net.body[0].register_full_backward_hook(lambda m, given, out: tuple(None if g is None else 3 * g for g in given))
    if tokens:
        return net, (torch.randint(CLASSES, (BATCH, LENGTH)), torch.randint(CLASSES, (BATCH, LENGTH)))
    return net, (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))


def _layer(r: random.Random, tokens: bool) -> nn.Module:
    activation = r.choice([nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.ELU])()
    hidden = r.choice([6, 8, 12, 16])
    kinds: list[Callable[[], Any]] = [
        lambda: Residual(nn.Linear(WIDTH, hidden), activation, nn.Linear(hidden, WIDTH)), lambda: Residual(nn.LayerNorm(WIDTH), Gated(hidden)),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), activation), Scaled, lambda: nn.RMSNorm(WIDTH), lambda: Residual(Experts(r.choice([2, 3]))),
        lambda: Residual(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden, bias=False), activation, nn.Dropout(r.choice([0.0, 0.1])), nn.Linear(hidden, WIDTH)
        ),
    ]  # fmt: skip
    if tokens:
        kinds += [lambda: Residual(nn.LayerNorm(WIDTH), Attention(r.choice([2, 4]), r.random() < 0.5, r.random() < 0.5))] * 3
    return r.choice(kinds)()


def __getattr__(name: str) -> Any:
    kind, _, number = name.partition("_")
    if kind not in ("net", "narrow") or not number.isdigit():
        raise AttributeError(name)

    def net() -> Model:
        return draw_net(int(number))

    def narrow() -> Model:
        """With weights and inputs of eight bits."""
        module, inputs = draw_net(int(number))
        return module.bfloat16(), tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)

    return net if kind == "net" else narrow
