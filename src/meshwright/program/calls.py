"""Inlining: a program without calls that means the same as one with them.

A call has one meaning: the callee's steps take part in the caller's graph. `inline` writes that out. A call step of a lane
becomes two nops, `enter` (with the call's `after` edges) and `exit` (after the last step of every callee lane of this
member); between them run the callee's lanes. For every (member, communicator, callee, callee lane) there is one lane that
holds the steps of all calls in order, like a stream of a communicator, so that channels keep one sender and one receiver.
Callee repeats are unrolled: iteration i of a buffer with C chunks and window 0 uses chunks i·C to (i+1)·C of what is bound to it. A
caller's buffer may be cut finer than the callee's: m chunks of it then stand for one. Folded callees are expanded.

Invariant: `inline(p).program` has no calls, validates if `p` does, and executes the callee's transfers in call order.
Cost: O(stored + inlined steps), vectorised per call and lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, Unsupported
from .fold import expand, representative
from .program import MAX_EXECUTED_STEPS, Kind, Part, Program
from .tables import I32, Buffers, Calls, Channels, Csr, Lanes, Steps
from .unroll import COLUMNS, RankBody, slices, unroll

__all__ = ["Callee", "InlinedProgram", "called_sizes", "inline", "refuse_too_many_steps"]


@dataclass(frozen=True)
class Callee:
    """A planned in-place collective that a program is to call: content hash, program, chunk count, and each member's local buffer in it."""

    name: str
    program: Program
    chunks: int
    local: tuple[int, ...]


@dataclass(frozen=True)
class InlinedProgram:
    """`origin_step`: the caller's step that each step came from (a callee's transfer: the call); `comm`: its communicator or -1."""

    program: Program
    origin_step: I32
    comm: I32


@dataclass
class _Site:
    """All calls of one callee by one member on one communicator, in order: they share lanes, one per callee lane."""

    actor: int
    comm: int
    callee: int
    body: RankBody
    steps: list[int]  # the caller's call steps
    buffer_of: list[I32]  # per call: what the callee's local buffers are bound to ...
    base_of: list[I32]  # ... and from which chunk on
    finer: list[int]  # per call: chunks of the caller per chunk of the callee
    first_lane: int = 0  # number of its first lane among all comm lanes

    def lane_length(self, lane: int) -> int:
        return len(self.body.lanes[lane]) * len(self.steps)


def inline(program: Program, programs: Mapping[str, Program]) -> InlinedProgram:
    """Expand every call of `program`; `programs` maps content hashes to callees.

    Raises: FormatError (a callee is missing, bindings do not fit), Unsupported (calls in repeated lanes, callees that compute,
    call, or use switches).
    """
    n = len(program.steps)
    if not len(program.calls):
        return InlinedProgram(program, np.arange(n, dtype=np.int32), np.full(n, -1, np.int32))
    if program.fold is not None:
        raise Unsupported("a folded program stores only some of its ranks", where=program.name, hint="expand it, or fold_calls.inline_folded")
    refuse_too_many_steps(program, programs)
    return _Inliner(program, programs).run()


def refuse_too_many_steps(program: Program, programs: Mapping[str, Program], *, where: str = "") -> None:
    """Raises: FormatError where `inline` would write out more than `MAX_EXECUTED_STEPS` (`called_sizes`), naming the call (`where`: what to write
    before the field) whose callee brings most."""
    sites, first, number, brought, total = _brought(program, programs)
    if total > MAX_EXECUTED_STEPS:
        most, s = int(np.argmax(brought)), program.steps
        at = int(np.flatnonzero(s.kind == Kind.CALL)[first[most]])
        raise FormatError(
            f"calls stand for {total:.0f} steps and edges, the limit is {MAX_EXECUTED_STEPS}; {int(number[most])} calls of program "
            f"{program.calls.names[sites[1, most]][:16]!r} for {brought[most]:.0f} of them",
            where=f"{where or 'program.'}calls.callee[{int(s.op[at])}]", hint="cut messages into fewer slices, or fold symmetric ranks",
        )  # fmt: skip


def called_sizes(program: Program, programs: Mapping[str, Program]) -> tuple[float, dict[str, float]]:
    """Steps, and `after` edges of callees, that `inline` would write out, every call and repeat counted: all, and of each callee by its hash."""
    sites, _, _, brought, total = _brought(program, programs)
    of = np.bincount(sites[1], weights=brought, minlength=len(program.calls.names))
    return total, dict(zip(program.calls.names, of.tolist(), strict=True))


def _brought(program: Program, programs: Mapping[str, Program]) -> tuple[NDArray[np.int64], Any, Any, NDArray[np.float64], float]:
    """By site (columns: communicator, callee, actor): its first call, its calls, what they stand for; and all that the program stands for."""
    s, calls = program.steps, program.calls
    at = np.flatnonzero(s.kind == Kind.CALL)
    actor = program.lanes.actor[program.lane_of_step()[at]].astype(np.int64)
    comm, callee = calls.comm[s.op[at]].astype(np.int64), calls.callee[s.op[at]].astype(np.int64)
    sites, first, number = np.unique(np.stack([comm, callee, actor]), axis=1, return_index=True, return_counts=True)
    sizes: dict[int, NDArray[np.float64]] = {}
    brought = np.zeros(sites.shape[1])
    for i, (on, called, who) in enumerate(sites.T.tolist()):
        group = program.comms.groups[on].tolist()
        if who in group and calls.names[called] in programs:  # `inline` says what is wrong with others
            if called not in sizes:
                sizes[called] = _unrolled_sizes(programs[calls.names[called]])
            member = group.index(who)
            brought[i] = number[i] * sizes[called][member] if member < len(sizes[called]) else 0.0
    own = program.executed_steps // (program.fold.members if program.fold is not None else 1)  # of a folded program, those of its representatives
    return sites, first, number, brought, own + len(at) + float(brought.sum())


def _unrolled_sizes(q: Program) -> NDArray[np.float64]:
    """Per rank: steps plus `after` edges with repeats unrolled."""
    edges = q.steps.after_ptr[q.lanes.end].astype(np.float64) - q.steps.after_ptr[q.lanes.start]
    work = ((q.lanes.end - q.lanes.start) + edges) * q.lanes.repeat
    of_rank = np.bincount(q.lanes.actor, weights=work, minlength=q.ranks).astype(np.float64)
    return of_rank if q.fold is None else of_rank[representative(q.fold, np.arange(q.ranks))]


class _Inliner:
    def __init__(self, program: Program, programs: Mapping[str, Program]) -> None:
        self.caller = program
        self.callees = []
        for name in program.calls.names:
            if name not in programs:
                raise FormatError(f"program {name[:16]!r} is called but not in the plan", where=f"program {program.name!r}.calls")
            _refuse_unsupported(programs[name], name)
            self.callees.append(expand(programs[name]) if programs[name].fold is not None else programs[name])
        self.bodies: dict[tuple[int, int], RankBody] = {}
        self.sites: dict[tuple[int, int, int], _Site] = {}
        self.channel_base: dict[tuple[int, int], tuple[int, int]] = {}
        self.channels: list[Channels] = [program.channels]
        self.scratch: dict[tuple[int, int, int, int, Fraction], I32] = {}
        self.new_buffers: list[dict[str, Any]] = []

    def run(self) -> InlinedProgram:
        caller = self.caller
        is_call = caller.steps.kind == Kind.CALL
        if np.any(caller.lanes.repeat[caller.lane_of_step()[is_call]] > 1):
            raise Unsupported("a call in a repeated lane", hint="unroll the lane first", where=caller.name)
        width = np.where(is_call, 2, 1)
        first = (np.cumsum(width) - width).astype(np.int32)
        last = (first + width - 1).astype(np.int32)
        lane_of = caller.lane_of_step()
        for step in np.flatnonzero(is_call):
            self.enter(int(step), int(caller.lanes.actor[lane_of[step]]))
        total = int(width.sum())
        lengths: list[int] = []
        for site in self.sites.values():
            site.first_lane = len(lengths)
            lengths += [site.lane_length(j) for j in range(len(site.body.lanes))]
        base = total + np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        steps, origin, comm = self.fill(first, last, is_call, base)
        merged = replace(
            caller, lanes=self.lanes(first, base, total), steps=steps, channels=_join_channels(self.channels), buffers=self.buffers(last),
            calls=Calls.none(),
        )  # fmt: skip
        return InlinedProgram(merged, origin, comm)

    # ---- pass 1: where everything goes -------------------------------------------------------------------------
    def enter(self, step: int, actor: int) -> None:
        calls = self.caller.calls
        call = int(self.caller.steps.op[step])
        comm, callee = int(calls.comm[call]), int(calls.callee[call])
        group = self.caller.comms.groups[comm].tolist()
        if actor not in group:
            raise FormatError(f"rank {actor} calls on comm {self.caller.comms.name[comm]!r} but is not a member", where=self.caller.describe(step))
        member = group.index(actor)
        if len(group) != self.callees[callee].ranks:
            raise FormatError(f"comm of {len(group)} ranks calls a program of {self.callees[callee].ranks}", where=self.caller.describe(step))
        body = self.body(callee, member)
        self.open_channels(comm, callee)
        buffer_of, base_of, finer = self.bind(step, call, comm, callee, member, body)
        site = self.sites.setdefault((actor, comm, callee), _Site(actor, comm, callee, body, [], [], [], []))
        site.steps.append(step)
        site.buffer_of.append(buffer_of)
        site.base_of.append(base_of)
        site.finer.append(finer)

    def body(self, callee: int, member: int) -> RankBody:
        if (callee, member) not in self.bodies:
            self.bodies[callee, member] = unroll(self.callees[callee], member)
        return self.bodies[callee, member]

    def open_channels(self, comm: int, callee: int) -> None:
        if (comm, callee) in self.channel_base:
            return
        q = self.callees[callee].channels
        group = self.caller.comms.groups[comm]
        base = sum(len(c) for c in self.channels)
        set_base = sum(len(c.sets) for c in self.channels)
        self.channel_base[comm, callee] = (base, set_base)
        self.channels.append(replace(q, src=group[q.src], dst=group[q.dst], tag=np.full(len(q), comm, np.int32)))

    def bind(self, step: int, call: int, comm: int, callee: int, member: int, body: RankBody) -> tuple[I32, I32, int]:
        """Caller buffer and first chunk of every local buffer of the callee, and how many of its chunks stand for one of the callee's."""
        q, b = self.callees[callee], self.caller.buffers
        triples = self.caller.calls.binds[call].reshape(-1, 3)
        buffer_of = np.full(len(body.buffers), -1, np.int32)
        base_of = np.zeros(len(body.buffers), np.int32)
        scale: Fraction | None = None  # bytes here of one of the callee's
        finer = 1
        for local, buffer, chunk in triples.tolist():
            if not 0 <= local < len(body.buffers) or not 0 <= buffer < len(b):
                raise FormatError(f"binding ({local}, {buffer}, {chunk}) names no buffer", where=self.caller.describe(step))
            theirs = int(body.buffers[local])
            wanted = int(q.buffers.chunks[theirs]) * slices(q, theirs)
            has = int(b.chunks[buffer]) - chunk
            more = has // wanted if wanted else finer  # an empty buffer stands for any number of chunks
            if has != wanted * more or more < 1 or (scale is not None and more != finer):
                name = self.caller.buffer_name(buffer)
                raise FormatError(
                    f"{name} has {has} chunks from {chunk} on, the callee needs {wanted} or a multiple", where=self.caller.describe(step)
                )
            buffer_of[local], base_of[local] = buffer, chunk
            if wanted:
                finer, nominal = more, int(q.buffers.chunk_bytes[theirs])
                scale = Fraction(int(b.chunk_bytes[buffer]) * finer, nominal) if nominal else None
        free = np.flatnonzero(buffer_of < 0).astype(np.int32)
        if len(free):
            # One callee may be called with messages of several sizes, whose chunks never fit each other's scratch.
            key = (comm, callee, member, finer, scale or Fraction(1))
            if key not in self.scratch:
                self.scratch[key] = self.make_scratch(q, body, free, key[-1], finer, int(self.caller.comms.groups[comm][member]))
            buffer_of[free] = self.scratch[key]
        return buffer_of, base_of, finer

    def make_scratch(self, q: Program, body: RankBody, free: I32, scale: Fraction, finer: int, actor: int) -> I32:
        numbers = []
        for local in free.tolist():
            theirs = int(body.buffers[local])
            nominal = int(q.buffers.chunk_bytes[theirs])
            real = ceil(nominal * scale / finer)
            numbers.append(len(self.caller.buffers) + len(self.new_buffers))
            chunks = int(q.buffers.chunks[theirs]) * slices(q, theirs) * finer
            if chunks >= 1 << 31:
                at = f"program {q.name!r}.buffers.chunks[{theirs}]"
                raise FormatError(f"needs {chunks} chunks of scratch, the limit is {(1 << 31) - 1}", where=at)
            self.new_buffers.append({"actor": actor, "space": int(q.buffers.space[theirs]), "chunks": chunks, "chunk_bytes": real})
        return np.array(numbers, np.int32)

    # ---- pass 2: fill the columns ------------------------------------------------------------------------------
    def fill(self, first: I32, last: I32, is_call: Any, base: Any) -> tuple[Steps, I32, I32]:
        s = self.caller.steps
        n = int(base[-1])
        columns = {name: np.full(n, -1, np.int32) for name in ("op", "chan_in", "chan_out", "src_buffer", "dst_buffer", "size")}
        columns |= {name: np.zeros(n, np.int32) for name in ("kind", "parts", "src_chunk", "dst_chunk", "count")}
        origin, comm = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        for name, column in columns.items():
            column[first] = getattr(s, name)
        origin[first] = origin[last] = np.arange(len(s), dtype=np.int32)
        for at in (first[is_call], last[is_call]):
            columns["kind"][at] = Kind.NOP
            columns["op"][at] = -1
            comm[at] = self.caller.calls.comm[s.op[is_call]]
        # after edges as (step, on, lag) triples, sorted by step at the end
        edges = [(np.repeat(first, np.diff(s.after_ptr)), last[s.after_step], s.after_lag)]
        for site in self.sites.values():
            edges += self.fill_site(site, columns, origin, comm, first, last, base)
        step = np.concatenate([e[0] for e in edges])
        order = np.argsort(step, kind="stable")
        ptr = np.zeros(n + 1, np.int32)
        np.cumsum(np.bincount(step, minlength=n), out=ptr[1:])
        after_step = np.concatenate([e[1] for e in edges])[order].astype(np.int32)
        after_lag = np.concatenate([e[2] for e in edges])[order].astype(np.int32)
        return Steps(after_ptr=ptr, after_step=after_step, after_lag=after_lag, **columns), origin, comm

    def fill_site(
        self, x: _Site, columns: dict[str, I32], origin: I32, comm: I32, first: I32, last: I32, base: Any
    ) -> list[tuple[Any, Any, Any]]:
        """The lanes of a site: each callee lane's body once per call. Returns their `after` edges."""
        calls = np.array(x.steps)
        k = np.arange(len(calls))
        buffer_of, base_of = np.stack(x.buffer_of), np.stack(x.base_of)
        finer = np.array(x.finer)[:, None]
        channel, set_base = self.channel_base[x.comm, x.callee]
        edges: list[tuple[Any, Any, Any]] = []
        starts = [int(base[x.first_lane + j]) for j in range(len(x.body.lanes))]
        lengths = np.array([len(body) for body in x.body.lanes])
        for start, body in zip(starts, x.body.lanes, strict=True):
            size = len(body)
            at = slice(start, start + size * len(calls))
            mine_of = {name: column[at].reshape(len(calls), size) for name, column in columns.items()}  # views: a row per call
            for name in COLUMNS:
                mine_of[name][:] = body.columns[name]
            for name, flag in (("chan_in", Part.IN_SET), ("chan_out", Part.OUT_SET)):
                theirs = body.columns[name]
                shift = np.where(body.columns["parts"] & flag, set_base, channel)
                mine_of[name][:] = np.where(theirs >= 0, theirs + shift, -1)
            for side, local in (("src", body.src_local), ("dst", body.dst_local)):
                has, mine = local >= 0, np.maximum(local, 0)
                mine_of[f"{side}_buffer"][:] = np.where(has, buffer_of[:, mine], -1)
                mine_of[f"{side}_chunk"][:] = np.where(has, body.columns[f"{side}_chunk"] * finer + base_of[:, mine], 0)
            mine_of["count"][:] = body.columns["count"] * finer
            origin[at] = np.repeat(calls, size)
            comm[at] = x.comm
            heads = start + k * size
            edges.append((heads, first[calls], np.zeros(len(calls), np.int32)))
            edges.append((last[calls], heads + size - 1, np.zeros(len(calls), np.int32)))
            if len(body.after_lane):
                owner = np.repeat(np.arange(size), np.diff(body.after_ptr))
                on = np.array(starts)[body.after_lane] + body.after_position
                step = (heads[:, None] + owner).ravel()
                edges.append((step, (on + k[:, None] * lengths[body.after_lane]).ravel(), np.zeros(len(step), np.int32)))
        return edges

    def lanes(self, first: I32, base: Any, total: int) -> Lanes:
        la = self.caller.lanes
        ends = np.concatenate([first, [total]])
        bodies = [(site.actor, body) for site in self.sites.values() for body in site.body.lanes]
        return Lanes(
            actor=_cat(la.actor, [actor for actor, _ in bodies]),
            unit=_cat(la.unit, [body.unit for _, body in bodies]),
            repeat=_cat(la.repeat, [1] * len(bodies)),
            role=_cat(la.role, [body.role for _, body in bodies]),
            start=_cat(ends[la.start], base[:-1]),
            end=_cat(ends[la.end], base[1:]),
        )

    def buffers(self, last: I32) -> Buffers:
        b, new = self.caller.buffers, self.new_buffers
        k = len(new)
        none = np.full(k, -1, np.int32)
        ptr = _cat(b.last.ptr, [int(b.last.ptr[-1])] * k)
        return Buffers(
            actor=_cat(b.actor, [x["actor"] for x in new]),
            space=_cat(b.space, [x["space"] for x in new]),
            role=_cat(b.role, [6] * k),  # scratch
            chunks=_cat(b.chunks, [x["chunks"] for x in new]),
            chunk_bytes=np.concatenate([b.chunk_bytes, np.array([x["chunk_bytes"] for x in new], np.int64)]),
            size=_cat(b.size, none),
            alias_of=_cat(b.alias_of, none),
            alias_offset_bytes=np.concatenate([b.alias_offset_bytes, np.zeros(k, np.int64)]),
            window=_cat(b.window, [0] * k),
            persistent=_cat(b.persistent, [1] * k),
            last=Csr(ptr, last[b.last.values]),
            arena_offset=np.concatenate([b.arena_offset, np.full(k, -1, np.int64)]),
            name=(*b.name, *[""] * k) if b.name else (),
        )


def _refuse_unsupported(q: Program, name: str) -> None:
    for what, found in (
        ("calls of its own", len(q.calls) > 0),
        ("compute steps", bool(np.any(q.steps.kind == Kind.COMPUTE))),
        ("in-network actors", q.switches > 0),
        ("buffers that alias others", bool(np.any(q.buffers.alias_of >= 0))),
    ):
        if found:
            raise Unsupported(f"program {q.name or name[:16]!r} cannot be inlined: it has {what}", hint="expand it first")


def _join_channels(parts: list[Channels]) -> Channels:
    routes: list[tuple[str, ...]] = []
    route_columns: list[I32] = []
    set_ptr: list[I32] = [np.zeros(1, np.int32)]
    set_values: list[I32] = []
    base = sets = 0
    for c in parts:
        route_columns.append(np.where(c.route >= 0, c.route + len(routes), -1))
        routes.extend(c.routes)
        set_ptr.append(c.sets.ptr[1:] + np.int32(sets))
        set_values.append(c.sets.values + np.int32(base))
        sets += len(c.sets.values)
        base += len(c)
    return Channels(
        src=_cat(*[c.src for c in parts]),
        dst=_cat(*[c.dst for c in parts]),
        tag=_cat(*[c.tag for c in parts]),
        depth=_cat(*[c.depth for c in parts]),
        route=_cat(*route_columns),
        routes=tuple(routes),
        sets=Csr(_cat(*set_ptr), _cat(*set_values)),
    )


def _cat(*columns: Any) -> I32:
    return np.concatenate([np.asarray(c, dtype=np.int32) for c in columns]).astype(np.int32)
