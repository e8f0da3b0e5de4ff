"""Models whose evaluation is another function than their training: dropout in several forms, running statistics, calls of one mode alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, LENGTH = 23, 16, 6
ROWS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (y.view(rows, length, 2, WIDTH // 2).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.words(tokens)))


class Noisy(nn.Module):
    """Noise in training alone, and a scale in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.training:
            x = x * torch.bernoulli(torch.full_like(x, 0.5)) * 2
        else:
            x = x.tanh() * 0.5
        return self.second(F.relu(x))


class Choosing(Noisy):
    """Its way depends on values in evaluation."""

    def forward(self, x):
        if not self.training and x.sum() > 0:
            return self.second(x)
        return self.second(self.first(x))


def choosing():
    _, batch = noisy()
    return Choosing().double(), batch


def words():
    torch.manual_seed(3)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH))
    return Words().double(), (tokens, tokens.roll(-1, 1))


def ignoring():
    """Samples with unlike numbers of targets that count."""
    module, (tokens, _) = words()
    return module, (tokens, tokens.roll(-1, 1))


def noisy():
    torch.manual_seed(4)
    return Noisy().double(), (torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.randn(ROWS, WIDTH, dtype=torch.float64))


class Samples:
    """`cut`: the first i % 4 + 1 targets of sample i count."""

    def __init__(self, cut=False, count=18, first=1000):
        self.cut, self.count, self.first = cut, count, first

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        torch.rand(1)  # of the generator that training has too
        tokens = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(self.first + i))
        target = tokens.roll(-1)
        if self.cut:
            target[i % 4 + 1 :] = -100
        return tokens, target


def some():
    return Samples(first=0, count=64)


def others():
    return Samples()


def unlike():
    return Samples(cut=True)


class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return tuple(torch.randn(WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))


def rows():
    return Rows()
