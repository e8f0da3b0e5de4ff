"""Finding the symmetry of a plain program, and folding it.

A permutation of the ranks is a symmetry when it maps the program onto itself: the k-th lane, buffer and step of a rank onto the k-th of
its image, channels and communicators onto channels and communicators one to one, chunks of a buffer onto chunks a constant
further round. Tried are the shifts along one mesh axis (size, stride), from stride 1 upwards, largest size first; axes without
symmetry stay plain. An exchange by xor is a shift on each of its bits, so it is found as axes of size 2. What is found is expanded again
and matched against the program before it is returned, so a wrong fold cannot leave.
Cost: O(axes tried · steps), vectorised; most wrong axes fail on the shapes of the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import Unsupported
from .fold import expand, image, is_representative
from .program import Contract, Fold, FoldAxis, Kind, Part, Program
from .select import select
from .tables import I32

__all__ = ["fold"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Match:
    """Where each thing of one program lies in the other; -1 unused. `shift`: chunks further round, per buffer."""

    channel: Ints
    buffer: Ints
    comm: Ints
    shift: Ints
    moves_parts: bool


def fold(program: Program) -> Program | None:
    """The folded form of a plain program, or None when no two ranks are symmetric (or it uses what folds cannot hold: in-network
    actors, channel sets, pinned routes, symbolic sizes)."""
    p = program
    sets = np.any(p.steps.parts & (Part.IN_SET | Part.OUT_SET))
    if p.fold is not None or p.switches or p.ranks < 2 or sets or len(p.sizes) or np.any(p.channels.route >= 0):
        return None
    axes, matches = _axes(p)
    if all(axis.kind == "plain" for axis in axes):
        return None
    try:
        folded = _stored(p, tuple(axes), matches)
        plain = expand(folded)
    except Unsupported:
        return None
    # the proof: folded and expanded again it must be the program itself, rank for rank, whatever was found above
    found = _match(plain, p, np.arange(p.ranks))
    if found is None or found.moves_parts or np.any(found.shift):
        return None
    return replace(folded, contracts=_contracts(p, found))


def _axes(p: Program) -> tuple[list[FoldAxis], list[_Match]]:
    axes: list[FoldAxis] = []
    matches: list[_Match] = []
    stride = 1
    # from the inside out: an axis begins where the one before ends, so the axes found tile the ranks
    while stride < p.ranks:
        rest = p.ranks // stride
        sizes = [n for n in range(rest, 1, -1) if rest % n == 0]
        axis, match = next(filter(None, (_symmetric_axis(p, n, stride) for n in sizes)), (None, None))
        if axis is None or match is None:
            # the smallest factor stays plain, so that larger symmetric axes outside of it can still be found
            axis = FoldAxis(f"axis{len(axes)}", sizes[-1], stride, "plain")
        else:
            matches.append(match)
            name = "tensor" if match.moves_parts else f"axis{len(axes)}"
            axis = axis._replace(name=name)
        axes.append(axis)
        stride *= axis.size
    return axes, matches


def _symmetric_axis(p: Program, size: int, stride: int) -> tuple[FoldAxis, _Match] | None:
    axis = FoldAxis("", size, stride, "shift")
    match = _match(p, p, _shifted(p, axis))
    return None if match is None else (axis, match)


def _orbits(n: int, maps: list[Ints]) -> Ints:
    """Smallest member of every element's orbit."""
    label = np.arange(n)
    while True:
        before = label.copy()
        for m in maps:
            used = m >= 0
            low = np.minimum(label[used], label[m[used]])
            np.minimum.at(label, np.flatnonzero(used), low)
            np.minimum.at(label, m[used], low)
        if np.array_equal(before, label):
            return label


def _shifted(p: Program, axis: FoldAxis) -> Ints:
    """Every rank one further along the axis."""
    above = axis.stride * axis.size
    axes = (FoldAxis("low", axis.stride, 1, "plain"), axis, FoldAxis("high", p.ranks // above, above, "plain"))
    return image(Fold(axes, np.zeros((1, 0), np.int32)), np.arange(p.ranks, dtype=np.int32), (1,)).astype(np.int64)


def _match(p: Program, q: Program, goes_to: Ints) -> _Match | None:
    """How p, with its rank r taken as q's rank `goes_to[r]`, is q; None if it is not."""
    lanes = _pair(p.lanes.actor, q.lanes.actor, goes_to, p.ranks)
    buffers = _pair(p.buffers.actor, q.buffers.actor, goes_to, p.ranks)
    if lanes is None or buffers is None:
        return None
    width = p.lanes.end - p.lanes.start
    if np.any(width != (q.lanes.end - q.lanes.start)[lanes]) or not _equal(p.lanes, q.lanes, lanes, ("unit", "repeat", "role")):
        return None
    step = np.arange(len(p.steps)) + np.repeat(q.lanes.start[lanes].astype(np.int64) - p.lanes.start, width)
    if not _equal(p.steps, q.steps, step, ("kind", "parts", "count")) or not _same_after(p, q, step):
        return None
    if not _equal(p.buffers, q.buffers, buffers, ("space", "role", "chunks", "chunk_bytes", "alias_offset_bytes", "window", "persistent")):
        return None
    alias = p.buffers.alias_of
    if np.any(np.where(alias >= 0, buffers[np.maximum(alias, 0)], -1) != q.buffers.alias_of[buffers]) if len(buffers) else False:
        return None
    if [sorted(step[p.buffers.last[b]].tolist()) for b in range(len(buffers))] != [sorted(q.buffers.last[int(b)].tolist()) for b in buffers]:
        return None
    comm = _comm_map(p, q, goes_to)
    channel = None if comm is None else _channel_map(p, q, goes_to, step, comm)
    moved = None if channel is None else _op_map(p, q, step, buffers, comm)
    if comm is None or channel is None or moved is None:
        return None
    accesses, moves_parts = moved
    shift = _shifts(p, q, step, buffers, accesses)
    return None if shift is None else _Match(channel, buffers, comm, shift, moves_parts)


def _pair(a: I32, b: I32, goes_to: Ints, ranks: int) -> Ints | None:
    """The k-th row of each rank onto the k-th row of its image; None if their numbers differ."""
    count_a, count_b = np.bincount(a, minlength=ranks), np.bincount(b, minlength=ranks)
    if len(a) != len(b) or np.any(count_a != count_b[goes_to]):
        return None
    first = np.cumsum(count_b) - count_b
    order_a, order_b = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    kth = np.arange(len(a)) - (np.cumsum(count_a) - count_a)[a[order_a]]
    out = np.empty(len(a), np.int64)
    out[order_a] = order_b[first[goes_to[a[order_a]]] + kth]
    return out


def _equal(a: Any, b: Any, onto: Ints, names: tuple[str, ...]) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)[onto]) for name in names)


def _rows(ptr: I32, of: Ints) -> Ints:
    """Positions of the values of rows `of`, one row after the other."""
    width = (ptr[of + 1] - ptr[of]).astype(np.int64)
    return np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width) + np.repeat(ptr[of].astype(np.int64), width)


def _same_after(p: Program, q: Program, step: Ints) -> bool:
    a, b = p.steps, q.steps
    if np.any(np.diff(a.after_ptr) != np.diff(b.after_ptr)[step]):
        return False
    at = _rows(b.after_ptr, step)
    return bool(np.array_equal(step[a.after_step], b.after_step[at]) and np.array_equal(a.after_lag, b.after_lag[at]))


def _one_to_one(a: Ints, b: Ints, n_a: int, n_b: int) -> Ints | None:
    """The map that sends every a[i] to b[i], if there is one and it is one to one; -1 where nothing is sent."""
    out, back = np.full(n_a, -1, np.int64), np.full(n_b, -1, np.int64)
    out[a], back[b] = b, a
    # a key written twice holds the last value: it reads back wrongly where the pairs disagree, in either direction
    return out if np.array_equal(out[a], b) and np.array_equal(back[b], a) else None


def _comm_map(p: Program, q: Program, goes_to: Ints) -> Ints | None:
    """Communicators by their members."""
    known = {tuple(sorted(q.comms.groups[c].tolist())): c for c in range(len(q.comms))}
    out = [known.get(tuple(sorted(goes_to[p.comms.groups[c]].tolist())), -1) for c in range(len(p.comms))]
    return None if -1 in out else np.array(out, np.int64)


def _channel_map(p: Program, q: Program, goes_to: Ints, step: Ints, comm: Ints) -> Ints | None:
    pairs = []
    for name in ("chan_in", "chan_out"):
        a, b = getattr(p.steps, name), getattr(q.steps, name)[step]
        if np.any((a >= 0) != (b >= 0)):
            return None
        pairs.append((a[a >= 0].astype(np.int64), b[a >= 0].astype(np.int64)))
    onto = _one_to_one(np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]), len(p.channels), len(q.channels))
    if onto is None:
        return None
    a, used = p.channels, onto >= 0
    to = onto[used]
    tag = np.where(a.tag >= 0, comm[np.maximum(a.tag, 0)], -1) if len(comm) else a.tag
    same = (
        np.array_equal(goes_to[a.src[used]], q.channels.src[to]) and np.array_equal(goes_to[a.dst[used]], q.channels.dst[to])
        and np.array_equal(a.depth[used], q.channels.depth[to]) and np.array_equal(tag[used], q.channels.tag[to])
    )  # fmt: skip
    return onto if same else None


def _op_map(p: Program, q: Program, step: Ints, buffers: Ints, comm: Ints | None) -> tuple[list[tuple[Ints, Ints, Ints, Ints, Ints]], bool] | None:
    """Chunk ranges that ops and calls use, as (buffer, chunk, count, its buffer, its chunk), and whether parts moved one on."""
    work = p.steps.kind == Kind.COMPUTE
    a, b = p.steps.op[work].astype(np.int64), q.steps.op[step[work]].astype(np.int64)
    texts: dict[tuple[str, str, str], int] = {}

    def code(program: Program) -> Ints:
        o = program.ops
        return np.array([texts.setdefault(key, len(texts)) for key in zip(o.name, o.graph, o.module, strict=True)], np.int64)

    if np.any(code(p)[a] != code(q)[b]) if len(a) else False:
        return None
    for name in ("copy", "stage", "microbatch", "parts", "accumulate", "workspace_bytes"):
        if np.any(getattr(p.ops, name)[a] != getattr(q.ops, name)[b]):
            return None
    moves = bool(np.any(p.ops.part[a] != q.ops.part[b]))
    if moves and np.any((p.ops.part[a] + 1) % np.maximum(p.ops.parts[a], 1) != q.ops.part[b]):
        return None
    accesses = []
    for name in ("reads", "writes"):
        x, y = getattr(p.ops, name), getattr(q.ops, name)
        if np.any(np.diff(x.ptr)[a] != np.diff(y.ptr)[b]):
            return None
        ours, theirs = x.values[_rows(x.ptr, a)].reshape(-1, 3).astype(np.int64), y.values[_rows(y.ptr, b)].reshape(-1, 3).astype(np.int64)
        if np.any(ours[:, 2] != theirs[:, 2]):
            return None
        accesses.append((ours[:, 0], ours[:, 1], ours[:, 2], theirs[:, 0], theirs[:, 1]))
    return (accesses, moves) if comm is not None and _same_calls(p, q, step, buffers, comm) else None


def _same_calls(p: Program, q: Program, step: Ints, buffers: Ints, comm: Ints) -> bool:
    calls = p.steps.kind == Kind.CALL
    a, b = p.steps.op[calls].astype(np.int64), q.steps.op[step[calls]].astype(np.int64)
    x, y = p.calls, q.calls
    if np.any(np.diff(x.binds.ptr)[a] != np.diff(y.binds.ptr)[b]) or np.any(comm[x.comm[a]] != y.comm[b]) if len(a) else False:
        return False
    if [x.names[c] for c in x.callee[a]] != [y.names[c] for c in y.callee[b]]:
        return False
    ours, theirs = x.binds.values[_rows(x.binds.ptr, a)].reshape(-1, 3), y.binds.values[_rows(y.binds.ptr, b)].reshape(-1, 3)
    return bool(np.array_equal(buffers[ours[:, 1]], theirs[:, 1]) and np.array_equal(ours[:, [0, 2]], theirs[:, [0, 2]]))


def _shifts(p: Program, q: Program, step: Ints, buffers: Ints, accesses: list[tuple[Ints, Ints, Ints, Ints, Ints]]) -> Ints | None:
    """How far round each buffer's chunks moved; None if a buffer is not the image, or different steps disagree."""
    everything = list(accesses)
    for side in ("src", "dst"):
        ours, theirs = getattr(p.steps, f"{side}_buffer"), getattr(q.steps, f"{side}_buffer")[step]
        if np.any((ours >= 0) != (theirs >= 0)):
            return None
        has = ours >= 0
        everything.append(
            (ours[has].astype(np.int64), getattr(p.steps, f"{side}_chunk")[has].astype(np.int64), p.steps.count[has].astype(np.int64),
             theirs[has].astype(np.int64), getattr(q.steps, f"{side}_chunk")[step[has]].astype(np.int64))
        )  # fmt: skip
    buffer, chunk, count, onto, there = (np.concatenate([e[k] for e in everything]) for k in range(5))
    out = np.zeros(len(p.buffers), np.int64)
    if not len(buffer):
        return out
    chunks = np.maximum(p.buffers.chunks[buffer].astype(np.int64), 1)
    part = count < chunks  # a whole buffer is the same however far round it is read
    if np.any(buffers[buffer] != onto) or np.any(~part & (chunk != there)):
        return None
    moved = (there - chunk) % chunks
    out[buffer[part]] = moved[part]
    return out if np.array_equal(out[buffer[part]], moved[part]) else None


def _stored(p: Program, axes: tuple[FoldAxis, ...], matches: list[_Match]) -> Program:
    """The representatives' part of the program, with channels by orbit.

    Raises: Unsupported when groups are not in rising order.
    """
    shell = Fold(axes, np.zeros((0, 0), np.int32))
    ours = np.array([is_representative(shell, rank) for rank in range(p.ranks)])
    # of each orbit of channels the one that starts at a representative is stored; steps name it instead of their own
    orbit = _orbits(len(p.channels), [m.channel for m in matches])
    stored = np.full(len(p.channels), -1, np.int64)  # by orbit: the channel that starts at a representative
    mine = ours[p.channels.src]
    stored[orbit[mine]] = np.flatnonzero(mine)
    if any(np.any(np.diff(p.comms.groups[c]) <= 0) for c in range(len(p.comms))):
        raise Unsupported("groups that are not in rising order", where=p.name)
    chosen = select(p, ours, stored[orbit] if len(orbit) else stored)
    kept = np.flatnonzero(ours[p.buffers.actor]) if len(p.buffers) else np.zeros(0, np.int64)
    rows = [m.shift[kept] for m in matches]
    shift = np.stack(rows).astype(np.int32) if rows else np.zeros((0, len(kept)), np.int32)
    return replace(chosen, fold=Fold(axes, shift))


def _contracts(p: Program, found: _Match) -> tuple[Contract, ...]:
    """The contracts in the expanded form's buffer numbers."""
    back = np.empty(len(found.buffer), np.int64)
    back[found.buffer] = np.arange(len(found.buffer))

    def moved(ranges: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
        return tuple((int(back[b]), first, count) for b, first, count in ranges)

    return tuple(replace(c, inputs=moved(c.inputs), outputs=moved(c.outputs)) for c in p.contracts)


