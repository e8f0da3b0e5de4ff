"""GPT-style decoders: learned positions, pre-norm blocks, one fused query-key-value linear, causal attention.

Every function returns `(module, (tokens, targets))`; tokens and targets are int64 of shape (batch, sequence). Modules are built on the
current default device, so `with torch.device("meta")` describes a model without its memory. Weights are drawn from N(0, 0.02), so
the first cross-entropy is close to ln(vocabulary).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

STD = 0.02


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, *, vocabulary: int, sequence: int, layers: int, width: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(
    *, vocabulary: int, sequence: int, layers: int, width: int, heads: int, tied: bool = False, batch: int = 4
) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    module = GPT(vocabulary=vocabulary, sequence=sequence, layers=layers, width=width, heads=heads, tied=tied)
    tokens = torch.randint(vocabulary, (batch, sequence + 1))
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """0.2 M parameters: for tests."""
    return build(vocabulary=256, sequence=32, layers=4, width=64, heads=4)


def tiny_tied() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Like `tiny`; the head's weight is the token embedding's."""
    return build(vocabulary=256, sequence=32, layers=4, width=64, heads=4, tied=True)


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """3.3 M parameters, byte-level: twenty steps at global batch 32 take less than a minute on two processor cores."""
    return build(vocabulary=256, sequence=128, layers=4, width=256, heads=8)


def medium() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """25 M parameters, byte-level."""
    return build(vocabulary=256, sequence=256, layers=8, width=512, heads=8)


def gpt3_175b() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The shape of GPT-3 175B with biases and a tied head: for planning on fake tensors only (698 GB of weights in float32)."""
    return build(vocabulary=50257, sequence=2048, layers=96, width=12288, heads=96, tied=True, batch=1)
