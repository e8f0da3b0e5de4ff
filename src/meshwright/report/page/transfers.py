"""Messages of a simulated program for stepping through them: who sends which chunks to whom over which links, and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...fabric.fabric import Fabric
from ...io.trace.slices import Slices, Trace
from ...program.program import Part, Program
from ...simulate import compile_network

__all__ = ["MAX_MESSAGES", "Transfers", "transfers"]

I64 = NDArray[np.int64]
MAX_MESSAGES = 30_000  # drawn one by one; the sums count all


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Columns in order of arrival. `start`: when it enters its first link, `end`: when the receiving step has the data, both in ticks.

    `route` indexes `routes`, lists of link numbers (empty: not known, of a folded program). `received_bytes[actor]` is of all messages,
    also of those beyond MAX_MESSAGES.
    """

    src: I64
    dst: I64
    start: I64
    end: I64
    size_bytes: NDArray[np.float64]
    what: I64
    category: I64
    route: I64
    whats: Sequence[str]
    routes: Sequence[tuple[int, ...]]
    received_bytes: Sequence[int]
    received: Sequence[int]
    left_out: int


def transfers(
    program: Program, trace: Trace, category: I64, fabric: Fabric, placement: Sequence[str], tick_s: float, *, most: int = MAX_MESSAGES
) -> Transfers:
    """Of the trace's first timeline; `category` is per slice of the trace."""
    slices = trace.slices
    who = np.array([trace.tracks[t].process for t in range(len(trace.tracks))] or [0])[slices.track]
    predicted = np.array([p.endswith(("predicted", "predicted 1")) or " predicted 1 " in p for p in trace.processes] or [False])[who]
    send, receive = trace.flows[:, 0], trace.flows[:, 1]
    mine = predicted[send] & predicted[receive]
    send, receive = send[mine], receive[mine]
    order = np.lexsort((slices.step[receive], slices.start_s[send], slices.end_s[receive]))
    send, receive = send[order], receive[order]
    actor = program.lanes.actor[program.lane_of_step()]
    src, dst = actor[slices.step[send]].astype(np.int64), actor[slices.step[receive]].astype(np.int64)
    size = program.message_bytes()[slices.step[send]]
    actors = program.ranks + program.switches
    received_bytes = np.bincount(dst, weights=size, minlength=actors)
    received = np.bincount(dst, minlength=actors)
    left_out = max(len(send) - most, 0)
    send, receive, src, dst, size = send[:most], receive[:most], src[:most], dst[:most], size[:most]
    begin_s = _entered(slices, np.array([p.startswith("links") for p in trace.processes] or [False])[who], send)
    whats: dict[str, int] = {}
    pairs = zip(slices.step[send].tolist(), slices.step[receive].tolist(), strict=True)
    what = np.array([whats.setdefault(_what(program, a, b), len(whats)) for a, b in pairs])
    route, routes = _routes(program, fabric, placement, slices.step[send], slices.step[receive])
    return Transfers(
        src=src, dst=dst, start=np.rint(begin_s / tick_s).astype(np.int64), end=np.rint(slices.end_s[receive] / tick_s).astype(np.int64),
        size_bytes=size.astype(np.float64), what=what.astype(np.int64), category=category[send], route=route, whats=list(whats), routes=routes,
        received_bytes=[int(x) for x in received_bytes], received=[int(x) for x in received], left_out=left_out,
    )  # fmt: skip


def _entered(slices: Slices, on_link: NDArray[np.bool_], send: I64) -> NDArray[np.float64]:
    """When each message enters its first link; where nothing says, when its sending step begins. A step that receives first begins earlier."""
    width = int(slices.iteration.max(initial=0)) + 1
    rows = np.flatnonzero(on_link & (slices.step >= 0))
    keys = slices.step[rows] * width + slices.iteration[rows]
    order = np.lexsort((slices.start_s[rows], keys))
    known, first = np.unique(keys[order], return_index=True)
    wanted = slices.step[send] * width + slices.iteration[send]
    if not len(known):
        return slices.start_s[send]
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, slices.start_s[rows][order][first[at]], slices.start_s[send])


def _what(program: Program, send: int, receive: int) -> str:
    """`input[4..7] into output[4..7]`: which chunks of which buffer, and where they go."""
    s = program.steps
    chunks = int(s.count[send])
    source = _chunks(program, int(s.src_buffer[send]), int(s.src_chunk[send]), chunks) or "what it received"
    target = _chunks(program, int(s.dst_buffer[receive]), int(s.dst_chunk[receive]), chunks)
    verb = "added into" if s.parts[receive] & Part.ADD else "into"
    return f"{source} {verb} {target}" if target else f"{source}, sent on"


def _chunks(program: Program, buffer: int, chunk: int, count: int) -> str:
    if buffer < 0:
        return ""
    return f"{program.buffer_name(buffer)}[{chunk}]" if count == 1 else f"{program.buffer_name(buffer)}[{chunk}..{chunk + count - 1}]"


def _routes(
    program: Program, fabric: Fabric, placement: Sequence[str], send: I64, receive: I64
) -> tuple[I64, list[tuple[int, ...]]]:  # fmt: skip
    """The route of every message: its channel's. A message of a channel set has the channel at the end that is not a set."""
    if program.fold is not None or not len(send):
        return np.zeros(len(send), np.int64), [()]
    network, s = compile_network(program, fabric, placement), program.steps
    in_set, out_set = (s.parts[receive] & Part.IN_SET) > 0, (s.parts[send] & Part.OUT_SET) > 0
    channel = np.where(in_set, np.where(out_set, -1, s.chan_out[send]), s.chan_in[receive])
    numbers: dict[tuple[int, ...], int] = {(): 0}
    of_channel = {-1: 0}
    for c in np.unique(channel[channel >= 0]).tolist():
        path = tuple(network.route_link[network.route_ptr[c] : network.route_ptr[c + 1]].tolist())
        of_channel[c] = numbers.setdefault(path, len(numbers))
    return np.array([of_channel[c] for c in channel.tolist()], np.int64), list(numbers)
