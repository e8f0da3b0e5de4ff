"""Folded programs: symmetric ranks share lane bodies. Their plain form; calls inside them: `fold_calls`.

`Fold` (see `program`) says which mesh axes of the ranks are symmetric; stored are the lanes and buffers of the representatives, the
ranks whose coordinates on those axes are 0, and of the ranks that no member moves (`Fold.fixed`), which stand for themselves. A stored channel
starts at one of these. A step that receives from it is stored at the representative of its destination and means the image that arrives there: so
one stored channel has one stored sender and one stored receiver, even where it leads to another member. Ops on an axis named "tensor" move their
`part` with the member.
Groups of communicators are stored in rising order, their images too. Everything is defined by `expand`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, Unsupported
from .program import MAX_EXECUTED_STEPS, Fold, FoldAxis, Kind, Part, Program
from .tables import I32, Buffers, Calls, Channels, Comms, Csr, Lanes, Ops, Sizes, Steps
from .validate import validate

__all__ = [
    "coordinates", "expand", "folded_axes", "generators", "image", "image_chunks", "is_representative", "members", "plain_buffers", "representative",
]  # fmt: skip


def folded_axes(fold: Fold) -> tuple[FoldAxis, ...]:
    """The symmetric axes, in order; rows of `buffer_shift`."""
    return tuple(axis for axis in fold.axes if axis.kind != "plain")


def members(fold: Fold) -> list[tuple[int, ...]]:
    """All offsets, one value per folded axis; the first is all zeros."""
    return list(product(*(range(axis.size) for axis in folded_axes(fold))))


def generators(fold: Fold) -> list[tuple[int, ...]]:
    """Offsets of which every other is a sum: one step along a shifted axis, each power of two along an `xor` axis."""
    axes, steps = folded_axes(fold), list[tuple[int, int]]()
    for at, axis in enumerate(axes):
        bits = (axis.size - 1).bit_length()
        steps += [(at, 1 << bit) for bit in range(bits if axis.kind == "xor" else min(1, bits))]
    return [tuple(offset * (i == at) for i in range(len(axes))) for at, offset in steps]


def image(fold: Fold, ranks: NDArray[np.integer[Any]] | int, member: tuple[int, ...]) -> NDArray[np.int32]:
    """Where the ranks go under a member's offset."""
    start = np.asarray(ranks, np.int32)
    out, stays = _place(fold, start)
    for axis, offset in zip(folded_axes(fold), member, strict=True):
        at = (out // axis.stride) % axis.size
        moved = at ^ offset if axis.kind == "xor" else (at + offset) % axis.size
        out = out + (moved - at) * axis.stride
    return np.where(stays, start, _rank(fold, out)).astype(np.int32)


def image_chunks(
    fold: Fold, ranks: int, member: tuple[int, ...], chunks: NDArray[np.integer[Any]], shift: NDArray[np.integer[Any]], at: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:  # fmt: skip
    """Where chunks `at`, of buffers of `chunks` chunks with `shift` (folded axes, chunks) go under a member's offset; `ranks`: of the program."""
    offset = np.asarray(member, np.int64) @ shift.astype(np.int64) if len(member) else np.zeros(len(at), np.int64)
    whole = np.maximum(chunks.astype(np.int64), 1)
    if not fold.by_rank:
        return np.asarray((at + offset) % whole, np.int64)
    own = np.maximum(whole // ranks, 1)
    block, inner = at // own, at % own
    there: NDArray[np.int64] = image(fold, block, member).astype(np.int64) * own + np.where(np.isin(block, fold.fixed), (inner + offset) % own, inner)
    return there


def representative(fold: Fold, ranks: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The rank that stands for each of these."""
    out, stays = _place(fold, ranks)
    for axis in folded_axes(fold):
        out = out - (out // axis.stride) % axis.size * axis.stride
    return np.where(stays, ranks, _rank(fold, out)).astype(np.int64)


def is_representative(fold: Fold, rank: int) -> bool:
    """Whether the rank is stored: it is a representative, or no member moves it."""
    return not coordinates(fold, np.array([rank])).any()


def plain_buffers(p: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rank and stored number of every buffer of the plain form, as contracts and calls number them; of a plain program its own."""
    number = np.arange(len(p.buffers) if p.fold is None else p.fold.plain_buffers(p.buffers.actor))
    if p.fold is None:
        return p.buffers.actor.astype(np.int64), number
    stored, member = p.fold.stored_buffers(p.buffers.actor, number)
    every = np.stack([image(p.fold, p.buffers.actor, m) for m in members(p.fold)])
    return every[member, stored].astype(np.int64), stored.astype(np.int64)


def coordinates(fold: Fold, ranks: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """(ranks, folded axes): the offsets of the ranks from their representatives; all 0 of ranks that stay."""
    place, stays = _place(fold, ranks)
    rows = [np.where(stays, 0, (place // axis.stride) % axis.size) for axis in folded_axes(fold)]
    return np.array(rows, np.int64).reshape(len(rows), len(place)).T


def _place(fold: Fold, ranks: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The ranks numbered among those that move, and which of them do not."""
    fixed = np.asarray(fold.fixed, np.int64)
    return ranks - np.searchsorted(fixed, ranks), np.isin(ranks, fixed)


def _rank(fold: Fold, place: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The ranks with these numbers among those that move: as many later as ranks that stay come before."""
    fixed = np.asarray(fold.fixed, np.int64)
    return place.astype(np.int64) + np.searchsorted(fixed - np.arange(len(fixed)), place, side="right")


def _back(fold: Fold, member: tuple[int, ...], by: tuple[int, ...]) -> tuple[int, ...]:
    """The member whose channel, leading `by` further, arrives at `member`."""
    axes = folded_axes(fold)
    return tuple(m ^ b if axis.kind == "xor" else (m - b) % axis.size for axis, m, b in zip(axes, member, by, strict=True))


def require_folded(p: Program) -> Fold:
    """The fold of `p` after checking that it fits the program.

    Raises: FormatError (axes do not tile the ranks, lanes or channels start elsewhere than at representatives), Unsupported (switches).
    """
    fold = p.fold
    if fold is None:
        raise FormatError("is not folded", where=p.name)
    if p.switches:
        raise Unsupported("a folded program with in-network actors", where=p.name, hint="expand it before it gets switches")
    stride = 1
    for axis in sorted(fold.axes, key=lambda a: (a.stride, a.size)):
        if axis.stride != stride or axis.size < 1 or (axis.kind == "xor" and axis.size & (axis.size - 1)):
            what = f"axis {axis.name!r} of size {axis.size} and stride {axis.stride}"
            raise FormatError(f"{what} does not tile {p.ranks} ranks", where=f"{p.name}.fold")
        stride *= axis.size
    if stride != p.ranks - len(fold.fixed):
        raise FormatError(f"axes hold {stride} ranks, the program has {p.ranks - len(fold.fixed)} that move", where=f"{p.name}.fold")
    if fold.fixed and (len(p.calls) or len(p.ops) or len(p.sizes) or len(p.comms) or np.any(p.buffers.alias_of >= 0) or len(p.buffers.last.values)):
        raise Unsupported("ranks that stay, in a program with more than transfers between whole buffers", where=p.name, hint="build it unfolded")
    expected = (len(folded_axes(fold)), len(p.buffers))
    if fold.buffer_shift.shape != expected:
        raise FormatError(f"shape {fold.buffer_shift.shape}, expected {expected}", where=f"{p.name}.fold.buffer_shift")
    for what, actors in (("lane", p.lanes.actor), ("buffer", p.buffers.actor), ("channel", p.channels.src)):
        first = representative(fold, actors) == actors
        if not first.all():
            number = int(np.flatnonzero(~first)[0])
            raise FormatError(f"{what} {number} is at rank {int(actors[number])}, which is not a representative", where=f"{p.name}.fold")
    return fold


def expand(program: Program) -> Program:
    """The plain program with every member's lanes, members in order. A program without a fold is returned as it is.

    Raises: FormatError, Unsupported: see `require_folded`; Unsupported also when a shifted chunk range would wrap, or routes are pinned.
    """
    if program.fold is None:
        return program
    fold = require_folded(program)
    if np.any(program.channels.route >= 0):
        raise Unsupported("a folded program with pinned routes", where=program.name, hint="leave the routes to the fabric")
    _refuse_too_many_steps(program, fold)
    everyone = members(fold)
    number = {m: i for i, m in enumerate(everyone)}
    comms, comm_of = _expand_comms(program, fold, everyone)
    steps = [_image_steps(program, fold, m, number) for m in everyone]
    s, n, k = program.steps, len(program.steps), len(everyone)
    columns = {name: np.concatenate([x[name] for x in steps]).astype(np.int32) for name in steps[0]}
    edge_base = np.repeat(np.arange(k, dtype=np.int64) * n, len(s.after_step))
    after_step = (np.tile(s.after_step, k) + edge_base).astype(np.int32)
    joined = Steps(after_ptr=_tile_ptr(s.after_ptr, k), after_step=after_step, after_lag=np.tile(s.after_lag, k), **columns)
    la = program.lanes
    lane_base = (np.repeat(np.arange(k), len(la)) * n).astype(np.int32)
    lanes = Lanes(
        actor=np.concatenate([image(fold, la.actor, m) for m in everyone]), unit=np.tile(la.unit, k), repeat=np.tile(la.repeat, k),
        role=np.tile(la.role, k), start=np.tile(la.start, k) + lane_base, end=np.tile(la.end, k) + lane_base,
    )  # fmt: skip
    plain = replace(
        program, lanes=lanes, steps=joined, channels=_expand_channels(program, fold, everyone, comm_of),
        buffers=_expand_buffers(program, fold, everyone), ops=_expand_ops(program, fold, everyone),
        sizes=_expand_sizes(program.sizes, k, n), comms=comms, calls=_expand_calls(program, k, comm_of), fold=None,
    )  # fmt: skip
    validate(plain)
    return plain


def _refuse_too_many_steps(p: Program, fold: Fold) -> None:
    stored = {
        "steps": len(p.steps), "edges": len(p.steps.after_step), "buffers": len(p.buffers), "channels": len(p.channels),
        "ranges of operators": (len(p.ops.reads.values) + len(p.ops.writes.values)) // 3,
    }  # fmt: skip
    what, count = max(stored.items(), key=lambda item: item[1])
    if count * fold.members > MAX_EXECUTED_STEPS:
        raise FormatError(
            f"{count} {what} of {fold.members} symmetric ranks are {count * fold.members}, the limit is {MAX_EXECUTED_STEPS}", where=f"{p.name}.fold",
            hint="simulate it folded",
        )  # fmt: skip


def _image_steps(p: Program, fold: Fold, member: tuple[int, ...], number: Mapping[tuple[int, ...], int]) -> dict[str, NDArray[np.int64]]:
    """Step columns of one member in the plain program's numbers (all but `after`)."""
    s, c, me = p.steps, p.channels, number[member]
    # a channel is its sender's: what arrives here was sent by the member from which the same channel leads to this one
    sends_to = np.array([number[_back(fold, member, tuple(by))] for by in coordinates(fold, c.dst).tolist()], np.int64)
    out: dict[str, NDArray[np.int64]] = {}
    for name in ("kind", "parts", "count", "size"):
        out[name] = getattr(s, name).astype(np.int64)
    out["size"] = np.append(_size_numbers(p.sizes, me), -1)[s.size]
    count = np.where(s.kind == Kind.COMPUTE, len(p.ops), len(p.calls))
    out["op"] = np.where(s.op >= 0, s.op + me * count, -1)
    sets = (s.parts & (Part.IN_SET | Part.OUT_SET)) != 0
    if np.any(sets):
        raise Unsupported("a folded program with channel sets", where=p.name, hint="build it unfolded")
    incoming, at = np.maximum(s.chan_in, 0), _buffer_numbers(p, fold)[me]
    out["chan_in"] = np.where(s.chan_in >= 0, (sends_to[incoming] if len(c) else 0) * len(c) + s.chan_in, -1)
    out["chan_out"] = np.where(s.chan_out >= 0, me * len(c) + s.chan_out, -1)
    for side in ("src", "dst"):
        buffer, chunk = getattr(s, f"{side}_buffer"), getattr(s, f"{side}_chunk")
        out[f"{side}_buffer"] = np.where(buffer >= 0, at[np.maximum(buffer, 0)] if len(at) else -1, -1)
        out[f"{side}_chunk"] = _shift_chunks(p, fold, member, buffer, chunk, s.count)
    return out


def _buffer_numbers(p: Program, fold: Fold) -> NDArray[np.int64]:
    """(members, stored buffers): the number of each in the plain form; buffers of ranks that stay are one for all."""
    out = np.tile(np.arange(len(p.buffers), dtype=np.int64), (fold.members, 1))
    number = np.arange(fold.plain_buffers(p.buffers.actor))
    stored, member = fold.stored_buffers(p.buffers.actor, number)
    out[member, stored] = number
    return out


def _shift_chunks(p: Program, fold: Fold, member: tuple[int, ...], buffer: I32, chunk: I32, count: I32) -> NDArray[np.int64]:
    if not len(p.buffers):
        return chunk.astype(np.int64)
    at = np.maximum(buffer, 0)
    chunks = np.maximum(p.buffers.chunks[at].astype(np.int64), 1)
    shift, last = fold.buffer_shift[:, at], np.maximum(chunk + np.maximum(count, 1) - 1, 0) % chunks
    held = (buffer >= 0) & (count < chunks)
    moved = np.where(held, image_chunks(fold, p.ranks, member, chunks, shift, chunk), chunk)
    # A range stays one: its last chunk goes as far as its first.
    wraps = held & (image_chunks(fold, p.ranks, member, chunks, shift, last) != moved + np.maximum(count, 1) - 1) | (held & (chunk + count > chunks))
    if np.any(wraps):
        step = int(np.argmax(wraps))
        raise Unsupported(f"chunks {int(moved[step])}+{int(count[step])} wrap around {int(chunks[step])}", where=f"{p.name} entry {step}")
    return moved.astype(np.int64)


def _tile_ptr(ptr: I32, k: int) -> I32:
    out: I32 = np.concatenate([[0], np.cumsum(np.tile(np.diff(ptr), k))]).astype(np.int32)
    return out


def _tile_csr(csr: Csr, k: int, step: int) -> Csr:
    base = np.repeat(np.arange(k, dtype=np.int64) * step, len(csr.values))
    return Csr(_tile_ptr(csr.ptr, k), (np.tile(csr.values, k) + base).astype(np.int32))


def _expand_comms(p: Program, fold: Fold, everyone: list[tuple[int, ...]]) -> tuple[Comms, NDArray[np.int32]]:
    """Distinct images of the communicators, and the number of each (member, stored communicator)."""
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    table = np.zeros((len(everyone), len(p.comms)), np.int32)
    for i, m in enumerate(everyone):
        for c, name in enumerate(p.comms.name):
            group = tuple(sorted(image(fold, p.comms.groups[c], m).tolist()))
            table[i, c] = numbers.setdefault((name, group), len(numbers))
    return Comms(name=tuple(name for name, _ in numbers), groups=Csr.of([group for _, group in numbers])), table


def _expand_channels(p: Program, fold: Fold, everyone: list[tuple[int, ...]], comm_of: NDArray[np.int32]) -> Channels:
    c, k = p.channels, len(everyone)
    tags = [np.where(c.tag >= 0, comm_of[i][np.maximum(c.tag, 0)] if len(p.comms) else -1, -1) for i in range(k)]
    return replace(
        c, src=np.concatenate([image(fold, c.src, m) for m in everyone]), dst=np.concatenate([image(fold, c.dst, m) for m in everyone]),
        tag=np.concatenate(tags).astype(np.int32), depth=np.tile(c.depth, k), route=np.tile(c.route, k), sets=Csr(),
    )  # fmt: skip


def _expand_buffers(p: Program, fold: Fold, everyone: list[tuple[int, ...]]) -> Buffers:
    b, k, n = p.buffers, len(everyone), len(p.buffers)
    if fold.fixed:
        return _kept_buffers(p)
    base = np.repeat(np.arange(k, dtype=np.int32) * n, n)
    tiled = {
        name: np.tile(getattr(b, name), k)
        for name in ("space", "role", "chunks", "chunk_bytes", "window", "persistent", "arena_offset")
    }
    tiled["alias_offset_bytes"] = np.concatenate([_moved_views(p, fold, m) for m in everyone])
    alias = np.tile(b.alias_of, k)
    size = np.concatenate([np.append(_size_numbers(p.sizes, me), -1)[b.size] for me in range(k)])
    return replace(
        b, actor=np.concatenate([image(fold, b.actor, m) for m in everyone]), alias_of=np.where(alias >= 0, alias + base, -1).astype(np.int32),
        size=size.astype(np.int32), last=_tile_csr(b.last, k, len(p.steps)), name=b.name * k, **tiled,
    )  # fmt: skip


def _moved_views(p: Program, fold: Fold, member: tuple[int, ...]) -> NDArray[np.int64]:
    """Where a member's views of other buffers begin: they move with the chunks that they lie on, along axes on which their own chunks do not."""
    b = p.buffers
    out = b.alias_offset_bytes.copy()
    views = np.flatnonzero(b.alias_of >= 0)
    of = b.alias_of[views]
    shift = np.where(fold.buffer_shift[:, views] == 0, fold.buffer_shift[:, of], 0)
    moving = (shift != 0).any(axis=0)
    views, of, shift = views[moving], of[moving], shift[:, moving]
    chunk, inside = np.divmod(out[views], np.maximum(b.chunk_bytes[of], 1))
    out[views] = image_chunks(fold, p.ranks, member, b.chunks[of], shift, chunk) * b.chunk_bytes[of] + inside
    return out


def _kept_buffers(p: Program) -> Buffers:
    """`_expand_buffers` where some ranks stay."""
    b = p.buffers
    actor, stored = plain_buffers(p)
    tiled = {f.name: getattr(b, f.name)[stored] for f in fields(Buffers) if f.name not in ("actor", "last", "name")}
    name = tuple(b.name[i] for i in stored.tolist()) if b.name else ()
    return replace(b, actor=actor.astype(np.int32), last=Csr.of([[]] * len(stored)), name=name, **tiled)


def _expand_ops(p: Program, fold: Fold, everyone: list[tuple[int, ...]]) -> Ops:
    o, k = p.ops, len(everyone)
    tensor = [i for i, axis in enumerate(folded_axes(fold)) if axis.name == "tensor"]
    parts = np.maximum(o.parts, 1)
    part = [(o.part + (m[tensor[0]] if tensor else 0)) % parts for m in everyone]
    tiled = {name: np.tile(getattr(o, name), k) for name in ("copy", "stage", "microbatch", "parts", "accumulate", "workspace_bytes")}
    return replace(
        o, name=o.name * k, graph=o.graph * k, module=o.module * k, part=np.concatenate(part).astype(np.int32),
        reads=_expand_ranges(p, fold, everyone, o.reads), writes=_expand_ranges(p, fold, everyone, o.writes), **tiled,
    )  # fmt: skip


def _expand_ranges(p: Program, fold: Fold, everyone: list[tuple[int, ...]], csr: Csr) -> Csr:
    triples = csr.values.reshape(-1, 3)
    rows = []
    for i, m in enumerate(everyone):
        chunk = _shift_chunks(p, fold, m, triples[:, 0], triples[:, 1], triples[:, 2])
        rows.append(np.stack([triples[:, 0] + i * len(p.buffers), chunk, triples[:, 2]], axis=1))
    return Csr(_tile_ptr(csr.ptr, len(everyone)), np.concatenate(rows).reshape(-1).astype(np.int32))


def _size_numbers(z: Sizes, me: int) -> NDArray[np.int64]:
    """The plain program's numbers of a member's symbols. One that no step produces is the same for all, so that both ends of a message name it."""
    own = z.producer >= 0
    after = len(z) + (me - 1) * int(own.sum()) + np.cumsum(own) - 1
    return np.where(own & (me > 0), after, np.arange(len(z)))


def _expand_sizes(z: Sizes, k: int, steps: int) -> Sizes:
    own = np.flatnonzero(z.producer >= 0)
    take = np.concatenate([np.arange(len(z)), np.tile(own, k - 1)])
    base = np.concatenate([np.zeros(len(z), np.int64), np.repeat(np.arange(1, k, dtype=np.int64) * steps, len(own))])
    names = (*z.name, *(f"{z.name[j]}@{i}" for i in range(1, k) for j in own))
    producer = np.where(z.producer[take] >= 0, z.producer[take] + base, -1).astype(np.int32)
    return Sizes(name=names, lower=z.lower[take], expected=z.expected[take], upper=z.upper[take], producer=producer)


def _expand_calls(p: Program, k: int, comm_of: NDArray[np.int32]) -> Calls:
    c = p.calls
    if not len(c):
        return c
    triples = c.binds.values.reshape(-1, 3)
    rows = [triples + np.array([0, i * len(p.buffers), 0], np.int32) for i in range(k)]
    return Calls(
        comm=np.concatenate([comm_of[i][c.comm] for i in range(k)]).astype(np.int32), callee=np.tile(c.callee, k), names=c.names,
        binds=Csr(_tile_ptr(c.binds.ptr, k), np.concatenate(rows).reshape(-1).astype(np.int32)),
    )  # fmt: skip
