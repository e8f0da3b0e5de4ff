"""Which rank of the new layout goes on which device, so that most of what it needs lies there already.

An assignment problem: rank r on device d leaves `needed(r) - held(r, d)` bytes to be fetched; the least sum is exact (`kernels.assignment`, whose
dual solution proves it). Ranks with equal needs and devices with equal files are compared once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...cite import FOLKLORE, Cite
from ...kernels.assignment import Assignment, assign
from ...plan.regions import Region, TensorSpec, elements, intersection, minus
from .problem import PlacementProblem, PlacementStrategy

__all__ = ["MostInPlace", "reuse_bytes", "reuse_placement"]


def reuse_bytes(
    tensors: Mapping[str, TensorSpec], needs: Sequence[Mapping[str, Region]], held: Sequence[Sequence[Mapping[str, Region]]]
) -> NDArray[np.int64]:
    """Bytes of what rank i needs that lie on device j; `held[j]`: the files there."""
    keys: list[Hashable] = [tuple(sorted(x.items())) for x in needs]
    there: list[Hashable] = [tuple(tuple(sorted(f.items())) for f in files) for files in held]
    known: dict[tuple[Hashable, Hashable], int] = {}
    found = np.zeros((len(needs), len(held)), np.int64)
    for i, need in enumerate(needs):
        for j, files in enumerate(held):
            pair = (keys[i], there[j])
            if pair not in known:
                known[pair] = sum(_common(need, files, name) * tensors[name].item_bytes for name in need)
            found[i, j] = known[pair]
    return found


def _common(need: Mapping[str, Region], files: Sequence[Mapping[str, Region]], name: str) -> int:
    left, found = list(need[name]), 0
    for file in files:
        for box in file.get(name, ()):
            found += elements(c for x in left if (c := intersection(x, box)) is not None)
            left = minus(left, box)
    return found


def reuse_placement(reuse: NDArray[np.int64], allowed: NDArray[np.bool_] | None = None) -> Assignment:
    """Ranks on devices (column numbers) so that most bytes are in place; only where `allowed`. The cost is minus the bytes."""
    cost = -reuse
    if allowed is not None:
        cost = np.where(allowed, cost, int(reuse.sum()) + 1)
    return assign(cost)


@dataclass(frozen=True, kw_only=True)
class MostInPlace(PlacementStrategy):
    """Most bytes in place, exactly. No options."""

    name: ClassVar[str] = "most-in-place"
    cite: ClassVar[Cite] = FOLKLORE

    def plan(self, problem: PlacementProblem) -> Assignment:
        return reuse_placement(problem.reuse, problem.allowed)
