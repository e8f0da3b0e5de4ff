"""A model for the tests of pipeline schedules, in float64: a table that is also the head, a value that every block reads, an operator without
parameters, dropout, a frozen weight, a weight used twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH, WIDTH, TOKENS = 2, 5, 8, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) + first)))


class Net(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = self.tokens(tokens)
        x = F.dropout(first, 0.1)
        for i, block in enumerate(self.blocks):
            x = block(x, first)
            if i % 2:
                x = self.twice(x) * self.scale
        return self.head(F.layer_norm(x, (WIDTH,)))


def net():
    tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1))
    return Net(4).double(), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
