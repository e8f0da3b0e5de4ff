"""Small models whose whole steps are planned quickly."""

import torch
from torch import nn


def tower() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Six layers, one after the other."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(64, 4)), (torch.zeros(256, 64), torch.zeros(256, dtype=torch.int64))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def branches() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Three residual blocks."""
    return Branches(), (torch.zeros(128, 32), torch.zeros(128, dtype=torch.int64))
