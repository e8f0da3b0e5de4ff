"""A model with two tables."""

import torch
from torch import nn


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.top = nn.Embedding(2000, 16), nn.Embedding(800, 16), nn.Linear(32, 2)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.user(user), self.item(item)], 1))


def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    ids = torch.randint(0, 800, (2, 64))
    return Clicks(), (ids[0], ids[1], torch.randint(0, 2, (64,)))
