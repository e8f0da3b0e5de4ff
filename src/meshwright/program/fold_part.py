"""Some lanes of some members of a folded program, as a plain program with the buffers of all ranks.

A checker that cannot hold the whole plain form looks at it part by part. Everything is as `program.fold.expand` defines it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import Unsupported
from .fold import coordinates, folded_axes, image, members, require_folded
from .program import Fold, Part, Program
from .tables import I32, Buffers, Channels, Csr, Lanes, Steps

__all__ = ["Lifted", "part"]

Ints = NDArray[np.int64]


class Lifted:
    """A folded program's lanes as nodes (stored lane, member number), and which of them belong together.

    Raises: FormatError, Unsupported (calls, channel sets, aliases or computing steps: no collective has them).
    """

    def __init__(self, program: Program) -> None:
        p, self.program = program, program
        self.fold: Fold = require_folded(p)
        sets = np.any(p.steps.parts & (Part.IN_SET | Part.OUT_SET))
        if len(p.calls) or len(p.ops) or len(p.sizes) or sets or np.any(p.buffers.alias_of >= 0) or np.any(p.channels.route >= 0):
            raise Unsupported("a folded program with more than plain transfers cannot be taken in parts", where=p.name, hint="expand it")
        self.everyone = members(self.fold)
        self.number = {m: i for i, m in enumerate(self.everyone)}
        self.axes = folded_axes(self.fold)
        lane_of = p.lane_of_step()
        c = len(p.channels)
        self.sender, self.receiver = np.full(c, -1, np.int64), np.full(c, -1, np.int64)
        for column, flag, table in ((p.steps.chan_out, Part.SEND, self.sender), (p.steps.chan_in, Part.RECV, self.receiver)):
            at = np.flatnonzero((p.steps.parts & flag) != 0)
            table[column[at]] = lane_of[at]
        self.leads = coordinates(self.fold, p.channels.dst)
        owner = np.repeat(np.arange(len(p.steps)), np.diff(p.steps.after_ptr))
        joined = np.unique(np.stack([lane_of[owner], lane_of[p.steps.after_step]]), axis=1) if len(owner) else np.zeros((2, 0), np.int64)
        self.near: list[list[tuple[int, int, int]]] = [[] for _ in range(len(p.lanes))]  # (other lane, channel or -1, +1 | -1)
        for a, b in joined.T.tolist():
            self.near[a].append((b, -1, 0))
            self.near[b].append((a, -1, 0))
        for channel in np.flatnonzero((self.sender >= 0) & (self.receiver >= 0)).tolist():
            a, b = int(self.sender[channel]), int(self.receiver[channel])
            self.near[a].append((b, channel, 1))
            self.near[b].append((a, channel, -1))

    def moved(self, member: int, channel: int, way: int) -> int:
        """The member that a channel of `member` leads to (way 1), or whose channel leads to it (-1)."""
        here, by = self.everyone[member], self.leads[channel].tolist()
        return self.number[
            tuple(h ^ b if axis.kind == "xor" else (h + way * b) % axis.size for axis, h, b in zip(self.axes, here, by, strict=True))
        ]

    def component(self, lane: int, most: int) -> list[tuple[int, int]] | None:
        """All nodes tied to (lane, member 0) by channels and waits, sorted; None when they are more than `most`."""
        seen = {(lane, 0)}
        todo = [(lane, 0)]
        while todo:
            here, member = todo.pop()
            for other, channel, way in self.near[here]:
                # waits stay within a member; a channel leads from its member to another, a fixed step along every axis
                node = (other, member if channel < 0 else self.moved(member, channel, way))
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
                    if len(seen) > most:
                        return None
        return sorted(seen)


def part(lifted: Lifted, nodes: list[tuple[int, int]]) -> Program:
    """The plain program of these nodes. All lanes tied to a node must be among them; buffers are those of the whole plain form.

    Raises: Unsupported (a range of chunks wraps around, or ranks stay where they are).
    """
    p, fold = lifted.program, lifted.fold
    if fold.fixed:
        raise Unsupported("lanes that hang together are not written out where ranks stay", where=p.name)
    lane = np.array([node[0] for node in nodes], np.int64)
    member = np.array([node[1] for node in nodes], np.int64)
    width = (p.lanes.end - p.lanes.start).astype(np.int64)[lane]
    end = np.cumsum(width)
    start = end - width
    step = np.arange(int(end[-1])) - np.repeat(start, width) + np.repeat(p.lanes.start.astype(np.int64)[lane], width)
    step_member = np.repeat(member, width)
    s = p.steps
    new_start = {node: int(at) for node, at in zip(nodes, start.tolist(), strict=True)}
    lane_of = p.lane_of_step().astype(np.int64)
    ptr_width = np.diff(s.after_ptr).astype(np.int64)[step]
    first_edge = np.repeat(s.after_ptr[step].astype(np.int64), ptr_width)
    at = np.arange(int(ptr_width.sum())) - np.repeat(np.cumsum(ptr_width) - ptr_width, ptr_width) + first_edge
    target, edge_member = s.after_step[at].astype(np.int64), np.repeat(step_member, ptr_width)
    base = np.array([new_start[x] for x in zip(lane_of[target].tolist(), edge_member.tolist(), strict=True)], np.int64)
    columns = {name: getattr(s, name)[step] for name in ("kind", "parts", "op", "count", "size")}
    chan = {name: _channels(lifted, getattr(s, name)[step], step_member, way) for name, way in (("chan_in", -1), ("chan_out", 0))}
    used = np.unique(np.concatenate([x[x >= 0] for x in chan.values()]))
    for name, key in chan.items():
        columns[name] = np.where(key >= 0, np.searchsorted(used, key), -1).astype(np.int32)
    b, n, k = p.buffers, len(p.buffers), len(lifted.everyone)
    offset = np.array(lifted.everyone, np.int64).reshape(k, -1) @ fold.buffer_shift.astype(np.int64)
    for side in ("src", "dst"):
        buffer, chunk = getattr(s, f"{side}_buffer")[step].astype(np.int64), getattr(s, f"{side}_chunk")[step].astype(np.int64)
        held = buffer >= 0
        total = np.maximum(b.chunks[np.maximum(buffer, 0)].astype(np.int64), 1)
        apart = held & (columns["count"] < total)
        chunk = np.where(apart, (chunk + offset[step_member, np.maximum(buffer, 0)]) % total, chunk)
        if np.any(held & (chunk + columns["count"] > total)):
            raise Unsupported("a shifted range of chunks wraps around", where=p.name)
        columns[f"{side}_buffer"] = np.where(held, buffer + step_member * n, -1).astype(np.int32)
        columns[f"{side}_chunk"] = chunk.astype(np.int32)
    after_ptr = np.concatenate([[0], np.cumsum(ptr_width)]).astype(np.int32)
    after_step = (base + target - p.lanes.start[lane_of[target]]).astype(np.int32)
    steps = Steps(after_ptr=after_ptr, after_step=after_step, after_lag=s.after_lag[at], **columns)
    actor = np.array([int(image(fold, int(p.lanes.actor[x]), lifted.everyone[m])) for x, m in nodes], np.int32)
    lanes = Lanes(
        actor=actor, unit=p.lanes.unit[lane], repeat=p.lanes.repeat[lane], role=p.lanes.role[lane], start=start.astype(np.int32),
        end=end.astype(np.int32),
    )  # fmt: skip
    return replace(p, lanes=lanes, steps=steps, channels=_used_channels(lifted, used), buffers=_buffers(lifted), fold=None)


def _channels(lifted: Lifted, channel: I32, member: Ints, way: int) -> Ints:
    """channel * members + the member at whose image it starts; -1 unused."""
    k = len(lifted.everyone)
    out = np.full(len(channel), -1, np.int64)
    has = channel >= 0
    if way:
        pairs = np.unique(np.stack([channel[has].astype(np.int64), member[has]]), axis=1)
        table = {(c, m): lifted.moved(m, c, way) for c, m in pairs.T.tolist()}
        origin = np.array([table[x] for x in zip(channel[has].tolist(), member[has].tolist(), strict=True)], np.int64)
    else:
        origin = member[has]
    out[has] = channel[has].astype(np.int64) * k + origin
    return out


def _used_channels(lifted: Lifted, used: Ints) -> Channels:
    c, k, fold = lifted.program.channels, len(lifted.everyone), lifted.fold
    which, member = used // k, used % k
    rows = [(x, lifted.everyone[m]) for x, m in zip(which.tolist(), member.tolist(), strict=True)]
    ends = [np.array([int(image(fold, int(column[x]), m)) for x, m in rows], np.int32) for column in (c.src, c.dst)]
    return replace(c, src=ends[0], dst=ends[1], tag=c.tag[which], depth=c.depth[which], route=c.route[which])


def _buffers(lifted: Lifted) -> Buffers:
    b, k = lifted.program.buffers, len(lifted.everyone)
    tiled = ("space", "role", "chunks", "chunk_bytes", "size", "alias_of", "alias_offset_bytes", "window", "persistent", "arena_offset")
    actor = np.concatenate([image(lifted.fold, b.actor, m) for m in lifted.everyone])
    return replace(b, actor=actor, last=Csr.of([[]] * (len(b) * k)), name=b.name * k, **{name: np.tile(getattr(b, name), k) for name in tiled})
