"""Why a training job has no plan, as an error that carries what a user can act on.

Either not everything was looked at (too large, out of time), or the schedule asked for does not fit, or nothing does: then the candidate that
misses its limit by least is named, and the nearest changes that were found to fit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from .decide.layout.problem import Fixed
from .drive_collectives import CollectivePlanner
from .drive_evaluated import Evaluated
from .drive_layouts import LayoutSearch
from .drive_nearest import nearest_changes, with_nearest_changes
from .drive_pipeline_choice import PipelineWanted, schedule_does_not_fit
from .errors import Infeasible, TimeLimit
from .fabric import Fabric

__all__ = ["no_plan", "nothing_fits"]


def no_plan(search: LayoutSearch, fixed: Fixed, judged: list[Evaluated], asked: PipelineWanted) -> TimeLimit | Infeasible:
    """Why the search found nothing: not everything was looked at, the schedule asked for does not fit, or nothing does (with the nearest changes)."""
    if (stopped := _unfinished(search)) is not None:
        return stopped
    if asked.name not in ("1f1b", "auto"):
        return schedule_does_not_fit(search, fixed, judged, nothing_fits([e for e in judged if e.candidate.schedule], search.fabric))

    def search_on(where: Fabric, batch: int, limit_s: float) -> LayoutSearch:
        planner = search.planner
        again = CollectivePlanner(fabric=where, transport=planner.transport, strategy=planner.strategy, seed=planner.seed)
        smaller = msgspec.structs.replace(search.job, global_batch=batch)
        return replace(search, job=smaller, fabric=where, planner=again, time_limit_s=limit_s, findings=None, too_large=0, out_of_time=False)

    changes = nearest_changes(search_on, search.fabric, search.job.global_batch, fixed, judged)
    return with_nearest_changes(nothing_fits(judged, search.fabric, search), changes)


def _unfinished(search: LayoutSearch) -> TimeLimit | None:
    """The error where degrees were left out for their size or for want of time: nothing says that none fits. Carries the layer table's best."""
    if not search.too_large and not search.out_of_time:
        return None
    found = search.findings.found.best if search.findings is not None else None
    data: dict[str, Any] = {"program_steps": search.too_large}
    said = ""
    if found is not None:
        data |= {"layout": found.candidate.layout.name, "time_s": found.time_s}
        said = f"; best by its layer table: {found.candidate.layout.name}, {found.time_s:.4g} s a step"
    why = "the time limit was reached" if search.out_of_time else f"programs have {search.too_large:,} steps or more"
    return TimeLimit(
        f"no layout on {len(search.fabric.devices)} devices was built that fits: {why}{said}", where="train plan",
        hint="--time-limit, larger micro-batches, fewer devices; `meshwright layout search` finds layouts of any size", data=data,
    )  # fmt: skip


def nothing_fits(judged: list[Evaluated], fabric: Fabric, search: LayoutSearch | None = None) -> Infeasible:
    """The error for a job that has no plan: the candidate that misses its limit by least, and what would make it fit."""
    over = [e for e in judged if e.timeline is not None]
    if not over:
        judged = sorted(judged, key=lambda e: e.excess_bytes or 1 << 62)
        reasons = [f"{e.candidate.degrees}: {e.why}" for e in judged]
        floor = judged[0].candidate.memory_floor_bytes if judged and judged[0].excess_bytes else 0
        return Infeasible(
            f"no layout of this model uses {len(fabric.devices)} devices: {reasons[0] if reasons else 'no degrees divide the global batch'}",
            hint=f"more devices, or devices with {floor} bytes" if floor else "fewer devices (--devices 0-3), another global batch, or other degrees",
            data={"reasons": reasons[:32], "needed_bytes": floor},
        )
    closest = min(over, key=lambda e: e.excess_bytes)
    rank = closest.worst_rank
    device = fabric.device(closest.placement[rank])
    need = device.memory_bytes + closest.excess_bytes
    hint = f"devices with memory of {need} bytes, more devices, or a smaller global batch would make it fit"
    data: dict[str, Any] = {
        "rank": rank, "device": device.name, "needed_bytes": need, "limit_bytes": device.memory_bytes, "layout": str(closest.candidate.degrees),
        "recompute": str(closest.policy),
    }  # fmt: skip
    with_least = ", recomputing what keeps least" if closest.policy.name in ("optimal", "steps") else ""
    if search is not None and search.recompute == "none":
        least = _with_recomputation(search, closest)
        data["recomputing"] = {"needed_bytes": least.worst_bytes, "fits": least.excess_bytes <= 0, "time_s": least.time_s}
        with_least = f"; --recompute auto needs {least.worst_bytes} bytes there" + (" and fits" if least.excess_bytes <= 0 else "")
    return Infeasible(
        f"the job does not fit: rank {rank} ({device.name}) needs {need} bytes, has {device.memory_bytes}, "
        f"with {closest.candidate.degrees}{with_least}",
        where=f"device {device.name}", hint=hint, data=data,
    )  # fmt: skip


def _with_recomputation(search: LayoutSearch, closest: Evaluated) -> Evaluated:
    """The layout with as much recomputed as makes it fit, or as little as possible kept."""
    allowed = search.recompute
    search.recompute = "auto"
    try:
        return search.evaluate_with_recomputation(closest.candidate, closest.placement, closest.placement_name)[-1]
    finally:
        search.recompute = allowed
