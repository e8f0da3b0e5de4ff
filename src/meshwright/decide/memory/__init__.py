"""The memory decision: what a training step keeps for its backward pass and what it computes again."""

from collections.abc import Callable

from .problem import Layer, LayerPolicy, Operator, RecomputePlan, RecomputeProblem, RecomputeStrategy, StageBudget, StageChoice
from .rules import CITE as WHOLE_LAYERS_CITE
from .rules import FullBlock, FullUniform, KeepAll, SelectiveAttention
from .selective import CITE as SELECTIVE_CITE
from .selective import OptimalRecompute

STRATEGIES = (KeepAll, SelectiveAttention, FullUniform, FullBlock, OptimalRecompute)
NAMES: dict[str, Callable[..., RecomputeStrategy]] = {
    "none": KeepAll, "selective": SelectiveAttention, "uniform": FullUniform, "block": FullBlock, "optimal": OptimalRecompute,
}  # fmt: skip
CITES = {"selective": SELECTIVE_CITE, "uniform": WHOLE_LAYERS_CITE, "block": WHOLE_LAYERS_CITE, "optimal": SELECTIVE_CITE}

__all__ = [
    "CITES", "NAMES", "STRATEGIES", "FullBlock", "FullUniform", "KeepAll", "Layer", "LayerPolicy", "Operator", "OptimalRecompute",
    "RecomputePlan", "RecomputeProblem", "RecomputeStrategy", "SelectiveAttention", "StageBudget", "StageChoice",
]  # fmt: skip
