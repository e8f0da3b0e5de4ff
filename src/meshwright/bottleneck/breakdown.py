"""The whole breakdown of one run: ranks on one clock, where each rank's time went, who was last, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..kernels.stages import stage
from .causes import Cause, rank_causes
from .clocks import Clocks, align
from .lanes import RankView
from .path import CriticalPath, critical_path
from .table import RankTimes, Straggler, rank_times, stragglers

__all__ = ["Breakdown", "break_down"]


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """`views` are on the first one's clock; `times` and `clocks` in their order; `causes` ranked by what removing them gains."""

    views: Sequence[RankView]
    times: Sequence[RankTimes]
    clocks: Clocks
    stragglers: Sequence[Straggler]
    path: CriticalPath
    causes: Sequence[Cause]
    warnings: Sequence[str]

    @property
    def step_s(self) -> float:
        """Length of the critical path per step."""
        return (self.path.end - self.path.start) / 1e9 / max(max(len(v.steps) for v in self.views), 1)


@stage("finding where the time goes")
def break_down(
    views: Sequence[RankView], *, one_clock: bool = False, rates_Bps: Mapping[tuple[int, int], float] | None = None
) -> Breakdown:
    """`one_clock`: the views' times need no alignment; `rates_Bps`: what links between ranks should carry, where known.

    Raises: what `align` raises for ranks that do not belong together.
    """
    views = sorted(views, key=lambda v: v.rank)
    moved, clocks, shared = align(views, one_clock=one_clock)
    path = critical_path(moved, shared)
    warnings = [f"rank {v.rank}: {w}" for v in views for w in v.warnings] + list(clocks.warnings)
    return Breakdown(
        views=moved, times=[rank_times(v) for v in moved], clocks=clocks, stragglers=stragglers(moved, shared, clocks.spread_ns), path=path,
        causes=rank_causes(moved, shared, path, rates_Bps=rates_Bps), warnings=warnings,
    )  # fmt: skip
