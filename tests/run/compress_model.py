"""A small float32 regression that gives its own loss, with layers of different sizes."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

SIZES = (24, 32, 48, 32, 5)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(SIZES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.layers[-1](x), y)


def regression(batch_size: int = 2) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Regression(), (torch.randn(batch_size, SIZES[0]), torch.randn(batch_size, SIZES[-1]))


class Odd(nn.Module):
    """Sizes that divide by nothing, a table that two layers share, a frozen layer, a scale of one element, a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(SIZES[0], 18), nn.Linear(18, 18, bias=False), nn.Linear(18, SIZES[-1])
        self.frozen = nn.Linear(18, 18).requires_grad_(False)
        self.scale, self.norm = nn.Parameter(torch.ones(1)), nn.LayerNorm(18)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x)))) * self.scale
        x = self.norm(torch.tanh(self.frozen(x)) + self.shared(x))
        return F.mse_loss(self.last(x), y)


def odd(batch_size: int = 2) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Odd(), (torch.randn(batch_size, SIZES[0]), torch.randn(batch_size, SIZES[-1]))


class Tokens(nn.Module):
    """A residual block with norms on tokens, so that what lies between tensor-parallel regions can be split along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.before, self.after = nn.Linear(6, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, SIZES[-1])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.view(x.shape[0], 4, 6))
        x = x + self.down(F.gelu(self.up(self.before(x))))
        return F.mse_loss(self.head(self.after(x)).mean(1), y)


def tokens(batch_size: int = 2) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Tokens(), (torch.randn(batch_size, SIZES[0]), torch.randn(batch_size, SIZES[-1]))


class _Samples:
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        return torch.randn(SIZES[0], generator=made), torch.randn(SIZES[-1], generator=made)


def samples() -> _Samples:
    """Data by file name: sample i is what it is by i alone."""
    return _Samples()
