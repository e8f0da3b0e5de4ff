"""Operators of `mutate` that change what a table says, and leave every step in its place: where a transfer stores, how large a buffer is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..program.program import Kind, Part, Program
from ..program.tables import Csr

Rng = np.random.Generator


def pick(rng: Rng, sites: Any) -> int | None:
    found = np.asarray(sites)
    found = np.flatnonzero(found) if found.dtype.kind == "b" else found
    return int(rng.choice(found)) if len(found) else None


def has(p: Program, part: Part) -> NDArray[np.bool_]:
    out: NDArray[np.bool_] = (p.steps.kind == Kind.TRANSFER) & ((p.steps.parts & part) != 0)
    return out


def _set(table: Any, column: str, index: int, value: int) -> Any:
    values = getattr(table, column).copy()
    values[index] = value
    return replace(table, **{column: values})


def _steps(p: Program, index: int, **values: int) -> Program:
    steps = p.steps
    for column, value in values.items():
        steps = _set(steps, column, index, value)
    return replace(p, steps=steps)


def _csr(csr: Csr, index: int, values: Any) -> Csr:
    return Csr.of([values if i == index else csr[i].tolist() for i in range(len(csr))])


# ---- transfers ---------------------------------------------------------------------------------------------------------
def redirect(p: Program, rng: Rng, part: Part, column: str, end: str) -> tuple[Program, str] | None:
    step = pick(rng, has(p, part))
    if step is None:
        return None
    old = int(getattr(p.steps, column)[step])
    ends = getattr(p.channels, end)
    new = pick(rng, [c for c in range(len(p.channels)) if c != old and ends[c] == ends[old]])
    new = pick(rng, [c for c in range(len(p.channels)) if c != old]) if new is None else new
    return None if new is None else (_steps(p, step, **{column: new}), f"step {step} on channel {new}")


def shift_chunk(p: Program, rng: Rng, side: str) -> tuple[Program, str] | None:
    b, s = getattr(p.steps, f"{side}_buffer"), p.steps
    if not len(p.buffers):
        return None
    room = p.buffers.chunks[np.maximum(b, 0)]
    step = pick(rng, (b >= 0) & (room > s.count))
    if step is None:
        return None
    chunk = int((getattr(s, f"{side}_chunk")[step] + rng.choice([-1, 1])) % (room[step] - s.count[step] + 1))
    return _steps(p, step, **{f"{side}_chunk": chunk}), f"step {step} {side} chunk {chunk}"


def wrong_buffer(p: Program, rng: Rng, side: str) -> tuple[Program, str] | None:
    b = p.buffers
    step = pick(rng, getattr(p.steps, f"{side}_buffer") >= 0)
    if step is None:
        return None
    old = int(getattr(p.steps, f"{side}_buffer")[step])
    alike = [k for k in range(len(b)) if k != old and b.actor[k] == b.actor[old]]
    other = pick(rng, alike or [k for k in range(len(b)) if k != old])
    if other is None:
        return None
    return _steps(p, step, **{f"{side}_buffer": other}), f"step {step} {side} buffer {other}"


def reduce_to_copy(p: Program, rng: Rng) -> tuple[Program, str] | None:
    step = pick(rng, has(p, Part.ADD))
    if step is None:
        return None
    parts = int(p.steps.parts[step]) & ~Part.ADD
    if parts & Part.RECV:
        return _steps(p, step, parts=parts & ~Part.READ, src_buffer=-1, src_chunk=0), f"step {step} copies"
    return _steps(p, step, parts=parts), f"step {step} copies"


def copy_to_reduce(p: Program, rng: Rng) -> tuple[Program, str] | None:
    s = p.steps
    step = pick(rng, has(p, Part.STORE) & ~has(p, Part.ADD) & has(p, Part.RECV))
    if step is None:
        return None
    parts = int(s.parts[step]) | Part.ADD | Part.READ
    return _steps(p, step, parts=parts, src_buffer=int(s.dst_buffer[step]), src_chunk=int(s.dst_chunk[step])), f"step {step} adds"


def drop_part(p: Program, rng: Rng) -> tuple[Program, str] | None:
    step = pick(rng, has(p, Part.STORE) & has(p, Part.SEND))
    if step is None:
        return None
    return _steps(p, step, parts=int(p.steps.parts[step]) & ~Part.STORE, dst_buffer=-1, dst_chunk=0), f"step {step} keeps nothing"


def change_count(p: Program, rng: Rng) -> tuple[Program, str] | None:
    step = pick(rng, (p.steps.kind == Kind.TRANSFER) & (p.steps.count > 0))
    if step is None:
        return None
    count = int(p.steps.count[step]) + int(rng.choice([-1, 1]))
    return _steps(p, step, count=count), f"step {step} moves {count} chunks"


# ---- tables ------------------------------------------------------------------------------------------------------------
def lower_depth(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = pick(rng, p.channels.depth > 1)
    if k is None:
        return None
    depth = int(p.channels.depth[k]) - 1
    return replace(p, channels=_set(p.channels, "depth", k, depth)), f"channel {k} of depth {depth}"


def change_channel_end(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = pick(rng, np.arange(len(p.channels)))
    if k is None or p.ranks < 3:
        return None
    end = str(rng.choice(["src", "dst"]))
    other = pick(rng, [r for r in range(p.ranks) if r not in (int(p.channels.src[k]), int(p.channels.dst[k]))])
    return None if other is None else (replace(p, channels=_set(p.channels, end, k, other)), f"channel {k} {end} is {other}")


def shrink_buffer(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = pick(rng, p.buffers.chunks > 0)
    return None if k is None else (replace(p, buffers=_set(p.buffers, "chunks", k, int(p.buffers.chunks[k]) - 1)), f"buffer {k} a chunk smaller")


def alias_buffers(p: Program, rng: Rng) -> tuple[Program, str] | None:
    b = p.buffers
    size = b.chunks * b.chunk_bytes
    pairs = [
        (i, j)
        for i in range(len(b))
        for j in range(len(b))
        if i != j and b.actor[i] == b.actor[j] and 0 < size[i] <= size[j] and b.alias_of[i] < 0 and b.alias_of[j] < 0 and b.window[i] == b.window[j]
    ]
    k = pick(rng, np.arange(len(pairs)))
    return None if k is None else (replace(p, buffers=_set(b, "alias_of", pairs[k][0], pairs[k][1])), f"buffer {pairs[k][0]} lies in {pairs[k][1]}")


def shorten_life(p: Program, rng: Rng) -> tuple[Program, str] | None:
    """The buffer dies before the step that now ends its life: after that step's predecessor in the lane."""
    lane, last = p.lane_of_step(), p.buffers.last
    sites = [k for k in range(len(p.buffers)) if len(last[k]) and any(x > p.lanes.start[lane[x]] for x in last[k].tolist())]
    k = pick(rng, sites)
    if k is None:
        return None
    earlier = [x - 1 if x > p.lanes.start[lane[x]] else x for x in last[k].tolist()]
    return replace(p, buffers=replace(p.buffers, last=_csr(last, k, earlier))), f"buffer {k} dies after {earlier}"


def change_window(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = pick(rng, p.buffers.window > 1)
    return None if k is None else (replace(p, buffers=_set(p.buffers, "window", k, int(p.buffers.window[k]) - 1)), f"buffer {k} with a slot less")


def change_repeat(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = pick(rng, np.arange(len(p.lanes)))
    return None if k is None else (replace(p, lanes=_set(p.lanes, "repeat", k, int(p.lanes.repeat[k]) + 1)), f"lane {k} once more")


# ---- work --------------------------------------------------------------------------------------------------------------
def _ops(p: Program, k: int, column: str, value: int) -> Program:
    return replace(p, ops=_set(p.ops, column, k, value))


def wrong_part(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = pick(rng, p.ops.parts > 1)
    if k is None:
        return None
    part = int((p.ops.part[k] + 1) % p.ops.parts[k])
    return _ops(p, k, "part", part), f"op {k} computes part {part}"


def wrong_microbatch(p: Program, rng: Rng) -> tuple[Program, str] | None:
    count = int(p.ops.microbatch.max(initial=-1)) + 1
    k = pick(rng, p.ops.microbatch >= 0) if count > 1 else None
    if k is None:
        return None
    m = int((p.ops.microbatch[k] + 1) % count)
    return _ops(p, k, "microbatch", m), f"op {k} of micro-batch {m}"


def drop_accumulate(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = pick(rng, p.ops.accumulate > 0)
    return None if k is None else (_ops(p, k, "accumulate", 0), f"op {k} overwrites")


def skip_optimizer_read(p: Program, rng: Rng) -> tuple[Program, str] | None:
    """The optimizer does not look at a gradient buffer."""
    sites = [i for i, name in enumerate(p.ops.name) if name == "optimizer"]
    k = pick(rng, sites)
    if k is None:
        return None
    rows = p.ops.reads[k].reshape(-1, 3).tolist()
    kept = [row for row in rows if int(p.buffers.role[row[0]]) != 3]
    if len(kept) == len(rows):
        return None
    return replace(p, ops=replace(p.ops, reads=_csr(p.ops.reads, k, [v for row in kept for v in row]))), f"op {k} without gradients"


def drop_write(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = pick(rng, np.diff(p.ops.writes.ptr) > 0)
    if k is None:
        return None
    rows = p.ops.writes[k].reshape(-1, 3).tolist()
    gone = rows.pop(int(rng.integers(len(rows))))
    return replace(p, ops=replace(p.ops, writes=_csr(p.ops.writes, k, [v for row in rows for v in row]))), f"op {k} does not write {gone}"


def wrong_bind(p: Program, rng: Rng) -> tuple[Program, str] | None:
    """A call works on another buffer of its rank."""
    b = p.buffers
    k = pick(rng, [i for i in range(len(p.calls)) if len(p.calls.binds[i])])
    if k is None:
        return None
    rows = p.calls.binds[k].reshape(-1, 3).tolist()
    old = rows[0][1]
    other = pick(rng, [j for j in range(len(b)) if j != old and b.actor[j] == b.actor[old] and b.chunks[j] >= b.chunks[old]])
    if other is None:
        return None
    rows[0][1] = other
    return replace(p, calls=replace(p.calls, binds=_csr(p.calls.binds, k, [v for row in rows for v in row]))), f"call {k} on buffer {other}"
