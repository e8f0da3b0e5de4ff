"""Decoders whose blocks hold experts: a router, and gated experts in two tensors, as transformers 5 keeps them (`meshwright.nn.StackedExperts`).

Every function returns `(module, (tokens, targets))`, as in `gpt.py`. `train plan --ep N` spreads the experts over N data replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpt import Attention
from llama import Attention as LlamaAttention
from llama import FeedForward, rotated
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


class LatentAttention(nn.Module):
    """DeepSeek-V3's: queries and keys through narrow projections, a part of every head's key rotated and shared (arXiv:2412.19437, section 2.1.1)."""

    def __init__(self, width: int, heads: int, query: int, latent: int, size: int, rotary: int) -> None:
        super().__init__()
        self.heads, self.latent, self.size, self.rotary = heads, latent, size, rotary
        self.q_a, self.q_b = nn.Linear(width, query, bias=False), nn.Linear(query, heads * (size + rotary), bias=False)
        self.kv_a, self.kv_b = nn.Linear(width, latent + rotary, bias=False), nn.Linear(latent, heads * 2 * size, bias=False)
        self.q_norm, self.kv_norm = nn.RMSNorm(query), nn.RMSNorm(latent)
        self.o = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(batch, sequence, self.heads, -1).transpose(1, 2)
        narrow, turned = self.kv_a(x).split([self.latent, self.rotary], dim=-1)
        k, v = self.kv_b(self.kv_norm(narrow)).view(batch, sequence, self.heads, -1).transpose(1, 2).split(self.size, dim=-1)
        still, moved = q.split([self.size, self.rotary], dim=-1)
        shared = rotated(turned.unsqueeze(1), cos, sin).expand(batch, self.heads, sequence, self.rotary)
        q, k = torch.cat((still, rotated(moved, cos, sin)), dim=-1), torch.cat((k, shared), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, sequence, self.heads * self.size))


class GroupedAttention(LlamaAttention):
    """Llama's, with heads of a size of their own."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.q, self.o = nn.Linear(width, heads * size, bias=False), nn.Linear(heads * size, width, bias=False)
        self.k, self.v = nn.Linear(width, kv_heads * size, bias=False), nn.Linear(width, kv_heads * size, bias=False)


class SparseBlock(nn.Module):
    """Attention, then experts with `shared` inner dimension beside them for all tokens; `experts` 0: a dense layer of `inner`."""

    def __init__(self, attention: nn.Module, width: int, experts: int, inner: int, k: int, shared: int, factor: float) -> None:
        super().__init__()
        self.k, self.norm1, self.attention, self.norm2 = k, nn.RMSNorm(width), attention, nn.RMSNorm(width)
        self.mlp = FeedForward(width, shared or inner) if shared or not experts else None
        self.gate = nn.Linear(width, experts, bias=False) if experts else None
        if experts:
            up, down = nn.Parameter(torch.empty(experts, 2 * inner, width)), nn.Parameter(torch.empty(experts, width, inner))
            self.experts = StackedExperts(up, down, "silu", k=k, capacity_factor=factor)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        flat = self.norm2(x).flatten(0, 1)
        more = self.mlp(flat) if self.mlp is not None else 0
        if self.gate is not None:
            weights, index = F.softmax(self.gate(flat), dim=-1).topk(self.k, dim=-1)
            more = more + self.experts(flat, index, weights / weights.sum(-1, keepdim=True))
        return x + more.view(x.shape)


class SparseDecoder(nn.Module):
    """Blocks with rotary positions. `attention`: makes one; `dense`: layers without experts at the start, of `dense_inner`."""

    def __init__(
        self, attention: Callable[[], nn.Module], rotary: int, *, vocabulary: int, sequence: int, layers: int, width: int, experts: int, inner: int,
        k: int, shared: int = 0, dense: int = 0, dense_inner: int = 0, factor: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        first = [SparseBlock(attention(), width, 0, dense_inner, k, 0, factor) for _ in range(dense)]
        self.blocks = nn.ModuleList([*first, *(SparseBlock(attention(), width, experts, inner, k, shared, factor) for _ in range(layers - dense))])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(sequence).float(), 10_000.0 ** -(torch.arange(0, rotary, 2) / rotary)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def _shaped(make: Callable[[], nn.Module], vocabulary: int, sequence: int = 4096) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """On the meta device: parameters of these shapes fit on no single machine."""
    with torch.device("meta"):
        module, tokens = make(), torch.empty(1, sequence + 1, dtype=torch.int64)
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def deepseek_v3(layers: int = 61, factor: float = 1.0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """671 B parameters, of which 37 B for a token (arXiv:2412.19437, section 4.2), without its layer that predicts a second token."""
    return _shaped(lambda: SparseDecoder(
        lambda: LatentAttention(7168, 128, 1536, 512, 128, 64), 64, vocabulary=129_280, sequence=4096, layers=layers, width=7168, experts=256,
        inner=2048, k=8, shared=2048, dense=min(3, layers - 1), dense_inner=18_432, factor=factor,
    ), 129_280)  # fmt: skip


def mixtral_8x22b(layers: int = 56, factor: float = 1.0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """141 B parameters, of which 39 B for a token (mistralai/Mixtral-8x22B-v0.1, config.json)."""
    return _shaped(lambda: SparseDecoder(
        lambda: GroupedAttention(6144, 48, 8, 128), 128, vocabulary=32_768, sequence=4096, layers=layers, width=6144, experts=8, inner=16_384, k=2,
        factor=factor,
    ), 32_768)  # fmt: skip


def qwen3_235b(layers: int = 94, factor: float = 1.0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """235 B parameters, of which 22 B for a token (Qwen/Qwen3-235B-A22B, config.json), without norms of queries and keys."""
    return _shaped(lambda: SparseDecoder(
        lambda: GroupedAttention(4096, 64, 4, 128), 128, vocabulary=151_936, sequence=4096, layers=layers, width=4096, experts=128, inner=1536, k=8,
        factor=factor,
    ), 151_936)  # fmt: skip


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Two layers of four experts. The vocabulary is bytes, as `train run` reads text."""
    tokens = torch.randint(256, (8, 9))
    module = ExpertGPT(sequence=8, layers=2, width=16, heads=2, experts=4, inner=16)
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Four layers of eight experts, with buffers for as many rows as all experts alike get."""
    tokens = torch.randint(64, (2, 17))
    module = ExpertGPT(vocabulary=64, sequence=16, layers=4, width=32, heads=2, experts=8, inner=64, factor=1.0)
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
