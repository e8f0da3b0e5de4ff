"""What is sent smaller, and together: groups of gradients and the codec of each."""

from __future__ import annotations

from ...cite import Cite
from . import cupcake, fixed
from .cupcake import Cupcake
from .fixed import DdpBuckets, LayerWise, MergeComp, OneGroup
from .problem import Fusion, TrafficProblem, TrafficStrategy, groups_of, timeline

__all__ = [
    "CITES", "NAMES", "STRATEGIES", "Cupcake", "DdpBuckets", "Fusion", "LayerWise", "MergeComp", "OneGroup", "TrafficProblem", "TrafficStrategy",
    "groups_of", "timeline",
]  # fmt: skip

STRATEGIES: tuple[type[TrafficStrategy], ...] = (Cupcake, MergeComp, DdpBuckets, OneGroup, LayerWise)
NAMES: dict[str, type[TrafficStrategy]] = {
    "cupcake": Cupcake, "mergecomp": MergeComp, "ddp-buckets": DdpBuckets, "one-group": OneGroup, "layer-wise": LayerWise,
}  # fmt: skip
CITES: dict[str, Cite] = {
    "cupcake": cupcake.CITE, "mergecomp": fixed.MERGECOMP_CITE, "ddp-buckets": fixed.DDP_CITE, "one-group": fixed.DDP_CITE,
    "layer-wise": fixed.DDP_CITE,
}  # fmt: skip
