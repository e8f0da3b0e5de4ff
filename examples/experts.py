"""Decoders whose blocks hold experts: a router, and gated experts in two tensors, as transformers 5 keeps them (`meshwright.nn.StackedExperts`).

Every function returns `(module, (tokens, targets))`, as in `gpt.py`. `train plan --ep N` spreads the experts over N data replicas.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from gpt import Attention
from torch import nn

from meshwright.nn import Spread, StackedExperts


class ExpertBlock(nn.Module):
    """Attention, then every token through `k` of `experts` experts. `factor`: capacity of their buffers, 0 drops nothing."""

    def __init__(self, width: int, heads: int, experts: int, inner: int, k: int, factor: float, spread: Spread | None) -> None:
        super().__init__()
        self.k = k
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts, bias=False)
        up = nn.Parameter(torch.randn(experts, 2 * inner, width) / math.sqrt(width))
        down = nn.Parameter(torch.randn(experts, width, inner) / math.sqrt(inner))
        self.experts = StackedExperts(up, down, "silu", k=k, capacity_factor=factor, spread=spread)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        flat = self.norm2(x).flatten(0, 1)
        weights, index = F.softmax(self.gate(flat), dim=-1).topk(self.k, dim=-1)
        return x + self.experts(flat, index, weights / weights.sum(-1, keepdim=True)).view(x.shape)


class ExpertGPT(nn.Module):
    def __init__(
        self, *, vocabulary: int = 256, sequence: int = 64, layers: int = 4, width: int = 64, heads: int = 4, experts: int = 8, inner: int = 64,
        k: int = 2, factor: float = 0.0, spread: Spread | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(ExpertBlock(width, heads, experts, inner, k, factor, spread) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Two layers of four experts. The vocabulary is bytes, as `train run` reads text."""
    tokens = torch.randint(256, (8, 9))
    module = ExpertGPT(sequence=8, layers=2, width=16, heads=2, experts=4, inner=16)
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
