"""How long a program takes as this executor runs it, which is not quite how its lanes would run.

Four things differ. One thread per rank takes in messages in the fused order, so their overheads add up: the simulator gets the walk, one lane of
everything but sends per rank, and a lane of sends per channel (posting is all a send costs the walk). Ranks that share a machine share its cores:
overheads grow by ranks per core. Several TCP flows on one link lose part of it, measured on shaped links: queues overflow, flows take turns
unevenly; so the rate of a link falls with the number of pairs of ranks that talk across it. And gloo sends a message only once its receiver has
answered that there is a place for it. Receives are posted ahead, so the answer is there in time, but for the first messages of a
call: over 5 ms they take 10. Where an answer takes long, it is a message of the walk (`with_answers`).

Sources: fabricrun card, section 3.3 (three owners behind one slow link are 10 to 60 % slower than one; four pairs across a trunk);
`benchmarks/predicted.py` fits the figures.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...cost import Cost, Transport, assumed_cost
from ...fabric.fabric import Fabric
from ...program.builder import LaneBuilder, ProgramBuilder, StepRef
from ...program.program import Kind, Part, Program
from ...simulate import compile_network, simulate_program
from ...simulate.pricing import durations
from ..executor.lanes import channel_messages
from .rank_code import F64, MAX_ELEMENTS_AHEAD, Form, form_of, posted_depth

__all__ = [
    "MAX_SIMULATED_STEPS", "WALKS", "Walked", "executor_transport", "flows_on_links", "late_time_s", "on_the_wire", "predicted_time_s",
    "quickest_walk", "slowed_by_flows", "slowly_answered", "timed_form", "walk_program", "walked", "with_headers",
]  # fmt: skip

WALKS = ("depth", "simulated")

# Fitted on the fabrics that `benchmarks/predicted.py` fits on.
PER_MESSAGE_S = 1e-4  # of processor time at either end of a message, on a core of its own
PER_BYTE_S = 1e-9  # of processor time for each byte of a message at either end
RATE_LOSS_SHARE_PER_FLOW = 0.005  # of a link's rate, lost for every pair of ranks beyond the first that talks across it

WIRE_OVERHEAD_BYTES = 256  # that a message adds on the wire: gloo's header, what announces it and what allows it, each a small packet of its own
MAX_RATE_LOSS_SHARE = 0.3  # of a link's rate, however many pairs share it: a line fitted on a few flows must not end at no rate at all
MAX_SIMULATED_STEPS = 60_000  # executed steps of all ranks: a larger program is walked without simulated times, and `choose` does not predict it
LATE_SHARE = 0.05  # of the messages find their rank without a core; chosen so that walks of a DGX-1 in the lab fall in their measured order
LATE_S = 3e-3  # that such a message waits on average: a time slice of the scheduler
LATE_SIMULATIONS = 3  # whose mean is taken, each with other messages late
MIN_ANSWER_S = PER_MESSAGE_S  # that a receiver's answer is on the way: less is lost in what a message costs the processors
MIN_FLOW_SHARE = 0.05  # of the bytes of a link's busiest pair: a pair that sends less is not counted as a flow


def executor_transport(fabric: Fabric, ranks_per_core: float = 1.0) -> Transport:
    """Overheads of messages, where so many ranks share each core of a machine."""
    assumed, times = assumed_cost(fabric).transport, max(1.0, ranks_per_core)
    return Transport(per_message_s=PER_MESSAGE_S * times, per_byte_s=PER_BYTE_S * times, per_step_s=assumed.per_step_s * times)


def walk_program(form: Form, answered: Container[int] = (), sized: Program | None = None) -> Program:
    """The program of the walks, for prediction only: what is sent from staging is read where the sum would have been stored.

    sized: the unrolled program at the size that is predicted, which says how many receives are posted ahead; the form's own unless given.
    answered: channels whose messages wait for an answer of the receiver, that it has posted the receive: one of no bytes, on a channel the other way.
    """
    p = form.unrolled
    s = p.steps
    b = ProgramBuilder(ranks=p.ranks, name=p.name)
    for i, actor in enumerate(p.buffers.actor.tolist()):
        b.buffer(actor, chunks=int(p.buffers.chunks[i]), chunk_bytes=int(p.buffers.chunk_bytes[i]))
    depths = _posted_depths(sized or p)
    for src, dst, depth in zip(p.channels.src.tolist(), p.channels.dst.tolist(), depths, strict=True):
        b.channel(src, dst, depth=depth)
    answers = {c: _Answers(b, p, c, depths[c]) for c in range(len(p.channels)) if c in answered}
    columns = (s.kind, s.parts, s.chan_in, s.chan_out, s.src_buffer, s.src_chunk, s.dst_buffer, s.dst_chunk, s.count)
    kind, parts, chan_in, chan_out, src_buffer, src_chunk, dst_buffer, dst_chunk, count = (c.tolist() for c in columns)
    sending = Part.SEND | Part.OUT_SET
    for rank, order in enumerate(form.orders):
        main = b.lane(rank)
        outgoing: dict[int, LaneBuilder] = {}
        before: list[StepRef] = []
        for step in order.tolist():
            if kind[step] != Kind.TRANSFER:
                continue
            held = parts[step]
            src, dst = (src_buffer[step], src_chunk[step]), (dst_buffer[step], dst_chunk[step])
            if held & ~(sending | Part.READ):
                stores = bool(held & Part.STORE)
                into = dst if stores else src if held & Part.READ else dst
                ref = main.transfer(
                    recv=chan_in[step] if held & Part.RECV else -1, src=src if held & Part.READ else (-1, 0), dst=into, count=count[step],
                    add=bool(held & Part.ADD), store=True,
                )  # fmt: skip
                before, src = [ref], into
                if held & Part.RECV and chan_in[step] in answers:
                    answers[chan_in[step]].takes.append(ref)
            if held & Part.SEND:
                out = outgoing.setdefault(chan_out[step], b.lane(rank)) if chan_out[step] not in outgoing else outgoing[chan_out[step]]
                if chan_out[step] in answers:
                    answers[chan_out[step]].awaited(out)
                out.send(chan_out[step], *src, count[step], after=before)
    for channel in answers.values():
        channel.give(b)
    return b.build()


def _posted_depths(program: Program) -> list[int]:
    """By channel, as the ranks' code posts receives of numbers of 4 bytes."""
    size_bytes = program.message_bytes()
    sizes = [size_bytes[sends].astype(np.int64).tolist() for sends in channel_messages(program)[0]]
    return [posted_depth(x, depth, 4 * MAX_ELEMENTS_AHEAD) for x, depth in zip(sizes, program.channels.depth.tolist(), strict=True)]


class _Answers:
    """Of the receiver of one channel: a message may come once it has been answered, the first `depth` of them when the call begins."""

    def __init__(self, b: ProgramBuilder, program: Program, channel: int, depth: int) -> None:
        self.receiver, self.depth = int(program.channels.dst[channel]), depth
        sender = int(program.channels.src[channel])
        self.here, self.there = (b.buffer(rank, chunks=1, chunk_bytes=0) for rank in (self.receiver, sender))
        messages = int(np.count_nonzero((program.steps.chan_out == channel) & ((program.steps.parts & Part.SEND) != 0)))
        self.channel = b.channel(self.receiver, sender, depth=max(1, messages))
        self.messages = messages
        self.takes: list[StepRef] = []

    def awaited(self, lane: LaneBuilder) -> None:
        lane.recv(self.channel, self.there, 0)

    def give(self, b: ProgramBuilder) -> None:
        lane = b.lane(self.receiver)
        for number in range(self.messages):
            lane.send(self.channel, self.here, 0, after=self.takes[number - self.depth : number - self.depth + 1] if number >= self.depth else ())


def slowly_answered(program: Program, fabric: Fabric, ranks: Sequence[str]) -> set[int]:
    """Channels whose way back takes MIN_ANSWER_S and more. Raises: Disconnected."""
    actors = [fabric.actor_of[name] for name in ranks]
    ends = list(zip(program.channels.src.tolist(), program.channels.dst.tolist(), strict=True))
    slow = {(src, dst) for src, dst in set(ends) if fabric.message_costs(actors[dst], actors[src])[0] >= MIN_ANSWER_S}
    return {channel for channel, pair in enumerate(ends) if pair in slow}


def flows_on_links(program: Program, fabric: Fabric, ranks: Sequence[str]) -> np.ndarray:
    """By link: how many ordered pairs of ranks send a fair part of what crosses it."""
    network = compile_network(program, fabric, tuple(ranks))
    s = program.steps
    sends = (s.parts & Part.SEND) != 0
    moved = np.bincount(s.chan_out[sends], weights=program.message_bytes()[sends].astype(float), minlength=len(program.channels))
    pair = program.channels.src.astype(np.int64) * program.ranks + program.channels.dst
    hops = np.diff(network.route_ptr)
    link, owner = network.route_link, np.repeat(np.arange(len(pair)), hops)
    flows = np.zeros(len(fabric.links), np.int64)
    for number in np.unique(link).tolist():
        on = owner[link == number]
        by_pair = np.bincount(pair[on], weights=moved[on])
        flows[number] = int((by_pair > MIN_FLOW_SHARE * by_pair.max(initial=0.0)).sum())
    return flows


def slowed_by_flows(fabric: Fabric, flows: np.ndarray, loss_per_flow: float = RATE_LOSS_SHARE_PER_FLOW) -> Fabric:
    """`flows`: by link, of `flows_on_links`."""
    share = 1 - np.minimum(loss_per_flow * np.maximum(flows - 1, 0), MAX_RATE_LOSS_SHARE)
    return replace(fabric, links=tuple(replace(x, rate_Bps=max(1, int(x.rate_Bps * f))) for x, f in zip(fabric.links, share.tolist(), strict=True)))


def at_size(program: Program, size_bytes: int) -> Program:
    """The unrolled program with chunks that fit a message of another size."""
    contract = program.contract or next(iter(program.contracts), None)
    rows = (*contract.inputs, *contract.outputs) if contract is not None else ()
    most = max((count for _, _, count in rows), default=int(program.buffers.chunks.max()))
    chunk = max(1, -(-size_bytes // max(most, 1)))
    return replace(program, buffers=replace(program.buffers, chunk_bytes=np.where(program.buffers.chunk_bytes > 0, chunk, 0)))


def with_headers(program: Program) -> Program:
    """Chunks so much longer that a message of usual length takes what it takes on the wire."""
    sends = ((program.steps.parts & Part.SEND) != 0) & (program.message_bytes() > 0)
    usual = float(program.steps.count[sends].mean()) if sends.any() else 1.0
    longer = program.buffers.chunk_bytes + int(np.ceil(WIRE_OVERHEAD_BYTES / max(usual, 1.0))) * (program.buffers.chunk_bytes > 0)
    return replace(program, buffers=replace(program.buffers, chunk_bytes=longer.astype(np.int64)))


def timed_form(program: Program, fabric: Fabric | None, ranks: Sequence[str]) -> Form:
    """The form whose walks follow a simulation of the lanes, where it is quick enough. Raises: as `form_of` and `simulate_program`."""

    def times(unrolled: Program) -> tuple[F64, F64]:
        assert fabric is not None
        spans = simulate_program(unrolled, fabric, tuple(ranks), assumed_cost(fabric), memory=False).spans
        known = spans.step >= 0
        start_s, end_s = np.zeros(len(unrolled.steps)), np.zeros(len(unrolled.steps))
        start_s[spans.step[known]], end_s[spans.step[known]] = spans.start_s[known], spans.end_s[known]
        return start_s, end_s

    return form_of(program, times if fabric is not None and program.executed_steps <= MAX_SIMULATED_STEPS else None)


def walked(program: Program, fabric: Fabric | None, ranks: Sequence[str], walk: str) -> Form:
    """`walk`: which order the walks prefer, one of WALKS. Raises: as `form_of` and `simulate_program`."""
    return timed_form(program, fabric, ranks) if walk == "simulated" else form_of(program)


@dataclass(frozen=True)
class Walked:
    """A walk with its predicted time, and the time it is judged by: that which it takes when some messages find their rank without a core."""

    walk: str
    time_s: float
    judged_s: float


def quickest_walk(program: Program, fabric: Fabric, ranks: Sequence[str], transport: Transport, *, shared: bool) -> Walked:
    """The order that is judged to be walked fastest. Neither is better in general: simulated times know the rates, but not that one thread handles
    all messages of a rank, and the more closely an order follows them the more it loses by one late message. `shared`: ranks share cores.

    Raises: as `walked` and `predicted_time_s`.
    """
    found = []
    for walk in WALKS:
        form = walked(program, fabric, ranks, walk)
        time_s = predicted_time_s(form, fabric, ranks, transport)
        found.append(Walked(walk, time_s, late_time_s(form, fabric, ranks, transport) if shared else time_s))
    return min(found, key=lambda w: w.judged_s)


def on_the_wire(form: Form, fabric: Fabric, ranks: Sequence[str], size_bytes: int | None = None) -> Program:
    """The walks with what messages take on the wire, for the planned or another size. Raises: Disconnected."""
    sized = form.unrolled if size_bytes is None else at_size(form.unrolled, size_bytes)
    walks = walk_program(form, slowly_answered(form.unrolled, fabric, ranks), sized)
    return with_headers(walks if size_bytes is None else at_size(walks, size_bytes))


def predicted_time_s(form: Form, fabric: Fabric, ranks: Sequence[str], transport: Transport, size_bytes: int | None = None) -> float:
    """Simulated time of the walks on links slowed by their flows, for the planned or another size. Raises: as `simulate_program`."""
    walks = on_the_wire(form, fabric, ranks, size_bytes)
    slowed = slowed_by_flows(fabric, flows_on_links(walks, fabric, ranks))
    return simulate_program(walks, slowed, tuple(ranks), Cost(transport=transport), record=False, memory=False).makespan_s


def late_time_s(form: Form, fabric: Fabric, ranks: Sequence[str], transport: Transport) -> float:
    """The mean of LATE_SIMULATIONS predictions in which LATE_SHARE of the messages, drawn with fixed seeds, wait for their rank's core.

    A walk with slack loses little. One whose messages all wait for each other loses the whole of every delay: on GPUs 0 to 4 of a DGX-1 in the lab,
    five ranks on two cores, 8 MiB in the order of simulated times was predicted to take 1.42 s and took 1.6 to 2.1, by depth 1.47 and 1.50.
    Raises: as `simulate_program`.
    """
    walks = on_the_wire(form, fabric, ranks)
    slowed = slowed_by_flows(fabric, flows_on_links(walks, fabric, ranks))
    usual_s = durations(walks, Cost(transport=transport), slowed, ranks)
    taken = np.flatnonzero((walks.steps.parts & Part.RECV) != 0)
    times = []
    for seed in range(LATE_SIMULATIONS):
        random, time_s = np.random.default_rng(seed), usual_s.copy()
        late = taken[random.random(len(taken)) < LATE_SHARE]
        time_s[late] += random.exponential(LATE_S, len(late))
        times.append(simulate_program(walks, slowed, tuple(ranks), durations_s=time_s, record=False, memory=False).makespan_s)
    return float(np.mean(times))
