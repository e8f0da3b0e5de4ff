"""Seconds per step of every rank and stage: computing, copying, waiting for others, stalled on data, starting work, nothing.

The columns of a rank sum to its time; communication that runs while the rank computes is counted beside them, since it costs nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .clocks import Shared
from .lanes import STAGES, Kind, RankView
from .tiles import overlap_ns, tiles

__all__ = ["COLUMNS", "RankTimes", "Straggler", "rank_times", "stragglers"]

COLUMNS = ("compute_s", "copy_s", "exposed_s", "transfer_s", "data_stall_s", "host_s", "idle_s")
_COLUMN = {
    Kind.COMPUTE: 0, Kind.COPY: 1, Kind.WAIT: 2, Kind.COLLECTIVE: 2, Kind.TRANSFER: 3, Kind.DATA: 4, Kind.HOST: 5, Kind.LAUNCH: 5, Kind.SYNC: 6,
    Kind.IDLE: 6,
}  # fmt: skip


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the rank's steps. `stages[name][column]`; `communication_s` was under way, `overlap_s` of it while the rank computed."""

    rank: int
    steps: int
    step_s: float
    stages: dict[str, dict[str, float]]
    communication_s: float
    overlap_s: float

    @property
    def total(self) -> dict[str, float]:
        return {c: sum(s[c] for s in self.stages.values()) for c in COLUMNS}


def rank_times(view: RankView) -> RankTimes:
    """The table of one rank."""
    pieces, steps = tiles(view), max(len(view.steps), 1)
    column = np.array([_COLUMN[k] for k in Kind])[pieces.kind]
    sums = np.bincount(
        pieces.stage.astype(np.int64) * len(COLUMNS) + column, weights=pieces.end - pieces.start, minlength=len(STAGES) * len(COLUMNS)
    ).reshape(len(STAGES), len(COLUMNS))
    stages = {name: dict(zip(COLUMNS, (row / 1e9 / steps).tolist(), strict=True)) for name, row in zip(STAGES, sums, strict=True) if row.any()}
    communication, overlap = overlap_ns(view)
    return RankTimes(
        rank=view.rank, steps=len(view.steps), step_s=int((pieces.end - pieces.start).sum()) / 1e9 / steps, stages=stages,
        communication_s=communication / 1e9 / steps, overlap_s=overlap / 1e9 / steps,
    )  # fmt: skip


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that came last to a meeting, by how much the next was earlier, and what all others waited for it together. `sure`: by
    three times more than the clocks are likely to be wrong. Of messages only those count whose sender came after the receiver."""

    key: str
    operation: str
    rank: int
    gain_s: float
    waited_s: float
    sure: bool


def stragglers(views: Sequence[RankView], shared: Shared, spread_ns: Sequence[int]) -> list[Straggler]:
    """One per shared meeting, in time. Times are on one clock."""
    if not shared.keys:
        return []
    arrives, _ = shared.times(views)
    here = shared.row >= 0
    masked = np.where(here, arrives, np.iinfo(np.int64).min // 2)
    order = np.argsort(masked, axis=1, kind="stable")
    last, second = order[:, -1], order[:, -2]
    rows = np.arange(len(shared.keys))
    gain = masked[rows, last] - masked[rows, second]
    waited = np.where(here, masked[rows, last][:, None] - masked, 0).sum(axis=1)
    first = [int(np.flatnonzero(h)[0]) for h in here]
    found = []
    for i in rows[np.argsort(masked[rows, last], kind="stable")].tolist():
        meetings, row = views[first[i]].meetings, int(shared.row[i, first[i]])
        if not meetings.everyone[row] and int(meetings.source[row]) not in (-1, views[last[i]].rank):
            continue
        known = all(spread_ns[r] >= 0 for r in (last[i], second[i]))
        sure = known and int(gain[i]) > 3 * (spread_ns[last[i]] + spread_ns[second[i]])
        straggler = Straggler(
            key=shared.keys[i], operation=meetings.label[row], rank=views[last[i]].rank, gain_s=int(gain[i]) / 1e9, waited_s=int(waited[i]) / 1e9,
            sure=sure,
        )  # fmt: skip
        found.append(straggler)
    return found
