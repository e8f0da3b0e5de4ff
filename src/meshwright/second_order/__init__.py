"""Second-order optimisation of Linear layers: K-FAC as an optimizer of its own, and in pieces that a pipeline runs in its idle time.

    optimizer = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.3), damping=1e-2)
    loss.backward(); optimizer.step(); optimizer.zero_grad()

Needs the extra `torch`.
"""

from __future__ import annotations

from .capture import Conventions
from .kfac import CITE, KFAC, Refresh
from .layer import LinearCurvature

__all__ = ["CITE", "KFAC", "Conventions", "LinearCurvature", "Refresh"]
