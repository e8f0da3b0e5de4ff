"""A trace before it has a file format: processes, tracks, slices, flows and counters of one or two timelines of a program.

One process per rank and timeline ("rank 3 · predicted", "rank 3 · measured", next to each other), one track per lane, one slice per
executed step; one process for the links, one track per link. A flow joins the slice of a send with the slice of the receive it
matches. Times start at 0 in every timeline, so that prediction and measurement lie over each other. Slices of one track
never overlap: where a lane has several operations under way (receives posted ahead), the later ones get a track of their own beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...program.program import Kind, Part, Program, Role
from ...timeline import Timeline
from .links import link_slices
from .slices import Counter, Slices, Trace, join, layers, take

__all__ = ["build_trace", "matched_messages", "matched_steps"]

_WORDS = {"simulated": "predicted", "measured": "measured"}
_RANK = re.compile(r"\brank (\d+)$")


def build_trace(program: Program, timelines: Sequence[Timeline], *, title: str = "", counters: bool = True) -> Trace:
    """Everything that the timelines of `program` show, without `counters` no curves. Raises UsageError for a timeline of another program."""
    trace = Trace(title or program.name or "meshwright")
    labels = _labels(timelines)
    step_names = _StepNames(program)
    ranks = sorted({int(r) for t in timelines for r in np.unique(t.spans.rank)})
    process = {(rank, k): trace.process_id(f"rank {rank} · {label}") for rank in ranks for k, label in enumerate(labels)}
    phase_of_step = _phases(timelines)
    parts: list[Slices] = []
    for k, timeline in enumerate(timelines):
        spans = timeline.spans
        if len(spans) and int(spans.step.max()) >= len(program.steps):
            raise UsageError(f"a timeline has step {int(spans.step.max())}, the program has {len(program.steps)}", where=labels[k])
        zero = float(spans.start_s.min()) if len(spans) else 0.0
        lanes = _lane_slices(trace, program, timeline, {rank: process[rank, k] for rank in ranks}, step_names, phase_of_step, zero)
        parts += [lanes, _critical_path(trace, timeline, lanes, labels[k]), link_slices(trace, timeline, labels[k], zero, counters=counters)]
        if counters:
            _counters(trace, timeline, {rank: process[rank, k] for rank in ranks}, labels[k])
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    joined = join(parts)
    order = np.lexsort((joined.start_s, joined.track))
    trace.slices = take(joined, order)
    trace.flows = _flows(program, trace.slices, owner[order], range(0, len(parts), 3))
    return trace


def _labels(timelines: Sequence[Timeline]) -> list[str]:
    words = [_WORDS[t.origin] for t in timelines]
    if len(set(words)) == len(words):
        return words
    return [f"{word} {i + 1} ({t.run_fabric})" for i, (word, t) in enumerate(zip(words, timelines, strict=True))]


def _phases(timelines: Sequence[Timeline]) -> dict[int, str]:
    """Phase of every step that some timeline names one for: a recording has none, the simulation of the same program has."""
    return {step: phase for t in timelines if t.spans.phase for step, phase in zip(t.spans.step.tolist(), t.spans.phase, strict=True)}


# ---- slices ------------------------------------------------------------------------------------------------------------
def _lane_slices(
    trace: Trace, program: Program, timeline: Timeline, process: dict[int, int], step_names: _StepNames, phase_of_step: dict[int, str], zero: float
) -> Slices:  # fmt: skip
    spans = timeline.spans
    order = np.lexsort((spans.end_s, spans.start_s, spans.lane, spans.rank))
    rank, lane, start, end = spans.rank[order], spans.lane[order], spans.start_s[order] - zero, spans.end_s[order] - zero
    end = np.maximum(start, end)
    track = np.zeros(len(order), np.int64)
    change = np.flatnonzero((rank[1:] != rank[:-1]) | (lane[1:] != lane[:-1])) + 1
    bounds = [0, *change.tolist(), len(order)] if len(order) else [0]
    labels = _LaneLabels(program)
    for low, high in pairwise(bounds):
        label = labels[int(lane[low])]
        for layer, members in enumerate(layers(start[low:high], end[low:high])):
            name = label if layer == 0 else f"{label} (also under way, {layer})"
            track[low:high][members] = trace.track_id(process[int(rank[low])], name)
    steps = spans.step[order]
    given = list(spans.name)
    if given:
        names = [trace.name_id(given[i] or step_names[int(s)]) for i, s in zip(order.tolist(), steps.tolist(), strict=True)]
    else:
        known = {int(s): trace.name_id(step_names[int(s)]) for s in np.unique(steps)}
        names = [known[s] for s in steps.tolist()]
    phases = [spans.phase[i] for i in order.tolist()] if spans.phase else [phase_of_step.get(s, "step") for s in steps.tolist()]
    known_phase = {phase: trace.category_id(phase) for phase in dict.fromkeys(phases)}
    categories = [known_phase[phase] for phase in phases]
    return Slices(
        track=track, start_s=start, end_s=end, name=np.array(names, np.int64), category=np.array(categories, np.int64),
        step=steps.astype(np.int64), iteration=spans.iteration[order].astype(np.int64),
    )  # fmt: skip


class _LaneLabels:
    """`lane 3 comm from rank 1 to rank 2`: role, and the only rank that a lane hears from or sends to, of all lanes at once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.role = [Role(r).name.lower() for r in program.lanes.role.tolist()]
        self.heard = _only_peers(program, Part.RECV, Part.IN_SET, program.steps.chan_in, program.channels.src)
        self.told = _only_peers(program, Part.SEND, Part.OUT_SET, program.steps.chan_out, program.channels.dst)

    def __getitem__(self, lane: int) -> str:
        if not 0 <= lane < len(self.role):
            return "outside the program"
        label = f"lane {lane} {self.role[lane]}"
        for arrow, peer in (("from", self.heard[lane]), ("to", self.told[lane])):
            label += f" {arrow} {_actor(self.program, peer)}" if peer >= 0 else ""
        return label


def _only_peers(program: Program, part: Part, in_set: Part, channel: NDArray[np.int32], ends: NDArray[np.int32]) -> list[int]:
    """Of every lane the one actor at the other end of its messages; -1 where there is none, or several."""
    steps, found = program.steps, np.full(len(program.lanes), -1, np.int64)
    rows = np.flatnonzero((steps.parts & part > 0) & (steps.parts & in_set == 0))
    if len(rows):
        lane, peer = program.lane_of_step()[rows], ends[channel[rows]]  # steps stand lane by lane
        first = np.flatnonzero(np.diff(lane, prepend=-1))
        low, high = np.minimum.reduceat(peer, first), np.maximum.reduceat(peer, first)
        found[lane[first]] = np.where(low == high, low, -1)
    only: list[int] = found.tolist()
    return only


def _actor(program: Program, actor: int) -> str:
    return f"rank {actor}" if actor < program.ranks else f"switch {actor - program.ranks}"


class _StepNames:
    """Short names of steps, made once each: `F stage0 micro-batch 3`, `send 2 chunks to rank 1 of act:x:3`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made: dict[int, str] = {-1: "outside the program"}
        steps = program.steps
        columns = (steps.kind, steps.parts, steps.op, steps.chan_in, steps.chan_out, steps.src_buffer, steps.src_chunk, steps.dst_buffer,
                   steps.dst_chunk, steps.count)  # fmt: skip
        _, first, alike = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
        self.like = first[alike.reshape(-1)].tolist()  # steps that say the same are named once

    def __getitem__(self, step: int) -> str:
        like = self.like[step] if step >= 0 else step
        if like not in self.made:
            self.made[like] = self._make(like)
        return self.made[like]

    def _make(self, step: int) -> str:
        program = self.program
        if int(program.steps.kind[step]) == Kind.COMPUTE:
            ops, op = program.ops, int(program.steps.op[step])
            microbatch = int(ops.microbatch[op])
            return f"{ops.name[op]} {ops.graph[op]}".strip() + (f" micro-batch {microbatch}" if microbatch >= 0 else "")
        return program.says(step)


def _critical_path(trace: Trace, timeline: Timeline, lanes: Slices, label: str) -> Slices:
    """The steps that decide the makespan, once more, on one track: each from the end of the one before it, so that they tile the step."""
    # A path has thousands of steps of a timeline's millions.
    mine = np.flatnonzero(np.isin(lanes.step, [step for step, _ in timeline.critical_path]))
    at = dict(zip(zip(lanes.step[mine].tolist(), lanes.iteration[mine].tolist(), strict=True), mine.tolist(), strict=True))
    found = take(lanes, np.array([at[key] for key in timeline.critical_path if key in at], np.int64))
    if not len(found):
        return found
    end = np.maximum.accumulate(found.end_s)
    start = np.minimum(np.maximum(found.start_s, np.concatenate([[0.0], end[:-1]])), end)
    track = np.full(len(found), trace.track_id(trace.process_id(f"critical path · {label}"), "what decides the step's time"))
    category = np.full(len(found), trace.category_id("critical path"))
    return Slices(track=track, start_s=start, end_s=end, name=found.name, category=category, step=found.step, iteration=found.iteration)


def _counters(trace: Trace, timeline: Timeline, process: dict[int, int], label: str) -> None:
    overview = -1
    for name, (time_s, value) in timeline.counters.items():
        found = _RANK.search(name)
        home = process.get(int(found[1])) if found else None
        shown = name
        if found and home is not None:
            shown = name[: found.start()].rstrip().removesuffix(" of").rstrip() or name
        else:
            overview = trace.process_id(f"counters · {label}") if overview < 0 else overview
            home = overview
        unit = "bytes" if "memory" in name else ""
        trace.counters.append(Counter(home, shown, unit, np.asarray(time_s, np.float64), np.asarray(value, np.float64)))


# ---- flows -------------------------------------------------------------------------------------------------------------
def _flows(program: Program, slices: Slices, owner: NDArray[np.int64], parts: Sequence[int]) -> NDArray[np.int64]:
    """(sending slice, receiving slice) pairs within each timeline: the j-th send on a channel matches the j-th receive."""
    send, receive = matched_steps(program)
    found = []
    width = int(slices.iteration.max(initial=0)) + 1
    for part in parts:
        mine = np.flatnonzero((owner == part) & (slices.step >= 0))
        keys = slices.step[mine] * width + slices.iteration[mine]
        order = np.argsort(keys, kind="stable")
        keys, mine = keys[order], mine[order]
        for iteration in range(width if len(keys) else 0):
            from_slice, sent = _find(keys, send * width + iteration)
            to_slice, received = _find(keys, receive * width + iteration)
            both = sent & received
            found.append(np.stack([mine[from_slice[both]], mine[to_slice[both]]], axis=1))
    return np.concatenate(found) if found else np.zeros((0, 2), np.int64)


def _find(keys: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Places of `wanted` in sorted `keys`, and whether they are there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return at, keys[at] == wanted


def matched_steps(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Steps that send and the steps that receive the same message of an iteration."""
    send, receive, _ = matched_messages(program)
    return send, receive


def matched_messages(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per message of an iteration: the step that sends it, the step that receives it, its channel."""
    s = program.steps
    ends = []
    for part, set_part, channel in ((Part.SEND, Part.OUT_SET, s.chan_out), (Part.RECV, Part.IN_SET, s.chan_in)):
        active = (s.kind == Kind.TRANSFER) & (s.parts & part > 0)
        plain = np.flatnonzero(active & (s.parts & set_part == 0))
        several = np.flatnonzero(active & (s.parts & set_part > 0))
        members = [program.channels.sets[int(channel[i])] for i in several]
        steps = np.concatenate([plain, np.repeat(several, [len(m) for m in members])]).astype(np.int64)
        channels = np.concatenate([channel[plain], *members]).astype(np.int64)
        order = np.lexsort((steps, channels))
        steps, channels = steps[order], channels[order]
        position = np.arange(len(steps)) - np.searchsorted(channels, channels)
        ends.append((steps, channels * (len(s) + 1) + position))
    (send, send_key), (receive, receive_key) = ends
    key, i, j = np.intersect1d(send_key, receive_key, assume_unique=True, return_indices=True)
    return send[i], receive[j], key // (len(s) + 1)
