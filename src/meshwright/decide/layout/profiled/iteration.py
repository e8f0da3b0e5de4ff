"""The program of one training iteration of a profiled layout: 1F1B or a schedule in every pipeline, a ring all-reduce of every stage's gradients,
the update.

Actors are the replicas of stages (see `servers`). Compute, messages, gradient rings and updates are steps of a `Program`, so that the event
engine decides who waits for whom; with `overlapped` sends every direction of every neighbour has its own lane, with `blocking` ones they are in the
compute lane. Messages are sent when they are ready; receivers take them in their order (a sender never waits for the receiver to ask, which two
blocking neighbours would do for ever). Only what a rank keeps is in device memory: its state, and the saved values of the micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from ....cost import Cost, Evidence, Priced, Transport
from ....errors import UsageError
from ....plan.orders import one_f_one_b_order
from ....profile.layer_profile import Entry, LayerProfile
from ....profile.network import PieceOrder, ProfiledLayout, Replica, TrainingRuntime
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
    saved: dict[tuple[int, int], int]  # by piece and micro-batch
    left: dict[tuple[int, int], int]  # by the input's gradient for the weights' one, where a schedule parts them
    last_backward: StepRef | None = None
    waits: list[tuple[StepRef, _Way, int]] = field(default_factory=list)  # for the message of a micro-batch
    parts: dict[int, StepRef] = field(default_factory=dict)  # by layer, of the last backward, after which gradients go, in order


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
    layers = layout.layers_of(stage)
    entry = Entry(replica.device, layout.microbatch, replica.tensor)
    whole = profile.memory_bytes.get(entry)
    if not profile.sizes and whole is not None:
        return 0, sum(whole[layer] for layer in layers)
    sizes = [profile.size(replica.tensor, layer) for layer in layers]
    state = sum(s.state_bytes if s.state_bytes >= 0 else s.parameters * runtime.state_bytes_per_parameter for s in sizes)
    state += max(s.working_bytes for s in sizes)
    if whole is not None:
        return round(state), max(0, sum(whole[layer] for layer in layers) - round(state))
    return round(state), round(sum(s.saved_values for s in sizes) * runtime.saved_bytes_per_value * layout.microbatch)


def build_iteration(
    profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, *, faster: float = 1.0, pipelines: int = 0,
    shapes: dict[tuple[object, ...], Program] | None = None, orders: PieceOrder | None = None,
) -> Iteration:  # fmt: skip
    """`faster` divides the profile's times (error bars). `pipelines`: in whose rings these take part, where they stand for more (`symmetric`).

    `orders`: of a layout with a schedule, whose pipelines have the same number of micro-batches. `shapes` remembers programs: layouts with the
    same stages, micro-batches and rings differ in the sizes of buffers only. Raises: ProfileEntryMissing, UnknownName, UsageError.
    """
    if (orders is None) != (layout.schedule is None) or (orders is not None and len(set(layout.microbatches)) > 1):
        raise UsageError("a schedule needs its orders, and as many micro-batches in every pipeline", where=layout.name or "layout")
    stages = range(len(layout.stages))
    rings = [_rings(profile, layout, runtime, servers, s, max(pipelines, layout.data)) for s in stages]
    sizes = _buffer_sizes(profile, layout, runtime, servers, rings, orders)
    table = _prices(profile, layout, runtime, faster)
    cost = Cost(name="layer profile", table=table, transport=Transport(per_message_s=runtime.per_message_s), source=profile.source or "layer profile")
    layers = layout.pieces if runtime.overlap_gradients or layout.schedule is not None else ()
    turns = tuple(tuple((r.portion, r.exchanges, r.turns) for r in of_stage) for of_stage in rings)
    shape = (len(layout.stages), layout.microbatches, runtime.p2p, runtime.overlap_gradients, layers, turns, layout.schedule and layout.schedule.name)
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
            held = [k for k, (stage, _, _) in enumerate(layout.pieces) if stage == s]
            saved, left = (
                {(k, m): b.sized(actor, role="activation") for k in held for m in range(layout.microbatches[d])} if made else {}
                for made in (True, _parted(orders))
            )
            row.append(_Stage(actor, b.lane(actor, unit=Unit.COMPUTE, role=Role.COMPUTE), state, saved, left))
        rows.append(row)
    for d in range(layout.data):
        _pipeline(b, layout, runtime, d, [row[d] for row in rows], orders)
    for s, row in enumerate(rows):
        done = _gradients(b, row, rings[s], layout.layers_of(s))
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
    profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, rings: Sequence[Sequence[_Ring]],
    orders: PieceOrder | None,
) -> list[int]:  # fmt: skip
    """Bytes of every buffer: states and kept activations by stage and replica, messages by pipeline and border, rings."""
    data, sizes = layout.data, list[int]()
    for s, stage in enumerate(layout.stages):
        memory = {r: stage_memory(profile, layout, runtime, s, r) for r in dict.fromkeys(stage.replicas)}
        for d, replica in enumerate(stage.replicas):
            state_bytes, kept_bytes = memory[replica]
            each = [[kept_bytes]]
            if layout.schedule is not None:
                each = [_piece_bytes(profile, layout, runtime, s, replica, left=left) for left in (False, True)[: 1 + _parted(orders)]]
            sizes += [max(1, state_bytes), *(max(1, x) for row in each for x in row for _ in range(layout.microbatches[d]))]
    for d in range(data):
        for (s, _, _), (onto, first, _) in pairwise(layout.pieces):
            if s == onto:
                continue
            tensor = layout.stages[s].replicas[d].tensor
            values = profile.size(tensor, first - 1).output_values if profile.sizes else 0.0
            size_bytes = values * layout.microbatch * runtime.activation_bytes_per_value / (tensor if runtime.activation_copies == "part" else 1)
            for a, z in ((s, onto), (onto, s)):
                sizes += [servers.link_bytes(a * data + d, z * data + d, size_bytes)] * 2
    for of_stage in rings:
        sizes += [x for ring in of_stage for pair in ring.bytes_of for x in pair]
    return sizes


def _parted(orders: PieceOrder | None) -> bool:
    return orders is not None and any(phase == "I" for order in orders for phase, _, _ in order)


def _piece_bytes(
    profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, stage: int, replica: Replica, *, left: bool
) -> list[int]:
    """Bytes that every piece of a stage keeps of a micro-batch, or (`left`) leaves for its weights' gradient."""
    found = []
    for s, first, count in layout.pieces:
        if s == stage:
            sizes = [profile.size(replica.tensor, layer) for layer in range(first, first + count)]
            values = sum(x.left_values if left else x.saved_values for x in sizes)
            found.append(round(values * runtime.saved_bytes_per_value * layout.microbatch))
    return found


def _prices(profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, faster: float) -> dict[str, Priced]:
    """Seconds of every compute step by actor; where gradients go during the last backward, of every layer of it, overhead once."""
    table: dict[str, Priced] = {}
    for s, stage in enumerate(layout.stages):
        held = [(k, first, count) for k, (host, first, count) in enumerate(layout.pieces) if host == s]
        spans = {
            r: {k: profile.span(Entry(r.device, layout.microbatch, r.tensor), first, count) for k, first, count in held}
            for r in dict.fromkeys(stage.replicas)
        }  # fmt: skip
        for d, replica in enumerate(stage.replicas):
            actor, entry, times = s * layout.data + d, Entry(replica.device, layout.microbatch, replica.tensor), spans[replica]
            evidence: Evidence = "interpolated" if entry in profile.interpolated else "measured"
            update_s = sum(t.update_s for t in times.values()) if runtime.update == "layer" else profile.times[entry][0].update_s
            table[f"{actor}|optimizer"] = Priced(update_s / faster + runtime.per_iteration_s, evidence)
            for k, first, count in held:
                time = times[k]
                parts = (("F", time.forward_s), ("B", time.backward_s), ("I", time.backward_s - time.weights_s), ("W", time.weights_s))
                for name, seconds in parts:
                    table[f"{_graph(actor, k)}|{name}"] = Priced(seconds / faster + (runtime.per_action_s if name != "W" else 0.0), evidence)
                whole = table[f"{_graph(actor, k)}|B"]
                for layer in range(first, first + count) if runtime.overlap_gradients else ():
                    share = profile.times[entry][layer].backward_s / time.backward_s if time.backward_s > 0 else 1 / count
                    table[f"{actor}.{layer}|B"] = Priced(whole.time_s * share, whole.evidence)
    return table


def _graph(actor: int, piece: int) -> str:
    return f"{actor}:{piece}"


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
    b: _Builder, layout: ProfiledLayout, runtime: TrainingRuntime, d: int, row: Sequence[_Stage], orders: PieceOrder | None
) -> None:
    count, blocking = layout.microbatches[d], runtime.p2p == "blocking"
    forward: dict[int, _Way] = {}  # after a piece, to the next one
    backward: dict[int, _Way] = {}
    for k, ((s, _, _), (onto, _, _)) in enumerate(pairwise(layout.pieces)):
        for ways, a, z in ((forward, row[s], row[onto]), (backward, row[onto], row[s])) if s != onto else ():
            out, into = (b.sized(x.actor) for x in (a, z))
            lanes = (a.compute, z.compute) if blocking else (b.lane(a.actor), b.lane(z.actor))
            ways[k] = _Way(b.channel(a.actor, z.actor, depth=count), out, into, *lanes, {})
    if orders is None:
        orders = tuple(tuple((phase, s, m) for phase, m in one_f_one_b_order(len(row), count, s)) for s in range(len(row)))
    for s, x in enumerate(row):
        _stage_steps(b, layout, runtime, orders[s], x, forward, backward)
    if not blocking:
        for order in orders:  # receives stand in the sender's order
            for phase, k, m in order:
                way = forward.get(k) if phase == "F" else backward.get(k - 1) if phase in "BI" else None
                if way is not None:
                    way.steps[m] = way.receiver.recv(way.channel, way.into, 0)
        for x in row:
            for step, way, m in x.waits:
                x.compute.wait(step[1], way.steps[m])


def _stage_steps(
    b: ProgramBuilder, layout: ProfiledLayout, runtime: TrainingRuntime, order: Sequence[tuple[str, int, int]], x: _Stage,
    forward: Mapping[int, _Way], backward: Mapping[int, _Way],
) -> None:  # fmt: skip
    blocking, pieces = runtime.p2p == "blocking", layout.pieces
    final = {k: i for i, (phase, k, _) in enumerate(order) if phase in "BW"}  # where the gradients of a piece are complete
    for i, (phase, k, m) in enumerate(order):
        source = forward.get(k - 1) if phase == "F" else backward.get(k) if phase in "BI" else None
        sink = forward.get(k) if phase == "F" else backward.get(k - 1) if phase in "BI" else None
        if source is not None and blocking:
            x.compute.recv(source.channel, source.into, 0)
        if phase == "B" and final[k] == i and runtime.overlap_gradients:
            start, step = _last_backward_by_layer(b, layout, k, x, m)
        else:
            kept, left = [(x.saved[k, m], 0, 1)], [(x.left[k, m], 0, 1)] if x.left else []
            reads, writes = {"F": ([], kept), "B": (kept, []), "I": (kept, left), "W": (kept + left, [])}[phase]
            op = b.op(phase, graph=_graph(x.actor, k), stage=pieces[k][0], microbatch=m, reads=reads, writes=writes)
            start = step = x.compute.compute(op)
        if source is not None and not blocking:
            x.waits.append((start, source, m))
        if phase in "BW":
            b.dies_after(x.saved[k, m], step)
            if x.left:
                b.dies_after(x.left[k, m], step)
            x.last_backward = step
            if phase == "W" and final[k] == i and runtime.overlap_gradients:
                _, first, count = pieces[k]
                x.parts |= dict.fromkeys(range(first, first + count), step)
        if sink is not None:
            if blocking:
                x.compute.send(sink.channel, sink.out, 0)
            else:
                sink.sender.send(sink.channel, sink.out, 0, after=[step])


def _last_backward_by_layer(b: ProgramBuilder, layout: ProfiledLayout, k: int, x: _Stage, m: int) -> tuple[StepRef, StepRef]:
    """The last backward of a piece layer by layer, so that gradients can go as they become final: its first step and its last."""
    stage, first, count = layout.pieces[k]
    for layer in reversed(range(first, first + count)):
        op = b.op("B", graph=f"{x.actor}.{layer}", stage=stage, microbatch=m, reads=[(x.saved[k, m], 0, 1)])
        x.parts[layer] = x.compute.compute(op)
    return x.parts[first + count - 1], x.parts[first]


# ---- gradients ---------------------------------------------------------------------------------------------------------


def _rings(
    profile: LayerProfile, layout: ProfiledLayout, runtime: TrainingRuntime, servers: Servers, s: int, n: int
) -> list[_Ring]:
    """Ring all-reduces of a stage over `n` replicas, bucket by bucket; real messages may be merged into fewer."""
    here, span = layout.data, layout.layers_of(s)
    if here == 1 or not profile.sizes:
        return []
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


def _gradients(b: _Builder, row: Sequence[_Stage], rings: Sequence[_Ring], layers: Sequence[int]) -> list[list[StepRef]]:
    """The rings of a stage with these layers; per replica, the steps its update waits for."""
    done: list[list[StepRef]] = [[] for _ in row]
    if not rings:
        return done
    n = len(row)
    lanes = [(b.lane(x.actor), b.lane(x.actor)) for x in row]
    channels = [b.channel(x.actor, row[(j + 1) % n].actor, depth=2) for j, x in enumerate(row)]
    for ring in rings:
        for j, x in enumerate(row):
            after = [x.parts[layers[-1 - ring.portion]]] if x.parts else [x.last_backward] if x.last_backward else []
            out, into, (sending, receiving) = b.sized(x.actor), b.sized(x.actor), lanes[j]
            step: StepRef | None = None
            for exchange in range(ring.exchanges):
                sending.send(channels[j], out, 0, after=list(after) if exchange % ring.turns == 0 or step is None else [step])
                step = receiving.recv(channels[(j - 1) % n], into, 0)
            done[j] = [sending.last, receiving.last]
    return done
