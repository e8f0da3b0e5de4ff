"""A convolutional network for planned stages: large workspaces in pieces, max pooling, a batch that is not divisible by much."""

from __future__ import annotations

import torch
from torch import nn

ROWS, SIDE = 16, 32


def pictures():
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 32), (32, 20)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
    layers.insert(4, nn.MaxPool2d(2))
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 5))
    return module, (torch.randn(ROWS, 3, SIDE, SIDE), torch.randint(0, 5, (ROWS,)))
