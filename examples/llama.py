"""Llama 3.1's shapes: rotary positions, grouped key-value heads, RMSNorm, SwiGLU, no biases, sequences of 8,192 tokens.

Sizes are those of the published configurations ("The Llama 3 Herd of Models", arXiv:2407.21783, table 3). Every function returns
`(module, (tokens, targets))`; under `torch.device("meta")` or fake tensors nothing of the model's memory is needed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

ROTARY_BASE = 500_000.0


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Positions of `x` (batch, heads, sequence, width of a head), half of the width turned against the other."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q = self.q(x).view(batch, sequence, self.heads, self.size).transpose(1, 2)
        k, v = (y.view(batch, sequence, self.kv_heads, self.size).transpose(1, 2) for y in (self.k(x), self.v(x)))
        y = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, sequence, self.heads * self.size))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((width, hidden), (width, hidden), (hidden, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp = FeedForward(width, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, *, vocabulary: int, sequence: int, layers: int, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = torch.arange(0, width // heads, 2) / (width // heads)
        angles = torch.outer(torch.arange(sequence).float(), ROTARY_BASE**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def build(*, vocabulary: int = 128_256, sequence: int = 8192, batch: int = 1, **sizes: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(vocabulary, (batch, sequence + 1))
    return Llama(vocabulary=vocabulary, sequence=sequence, **sizes), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """0.1 M parameters: for tests."""
    return build(vocabulary=128, sequence=32, batch=4, layers=4, width=64, heads=4, kv_heads=2, hidden=128)


def llama_8b() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return build(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336)


def llama_70b() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return build(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672)


def llama_405b() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return build(layers=126, width=16384, heads=128, kv_heads=8, hidden=53248)
