"""A model with BatchNorm."""

import torch
from torch import nn


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(8, 8), torch.randint(0, 4, (8,)))
