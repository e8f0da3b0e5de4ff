"""Small PyTorch nets as model functions, for tests that capture one. Needs torch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from ..capture.graph import capture
from ..graph.graph import OpGraph

__all__ = ["captured", "chain", "residual"]

BATCH_SAMPLES = 8


def chain() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Linear layers one after the other."""
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    return layers, (torch.randn(BATCH_SAMPLES, 32), torch.randint(16, (BATCH_SAMPLES,)))


class _Residual(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.into(x)))
        out: torch.Tensor = self.out(x + y)
        return out


def residual() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A value with two readers, and a normalisation."""
    return _Residual(), (torch.randn(BATCH_SAMPLES, 16), torch.randint(8, (BATCH_SAMPLES,)))


@lru_cache
def captured(net: str) -> OpGraph:
    """The graph of a net of this module, at any batch size."""
    return capture(f"{__name__}:{net}")
