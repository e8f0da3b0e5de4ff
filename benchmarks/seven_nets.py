"""Seven kinds of net, in plain torch, of sizes whose step takes a core some tenths of a second: what `step_time.py --seven` runs.

Every function returns (module, (input, target)), for a cross-entropy. Two blocks or more follow each other in each, which two stages can share.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1] / "examples"), str(Path(__file__).parent)]

Net = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]
CLASSES, WORDS, LENGTH = 10, 512, 64


def _words(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (batch, LENGTH)), torch.randint(WORDS, (batch, LENGTH))


def _pictures(batch: int = 4, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))


def residual() -> Net:
    from convnet import build

    return build(widths=(32, 64, 128), blocks=2, batch=4)


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vision(nn.Module):
    def __init__(self, width: int = 192, depth: int = 6, heads: int = 4, patch: int = 4, size: int = 32) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, patch, patch), nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


def vit() -> Net:
    return Vision(), _pictures()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, width), nn.ModuleList(kind(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


def gru() -> Net:
    return Recurrent(nn.GRU), _words()


def lstm() -> Net:
    return Recurrent(nn.LSTM), _words()


class Experts(nn.Module):
    """Two of four experts, by a router; all are computed, and what was not chosen counts for nothing."""

    def __init__(self, width: int, inside: int, experts: int = 4) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(width, experts), nn.LayerNorm(width)
        self.up, self.down = (nn.Parameter(0.02 * torch.randn(experts, a, b)) for a, b in ((width, inside), (inside, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        scores = self.router(y)
        best = scores.topk(2, -1).values[..., -1:]
        weights = torch.softmax(scores.masked_fill(scores < best, -torch.inf), -1)
        made = torch.einsum("blei,eiw->blew", F.gelu(torch.einsum("blw,ewi->blei", y, self.up)), self.down)
        return x + torch.einsum("blew,ble->blw", made, weights)


class Mixture(nn.Module):
    def __init__(self, width: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.Sequential(*(m for _ in range(depth) for m in (Encoder(width, 4), Experts(width, 2 * width))))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(words)))


def moe() -> Net:
    return Mixture(), _words()


def gpt2() -> Net:
    from gpt import build

    return build(vocabulary=WORDS, sequence=LENGTH, layers=6, width=256, heads=4, batch=4)


def llama_like() -> Net:
    from llama import build

    return build(vocabulary=WORDS, sequence=LENGTH, batch=4, layers=6, width=256, heads=4, kv_heads=2, hidden=512)
