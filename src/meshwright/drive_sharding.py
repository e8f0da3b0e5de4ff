"""The decision on data-parallel sharding: which level, and whether gradient sums run during backward, judged by simulation and memory.

The search over degrees judges level 0 with sums after backward. Then, where replicas exist: sums during backward for the fastest layouts; and for
layouts that do not fit, the levels in order until one does, if they may still win. A level moves at least the bytes of an all-reduce, so levels
are chosen for memory, not for speed; a lost replica takes the only copy of its pieces with it, so nothing is divided without need.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .decide.layout.data_sharding import CITE, DataSharding
from .decide.layout.problem import LayoutCandidate
from .decide.layout.unlike import EVEN
from .drive_evaluated import Evaluated
from .drive_layouts import LayoutSearch
from .drive_placements import placements_of
from .errors import Infeasible, UsageError

__all__ = ["ShardingWanted", "as_wanted", "choose_sharding", "sharding_decision"]

FASTEST = 1  # layouts that fit, fastest first, that are tried sharded and overlapped
UNFITTING = 4  # layouts that do not fit, best closed form first, that are tried sharded
ASKED = 8  # layouts tried at a level that was asked for


@dataclass(frozen=True, kw_only=True)
class ShardingWanted:
    """`level` 0 to 3 and `overlap`: None where the search may choose. `bucket_bytes` 0: chosen."""

    level: int | None = None
    overlap: bool | None = None
    bucket_bytes: int = 0

    def __post_init__(self) -> None:
        DataSharding(self.level or 0, bool(self.overlap), self.bucket_bytes)

    def text(self) -> dict[str, str]:
        overlap = {None: "auto", True: "on", False: "off"}[self.overlap]
        return {"wanted_level": "auto" if self.level is None else str(self.level), "wanted_overlap": overlap}


def choose_sharding(
    search: LayoutSearch, fixed: tuple[int | None, int | None, int | None, int | None], best: Evaluated | None, judged: list[Evaluated],
    wanted: ShardingWanted,
) -> tuple[Evaluated | None, list[Evaluated]]:  # fmt: skip
    """The best with sharding and overlap considered, and everything judged.

    Raises: Infeasible when a level is asked for and no degrees have replicas; UsageError when the optimizer cannot be sharded.
    """
    custom = ":" in search.job.optimizer
    if custom and wanted.level:
        raise UsageError(
            f"optimizer {search.job.optimizer} cannot be sharded: it would be given pieces of parameters", where="--zero",
            hint="adamw or sgd, or --zero 0",
        )  # fmt: skip
    if wanted.level == 0 and wanted.overlap is False:
        return best, judged
    return _Chooser(search, fixed, wanted, 0 if custom else 3, judged).run(best)


def as_wanted(e: Evaluated, wanted: ShardingWanted) -> bool:
    """A layout that has the sharding level and the overlap that were asked for."""
    if e.candidate.degrees.data == 1:
        return not wanted.level
    chosen = e.candidate.sharding
    return wanted.level in (None, chosen.level) and wanted.overlap in (None, chosen.overlap)


class _Chooser:
    def __init__(self, search: LayoutSearch, fixed: Any, wanted: ShardingWanted, highest: int, judged: list[Evaluated]) -> None:
        self.search, self.wanted, self.highest = search, wanted, highest
        self.until = time.monotonic() + search.time_limit_s / 2
        self.judged = list(judged)
        self.problem = search.problem(fixed)
        self.grid = search.grid()

    def run(self, best: Evaluated | None) -> tuple[Evaluated | None, list[Evaluated]]:
        replicated = [e for e in self.judged if e.candidate.layout is not None and e.candidate.degrees.data > 1]
        fitting = sorted((e for e in replicated if e.timeline is not None and e.excess_bytes <= 0), key=lambda e: e.time_s)
        if self.wanted.level:
            self._asked(replicated)
            best = None
        else:
            fastest = [e for e in fitting if e.candidate.division == EVEN][:FASTEST] + [e for e in fitting if e.candidate.division != EVEN][:FASTEST]
            for e in fastest:  # those with equal parts too: which is faster may change with the sums
                for sharding in self._quick():
                    self._try(e, sharding)
            if self.wanted.level is None and self.highest:
                self._unfitting(replicated, best)
        required = [e for e in self.judged if as_wanted(e, self.wanted)]
        found = [e for e in required if e.timeline is not None and e.excess_bytes <= 0]
        best = min(found, key=lambda e: (e.time_s, e.candidate.sharding, e.candidate.degrees, e.placement_name), default=None)
        return best, self.judged

    def _overlaps(self) -> list[bool]:
        return [self.wanted.overlap is not False]  # where it may choose: nothing is lost by summing early

    def _quick(self) -> list[DataSharding]:
        """What may shorten a step that fits without dividing anything: then every replica's checkpoint is a whole one."""
        return [DataSharding(0, True, self.wanted.bucket_bytes)] if self.wanted.overlap is not False else []

    def _asked(self, replicated: list[Evaluated]) -> None:
        if not replicated:
            raise Infeasible(
                f"sharding level {self.wanted.level} divides state among data-parallel replicas, and no layout has any", where="--zero",
                hint="a data degree of at least 2 (--dp), or --zero 0", data={"level": self.wanted.level},
            )  # fmt: skip
        seen: set[Any] = set()
        for e in sorted(replicated, key=lambda e: (e.time_s, e.candidate.estimate_s)):
            if (e.candidate.degrees, e.candidate.division, e.placement) in seen:
                continue
            if len(seen) >= ASKED or (seen and time.monotonic() > self.until):
                break
            seen.add((e.candidate.degrees, e.candidate.division, e.placement))
            for overlap in self._overlaps():
                self._try(e, DataSharding(self.wanted.level or 0, overlap, self.wanted.bucket_bytes))

    def _unfitting(self, replicated: list[Evaluated], best: Evaluated | None) -> None:
        """Layouts that need more memory than there is, sharded more and more until they fit."""
        limit = min((e.time_s for e in self.judged if e.timeline is not None and e.excess_bytes <= 0), default=float("inf"))
        over: dict[Any, Evaluated] = {}
        for e in sorted((e for e in replicated if e.excess_bytes > 0), key=lambda e: e.candidate.estimate_s):
            over.setdefault(e.candidate.degrees, e)
        for e in [x for x in over.values() if x.candidate.estimate_s < limit][:UNFITTING]:
            for level in range(1, self.highest + 1):
                if time.monotonic() > self.until and best is not None:
                    return
                tried = [self._try(e, DataSharding(level, overlap, self.wanted.bucket_bytes)) for overlap in self._overlaps()]
                if any(x is not None and x.timeline is not None and x.excess_bytes <= 0 for x in tried):
                    break

    def _try(self, e: Evaluated, sharding: DataSharding) -> Evaluated | None:
        if time.monotonic() > self.until and any(x.timeline is not None and x.excess_bytes <= 0 and as_wanted(x, self.wanted) for x in self.judged):
            return None
        candidate: LayoutCandidate = self.grid.sharded(self.problem, e.candidate.degrees, sharding, e.candidate.division)
        if candidate.layout is None:
            self.judged.append(Evaluated(candidate=candidate, why=candidate.why))
            return None
        capacity = max(d.memory_bytes for d in self.search.fabric.devices)
        if capacity and candidate.memory_floor_bytes > capacity:
            why = f"weights, gradients and optimizer state alone need {candidate.memory_floor_bytes} bytes, devices have {capacity}"
            self.judged.append(Evaluated(candidate=candidate, why=why, excess_bytes=candidate.memory_floor_bytes - capacity))
            return None
        name, placement = (e.placement_name, e.placement) if e.placement else next(placements_of(candidate.layout, self.search.fabric))
        found = self.search.evaluate_with_recomputation(candidate, placement, name)
        self.judged += found
        return found[-1]


def sharding_decision(best: Evaluated, judged: list[Evaluated], wanted: ShardingWanted) -> dict[str, Any]:
    """The plan's entry: what was chosen, and what the same degrees and placement do otherwise."""
    layout, chosen = best.layout, best.candidate.sharding
    others = [
        e for e in judged
        if e.candidate.degrees == best.candidate.degrees and e.placement == best.placement and e.candidate.sharding != chosen
        and e.candidate.division == best.candidate.division and e.timeline is not None
    ]  # fmt: skip
    told = []
    for e in sorted(others, key=lambda e: e.candidate.sharding):
        peak = max(e.timeline.memory_peak_bytes) if e.timeline is not None else 0
        told.append(f"{e.candidate.sharding}: {e.time_s:.4g} s, {peak} bytes per rank" + (", does not fit" if e.excess_bytes > 0 else ""))
    assert best.timeline is not None
    why = f"{best.time_s:.4g} s and {max(best.timeline.memory_peak_bytes)} bytes per rank" + (f"; {'; '.join(told)}" if told else "")
    options: dict[str, Any] = {"level": layout.zero_level, "overlap": layout.overlap, "bucket_bytes": layout.bucket_bytes}
    options["buckets"] = len(layout.buckets)
    return {"strategy": f"zero-{layout.zero_level}", "options": options | wanted.text(), "why": why, "cite": [CITE.key] if layout.zero_level else []}

