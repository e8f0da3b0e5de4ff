"""Messages of a folded program that lead to other members, outside of calls: both ends as the representatives have them.

A stored channel has one sender, at a representative, and one receiver, stored at the representative of its destination, which gets the image of what
is sent. The j-th receipt takes the j-th message, as everywhere; a message waits for room until the one `depth` before it is taken. Filled rows
of experts' buffers, whose sizes are symbols, are packed by the sender too, so both ends hold them beside the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import FormatError, Unsupported
from ...program.fold import coordinates, representative, require_folded
from ...program.program import Part, Program
from ...program.tables import Steps
from ..program.staging import PACKED

__all__ = ["End", "Ends", "ends_of", "linked", "linked_by"]

SENDS = (int(Part.READ | Part.SEND),)
TAKES = (int(Part.RECV | Part.STORE), int(Part.RECV | Part.READ | Part.ADD | Part.STORE))
Ints = np.ndarray[Any, Any]


class End(NamedTuple):
    """A step at one end of a channel; `place`: (buffer, chunk, count) that it reads, or writes; `adds`: to what is there; `by`: the receiver's offset
    from the sender along the folded axes; `size`: its symbol for the size, or -1."""

    step: int
    channel: int
    sends: bool
    place: tuple[int, int, int]
    adds: bool
    by: tuple[int, ...]
    size: int


class Ends(NamedTuple):
    """`pairs`: (send, receipt) of every message, `rooms`: (receipt, send that needs its room); `staging_bytes`: per actor."""

    ends: tuple[End, ...]
    pairs: tuple[tuple[int, int], ...]
    rooms: tuple[tuple[int, int], ...]
    staging_bytes: Ints


def ends_of(p: Program) -> Ends:
    """Raises: FormatError where the ends of a channel do not match, Unsupported where a step does more than send from, or receive into, a buffer."""
    fold, s, c = require_folded(p), p.steps, p.channels
    offsets, home = coordinates(fold, c.dst), representative(fold, c.dst)
    away: Ints = np.asarray(offsets.any(axis=1))
    staging = np.zeros(p.ranks + p.switches, np.int64)
    found: list[End] = []
    at: dict[tuple[int, bool], list[int]] = {}
    lane, sizes = p.lane_of_step(), p.message_bytes("upper") if away.any() else np.zeros(0)
    steps = np.flatnonzero(_of(s.chan_in, away) | _of(s.chan_out, away))
    of_step = ("parts", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "count", "size", "chan_in", "chan_out")
    columns = zip(steps.tolist(), p.lanes.actor[lane[steps]].tolist(), *(getattr(s, name)[steps].tolist() for name in of_step), strict=True)
    owner, source, target, by = p.buffers.actor.tolist(), c.src.tolist(), home.tolist(), [tuple(row) for row in offsets.tolist()]
    packed = [name.startswith(PACKED) for name in p.sizes.name]
    for step, actor, parts, src_buffer, src_chunk, dst_buffer, dst_chunk, count, size, chan_in, chan_out in columns:
        sends = parts in SENDS
        adds = parts == TAKES[1]
        alike = (src_buffer, src_chunk) == (dst_buffer, dst_chunk)
        if not (sends or parts == TAKES[0] or (adds and alike)) or (size >= 0 and not packed[size]):
            text = "a message to another member that is passed on, added elsewhere or of unknown size is not proved folded"
            raise Unsupported(text, where=p.describe(step))
        channel = chan_out if sends else chan_in
        if actor != (source if sends else target)[channel]:
            raise FormatError("is not at the end of its channel", where=p.describe(step))
        place = (src_buffer, src_chunk, count) if sends else (dst_buffer, dst_chunk, count)
        if owner[place[0]] != actor:
            raise FormatError("uses a buffer of another rank", where=p.describe(step))
        found.append(End(step, channel, sends, place, adds, by[channel], size))
        at.setdefault((channel, sends), []).append(step)
    pairs, rooms = list[tuple[int, int]](), list[tuple[int, int]]()
    for channel in sorted({channel for channel, _ in at}):
        out, into, depth = at.get((channel, True), []), at.get((channel, False), []), int(c.depth[channel])
        one_lane = len(np.unique(lane[out])) < 2 and len(np.unique(lane[into])) < 2
        if not one_lane or len(out) != len(into) or np.any(sizes[out] != sizes[into]) or np.any(s.size[out] != s.size[into]):
            raise FormatError(f"channel {channel} has {len(out)} messages and {len(into)} receipts that do not match", where=p.name)
        pairs += zip(out, into, strict=True)
        rooms += zip(into, out[depth:], strict=False)
        staging[home[channel]] += depth * int(sizes[into].max())
        staging[c.src[channel]] += depth * int(sizes[out][s.size[out] >= 0].max(initial=0))
    return Ends(tuple(found), tuple(pairs), tuple(rooms), staging)


def _of(channel: Ints, away: Ints) -> Ints:
    return np.append(away, False)[channel]


def linked(p: Program, number: dict[int, int], ends: Ends) -> Program:
    """`p` with the waits between the ends of messages; `number`: of their steps in `p`."""
    return linked_by(p, [(number[a], number[b]) for a, b in (*ends.pairs, *ends.rooms)])


def linked_by(p: Program, edges: Sequence[tuple[int, int]]) -> Program:
    """`p` with more waits: (step, the step that waits for it)."""
    if not edges:
        return p
    s, n = p.steps, len(p.steps)
    owner = np.concatenate([np.repeat(np.arange(n), np.diff(s.after_ptr)), [b for _, b in edges]])
    after = np.concatenate([s.after_step, [a for a, _ in edges]])
    lag = np.concatenate([s.after_lag, np.zeros(len(edges), s.after_lag.dtype)])
    by = np.argsort(owner, kind="stable")
    ptr = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=n))])
    steps: Steps = replace(s, after_ptr=ptr.astype(np.int32), after_step=after[by].astype(np.int32), after_lag=lag[by])
    return replace(p, steps=steps)
