"""Factors of curvlinops' empirical K-FAC ("expand"), an implementation that shares nothing with this one.

`pip install --no-deps curvlinops-for-pytorch==3.0.1 backpack-for-pytorch einops einconv linear_operator opt-einsum scipy tqdm jaxtyping
wadler-lindig`: with dependencies it would replace torch's CPU build by a much larger one.
"""

from __future__ import annotations

import warnings
from types import ModuleType

import torch
from torch import nn

__all__ = ["factors_of"]


class _ClassesSecond(nn.Module):
    """As torch's cross-entropy wants outputs of sequences."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).movedim(-1, 1)


def factors_of(curvlinops: ModuleType, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A with the bias, B) by layer, for the mean cross-entropy of one batch; y [batch] or [batch, tokens]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operator = curvlinops.KFACLinearOperator(
            _ClassesSecond(net), nn.CrossEntropyLoss(), [p for p in net.parameters() if p.requires_grad], [(x, y)],
            fisher_type="empirical", kfac_approx="expand",
            separate_weight_and_bias=False, check_deterministic=False,
        )  # fmt: skip
        operator.compute_kronecker_factors()
    return {name.removeprefix("net."): (a, operator._gradient_covariances[name]) for name, a in operator._input_covariances.items()}
