"""A step that cannot be captured: control flow follows data."""

import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))
        self.head = nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
            if x.mean().item() > 100:
                x = x / 2
        return self.head(x)


def net() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Odd(), (torch.randn(1024, 256), torch.randint(0, 16, (1024,)))
