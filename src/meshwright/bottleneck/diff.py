"""Two measurements, or a prediction and a measurement, on one tree: seconds per step of every leaf, and what changed most.

A side is a mapping from leaves (paths such as ("forward", "blocks.0.mlp", "compute")) to seconds that sum to its step. So the differences of the
leaves sum to the difference of the steps, and every inner node's is the sum of its leaves'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .lanes import STAGES, Kind, RankView
from .tiles import flattened, tiles

__all__ = ["Change", "Diff", "by_module", "by_step", "difference"]

Leaf = tuple[str, ...]
IDLE = "idle"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A leaf on both sides, seconds per step."""

    leaf: Leaf
    a_s: float
    b_s: float

    @property
    def delta_s(self) -> float:
        return self.b_s - self.a_s


@dataclass(frozen=True, kw_only=True)
class Diff:
    """`changes` by how much they changed; `branches`: the same summed over the leaves below each inner node."""

    a_s: float
    b_s: float
    changes: Sequence[Change]
    branches: Sequence[Change]


def difference(a: Mapping[Leaf, float], b: Mapping[Leaf, float]) -> Diff:
    """All leaves of either side; those on one side only have 0 on the other."""
    changes = [Change(leaf=k, a_s=a.get(k, 0.0), b_s=b.get(k, 0.0)) for k in dict.fromkeys([*a, *b])]
    sums: dict[Leaf, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for c in changes:
        for depth in range(1, len(c.leaf)):
            sums[c.leaf[:depth]][0] += c.a_s
            sums[c.leaf[:depth]][1] += c.b_s
    branches = [Change(leaf=k, a_s=x, b_s=y) for k, (x, y) in sums.items()]
    return Diff(
        a_s=sum(a.values()), b_s=sum(b.values()), changes=sorted(changes, key=_most), branches=sorted(branches, key=_most),
    )  # fmt: skip


def _most(change: Change) -> tuple[float, Leaf]:
    return -abs(change.delta_s), change.leaf


def by_module(views: Sequence[RankView]) -> dict[Leaf, float]:
    """(stage, module, what it does) -> seconds per step, mean over ranks. They sum to the mean step."""
    sums: dict[Leaf, float] = defaultdict(float)
    for view in views:
        pieces = tiles(view)
        weight = 1e-9 / max(len(view.steps), 1) / len(views)
        keys = (pieces.stage.astype(np.int64) * len(view.modules) + pieces.module) * len(Kind) + pieces.kind
        found, place = np.unique(keys, return_inverse=True)
        times = np.bincount(place, weights=pieces.end - pieces.start)
        for key, time in zip(found.tolist(), times.tolist(), strict=True):
            stage, module = divmod(key // len(Kind), len(view.modules))
            sums[STAGES[stage], view.modules[module] or "(no module)", Kind(key % len(Kind)).name.lower()] += time * weight
    return dict(sums)


def by_step(
    rank: NDArray[np.int32], step: NDArray[np.int32], start_s: NDArray[np.float64], end_s: NDArray[np.float64], *, makespan_s: float, ranks: int,
    leaf_of: Sequence[Leaf],
) -> dict[Leaf, float]:
    """("rank r", ...leaf of the program step) -> seconds, and ("rank r", "idle"). Of several steps that run at once on a rank the latest
    started counts.

    Each rank's leaves sum to `makespan_s` in ns.
    """
    sums: dict[Leaf, float] = {}
    start, end = (np.round(x * 1e9).astype(np.int64) for x in (start_s, end_s))
    whole = round(makespan_s * 1e9)
    for r in range(ranks):
        rows = np.flatnonzero((rank == r) & (step >= 0) & (end > start))
        rows = rows[np.lexsort((-end[rows], start[rows]))]
        low, high, row = flattened(start, np.minimum(end, whole), rows)
        own = np.bincount(step[row], weights=high - low, minlength=1) if len(row) else np.zeros(1)
        for s in np.flatnonzero(own).tolist():
            leaf = (f"rank {r}", *leaf_of[s])
            sums[leaf] = sums.get(leaf, 0.0) + float(own[s]) / 1e9
        sums[f"rank {r}", IDLE] = (whole - int(own.sum())) / 1e9
    return sums
