"""What a schedule is worth: lowered, simulated, its memory counted, its bound beside it.

`bubble` = idle share of devices x time between the common start and the common end. `span_bubble`: the same with every device's own first start
and last end, the figure of the zero-bubble papers.
Memory of a device = weights + activations: an activation counts from the arrival of its input (received and not yet used included; of a stage whose
input is on the device, from F) to the end of its backward (of W when split), without the time in which it is in the host's memory. Buffers of
messages on their way out, of gradients, and receives posted ahead are in `program_bytes`, the peak of everything the program holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...bound import Bound
from ...kernels.effort import look
from ...program.program import Kind, Part, Program
from ...simulate import simulate_program
from ...timeline import Timeline
from .bound import schedule_bound
from .lower import PlanCollective, fabric_of, lower_schedule, price_table
from .orders import activation_bytes, check_orders, in_flight_peaks, message_bytes, stage_share
from .peaks import held_peaks
from .problem import PipelineProblem, Schedule
from .sync import synchronised

__all__ = ["Judged", "judge"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """`in_flight`: most micro-batches of a stage kept per device; `memory_bytes`: weights + activations per device, see the module."""

    schedule: Schedule
    program: Program
    callees: dict[str, Program]
    timeline: Timeline
    bound: Bound
    bubble: float
    span_bubble: float
    in_flight: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    program_bytes: tuple[int, ...]
    over_bytes: int  # beyond the cap on the worst device; <= 0 fits

    @property
    def time_s(self) -> float:
        return self.timeline.makespan_s


def judge(problem: PipelineProblem, schedule: Schedule, plan_collective: PlanCollective | None = None) -> Judged:
    """Simulate one schedule. Raises: CheckFailed or Deadlock when its orders are wrong, UsageError (see `lower_schedule`)."""
    check_orders(schedule)
    look()
    schedule = synchronised(problem, schedule)
    program, callees = lower_schedule(problem, schedule, plan_collective)
    fabric = fabric_of(problem)
    timeline = simulate_program(program, fabric, [d.name for d in fabric.devices], price_table(problem, schedule), programs=callees)
    look()
    busy, span = _busy_and_span(problem, schedule, timeline)
    weights = _weights(problem, schedule)
    memory = tuple(w + a for w, a in zip(weights, _activation_peaks(problem, schedule, program, timeline, callees), strict=True))
    caps = problem.memory_cap_bytes
    over = max((m - c for m, c in zip(memory, caps, strict=True) if c), default=0) if caps else 0
    # what waits in the host's memory is not kept, so no bound follows from what a device can keep
    bounded = caps and over <= 0 and not any(schedule.offloads)
    free = [max(1, c - w) if c else 0 for c, w in zip(caps, weights, strict=True)] if bounded else []
    total = timeline.makespan_s * problem.devices
    return Judged(
        schedule=schedule, program=program, callees=callees, timeline=timeline, bound=schedule_bound(problem, schedule, cap_bytes=free),
        bubble=1 - busy / total if total else 0.0, span_bubble=1 - busy / span if span else 0.0, in_flight=tuple(in_flight_peaks(schedule)),
        weight_bytes=weights, memory_bytes=memory, program_bytes=tuple(timeline.memory_peak_bytes[:: problem.data]), over_bytes=over,
    )  # fmt: skip


def _busy_and_span(problem: PipelineProblem, schedule: Schedule, timeline: Timeline) -> tuple[float, float]:
    """Seconds computed and seconds between first start and last end, over all devices (of the first replica)."""
    spans = timeline.spans
    busy = span = 0.0
    for d in range(schedule.devices):
        mine = np.flatnonzero((spans.rank == d * problem.data) & (spans.lane == _compute_lane(problem, schedule, d)))
        if len(mine):
            busy += float((spans.end_s[mine] - spans.start_s[mine]).sum())
            span += float(spans.end_s[mine].max() - spans.start_s[mine].min())
    return busy, span


def _compute_lane(problem: PipelineProblem, schedule: Schedule, device: int) -> int:
    """Lanes are made rank by rank: compute, and a collective lane where there is something to reduce."""
    per_rank = 2 if any(problem.gradient_bytes) and any(schedule.collectives) else 1
    return device * problem.data * per_rank


def _weights(problem: PipelineProblem, schedule: Schedule) -> tuple[int, ...]:
    """Bytes of parameters, gradients and state per device. Sharded: its share of each stage, and two gathered stages with their gradients."""
    sharded = any(c.kind == "gather" for row in schedule.collectives for c in row)
    found = []
    for d in range(schedule.devices):
        sizes = [-(-problem.weight_bytes[stage_share(schedule, s)] // schedule.chunks) for _, s in schedule.hosted(d)]
        moved = [-(-problem.gradient_bytes[stage_share(schedule, s)] // schedule.chunks) for _, s in schedule.hosted(d)]
        found.append(sum(-(-x // problem.data) for x in sizes) + 4 * max(moved) if sharded else sum(sizes))
    return tuple(found)


def _activation_peaks(
    problem: PipelineProblem, schedule: Schedule, program: Program, timeline: Timeline, callees: dict[str, Program]
) -> tuple[int, ...]:
    """Peak bytes of activations per device (first replica); at one instant what is freed goes first."""
    from ...program.calls import inline

    flat = inline(program, callees).program if callees else program
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for step, start, end in zip(timeline.spans.step.tolist(), timeline.spans.start_s.tolist(), timeline.spans.end_s.tolist(), strict=True):
        first[step], last[step] = start, end
    births = _births(flat, first, last)
    events: list[list[tuple[float, int]]] = [[] for _ in range(schedule.devices)]
    for b, name in enumerate(flat.buffers.name):
        kind, _, rest = name.partition(":")
        rank = int(flat.buffers.actor[b])
        if kind not in ("in", "saved", "again") or rank % problem.data:
            continue
        device, stage = rank // problem.data, int(rest.partition(":")[0])
        size = int(flat.buffers.chunk_bytes[b])
        if kind == "in":
            size = min(message_bytes(problem, schedule, stage - 1), activation_bytes(problem, schedule, stage))
        death = max(last[s] for s in flat.buffers.last[b].tolist())
        events[device] += [(death, -size), (births[b], size)]
    return held_peaks(events)


def _births(p: Program, first: dict[int, float], last: dict[int, float]) -> dict[int, float]:
    """When each buffer is there: the end of the receive into it, or the start of the compute step that writes it."""
    found: dict[int, float] = {}
    received = (p.steps.kind == Kind.TRANSFER) & ((p.steps.parts & Part.RECV) != 0) & (p.steps.dst_buffer >= 0)
    for step in np.flatnonzero(received).tolist():
        found[int(p.steps.dst_buffer[step])] = last[step]
    for step in np.flatnonzero(p.steps.kind == Kind.COMPUTE).tolist():
        for b in p.ops.writes[int(p.steps.op[step])][::3].tolist():
            found.setdefault(b, first[step])
    return found
