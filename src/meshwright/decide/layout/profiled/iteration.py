"""The program of one training iteration of a profiled layout: 1F1B in every pipeline, a ring all-reduce of every stage's gradients, the update.

Actors are the replicas of stages (see `servers`). Compute, messages, gradient rings and updates are steps of a `Program`, so that the event
engine decides who waits for whom; with `overlapped` sends every direction of every neighbour has its own lane, with `blocking` ones they are in the
compute lane. Messages are sent when they are ready; receivers take them in their order (a sender never waits for the receiver to ask, which two
blocking neighbours would do for ever). Only what a rank keeps is in device memory: its state, and the saved values of the micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ....cost import Cost, Evidence, Priced, Transport
from ....plan.orders import one_f_one_b_order
from ....profile.layer_profile import Entry, LayerProfile
from ....profile.network import ProfiledLayout, Replica, TrainingRuntime
from ....program.builder import LaneBuilder, ProgramBuilder, StepRef
from ....program.program import Program, Role, Space, Unit
from .servers import Servers

__all__ = ["Iteration", "build_iteration", "stage_memory"]

# Steps of one stage's gradient rings. Beyond it several buckets, then several turns, are simulated as one; bytes and rates are kept.
MAX_RING_STEPS = 200_000


@dataclass(frozen=True)
class Iteration:
    program: Program
    cost: Cost


@dataclass
class _Stage:
    """What building needs of one stage of one pipeline."""

    actor: int
    compute: LaneBuilder
    state: int
    saved: list[int]
    last_backward: StepRef | None = None
    parts: list[StepRef] | None = None  # of the last backward, after which gradients go, in order


@dataclass(frozen=True)
class _Ring:
    """A stage's all-reduce of one portion of its gradients: exchanges of every replica, turns of a bucket, link bytes out and in of each replica."""

    portion: int
    exchanges: int
    turns: int
    bytes_of: tuple[tuple[int, int], ...]


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
    profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, *, faster: float = 1.0, pipelines: int = 0,
    shapes: dict[tuple[object, ...], Program] | None = None,
) -> Iteration:  # fmt: skip
    """`faster` divides the profile's times (error bars). `pipelines`: in whose rings these take part, where they stand for more (`symmetric`).

    `shapes` remembers programs: layouts with the same stages, micro-batches and rings differ in the sizes of buffers only.
    Raises: ProfileEntryMissing, UnknownName.
    """
    stages = range(len(layout.stages))
    rings = [_rings(profile, layout, runtime, servers, s, max(pipelines, layout.data)) for s in stages]
    sizes = _buffer_sizes(profile, layout, runtime, servers, rings)
    table = _prices(profile, layout, runtime, faster)
    cost = Cost(name="layer profile", table=table, transport=Transport(per_message_s=runtime.per_message_s), source=profile.source or "layer profile")
    layers = tuple(s.layers for s in layout.stages) if runtime.overlap_gradients else ()
    turns = tuple(tuple((r.portion, r.exchanges, r.turns) for r in of_stage) for of_stage in rings)
    shape = (len(layout.stages), layout.microbatches, runtime.p2p, runtime.overlap_gradients, layers, turns)
    known = shapes.get(shape) if shapes is not None else None
    if known is not None:
        return Iteration(replace(known, buffers=replace(known.buffers, chunk_bytes=np.array(sizes, dtype=np.int64))), cost)
    b = _Builder(ranks=len(servers.seats), name=layout.name or "profiled iteration")
    b.take_sizes(sizes)
    rows: list[list[_Stage]] = []
    for s in stages:
        row = []
        for d in range(layout.data):
            actor = s * layout.data + d
            state = b.sized(actor, role="state", persistent=True)
            saved = [b.sized(actor, role="activation") for _ in range(layout.microbatches[d])]
            row.append(_Stage(actor, b.lane(actor, unit=Unit.COMPUTE, role=Role.COMPUTE), state, saved))
        rows.append(row)
    for d in range(layout.data):
        _pipeline(b, layout, runtime, d, [row[d] for row in rows])
    for s, row in enumerate(rows):
        done = _gradients(b, row, rings[s])
        for x, after in zip(row, done, strict=True):
            x.compute.compute(b.op("optimizer", graph=str(x.actor), stage=s, writes=[(x.state, 0, 1)]), after=after)
    program = b.build()
    if shapes is not None:
        shapes[shape] = program
    return Iteration(program, cost)


class _Builder(ProgramBuilder):
    """Takes the sizes of its buffers from a list, in the order of their making: `_buffer_sizes` knows the order."""

    def take_sizes(self, sizes: Sequence[int]) -> None:
        self._left = iter(sizes)

    def sized(self, actor: int, *, role: Literal["state", "activation", "scratch"] = "scratch", persistent: bool = False) -> int:
        space = Space.HOST if role == "scratch" else Space.DEVICE
        return self.buffer(actor, chunks=1, chunk_bytes=next(self._left), role=role, persistent=persistent, space=space)


def _buffer_sizes(
    profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, rings: Sequence[Sequence[_Ring]]
) -> list[int]:
    """Bytes of every buffer: states and kept activations by stage and replica, messages by pipeline and border, rings."""
    data, sizes = layout.data, list[int]()
    for s, stage in enumerate(layout.stages):
        memory = {r: stage_memory(profile, layout, runtime, s, r) for r in dict.fromkeys(stage.replicas)}
        for d, replica in enumerate(stage.replicas):
            state_bytes, kept_bytes = memory[replica]
            sizes += [max(1, state_bytes), *([max(1, kept_bytes)] * layout.microbatches[d])]
    for d in range(data):
        for s in range(len(layout.stages) - 1):
            tensor = layout.stages[s].replicas[d].tensor
            values = profile.size(tensor, layout.first_layer(s + 1) - 1).output_values if profile.sizes else 0.0
            size_bytes = values * layout.microbatch * runtime.activation_bytes_per_value / (tensor if runtime.activation_copies == "part" else 1)
            for a, z in ((s, s + 1), (s + 1, s)):
                sizes += [servers.link_bytes(a * data + d, z * data + d, size_bytes)] * 2
    for of_stage in rings:
        sizes += [x for ring in of_stage for pair in ring.bytes_of for x in pair]
    return sizes


def _prices(profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, faster: float) -> dict[str, Priced]:
    """Seconds of every compute step by actor; where gradients go during the last backward, of every layer of it, overhead once."""
    table: dict[str, Priced] = {}
    for s, stage in enumerate(layout.stages):
        first = layout.first_layer(s)
        times = {r: profile.span(Entry(r.device, layout.microbatch, r.tensor), first, stage.layers) for r in dict.fromkeys(stage.replicas)}
        for d, replica in enumerate(stage.replicas):
            actor, entry, time = s * layout.data + d, Entry(replica.device, layout.microbatch, replica.tensor), times[replica]
            evidence: Evidence = "interpolated" if entry in profile.interpolated else "measured"
            update_s = time.update_s if runtime.update == "layer" else profile.times[entry][0].update_s
            for name, seconds in (("F", time.forward_s), ("B", time.backward_s)):
                table[f"{actor}|{name}"] = Priced(seconds / faster + runtime.per_action_s, evidence)
            table[f"{actor}|optimizer"] = Priced(update_s / faster + runtime.per_iteration_s, evidence)
            whole = table[f"{actor}|B"]
            for layer in range(first, first + stage.layers) if runtime.overlap_gradients else ():
                share = profile.times[entry][layer].backward_s / time.backward_s if time.backward_s > 0 else 1 / stage.layers
                table[f"{actor}.{layer}|B"] = Priced(whole.time_s * share, whole.evidence)
    return table


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


def _pipeline(b: _Builder, layout: ProfiledLayout, runtime: TrainingRuntime, d: int, row: Sequence[_Stage]) -> None:
    count, blocking = layout.microbatches[d], runtime.p2p == "blocking"
    forward: list[_Way] = []
    backward: list[_Way] = []
    for s in range(len(row) - 1):
        for ways, a, z in ((forward, row[s], row[s + 1]), (backward, row[s + 1], row[s])):
            out, into = (b.sized(x.actor) for x in (a, z))
            lanes = (a.compute, z.compute) if blocking else (b.lane(a.actor), b.lane(z.actor))
            ways.append(_Way(b.channel(a.actor, z.actor, depth=count), out, into, *lanes, {}))
    for s, x in enumerate(row):
        _stage_steps(b, layout, runtime, s, d, x, forward, backward)
    if not blocking:
        _wait_for_messages(b, row, forward, backward)


def _stage_steps(
    b: ProgramBuilder, layout: ProfiledLayout, runtime: TrainingRuntime, s: int, d: int, x: _Stage, forward: list[_Way], backward: list[_Way]
) -> None:
    count, last, blocking = layout.microbatches[d], s == len(layout.stages) - 1, runtime.p2p == "blocking"
    for phase, i in one_f_one_b_order(len(layout.stages), count, s):
        source = forward[s - 1] if phase == "F" and s > 0 else backward[s] if phase == "B" and not last else None
        sink = forward[s] if phase == "F" and not last else backward[s - 1] if phase == "B" and s > 0 else None
        if source is not None and blocking:
            x.compute.recv(source.channel, source.into, 0)
        if phase == "B" and i == count - 1 and runtime.overlap_gradients:
            step = _last_backward_by_layer(b, layout, s, x, i)
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


def _last_backward_by_layer(b: ProgramBuilder, layout: ProfiledLayout, s: int, x: _Stage, i: int) -> StepRef:
    """The last micro-batch's backward layer by layer, so that gradients can go as they become final."""
    first = layout.first_layer(s)
    x.parts = []
    for layer in reversed(range(first, first + layout.stages[s].layers)):
        op = b.op("B", graph=f"{x.actor}.{layer}", stage=s, microbatch=i, reads=[(x.saved[i], 0, 1)])
        x.parts.append(x.compute.compute(op))
    return x.parts[-1]


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


def _rings(
    profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, s: int, n: int
) -> list[_Ring]:
    """Ring all-reduces of a stage over `n` replicas, bucket by bucket; real messages may be merged into fewer."""
    here, first = layout.data, layout.first_layer(s)
    if here == 1 or not profile.sizes:
        return []
    span = range(first, first + layout.stages[s].layers)
    values_of = {t: [profile.size(t, x).parameters for x in span] for t in {r.tensor for r in layout.stages[s].replicas}}
    values = [values_of[r.tensor] for r in layout.stages[s].replicas]
    portions = len(span) if runtime.overlap_gradients else 1
    found = []
    for portion in range(portions):
        each = [v[-1 - portion] if runtime.overlap_gradients else sum(v) for v in values]
        total = max(each) * runtime.gradient_bytes_per_value
        if total <= 0:
            continue
        buckets = max(1, round(total / runtime.bucket_bytes)) if runtime.bucket_bytes else 1
        shown = max(1, min(buckets, MAX_RING_STEPS // (4 * n * n * portions)))
        turns = max(1, min(2 * (n - 1), MAX_RING_STEPS // (2 * n * shown * portions)))
        # how many real messages one of those simulated stands for
        merged = buckets / shown * 2 * (n - 1) / turns
        sized = [x * runtime.gradient_bytes_per_value / buckets / n for x in each]
        out = [
            max(1, round(merged * servers.link_bytes(s * here + j, s * here + (j + 1) % here, max(sized[j], sized[(j + 1) % here]))))
            for j in range(here)
        ]  # fmt: skip
        found.append(_Ring(portion, shown * turns, turns, tuple((out[j], out[j - 1]) for j in range(here))))
    return found


def _gradients(b: _Builder, row: Sequence[_Stage], rings: Sequence[_Ring]) -> list[list[StepRef]]:
    """The stage's rings; per replica, the steps its update waits for."""
    done: list[list[StepRef]] = [[] for _ in row]
    if not rings:
        return done
    n = len(row)
    lanes = [(b.lane(x.actor), b.lane(x.actor)) for x in row]
    channels = [b.channel(x.actor, row[(j + 1) % n].actor, depth=2) for j, x in enumerate(row)]
    for ring in rings:
        for j, x in enumerate(row):
            after = [x.parts[ring.portion]] if x.parts else [x.last_backward] if x.last_backward else []
            out, into, (sending, receiving) = b.sized(x.actor), b.sized(x.actor), lanes[j]
            step: StepRef | None = None
            for exchange in range(ring.exchanges):
                sending.send(channels[j], out, 0, after=list(after) if exchange % ring.turns == 0 or step is None else [step])
                step = receiving.recv(channels[(j - 1) % n], into, 0)
            done[j] = [sending.last, receiving.last]
    return done
