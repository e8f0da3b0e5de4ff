"""The lanes of one rank of a collective program, repeats unrolled and buffers numbered among the rank's own: what a call inlines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .program import Program
from .tables import I32

__all__ = ["COLUMNS", "LaneBody", "RankBody", "slices", "unroll"]

COLUMNS = ("kind", "parts", "chan_in", "chan_out", "src_chunk", "dst_chunk", "count", "size")


@dataclass(frozen=True)
class LaneBody:
    """One callee lane of one member, unrolled. Buffers are numbered among the member's own; `after` names (lane, position)."""

    columns: dict[str, I32]
    src_local: I32
    dst_local: I32
    after_ptr: I32
    after_lane: I32
    after_position: I32
    unit: int
    role: int

    def __len__(self) -> int:
        return len(self.src_local)


@dataclass(frozen=True)
class RankBody:
    lanes: tuple[LaneBody, ...]
    buffers: I32  # the member's buffers, as numbers in the callee


def slices(q: Program, buffer: int) -> int:
    """Slices of a callee buffer: window many, or for window 0 one for every iteration of the lanes of its actor."""
    window = int(q.buffers.window[buffer])
    mine = q.lanes.repeat[q.lanes.actor == q.buffers.actor[buffer]]
    repeat = int(mine.max()) if len(mine) else 1
    return min(window, repeat) if window else repeat


def unroll(q: Program, member: int) -> RankBody:
    """The lanes of rank `member`, empty ones left out. Iteration i of a buffer with C chunks and window 0 uses chunks i·C to (i+1)·C."""
    s = q.steps
    mine = np.flatnonzero(q.lanes.actor == member)
    local_lane = {int(lane): j for j, lane in enumerate(mine)}
    buffers = np.flatnonzero(q.buffers.actor == member).astype(np.int32)
    local_buffer = np.full(len(q.buffers) + 1, -1, np.int32)  # the last entry answers for -1
    local_buffer[buffers] = np.arange(len(buffers), dtype=np.int32)
    lane_of = q.lane_of_step()
    bodies = []
    for lane in mine.tolist():
        lo, hi, repeat = int(q.lanes.start[lane]), int(q.lanes.end[lane]), int(q.lanes.repeat[lane])
        if lo == hi:
            continue
        length = hi - lo
        iteration = np.repeat(np.arange(repeat, dtype=np.int32), length)
        at = np.tile(np.arange(lo, hi), repeat)
        columns = {name: getattr(s, name)[at].astype(np.int32) for name in COLUMNS}
        for side in ("src", "dst"):
            buffer = getattr(s, f"{side}_buffer")[at]
            window = q.buffers.window[np.maximum(buffer, 0)]
            slot = np.where(window > 0, iteration % np.maximum(window, 1), iteration)
            chunk = columns[f"{side}_chunk"] + slot * q.buffers.chunks[np.maximum(buffer, 0)]
            columns[f"{side}_chunk"] = np.where(buffer >= 0, chunk, 0).astype(np.int32)
        ptr, on_lane, on_position = [0], [], []
        for step, turn in zip(at.tolist(), iteration.tolist(), strict=True):
            for edge in range(int(s.after_ptr[step]), int(s.after_ptr[step + 1])):
                d, lag = int(s.after_step[edge]), int(s.after_lag[edge])
                theirs = int(lane_of[d])
                if turn >= lag:  # a lane of repeat 1 is waited for once
                    on_lane.append(local_lane[theirs])
                    width = int(q.lanes.end[theirs] - q.lanes.start[theirs])
                    on_position.append(min(turn - lag, int(q.lanes.repeat[theirs]) - 1) * width + d - int(q.lanes.start[theirs]))
            ptr.append(len(on_lane))
        bodies.append(
            LaneBody(
                columns, local_buffer[s.src_buffer[at]], local_buffer[s.dst_buffer[at]], np.array(ptr, np.int32), np.array(on_lane, np.int32),
                np.array(on_position, np.int32), int(q.lanes.unit[lane]), int(q.lanes.role[lane]),
            )
        )  # fmt: skip
    return RankBody(tuple(bodies), buffers)
