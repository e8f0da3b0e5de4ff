"""Routers: how well a token suits each expert.

Cite: Tutel (arXiv 2206.03382), section 4.2, for the cosine router; N. Shazeer and others (arXiv 1701.06538) for the linear one.
Left open by the paper: nothing. Deviations: none. Invariant: logits are float32, whatever the model computes in. Cost: O(T H E).
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

__all__ = ["CosineRouter", "LinearRouter"]

MAX_SCALE = 100.0  # Tutel: the inverse temperature is learned, and clamped here


class LinearRouter(torch.nn.Module):  # type: ignore[misc]
    """logits [T, E] = x [T, H] · Wᵀ, without bias."""

    def __init__(self, model: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.linear = torch.nn.Linear(model, experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.to(_wide(x)), self.linear.weight.to(_wide(x)))


class CosineRouter(torch.nn.Module):  # type: ignore[misc]
    """logits = cos(W x + b, column of S) · exp(min(tau, ln 100)); `projected`: length of W x; `temperature`: exp(-tau) at the start."""

    def __init__(self, model: int, experts: int, *, projected: int = 256, temperature: float = 0.5) -> None:
        super().__init__()
        self.experts = experts
        self.projector = torch.nn.Linear(model, projected)
        self.similarity = torch.nn.Parameter(torch.randn(projected, experts) * 0.01)
        self.temperature = torch.nn.Parameter(torch.full([1], math.log(1 / temperature)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = _wide(x)
        seen = functional.linear(x.to(wide), self.projector.weight.to(wide), self.projector.bias.to(wide))
        cosine = functional.normalize(seen, dim=1) @ functional.normalize(self.similarity.to(wide), dim=0)
        return cosine * self.temperature.to(wide).clamp(max=math.log(MAX_SCALE)).exp()


def _wide(x: torch.Tensor) -> torch.dtype:
    """Float32, or float64 where that is what comes in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
