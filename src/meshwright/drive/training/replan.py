"""Planning a training job again when devices are lost or gained, so that what the survivors hold is used.

Every candidate has two prices: its simulated step, and its restart: which bytes of parameters and optimizer state every rank of the new layout lacks
on its device, who sends them, and how long that takes (`decide.restart`). Placements tried per layout: the search's own, the one that keeps most
bytes in place, and the one that does so within the servers of the search's own. `steps_left` decides by total time; without it the shortest step
wins, and what is printed is from how many steps on it pays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import msgspec
import numpy as np

from ...cost import Cost
from ...decide.restart import (
    RestartEstimate,
    RestartProblem,
    Transfers,
    estimate_restart,
    plan_transfers,
    require_complete,
    reuse_bytes,
    reuse_placement,
)
from ...errors import Infeasible, UsageError
from ...fabric.edit import without as taken_out
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ...job import Training
from ...kernels.effort import Budget, Cut
from ...plan.narrowed import in_precision
from ...plan.plan import Plan, TrainingLayout
from ...plan.regions import Region, TensorSpec, divided_bytes, holdings, training_tensors
from ...program.program import Program
from ..plans import check_plan, cost_of, fabric_of
from .changes import more_devices
from .compress import CompressWanted, Profiler
from .context import MAX_WORK_S, TIME_LIMIT_S, Context, Found, SearchBudget
from .decisions import choose, context_of, refine
from .evaluated import Evaluated
from .no_plan import nothing_fits
from .pipeline import PipelineWanted, schedule_asked
from .sharding import ShardingWanted
from .training import plan_of
from .wishes import LayoutWanted, PrecisionWanted

__all__ = ["KEEP", "Candidate", "OldShards", "TrainReplan", "old_shards", "replan_training"]

KEEP = ("dp", "tp", "pp", "microbatch")
# Layouts, the fastest, whose placements are judged by their restart too.
MAX_PLACED_LAYOUTS = 4
# Smaller numbers of devices that are tried beside all that are left.
MAX_SMALLER_SIZES = 3


@dataclass(frozen=True, kw_only=True)
class OldShards:
    """What the old plan's ranks held: tensors, and what of them each rank's file holds. `stored`: files that a shared checkpoint has."""

    tensors: Mapping[str, TensorSpec]
    files: Mapping[str, Mapping[str, Region]]
    stored: frozenset[str] = frozenset()
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout on a placement, with both its prices."""

    evaluated: Evaluated
    problem: RestartProblem
    transfers: Transfers
    restart: RestartEstimate
    context: Context

    @property
    def step_s(self) -> float:
        return self.evaluated.time_s

    @property
    def name(self) -> str:
        schedule = self.evaluated.candidate.schedule
        candidate = self.evaluated.candidate
        return ", ".join(filter(None, (str(candidate.degrees), schedule, str(candidate.division), self.evaluated.placement_name)))

    def total_s(self, steps: int) -> float:
        return self.restart.time_s + steps * self.step_s

    def breaks_even_after(self, other: Candidate) -> int | None:
        """Steps from which on this one, with the shorter step, has taken less time in all than `other`; None if never."""
        if self.step_s >= other.step_s:
            return None
        return max(0, ceil((self.restart.time_s - other.restart.time_s) / (other.step_s - self.step_s)))


@dataclass(frozen=True, kw_only=True)
class TrainReplan:
    """`candidates`: those judged by both prices, the chosen one first. `plan` is the chosen one's."""

    plan: Plan
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    quickest: Candidate  # to restart
    old_time_s: float


def old_shards(old: Plan, tensors: Mapping[str, TensorSpec]) -> OldShards:
    """What the ranks of a plan hold, by its layout. Raises: UsageError for a plan without a layout."""
    if old.layout is None:
        raise UsageError(f"this is a {old.kind} plan, not a training plan", hint="make one with `meshwright train plan`")
    held = _held(old.layout, old.main, tensors)
    return OldShards(tensors=tensors, files={f"rank-{r:03d}.safetensors": region for r, region in enumerate(held)})


def replan_training(
    old: Plan,
    *,
    lost: Sequence[str] = (),
    added: Sequence[str] = (),
    graph: OpGraph | None = None,
    shards: OldShards | None = None,
    keep: Sequence[str] = (),
    global_batch: int | None = None,
    steps_left: int | None = None,
    storage_Bps: int = 1_000_000_000,
    schedule: PipelineWanted | None = None,
    profile: Profiler | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> TrainReplan:
    """Plans the old plan's job on its own fabric without the parts `lost` and with a copy of each device in `added`.

    Args:
        shards: what a checkpoint's index says the old ranks' files hold; None: by the old layout.
        keep: decisions of the old layout that stay: some of KEEP.
        steps_left: decide by restart plus that many steps; None: by the step alone.
        schedule: of the pipeline; None: what the old plan was asked for, and 1F1B where that exists on none of the devices left.
        profile: times the codecs of the old plan, which the new one keeps; needed where it has any.

    Raises: as `plan_training`; UsageError where nothing changes or the model is another one; Infeasible naming the shards that are lost with the
    parts and that no checkpoint in `shards.stored` has.
    """
    if not lost and not added:
        raise UsageError("no device is lost and none is added", hint="name devices with --without or --with")
    if old.layout is None:
        raise UsageError(f"this is a {old.kind} plan, not a training plan", hint="make one with `meshwright train plan`")
    if steps_left is not None and steps_left < 1:
        raise UsageError(f"must be at least 1, got {steps_left}", where="--steps-left")
    job = msgspec.convert(old.job["training"], Training)
    kept = _kept(old, keep)
    if global_batch is not None:
        job = msgspec.structs.replace(job, global_batch=global_batch)
    if graph is None:
        from ...capture.precision import capture_job

        graph = capture_job(job)
    precision = PrecisionWanted.of(old.layout)
    if old.job.get("graph_fingerprint") and in_precision(graph, precision.precision).fingerprint() != old.job["graph_fingerprint"]:
        raise UsageError("the model is not the one that was planned", where=job.model, hint="plan it with `meshwright train plan`")
    if shards is None:
        shards = old_shards(old, training_tensors(in_precision(graph, precision.precision), job.optimizer, job.asked.ema))
    fabric = _changed(fabric_of(old), lost, added)
    fabric.require_connected()
    cost = _layout_free(cost_of(old), old)
    wanted = ShardingWanted(overlap=None if old.layout.overlap or old.layout.zero_level else False)
    asked = schedule or schedule_asked(old)
    wishes = (kept, wanted, asked, precision, _codecs_kept(old, profile))
    each = SearchBudget(work_s=MAX_WORK_S / (1 + MAX_SMALLER_SIZES), time_limit_s=time_limit_s)
    make = partial(context_of, job, cost=cost, graph=graph, wishes=wishes, budget=each, clock=Budget(1, time_limit_s=time_limit_s))
    found, judged, cuts = _found(old, map(make, _parts(fabric, job.global_batch)), schedule is not None, shards, storage_Bps)
    if not found:
        cut = next(iter(cuts.values()), None)
        raise cut.error(f"no layout on {len(fabric.devices)} devices fits so far") if cut is not None else nothing_fits(judged, fabric)
    chosen, ranked = _choose(found, steps_left)
    require_complete(chosen.problem, chosen.transfers, _holder_names(old))
    better = refine(chosen.context, Found(chosen.evaluated), ("collectives", "compression"))
    chosen = replace(chosen, evaluated=better.winner)
    quickest = min(ranked, key=lambda c: (c.restart.time_s, c.step_s))
    plan = plan_of(replace(better, judged=judged, cuts={**cuts, **better.cuts}), chosen.context)
    restart = _decision(old, chosen, quickest, shards, lost, added, keep, steps_left, storage_Bps)
    plan = replace(plan, decisions={**plan.decisions, "restart": restart})
    check_plan(plan)
    return TrainReplan(
        plan=plan, chosen=chosen, candidates=(chosen, *(c for c in ranked if c.evaluated.identity != chosen.evaluated.identity)),
        quickest=quickest, old_time_s=old.prediction.time_s if old.prediction is not None else float("nan"),
    )  # fmt: skip


def _found(
    old: Plan, contexts: Iterable[Context], asked_now: bool, shards: OldShards, storage_Bps: int
) -> tuple[list[Candidate], list[Evaluated], dict[str, Cut]]:
    """What has the schedule that counts, all that was judged, and what the clock cut.

    Raises: UsageError, Infeasible where what was asked for exists nowhere.
    """
    judged: list[Evaluated] = []
    cuts: dict[str, Cut] = {}
    found: list[Candidate] = []
    plain: list[tuple[Context, Found]] = []  # where the asked schedule exists for nothing
    refused: UsageError | None = None
    unscheduled: Infeasible | None = None
    for context in contexts:
        try:
            here = choose(context, ("layout", "sharding"))
        except UsageError as error:  # the kept degrees do not divide this many devices
            refused = refused or error
            continue
        try:
            here = choose(context, ("schedule",), here)
        except Infeasible as error:
            unscheduled = unscheduled or error
            plain.append((context.wishing(PipelineWanted(name="1f1b")), here))
            continue
        judged += here.judged
        cuts = {**here.cuts, **cuts}
        if here.best is not None:
            any_schedule = not context.wish(PipelineWanted).one
            found += _candidates(old, context, [e for e in here.judged if any_schedule or e.candidate.schedule], shards, storage_Bps)
    if not found and asked_now and unscheduled is not None:
        raise unscheduled
    for context, here in plain if not found else ():
        judged += here.judged
        cuts = {**here.cuts, **cuts}
        found += _candidates(old, context, here.judged, shards, storage_Bps)
    if not found and refused is not None and not judged:
        raise refused
    return found, judged, cuts


# ---- the fabric ----------------------------------------------------------------------------------------------------------
def _changed(fabric: Fabric, lost: Sequence[str], added: Sequence[str]) -> Fabric:
    """Copies first, so that a replacement for a lost device can be named after it."""
    for name in added:
        if name not in {d.name for d in fabric.devices}:
            raise UsageError(f"fabric {fabric.name!r} has no device {name!r}", where="--with", hint="name a device that the new one is like")
        order = [d for d in fabric.devices if d.name != name]
        like = next(d for d in fabric.devices if d.name == name)
        grown = more_devices(replace(fabric, devices=(*order, like)), 1)
        fabric = replace(grown, devices=(*fabric.devices, grown.devices[-1]))
    return taken_out(fabric, lost) if lost else fabric


def _parts(fabric: Fabric, batch: int) -> Iterator[Fabric]:
    """All that is left, then fewer devices that divide better: of the largest servers first, so that whole servers stay together."""
    n = len(fabric.devices)
    members: dict[str, list[str]] = {}
    for d in fabric.devices:
        members.setdefault(d.group or d.name, []).append(d.name)
    order = [name for group in sorted(members.values(), key=len, reverse=True) for name in group]
    yield fabric
    for k in sorted(sorted(range(max(1, n // 2), n), key=lambda k: (-_replicas(k, batch), -k))[:MAX_SMALLER_SIZES], reverse=True):
        yield fabric.subset(order[:k])


def _replicas(devices: int, batch: int) -> int:
    """The most data-parallel replicas that so many devices can form."""
    return max(d for d in range(1, devices + 1) if devices % d == 0 and batch % d == 0)


def _layout_free(cost: Cost, old: Plan) -> Cost:
    """The old plan's cost without prices of its own segments and codec groups: another layout has others under the same names."""
    table = {k: v for k, v in cost.table.items() if k.partition("@")[0] not in old.job["works"] and not k.startswith("codec")}
    return msgspec.structs.replace(cost, table=table)


def _codecs_kept(old: Plan, profile: Profiler | None) -> CompressWanted | None:
    """What has not been sent goes on in a codec that keeps it: those of the old plan. Raises: UsageError where nothing can time them."""
    assert old.layout is not None
    codecs = tuple(dict.fromkeys(b.codec for b in old.layout.buckets if b.codec))
    if not codecs:
        return None
    if profile is None:
        raise UsageError(f"the plan sends gradients through {codecs[0]}", where="replan", hint="give profile, which times codecs")
    wanted = old.decisions.get("compress", {}).get("options", {}).get("wanted", codecs[0])
    return CompressWanted(codec=str(wanted), profile=profile, kept=codecs)


def _kept(old: Plan, keep: Sequence[str]) -> LayoutWanted:
    unknown = [k for k in keep if k not in KEEP]
    if unknown:
        raise UsageError(f"{unknown[0]!r} cannot be kept", where="--keep", hint=f"some of {', '.join(KEEP)}")
    assert old.layout is not None
    values = (old.layout.data, old.layout.tensor, old.layout.pipeline, old.layout.microbatch_size)
    dp, tp, pp, m = (v if k in keep else None for k, v in zip(KEEP, values, strict=True))
    return LayoutWanted(data=dp, tensor=tp, pipeline=pp, microbatch=m)


# ---- candidates ------------------------------------------------------------------------------------------------------------
def _candidates(old: Plan, context: Context, judged: Sequence[Evaluated], shards: OldShards, storage_Bps: int) -> list[Candidate]:
    """The fastest layouts, each on its best placement and on the two that keep most bytes in place."""
    fitting = sorted((e for e in judged if e.fits), key=lambda e: (e.time_s, e.placement_name))
    firsts: dict[object, Evaluated] = {}
    for e in fitting:
        firsts.setdefault((e.candidate.degrees, e.candidate.schedule), e)
    found: dict[tuple[object, ...], Candidate] = {}
    for e in fitting:
        if (e.candidate.degrees, e.candidate.schedule) in list(firsts)[:MAX_PLACED_LAYOUTS]:
            found[e.identity] = _candidate(old, context, e, shards, storage_Bps)
    for e in list(firsts.values())[:MAX_PLACED_LAYOUTS]:
        for name, placement in _reusing(old, context.fabric, e, shards):
            if all(c.evaluated.candidate is not e.candidate or c.evaluated.placement != placement for c in found.values()):
                moved = context.evaluator.evaluate(e.candidate, placement, name)
                if moved.fits:
                    found[moved.identity] = _candidate(old, context, moved, shards, storage_Bps)
    return list(found.values())


def _reusing(old: Plan, fabric: Fabric, e: Evaluated, shards: OldShards) -> Iterator[tuple[str, tuple[str, ...]]]:
    assert e.program is not None
    needs = _held(e.layout, e.program, shards.tensors)
    homes = _homes(old, shards)
    devices = [d.name for d in fabric.devices]
    held = [[shards.files[f] for f, where in homes.items() if d in where] for d in devices]
    reuse = reuse_bytes(shards.tensors, needs, held)
    yield "most bytes in place", tuple(devices[j] for j in reuse_placement(reuse).column)
    group = {d.name: d.group for d in fabric.devices}
    allowed = np.array([[group[d] == group[mine] for d in devices] for mine in e.placement], np.bool_)
    yield f"{e.placement_name}; most bytes in place within servers", tuple(devices[j] for j in reuse_placement(reuse, allowed).column)


def _candidate(old: Plan, context: Context, e: Evaluated, shards: OldShards, storage_Bps: int) -> Candidate:
    assert e.program is not None
    group = {d.name: d.group for d in context.fabric.devices}
    problem = RestartProblem(
        tensors=shards.tensors, needs=tuple(_held(e.layout, e.program, shards.tensors)), files=shards.files,
        homes=_homes(old, shards), placement=e.placement, servers=tuple(group[d] for d in e.placement), stored=shards.stored,
    )  # fmt: skip
    transfers = plan_transfers(problem)
    restart = estimate_restart(problem, transfers, context.fabric, context.cost, storage_Bps)
    return Candidate(evaluated=e, problem=problem, transfers=transfers, restart=restart, context=context)


def _held(layout: TrainingLayout, program: Program, tensors: Mapping[str, TensorSpec]) -> list[dict[str, Region]]:
    """What every rank of a plan holds."""
    divided = divided_bytes(program, layout)
    return [holdings(layout, r, tensors, divided[r]) for r in range(layout.ranks)]


def _homes(old: Plan, shards: OldShards) -> dict[str, tuple[str, ...]]:
    return {f"rank-{r:03d}.safetensors": (d,) for r, d in enumerate(old.placement) if f"rank-{r:03d}.safetensors" in shards.files}


def _choose(found: Sequence[Candidate], steps_left: int | None) -> tuple[Candidate, list[Candidate]]:
    """Candidates that lose nothing come first. Without `steps_left`: the shortest step, of equal ones the quickest restart."""

    def key(c: Candidate) -> tuple[object, ...]:
        price = (c.total_s(steps_left),) if steps_left is not None else (round(c.step_s, 12), c.restart.time_s)
        return (bool(c.transfers.lost), *price, c.transfers.moved_bytes, c.evaluated.layout.ranks, c.name)

    ranked = sorted(found, key=key)
    return ranked[0], ranked


def _holder_names(old: Plan) -> dict[str, str]:
    return {f"rank-{r:03d}.safetensors": f"rank {r} ({d})" for r, d in enumerate(old.placement)}


def _decision(
    old: Plan, chosen: Candidate, quickest: Candidate, shards: OldShards, lost: Sequence[str], added: Sequence[str], keep: Sequence[str],
    steps_left: int | None, storage_Bps: int,
) -> dict[str, Any]:  # fmt: skip
    """What the new plan says about its restart: provenance, who held what, and the bytes that the run will count."""
    from ...io.plan.plan import plan_bytes

    t = chosen.transfers
    even = chosen.breaks_even_after(quickest)
    why = f"restart {chosen.restart.time_s:.6g} s, step {chosen.step_s:.6g} s"
    if even is not None and chosen.evaluated.identity != quickest.evaluated.identity:
        why += f"; the quickest restart ({quickest.name}) takes {quickest.restart.time_s:.6g} s, this pays from {even} steps on"
    return {
        "strategy": "reuse",
        "options": {
            "replanned_from": hashlib.sha256(plan_bytes(old)).hexdigest(), "without": list(lost), "with": list(added), "keep": list(keep),
            "steps_left": steps_left, "storage_Bps": storage_Bps, "checkpoint_step": shards.step,
        },
        "why": why,
        "cite": [],
        "held": {f: list(where) for f, where in sorted(_homes(old, shards).items())},
        "stored": sorted(shards.stored),
        "needed_bytes": list(t.needed_bytes), "reused_bytes": list(t.reused_bytes), "received_bytes": list(t.received_bytes),
        "stored_bytes": list(t.stored_bytes), "sent_bytes": list(t.sent_bytes),
        "time_s": chosen.restart.time_s, "bound_s": str(chosen.restart.bound_s), "bound_where": chosen.restart.bound_where,
    }  # fmt: skip
