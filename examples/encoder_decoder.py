"""An encoder-decoder transformer: self-attention in both, cross-attention from the decoder to the encoder's output.

Inputs: source tokens, the decoder's input tokens, the target tokens; all int64 of shape (batch, sequence), the two sequences having
different lengths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Queries from `x`, keys and values from `memory` (which is `x` for self-attention)."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        q = self.query(x).view(batch, rows, self.heads, width // self.heads).transpose(1, 2)
        k, v = self.key_value(memory).view(batch, memory.shape[1], 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, rows, width))


class Layer(nn.Module):
    """One block; with `cross`, attention to the encoder's output between self-attention and the MLP."""

    def __init__(self, width: int, heads: int, cross: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=cross)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads, causal=False) if cross else None
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class EncoderDecoder(nn.Module):
    def __init__(self, *, vocabulary: int, source: int, target: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.source_positions = nn.Parameter(torch.empty(source, width))
        self.target_positions = nn.Parameter(torch.empty(target, width))
        self.encoder = nn.ModuleList(Layer(width, heads, cross=False) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(Layer(width, heads, cross=True) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, source: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
        memory = self.tokens(source) + self.source_positions[: source.shape[1]]
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = self.tokens(shifted) + self.target_positions[: shifted.shape[1]]
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(self.decoder_norm(x))


def build(
    *, vocabulary: int, source: int, target: int, layers: int, width: int, heads: int, batch: int
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    module = EncoderDecoder(vocabulary=vocabulary, source=source, target=target, layers=layers, width=width, heads=heads)
    tokens = torch.randint(vocabulary, (batch, target + 1))
    return module, (torch.randint(vocabulary, (batch, source)), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """0.1 M parameters: for tests."""
    return build(vocabulary=128, source=24, target=16, layers=1, width=48, heads=4, batch=4)


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """7.6 M parameters, byte-level."""
    return build(vocabulary=256, source=128, target=96, layers=4, width=256, heads=8, batch=8)
