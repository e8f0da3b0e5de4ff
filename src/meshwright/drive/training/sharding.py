"""The decision on data-parallel sharding: which level, and whether gradient sums run during backward, judged by simulation and memory.

The search over degrees judges the level that is asked for, else level 0 with sums after backward. Then, where replicas exist: sums during backward
for the fastest layouts; and for layouts that do not fit, the levels in order until one does, if they may still win. A level moves at least the bytes
of an all-reduce, so levels are chosen for memory, not for speed; a lost replica takes the only copy of its pieces with it, so nothing is divided
without need. Under an optimizer that looks at all of a parameter, or may (`plan.optimizers.may_be_cut`), replicas divide parameters among themselves,
not elements.

On processors, a rank is one thread that computes, posts messages and adds what has come. There sums during backward must also be faster where nothing
of this overlaps and links alone run beside it (`Cost.thread`), or they are not chosen: more messages are then only more work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...cite import Cite
from ...decide.layout.data_sharding import CITE, DataSharding
from ...decide.layout.problem import LayoutCandidate
from ...decide.layout.unlike_devices import EVEN
from ...errors import Infeasible
from .context import Context, Decision, Found, Looks
from .evaluated import Evaluated

__all__ = ["Sharding", "ShardingWanted", "as_wanted"]

# Layouts that fit, fastest first, that are tried sharded and overlapped.
MAX_FITTING_LAYOUTS = 1
# Layouts that do not fit, best closed form first, that are tried sharded.
MAX_UNFITTING_LAYOUTS = 12


@dataclass(frozen=True, kw_only=True)
class ShardingWanted:
    """`level` 0 to 3 and `overlap`: None where the search may choose. `bucket_bytes` 0: chosen."""

    level: int | None = None
    overlap: bool | None = None
    bucket_bytes: int = 0

    def __post_init__(self) -> None:
        DataSharding(self.level or 0, bool(self.overlap), self.bucket_bytes)

    def at(self, level: int) -> DataSharding:
        """A level with sums early where it may choose: nothing is lost by it."""
        return DataSharding(level, self.overlap is not False, self.bucket_bytes)

    def text(self) -> dict[str, str]:
        overlap = {None: "auto", True: "on", False: "off"}[self.overlap]
        return {"wanted_level": "auto" if self.level is None else str(self.level), "wanted_overlap": overlap}


@dataclass(frozen=True)
class Sharding(Decision):
    name = "sharding"

    def choose(self, found: Found, context: Context) -> Found:
        """Raises: Infeasible when a level is asked for and no degrees have replicas."""
        wanted = context.wish(ShardingWanted)
        if wanted.level == 0 and wanted.overlap is False:
            return found
        if wanted.level:  # the search over degrees judged every candidate with it
            if all(e.candidate.degrees.replicas == 1 for e in found.judged):
                raise Infeasible(
                    f"sharding level {wanted.level} divides state among data-parallel replicas, and no layout has any", where="--zero",
                    hint="a data degree of at least 2 (--dp), or --zero 0", data={"level": wanted.level},
                )  # fmt: skip
            return found
        chooser = _Chooser(context.scouting() if context.sketching else context, wanted, found.judged)
        chooser.run()
        best = context.written_out(
            chooser.judged, lambda e: (e.candidate.sharding, e.candidate.degrees, e.placement_name), lambda e: as_wanted(e, wanted)
        )
        return replace(found, best=best, judged=chooser.judged).cut(self.name, chooser.looks.budget.cut)

    def entries(self, found: Found, context: Context) -> dict[str, Any]:
        """What was chosen, and what the same degrees and placement do otherwise."""
        best, layout = found.winner, found.winner.layout
        if layout.data == 1 and len(layout.placement) <= 1:
            return {}
        told = []
        for e in sorted((e for e in found.judged if _rival(e, best)), key=lambda e: e.candidate.sharding):
            does = f"{e.time_s:.4g} s, {e.peak_bytes} bytes per rank" + (", does not fit" if e.excess_bytes > 0 else "")
            told.append(f"{e.candidate.sharding}: {does if e.timeline is not None else e.why}")
        why = f"{best.time_s:.4g} s and {best.peak_bytes} bytes per rank" + (f"; {'; '.join(told)}" if told else "")
        options: dict[str, Any] = {"level": layout.zero_level, "overlap": layout.overlap, "bucket_bytes": layout.bucket_bytes}
        options |= {"buckets": len(layout.buckets), **context.wish(ShardingWanted).text()}
        cite = [CITE.key] if layout.zero_level else []
        return {"sharding": {"strategy": f"zero-{layout.zero_level}", "options": options, "why": why, "cite": cite}}

    def cites(self, key: str, entry: Mapping[str, Any]) -> list[tuple[str, Cite]]:
        return [(key, CITE)] if key == "sharding" and entry["cite"] else []


def _rival(e: Evaluated, best: Evaluated) -> bool:
    """What differs from the best in nothing but its sharding."""
    mine, theirs = best.candidate, e.candidate
    alike = theirs.degrees == mine.degrees and e.placement == best.placement and theirs.division == mine.division
    return alike and theirs.sharding != mine.sharding and (e.timeline is not None or (e.program is not None and bool(e.why)))


def as_wanted(e: Evaluated, wanted: ShardingWanted) -> bool:
    """A layout that has the sharding level and the overlap that were asked for."""
    if e.candidate.degrees.replicas == 1:
        return not wanted.level
    chosen = e.candidate.sharding
    return wanted.level in (None, chosen.level) and wanted.overlap in (None, chosen.overlap)


class _Chooser:
    def __init__(self, context: Context, wanted: ShardingWanted, judged: list[Evaluated]) -> None:
        self.context, self.wanted = context, wanted
        self.looks = Looks(2 * MAX_FITTING_LAYOUTS + 3 * MAX_UNFITTING_LAYOUTS, context.budget.work_s / 2)
        self.judged = list(judged)
        self.grid = context.grid()

    def run(self) -> None:
        replicated = [e for e in self.judged if e.candidate.layout is not None and e.candidate.degrees.replicas > 1]
        fitting = sorted((e for e in replicated if e.fits), key=lambda e: e.time_s)
        even, divided = ([e for e in fitting if (e.candidate.division == EVEN) is equal] for equal in (True, False))
        # those with equal parts too: which is faster may change with the sums
        for e in (*even[:MAX_FITTING_LAYOUTS], *divided[:MAX_FITTING_LAYOUTS]):
            if self.wanted.overlap is not False:  # may shorten a step that fits without dividing anything: every replica's checkpoint is a whole one
                tried = self._try(e, self.wanted.at(0))
                if tried is not None and self.wanted.overlap is None and tried.is_in_turns and tried.in_turns_s >= e.in_turns_s:
                    why = f"{tried.in_turns_s:.4g} s where a rank does one thing at a time, {e.in_turns_s:.4g} s with sums after backward"
                    self.judged[-1] = replace(tried, timeline=None, why=why)
        if self.wanted.level is None:
            self._unfitting(replicated)

    def _unfitting(self, replicated: list[Evaluated]) -> None:
        """Layouts that need more memory than there is, sharded more and more until they fit."""

        def may_s(e: Evaluated) -> float:
            """What it may take: where it was simulated no longer than that, whatever the closed form says."""
            return min(self.context.hoped_s(e.candidate), e.time_s)

        over: dict[Any, Evaluated] = {}
        for e in sorted((e for e in replicated if e.excess_bytes > 0), key=may_s):
            over.setdefault(e.candidate.degrees, e)
        for e in [*over.values()][:MAX_UNFITTING_LAYOUTS]:
            limit = min((x.time_s for x in self.judged if x.fits), default=float("inf"))
            # Simulated with sums after backward: beside it, a step may be shorter, but not than its least.
            for level in (1, 2, 3) if e.candidate.least_s < limit else ():
                if self.looks.spent:  # to build a large layout takes seconds, too
                    return
                tried = self._try(e, self.wanted.at(level))
                if tried is not None and (tried.fits or (tried.time_s >= limit and self.context.is_large(tried.candidate))):
                    break

    def _try(self, e: Evaluated, sharding: DataSharding) -> Evaluated | None:
        candidate: LayoutCandidate = self.grid.sharded(self.context.problem, e.candidate.degrees, sharding, e.candidate.division)
        if candidate.layout is None:
            self.judged.append(Evaluated(candidate=candidate, why=candidate.why))
            return None
        capacity = max(d.memory_bytes for d in self.context.fabric.devices)
        if capacity and candidate.memory_floor_bytes > capacity:
            why = f"weights, gradients and optimizer state alone need {candidate.memory_floor_bytes} bytes, devices have {capacity}"
            self.judged.append(Evaluated(candidate=candidate, why=why, excess_bytes=candidate.memory_floor_bytes - capacity))
            return None
        name, placement = (e.placement_name, e.placement) if e.placement else next(self.context.placements(candidate.layout))
        found: list[Evaluated] = []
        limit = min((e.time_s for e in self.judged if e.fits), default=float("inf"))
        self.looks.at(lambda: found.extend(self.context.judge(candidate, placement, name, limit)))
        self.judged += found
        return found[-1] if found else None
