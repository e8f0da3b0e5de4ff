"""The program of one training iteration of a profiled layout: 1F1B in every pipeline, a ring all-reduce of every stage's gradients, the update.

Actors are the replicas of stages (see `servers`). Compute, messages, gradient rings and updates are steps of a `Program`, so that the event
engine decides who waits for whom; with `overlapped` sends every direction of every neighbour has its own lane, with `blocking` ones they are in the
compute lane. Messages are sent when they are ready; receivers take them in their order (a sender never waits for the receiver to ask, which two
blocking neighbours would do for ever). Only what a rank keeps is in device memory: its state, and the saved values of the micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....cost import Cost, Evidence, Priced, Transport
from ....layer_profile import Entry, LayerProfile, LayerTime
from ....profile_layout import ProfiledLayout, Replica, TrainingRuntime
from ....program import Program, Role, Space, Unit
from ....program_builder import LaneBuilder, ProgramBuilder, StepRef
from ...pipeline.onefoneb import one_f_one_b_order
from .servers import Servers

__all__ = ["Iteration", "build_iteration", "stage_memory"]

MAX_RING_STEPS = 200_000  # of one stage's gradient rings; beyond this several buckets, then turns, are simulated as one; bytes and rate kept


@dataclass(frozen=True)
class Iteration:
    program: Program
    cost: Cost


@dataclass
class _Stage:
    """What building needs of one stage of one pipeline."""

    actor: int
    time: LayerTime
    compute: LaneBuilder
    state: int
    saved: list[int]
    last_backward: StepRef | None = None
    parts: list[tuple[StepRef, float]] | None = None  # (step after which, gradient values per rank), in order


def stage_memory(profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, stage: int, replica: Replica) -> tuple[int, int]:
    """(bytes of state, bytes kept per micro-batch) of one rank, the device's constant not included.

    From the sizes table; without one, from whole-layer memory, whose kept part is what the state leaves (all of it counts as kept once).
    Raises: ProfileEntryMissing when the profile has neither.
    """
    first, count = layout.first_layer(stage), layout.stages[stage].layers
    entry = Entry(replica.device, layout.microbatch, replica.tensor)
    whole = profile.memory_bytes.get(entry)
    if not profile.sizes and whole is not None:
        return 0, sum(whole[first : first + count])
    sizes = [profile.size(replica.tensor, layer) for layer in range(first, first + count)]
    state = sum(s.state_bytes if s.state_bytes >= 0 else s.parameters * runtime.state_bytes_per_parameter for s in sizes)
    state += max(s.working_bytes for s in sizes)
    if whole is not None:
        return round(state), max(0, sum(whole[first : first + count]) - round(state))
    return round(state), round(sum(s.saved_values for s in sizes) * runtime.saved_bytes_per_value * layout.microbatch)


def build_iteration(
    profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, *, faster: float = 1.0, pipelines: int = 0
) -> Iteration:
    """`faster` divides the profile's times (error bars). `pipelines`: in whose rings these take part, where they stand for more (`symmetric`).

    Raises: ProfileEntryMissing, UnknownName.
    """
    b = ProgramBuilder(ranks=len(servers.seats), name=layout.name or "profiled iteration")
    table: dict[str, Priced] = {}
    stages: list[list[_Stage]] = []
    for s, stage in enumerate(layout.stages):
        row = []
        for d, replica in enumerate(stage.replicas):
            actor = s * layout.data + d
            entry = Entry(replica.device, layout.microbatch, replica.tensor)
            time = profile.span(entry, layout.first_layer(s), stage.layers)
            evidence: Evidence = "interpolated" if entry in profile.interpolated else "measured"
            update_s = time.update_s if runtime.update == "layer" else profile.times[entry][0].update_s
            for name, seconds in (("F", time.forward_s), ("B", time.backward_s)):
                table[f"{actor}|{name}"] = Priced(seconds / faster + runtime.per_action_s, evidence)
            table[f"{actor}|optimizer"] = Priced(update_s / faster + runtime.per_iteration_s, evidence)
            state_bytes, kept_bytes = stage_memory(profile, layout, runtime, s, replica)
            state = b.buffer(actor, chunks=1, chunk_bytes=max(1, state_bytes), role="state", persistent=True)
            saved = [b.buffer(actor, chunks=1, chunk_bytes=max(1, kept_bytes), role="activation") for _ in range(layout.microbatches[d])]
            row.append(_Stage(actor, time, b.lane(actor, unit=Unit.COMPUTE, role=Role.COMPUTE), state, saved))
        stages.append(row)
    for d in range(layout.data):
        _pipeline(b, profile, layout, runtime, servers, d, [row[d] for row in stages], table)
    for s, row in enumerate(stages):
        done = _gradients(b, profile, layout, runtime, servers, s, row, max(pipelines, layout.data))
        for x, after in zip(row, done, strict=True):
            op = b.op("optimizer", graph=str(x.actor), stage=s, writes=[(x.state, 0, 1)])
            x.compute.compute(op, after=after)
    cost = Cost(name="layer profile", table=table, transport=Transport(per_message_s=runtime.per_message_s), source=profile.source or "layer profile")
    return Iteration(b.build(), cost)


# ---- one pipeline ------------------------------------------------------------------------------------------------------


@dataclass
class _Way:
    """Messages of one direction between two neighbours."""

    channel: int
    out: int  # buffer at the sender
    into: int  # buffer at the receiver
    sender: LaneBuilder
    receiver: LaneBuilder
    steps: dict[int, StepRef]  # receive of each micro-batch, where it has its own lane


def _pipeline(
    b: ProgramBuilder, profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, d: int, row: Sequence[_Stage],
    table: dict[str, Priced],
) -> None:  # fmt: skip
    count, blocking = layout.microbatches[d], runtime.p2p == "blocking"
    forward: list[_Way] = []
    backward: list[_Way] = []
    for s in range(len(row) - 1):
        tensor = layout.stages[s].replicas[d].tensor
        values = profile.size(tensor, layout.first_layer(s + 1) - 1).output_values if profile.sizes else 0.0
        size_bytes = values * layout.microbatch * runtime.activation_bytes_per_value / (tensor if runtime.activation_copies == "part" else 1)
        for ways, a, z in ((forward, row[s], row[s + 1]), (backward, row[s + 1], row[s])):
            link_bytes = servers.link_bytes(a.actor, z.actor, size_bytes)
            out, into = (b.buffer(x.actor, chunks=1, chunk_bytes=link_bytes, space=Space.HOST) for x in (a, z))
            lanes = (a.compute, z.compute) if blocking else (b.lane(a.actor), b.lane(z.actor))
            ways.append(_Way(b.channel(a.actor, z.actor, depth=count), out, into, *lanes, {}))
    for s, x in enumerate(row):
        _stage_steps(b, layout, runtime, profile, s, d, x, forward, backward, table)
    if not blocking:
        _wait_for_messages(b, row, forward, backward)


def _stage_steps(
    b: ProgramBuilder, layout: ProfiledLayout, runtime: TrainingRuntime, profile: LayerProfile, s: int, d: int, x: _Stage, forward: list[_Way],
    backward: list[_Way], table: dict[str, Priced],
) -> None:  # fmt: skip
    count, last, blocking = layout.microbatches[d], s == len(layout.stages) - 1, runtime.p2p == "blocking"
    for phase, i in one_f_one_b_order(len(layout.stages), count, s):
        source = forward[s - 1] if phase == "F" and s > 0 else backward[s] if phase == "B" and not last else None
        sink = forward[s] if phase == "F" and not last else backward[s - 1] if phase == "B" and s > 0 else None
        if source is not None and blocking:
            x.compute.recv(source.channel, source.into, 0)
        if phase == "B" and i == count - 1 and runtime.overlap_gradients:
            step = _last_backward_by_layer(b, layout, runtime, profile, s, d, x, i, table)
        else:
            kept = [(x.saved[i], 0, 1)]
            reads, writes = ([], kept) if phase == "F" else (kept, [])
            step = x.compute.compute(b.op(phase, graph=str(x.actor), stage=s, microbatch=i, reads=reads, writes=writes))
        if phase == "B":
            b.dies_after(x.saved[i], step)
            x.last_backward = step
        if sink is not None:
            if blocking:
                x.compute.send(sink.channel, sink.out, 0)
            else:
                sink.sender.send(sink.channel, sink.out, 0, after=[step])


def _last_backward_by_layer(
    b: ProgramBuilder, layout: ProfiledLayout, runtime: TrainingRuntime, profile: LayerProfile, s: int, d: int, x: _Stage, i: int,
    table: dict[str, Priced],
) -> StepRef:  # fmt: skip
    """The last micro-batch's backward layer by layer, so that gradients can go as they become final; overhead once."""
    replica, first = layout.stages[s].replicas[d], layout.first_layer(s)
    rows = profile.times[Entry(replica.device, layout.microbatch, replica.tensor)]
    whole, total = table[f"{x.actor}|B"], x.time.backward_s
    x.parts, step = [], None
    for layer in reversed(range(first, first + layout.stages[s].layers)):
        share = rows[layer].backward_s / total if total > 0 else 1 / layout.stages[s].layers
        table[f"{x.actor}.{layer}|B"] = Priced(whole.time_s * share, whole.evidence)
        step = x.compute.compute(b.op("B", graph=f"{x.actor}.{layer}", stage=s, microbatch=i, reads=[(x.saved[i], 0, 1)]))
        x.parts.append((step, profile.size(replica.tensor, layer).parameters))
    assert step is not None
    return step


def _wait_for_messages(b: ProgramBuilder, row: Sequence[_Stage], forward: list[_Way], backward: list[_Way]) -> None:
    """Receives in the sender's order, each compute step after its own."""
    for s, x in enumerate(row):
        for position, op in x.compute.ops():
            name, _, microbatch = b.op_key(op)
            way = forward[s - 1] if name == "F" and s > 0 else backward[s] if name == "B" and s < len(row) - 1 else None
            if way is None:
                continue
            if microbatch not in way.steps:
                way.steps[microbatch] = way.receiver.recv(way.channel, way.into, 0)
            x.compute.wait(position, way.steps[microbatch])


# ---- gradients ---------------------------------------------------------------------------------------------------------


def _gradients(
    b: ProgramBuilder, profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, s: int, row: Sequence[_Stage],
    n: int,
) -> list[list[StepRef]]:  # fmt: skip
    """Ring all-reduces of a stage over `n` replicas, bucket by bucket; per replica in `row`, the steps its update waits for."""
    done: list[list[StepRef]] = [[] for _ in row]
    if len(row) == 1 or not profile.sizes:
        return done
    first, here = layout.first_layer(s), len(row)
    lanes = [(b.lane(x.actor), b.lane(x.actor)) for x in row]
    channels = [b.channel(x.actor, row[(j + 1) % here].actor, depth=2) for j, x in enumerate(row)]
    span = range(first, first + layout.stages[s].layers)
    values = [[profile.size(r.tensor, layer).parameters for layer in span] for r in layout.stages[s].replicas]
    portions = len(row[0].parts or [0])
    for portion in range(portions):
        each = [row[j].parts[portion][1] if row[j].parts else sum(values[j]) for j in range(here)]  # type: ignore[index]
        total = max(each) * runtime.gradient_bytes_per_value
        if total <= 0:
            continue
        buckets = max(1, round(total / runtime.bucket_bytes)) if runtime.bucket_bytes else 1
        shown = max(1, min(buckets, MAX_RING_STEPS // (4 * n * n * portions)))
        turns = max(1, min(2 * (n - 1), MAX_RING_STEPS // (2 * n * shown * portions)))
        merged = buckets / shown * 2 * (n - 1) / turns
        for j, x in enumerate(row):
            after = [x.parts[portion][0]] if x.parts else [x.last_backward] if x.last_backward else []
            sized = [values_j * runtime.gradient_bytes_per_value / buckets / n for values_j in each]
            done[j] = _ring(b, servers, row, lanes, channels, j, sized, shown * turns, turns, merged, after)
    return done


def _ring(
    b: ProgramBuilder, servers: Servers, row: Sequence[_Stage], lanes: Sequence[tuple[LaneBuilder, LaneBuilder]], channels: Sequence[int], j: int,
    sizes: Sequence[float], exchanges: int, turns: int, merged: float, after: Sequence[StepRef],
) -> list[StepRef]:  # fmt: skip
    """Rank j's exchanges, `turns` per bucket; `merged` real messages are one simulated one, `sizes` are of one real one."""
    n = len(row)
    before = (j - 1) % n
    out = b.buffer(row[j].actor, chunks=1, chunk_bytes=_bytes(servers, row, j, (j + 1) % n, sizes, merged), space=Space.HOST)
    into = b.buffer(row[j].actor, chunks=1, chunk_bytes=_bytes(servers, row, before, j, sizes, merged), space=Space.HOST)
    sending, receiving = lanes[j]
    step: StepRef | None = None
    for exchange in range(exchanges):
        sending.send(channels[j], out, 0, after=list(after) if exchange % turns == 0 or step is None else [step])
        step = receiving.recv(channels[before], into, 0)
    return [sending.last, receiving.last]


def _bytes(servers: Servers, row: Sequence[_Stage], a: int, z: int, sizes: Sequence[float], merged: float) -> int:
    return max(1, round(merged * servers.link_bytes(row[a].actor, row[z].actor, max(sizes[a], sizes[z]))))
