"""What a rank keeps of every parameter that it trains."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["StateBytes"]


class StateBytes(NamedTuple):
    """Bytes per parameter of one rank; `message`: of a gradient on the wire."""

    weight: float
    gradient: float
    optimizer: float
    message: float

    def at(self, sharding: int, replicas: int) -> float:
        parts = (self.optimizer, self.gradient, self.weight)
        return sum(p / replicas if level < sharding else p for level, p in enumerate(parts))
