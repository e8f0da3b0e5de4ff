"""The question AutoDDL answers: a training step's operator graph, a fabric, costs; and its answer, a `ShardingPlan`.

The grid's `LayoutProblem` has one split region per layer and three degrees; here every operator and tensor has a state of its own, so the
problem and the plan are types of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from ....cost import Cost
from ....fabric.fabric import Fabric
from ....graph.graph import OpGraph
from ....plan.sharding import Optimizer, ShardingPlan
from ..problem import LayoutStrategy, Question
from .rules import Signature

__all__ = ["ShardingProblem", "ShardingStrategy"]

@dataclass(frozen=True, kw_only=True)
class ShardingProblem:
    """`graph` is captured at the global batch. `loader_Bps`: bytes of inputs that one device can load per second (every device can read any rows).
    `signatures`: more signatures per operator, e.g. derived from PyTorch's own sharding rules. `item_bytes`: bytes per floating-point element when
    the run uses another precision than the capture (0: as captured)."""

    graph: OpGraph
    fabric: Fabric
    cost: Cost
    optimizer: Optimizer = "sgd"
    loader_Bps: float = 1e9
    memory_bytes: int | None = None  # per device; None: the least the fabric states, 0: no limit
    signatures: Mapping[str, Sequence[Signature]] = field(default_factory=dict)
    item_bytes: int = 0
    max_axes: int = 3


class ShardingStrategy(LayoutStrategy, Protocol):
    answers: ClassVar[Question] = "operators"

    def plan(self, problem: ShardingProblem, *, rng: np.random.Generator | None = None, seed: int = 0) -> ShardingPlan:
        """Raises: Unsupported where it has no plan for the model or the number of devices, Infeasible where nothing fits in memory."""
        ...
