"""Iteration time and peak memory of a layout from a layer profile, by event simulation, with bound, closed form, error bar and assumptions.

    prediction = predict(profile, layout, network, runtime)

Cite: the cost model that Metis (Um et al., USENIX ATC 2024) and Sailor (Strati et al., SOSP 2025) share, here simulated instead of summed.
Left open by both: what a server's NIC does when several ranks use it, whether sends block, what engines add. Our answer: fields of the runtime.
Deviations: stragglers decide (the slowest pipeline, not the mean); the gradient ring shares links with late pipeline messages.
Invariant: the prediction is never below `bound_s`. Cost: O(stages x pipelines x micro-batches) events, plus the rings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ....plan.orders import peak_in_flight
from ....profile.layer_profile import Entry, LayerProfile
from ....profile.network import NetworkProfile, PieceOrder, ProfiledLayout, Replica, TrainingRuntime
from ....program.program import Program
from ....simulate import simulate_program
from .iteration import build_iteration, stage_memory
from .servers import place
from .symmetric import alike_part

__all__ = ["ProfilePrediction", "compute_bound_s", "predict", "require_layout"]


@dataclass(frozen=True, kw_only=True)
class ProfilePrediction:
    """`interval_s`: compute and network both better, both worse by the runtime's stated errors. `memory_peak_bytes`: of each stage's fullest rank."""

    time_s: float
    interval_s: tuple[float, float]
    bound_s: float
    closed_form_s: float
    samples_per_s: float
    memory_peak_bytes: tuple[int, ...]
    stage_compute_s: tuple[float, ...]
    bottleneck: int
    busiest_link: tuple[str, float]
    interpolated: tuple[Entry, ...]
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s, "interval_s": list(self.interval_s), "bound_s": self.bound_s, "closed_form_s": self.closed_form_s,
            "samples_per_s": self.samples_per_s, "memory_peak_bytes": list(self.memory_peak_bytes), "stage_compute_s": list(self.stage_compute_s),
            "bottleneck_stage": self.bottleneck, "busiest_link": {"name": self.busiest_link[0], "busy_s": self.busiest_link[1]},
            "interpolated": [list(e) for e in self.interpolated], "assumptions": list(self.assumptions),
        }  # fmt: skip


def require_layout(profile: LayerProfile, layout: ProfiledLayout, *, interpolate: bool = False) -> LayerProfile:
    """The profile with all a layout needs. Raises: UsageError when the layers do not add up; ProfileEntryMissing naming what lacks."""
    from ....errors import UsageError

    layers = sum(s.layers for s in layout.stages)
    if layers != profile.layers:
        raise UsageError(f"the stages hold {layers} layers, {profile.model!r} has {profile.layers}", where=layout.name or "layout")
    if interpolate:
        profile = profile.completed(layout.entries())
    profile.require(layout.entries())
    return profile


def predict(
    profile: LayerProfile, layout: ProfiledLayout, network: NetworkProfile, runtime: TrainingRuntime, *, interpolate: bool = False, bars: bool = True,
    shapes: dict[tuple[object, ...], Program] | None = None, orders: PieceOrder | None = None,
) -> ProfilePrediction:  # fmt: skip
    """`shapes` remembers programs from one prediction to the next; `orders`: of a layout with a schedule (`build_iteration`).

    Raises: UsageError, UnknownName (a device or rate that was not measured), ProfileEntryMissing.
    """
    profile = require_layout(profile, layout, interpolate=interpolate)
    whole, layout = layout, alike_part(layout, runtime)
    pipelines = whole.data
    simulated = partial(_simulated, profile, layout, network, runtime, pipelines, orders=orders)
    time_s, memory, busy = simulated(shapes=shapes)
    low = high = time_s  # the step is no simple function of its parts, so both ends are simulated too
    if bars:
        compute, net = runtime.compute_error, runtime.network_error
        low, high = (simulated(faster=1 + sign * compute, slow=1 + sign * net)[0] for sign in (1, -1))
    each = {r: _stage_times(profile, layout, r) for r in dict.fromkeys(r for s in layout.stages for r in s.replicas)}
    per_stage = [max(sum(each[r][s]) for r in dict.fromkeys(stage.replicas)) for s, stage in enumerate(layout.stages)]
    constant = [max(runtime.constant_memory_bytes.get(r.device, 0) for r in stage.replicas) for stage in layout.stages]
    peaks = [max(memory[s * layout.data : (s + 1) * layout.data]) + constant[s] for s in range(len(layout.stages))]
    top = max(busy.items(), key=lambda x: (x[1], x[0]), default=("none", 0.0))
    return ProfilePrediction(
        time_s=time_s, interval_s=(min(low, high), max(low, high)), bound_s=compute_bound_s(profile, layout, runtime),
        closed_form_s=_closed_form_s(profile, layout, runtime), samples_per_s=whole.global_batch / time_s, memory_peak_bytes=tuple(peaks),
        stage_compute_s=tuple(per_stage), bottleneck=max(range(len(per_stage)), key=lambda s: per_stage[s]), busiest_link=top,
        interpolated=tuple(sorted(profile.interpolated & set(layout.entries()))), assumptions=tuple(_assumptions(profile, layout, runtime)),
    )  # fmt: skip


def _simulated(
    profile: LayerProfile, layout: ProfiledLayout, network: NetworkProfile, runtime: TrainingRuntime, pipelines: int, *, faster: float = 1.0,
    slow: float = 1.0, shapes: dict[tuple[object, ...], Program] | None = None, orders: PieceOrder | None = None,
) -> tuple[float, list[int], dict[str, float]]:  # fmt: skip
    servers = place(layout, network, runtime, slow=slow)
    made = build_iteration(profile, layout, runtime, servers, faster=faster, pipelines=pipelines, shapes=shapes, orders=orders)
    devices = [d.name for d in servers.fabric.devices]
    timeline = simulate_program(made.program, servers.fabric, devices, made.cost, network="fair", record=False)
    return timeline.makespan_s, [int(x) for x in timeline.memory_peak_bytes], dict(timeline.link_busy_s)


def _stage_times(profile: LayerProfile, layout: ProfiledLayout, replica: Replica) -> list[tuple[float, float]]:
    """Seconds of forward and backward of every stage, were it on this replica."""
    found = [(0.0, 0.0)] * len(layout.stages)
    for s, first, count in layout.pieces:
        time = profile.span(Entry(replica.device, layout.microbatch, replica.tensor), first, count)
        found[s] = (found[s][0] + time.forward_s, found[s][1] + time.backward_s)
    return found


def _times(profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, pipeline: int) -> list[tuple[float, float]]:
    column = [s.replicas[pipeline] for s in layout.stages]
    each = {r: _stage_times(profile, layout, r) for r in dict.fromkeys(column)}
    actions = [0] * len(column)
    for s, _, _ in layout.pieces:
        actions[s] += 1
    extra = [runtime.per_action_s * n for n in actions]
    return [(each[r][s][0] + extra[s], each[r][s][1] + extra[s]) for s, r in enumerate(column)]


def compute_bound_s(profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime) -> float:
    """No schedule is faster: a stage computes all its micro-batches, after the first came through the stages before it, before the last goes back.

    With a schedule, stages have pieces early in the model, and only their own computation is counted."""
    best = 0.0
    for d, count in enumerate(layout.microbatches):
        times = _times(profile, layout, runtime, d)
        if layout.schedule is not None:
            best = max(best, max(count * (f + b) for f, b in times))
            continue
        # the stages before it have no part of its work, so what the first micro-batch needs there and the last on its way back is added
        for s, (f, b) in enumerate(times):
            best = max(best, sum(x + y for x, y in times[:s]) + count * (f + b))
    return best


def _closed_form_s(profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime) -> float:
    """Sum of the stages plus (micro-batches - 1) x the slowest: the textbook 1F1B estimate, without communication or update.

    With a schedule of several pieces per stage, the textbook's fill: that of 1F1B over the pieces."""
    found, pieces = [], len(layout.pieces) // len(layout.stages)
    for d, count in enumerate(layout.microbatches):
        sums = [f + b for f, b in _times(profile, layout, runtime, d)]
        textbook = sum(sums) + (count - 1) * max(sums)
        found.append(textbook if pieces == 1 else (sum(sums) - max(sums)) / pieces + count * max(sums))
    return max(found)


def _assumptions(profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime) -> list[str]:
    nics = f"{runtime.nics_per_server} NICs per server, shared" if runtime.nics_per_server else "a NIC per GPU"
    order = layout.schedule.name if layout.schedule is not None else "1F1B"
    sends = "all" if runtime.activation_copies == "whole" else "its part"
    when = "during the last backward" if runtime.overlap_gradients else "after the last backward"
    overheads = f"{runtime.per_action_s:g} s per action, {runtime.per_message_s:g} s per message, {runtime.per_iteration_s:g} s per iteration"
    said = [
        f"{order}, {runtime.p2p} sends in {runtime.activation_bytes_per_value:g} B per value, every tensor rank sends {sends}",
        nics,
        f"gradients in {runtime.gradient_bytes_per_value:g} B, ring all-reduce {when}",
        f"update time is per {runtime.update}",
        f"overheads {overheads} ({runtime.source})",
        f"error bar: compute {runtime.compute_error:.0%}, network {runtime.network_error:.0%}",
        "times of a tensor degree contain its collectives",
    ]
    if profile.split_assumed:
        said.append(f"forward is {profile.split_assumed:.0%} of forward and backward, which were measured together")
    if not profile.sizes:
        said.append("no layer sizes: messages and gradients are taken to cost nothing")
    missing = sorted({r.device for s in layout.stages for r in s.replicas} - set(runtime.constant_memory_bytes))
    if missing:
        said.append(f"constant memory of {', '.join(missing)} unknown: taken as 0")
    return said


def in_flight_bytes(profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, stage: int, pipeline: int) -> int:
    """Closed form of one rank's peak without the constant: state and what the micro-batches in flight keep."""
    state, kept = stage_memory(profile, layout, runtime, stage, layout.stages[stage].replicas[pipeline])
    return max(1, state) + max(1, kept) * peak_in_flight(len(layout.stages), layout.microbatches[pipeline], stage)
