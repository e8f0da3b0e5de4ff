"""Models for the tests of recipes: as those of tensor parallelism, with losses that are means of means, and nothing random."""

from __future__ import annotations

import torch
from tensor_models import ODD, _made
from torch import nn


def tied():
    """Five heads, 21 columns, 37 tokens; the head is the table."""
    return _made(37, **ODD, style="packed", tied=True, layers=2)


def grouped():
    """Two key-value heads, which four tensor-parallel ranks hold twice."""
    return _made(32, width=16, heads=8, groups=2, hidden=24, style="native", layers=2)


def single():
    """In float32, which autocast casts."""
    module, batch = _made(32, width=16, heads=4, groups=4, hidden=24, style="packed", layers=2, tied=True)
    return module.float(), batch


def normed():
    """Norms of what products give: a GPU's autocast makes them float32, a processor's does not."""
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    return nn.Sequential(*layers), (torch.randn(4, 16), torch.randint(8, (4,)))


def half():
    """In bfloat16, weights and all."""
    module, batch = _made(32, width=16, heads=4, groups=4, hidden=24, style="packed", layers=2, tied=True)
    return module.bfloat16(), batch


def shared():
    """One key-value head, which all tensor-parallel ranks hold."""
    return _made(32, width=16, heads=4, groups=1, hidden=24, style="expand", layers=2)
