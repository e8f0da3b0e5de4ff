"""What a net that scores moves of tasks has learned (`decide.place.giph`): its weights, and on what it was trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["LAYERS", "MoveNet"]

# (outputs, inputs) of every layer by name: node features 5, edge features 5, a sweep's state 5 (10 of both), hidden 16 (the paper's sizes).
LAYERS = {
    "node.0": (5, 5), "node.1": (5, 5), "forward.message": (10, 10), "forward.update": (5, 10), "backward.message": (10, 10),
    "backward.update": (5, 10), "score.0": (16, 10), "score.1": (1, 16),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class MoveNet:
    """`weights`: "<layer>.weight" and "<layer>.bias" for every layer of `LAYERS`, float32. `trained`: episodes, devices, seed, what it reached."""

    weights: Mapping[str, NDArray[np.float32]]
    trained: Mapping[str, float] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Which net it is, in a plan."""
        made = hashlib.sha256()
        for name in sorted(self.weights):
            made.update(name.encode() + np.ascontiguousarray(self.weights[name]).tobytes())
        return f"sha256:{made.hexdigest()[:16]}"
