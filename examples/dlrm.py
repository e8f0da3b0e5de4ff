"""A DLRM-style recommender: embedding bags for categories, an MLP for dense features, pairwise products, a top MLP.

Inputs: dense features (batch, dense) float32; categories (batch, tables, bag) int64, a bag of indices into every table; the target,
clicked or not, (batch,) float32. The module returns the probability; use the loss `mse`, or `examples/dlrm.py:click_loss`.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self, *, tables: int, rows: int, width: int, dense: int, bottom: tuple[int, ...], top: tuple[int, ...], sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for _ in range(tables))
        self.bottom = mlp((dense, *bottom, width))
        pairs = (tables + 1) * tables // 2
        self.top = mlp((width + pairs, *top, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, offset=-1), persistent=False)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        bags = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([x, *bags], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        chosen = products[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([x, chosen], dim=1))).squeeze(1)


def click_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of probabilities."""
    return F.binary_cross_entropy(output, target)


def build(
    *, tables: int, rows: int, width: int, dense: int, bag: int, bottom: tuple[int, ...], top: tuple[int, ...], batch: int, sparse: bool = False
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    module = DLRM(tables=tables, rows=rows, width=width, dense=dense, bottom=bottom, top=top, sparse=sparse)
    return module, (torch.randn(batch, dense), torch.randint(rows, (batch, tables, bag)), torch.rand(batch).round())


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """27 k parameters: for tests."""
    return build(tables=3, rows=500, width=16, dense=5, bag=4, bottom=(32,), top=(32, 16), batch=8)


def tiny_sparse() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Like `tiny`, with sparse gradients of the tables."""
    return build(tables=3, rows=500, width=16, dense=5, bag=4, bottom=(32,), top=(32, 16), batch=8, sparse=True)


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """5.2 M parameters, nearly all in eight tables."""
    return build(tables=8, rows=20_000, width=32, dense=13, bag=8, bottom=(128, 64), top=(128, 64), batch=64)
