"""Clipping of gradients before the optimizer's step, with torch.nn.utils' arithmetic, on whatever part of them a rank updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["clip_to_norm", "clip_to_value"]

SMALL = 1e-6  # what clip_grad_norm_ adds to the norm


def clip_to_norm(gradients: Sequence[torch.Tensor], norm: torch.Tensor, most: float) -> None:
    """Scale so that the norm of all, which `norm` says, is at most `most`. A norm that is not finite spreads, as in torch."""
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        # as clip_grad_norm_: the norm is of the gradients' type, and they are multiplied by 1 too
        coefficient = torch.clamp(most / (norm.to(dtype if dtype.itemsize > 2 else torch.float32) + SMALL), max=1.0)
        for g in gradients:
            if g.dtype == dtype:
                g.mul_(coefficient.to(g.device))


def clip_to_value(gradients: Sequence[torch.Tensor], most: float) -> None:
    """Every element into [-most, most]."""
    for g in gradients:
        g.clamp_(min=-most, max=most)
