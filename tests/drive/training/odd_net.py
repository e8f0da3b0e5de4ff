"""A net whose values and parameters have odd numbers of elements."""

from __future__ import annotations

import torch
from torch import nn


def odd() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)), (torch.randn(1, 7), torch.randint(3, (1,)))
