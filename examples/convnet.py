"""A small residual convolutional net for images: 3 x 32 x 32 inputs, ten classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width_out:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False), nn.BatchNorm2d(width_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNet(nn.Module):
    def __init__(self, widths: tuple[int, ...], blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        stages: list[nn.Module] = []
        last = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stages.append(Residual(last, width, stride=2 if stage and not block else 1))
                last = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(last, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def build(*, widths: tuple[int, ...], blocks: int, batch: int, size: int = 32, classes: int = 10) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return ConvNet(widths, blocks, classes), (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """20 k parameters: for tests."""
    return build(widths=(8, 16), blocks=1, batch=4, size=16)


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """2.8 M parameters: a ResNet-18 of half the usual width."""
    return build(widths=(32, 64, 128, 256), blocks=2, batch=16)
