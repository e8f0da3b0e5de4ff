"""What autograd keeps in place of a tensor that is not always there: whole weights that are gathered for a while, results that are made again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

__all__ = ["StandIn", "as_they_are", "opened"]


class StandIn(ABC):
    """Kept for backward instead of a tensor that will be there again by then."""

    @abstractmethod
    def tensor(self) -> torch.Tensor: ...


def as_they_are(tensor: torch.Tensor) -> Any:
    return tensor


def opened(kept: Any) -> Any:
    """What was kept; of a stand-in the tensor that it stands for."""
    return kept.tensor() if isinstance(kept, StandIn) else kept
