"""Why a training job has no plan, as an error that carries what a user can act on.

Either not everything was looked at (too large, out of time), or the schedule asked for does not fit, or nothing does: then the candidate that
misses its limit by least is named, and the nearest changes that were found to fit.
"""

from __future__ import annotations

from typing import Any

from ...errors import Infeasible, TimeLimit
from ...fabric.fabric import Fabric
from ...kernels.effort import Cut
from .collective_choice import CollectivesWanted
from .context import Context, Found
from .evaluated import Evaluated
from .nearest import nearest_changes, with_nearest_changes
from .order import LeftOut
from .pipeline import PipelineWanted, schedule_does_not_fit
from .recompute import RecomputeWanted
from .sharding import ShardingWanted, as_wanted

__all__ = ["no_plan", "nothing_fits"]

LEFT_ASIDE = ("not simulated: closed form", "not simulated: the search's work")  # for others (`layout`)


def no_plan(found: Found, context: Context) -> TimeLimit | Infeasible:
    """Why the search found nothing: not everything was looked at, the schedule asked for does not fit, or nothing does (with the nearest changes)."""
    left_out, cut = found.notes.get("layout", LeftOut()), next(iter(found.cuts.values()), None)
    if left_out.too_large or cut is not None:
        return _unfinished(left_out, cut, context.fabric)
    if context.wish(PipelineWanted).one:
        return schedule_does_not_fit(context, found.judged, nothing_fits([e for e in found.judged if e.candidate.schedule], context.fabric))
    error = nothing_fits(found.judged, context.fabric, context)
    refused = all(e.candidate.layout is not None and e.timeline is None and not e.excess_bytes for e in found.judged)
    if refused and context.wish(CollectivesWanted).strategy != "auto":
        return error  # layouts were built and not lowered: no memory, batch or device makes a strategy of collectives do what it lacks
    return with_nearest_changes(error, nearest_changes(context, found.judged))


def _unfinished(left_out: LeftOut, cut: Cut | None, fabric: Fabric) -> TimeLimit:
    """The error where degrees were left out for their size or for want of time: nothing says that none fits. Carries the layer table's best."""
    best = left_out.findings.found.best if left_out.findings is not None else None
    data: dict[str, Any] = {"program_steps": left_out.too_large, **(cut.to_json() if cut is not None else {})}
    said = ""
    if best is not None:
        data |= {"layout": best.candidate.layout.name, "time_s": best.time_s}
        said = f"; best by its layer table: {best.candidate.layout.name}, {best.time_s:.4g} s a step"
    why = str(cut) if cut is not None else f"programs have {left_out.too_large:,} steps or more"
    return TimeLimit(
        f"no layout on {len(fabric.devices)} devices was built that fits: {why}{said}", where="train plan",
        hint="--time-limit, larger micro-batches, fewer devices; `meshwright layout search` finds layouts of any size", data=data,
    )  # fmt: skip


def nothing_fits(judged: list[Evaluated], fabric: Fabric, context: Context | None = None) -> Infeasible:
    """The error for a job without a plan: which candidate, of those with the sharding level asked for, misses its limit by least, and what helps."""
    if context is not None and context.wish(ShardingWanted).level is not None:
        judged = [e for e in judged if as_wanted(e, context.wish(ShardingWanted))] or judged
    over = [e for e in judged if e.timeline is not None and not e.fits]
    if not over:
        # What was left aside for another layout that the decisions after it refused says least.
        judged = sorted((e for e in judged if not e.fits), key=lambda e: (e.excess_bytes or 1 << 62, e.why.startswith(LEFT_ASIDE)))
        reasons = [f"{e.candidate.what}: {e.why}" for e in judged]
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
    if context is not None and context.wish(RecomputeWanted).policy == "none":
        auto = context.wishing(RecomputeWanted())  # as much recomputed as makes it fit, or as little as possible kept
        least = auto.judge(closest.candidate, closest.placement, closest.placement_name)[-1]
        data["recomputing"] = {"needed_bytes": least.worst_bytes, "fits": least.excess_bytes <= 0, "time_s": least.time_s}
        with_least = f"; --recompute auto needs {least.worst_bytes} bytes there" + (" and fits" if least.excess_bytes <= 0 else "")
    return Infeasible(
        f"the job does not fit: rank {rank} ({device.name}) needs {need} bytes, has {device.memory_bytes}, "
        f"with {closest.candidate.what}{with_least}",
        where=f"device {device.name}", hint=hint, data=data,
    )  # fmt: skip
