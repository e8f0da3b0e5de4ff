"""Fusions by fixed rules: every tensor alone, PyTorch DDP's buckets, everything at once, and the best single cut.

Cite: Li et al., "PyTorch Distributed", VLDB 2020 (buckets); Wang, Wu, Ng, "MergeComp", 2021 (two groups).
Left open by the papers: which codec. Our answer: one codec for all groups, each of the problem's tried, the shortest step taken. MergeComp searches
    its cut by timing real steps; here every cut is priced by the cost model.
Invariant: groups cover the tensors in ready order; DDP's bucket is closed by the tensor that reaches its cap, as in torch's reducer.
Cost: one timeline per codec (and cut).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cite import Cite
from ...errors import UsageError
from .problem import Fusion, TrafficProblem, TrafficStrategy, best_of, groups_of, timeline

__all__ = ["DDP_CITE", "MERGECOMP_CITE", "DdpBuckets", "LayerWise", "MergeComp", "OneGroup"]

DDP_CITE = Cite(
    key="li2020ddp", title="PyTorch Distributed: Experiences on Accelerating Data Parallel Training", year=2020, venue="VLDB", authors="Li et al.",
    doi="10.14778/3415478.3415530",
)  # fmt: skip
MERGECOMP_CITE = Cite(
    key="wang2021mergecomp", title="MergeComp: A Compression Scheduler for Scalable Communication-Efficient Distributed Training", year=2021,
    venue="arXiv", authors="Wang, Wu, Ng", url="https://arxiv.org/abs/2103.15195",
)  # fmt: skip


def _best(problem: TrafficProblem, ends: Iterable[list[int]], **options: float) -> Fusion:
    names = [problem.profile.codecs[c].codec for c in problem.codecs]
    groups = best_of(problem, [groups_of(e, name) for e in ends for name in names])
    return Fusion(groups=groups, step_ns=timeline(problem, groups)[0] + problem.finish_ns, options=tuple(options.items()))


@dataclass(frozen=True, kw_only=True)
class LayerWise(TrafficStrategy):
    """No options."""

    name: ClassVar[str] = "layer-wise"
    cite: ClassVar[Cite] = DDP_CITE

    def plan(self, problem: TrafficProblem, *, rng: np.random.Generator | None = None) -> Fusion:
        return _best(problem, [list(range(1, problem.count + 1))])


@dataclass(frozen=True, kw_only=True)
class OneGroup(TrafficStrategy):
    """No options."""

    name: ClassVar[str] = "one-group"
    cite: ClassVar[Cite] = DDP_CITE

    def plan(self, problem: TrafficProblem, *, rng: np.random.Generator | None = None) -> Fusion:
        return _best(problem, [[problem.count]])


@dataclass(frozen=True, kw_only=True)
class DdpBuckets(TrafficStrategy):
    """Caps of the first bucket and of the others, in MiB, as torch's DDP has them."""

    name: ClassVar[str] = "ddp-buckets"
    cite: ClassVar[Cite] = DDP_CITE

    first_MiB: float = 1.0
    others_MiB: float = 25.0

    def plan(self, problem: TrafficProblem, *, rng: np.random.Generator | None = None) -> Fusion:
        """Raises: UsageError for a cap that is not positive."""
        if not (self.first_MiB > 0 and self.others_MiB > 0):
            raise UsageError("bucket caps must be positive", where=self.name)
        ends, held, cap = [], 0.0, self.first_MiB
        for i, tensor in enumerate(problem.profile.tensors, 1):
            held += tensor.elements * problem.profile.element_bytes / 2**20
            if held >= cap or i == problem.count:
                ends.append(i)
                held, cap = 0.0, self.others_MiB
        return _best(problem, [ends], first_MiB=self.first_MiB, others_MiB=self.others_MiB)


@dataclass(frozen=True, kw_only=True)
class MergeComp(TrafficStrategy):
    """No options."""

    name: ClassVar[str] = "mergecomp"
    cite: ClassVar[Cite] = MERGECOMP_CITE

    def plan(self, problem: TrafficProblem, *, rng: np.random.Generator | None = None) -> Fusion:
        return _best(problem, [[problem.count], *([i, problem.count] for i in range(1, problem.count))])
