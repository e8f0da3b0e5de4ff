"""A folded training program as its representatives see it: plain, a collective over a folded axis being one step that reads and writes what is bound.

Members of such a collective are each other's images, so a representative's call stands for all of them at once. What is proved on the shadow holds
for every member, being the image of a representative, as long as:
- waits through other members (messages outside of calls) are among those in which no cycle is looked for, and are not among those that order the
  accesses of one rank: a message from a member orders what that member did, not what this one does (`linked`);
- every callee is right on its own: live, free of races, keeping its contract (checked as any program, folded ones by their stored lanes);
- its contract is the same for all members: in place, whole buffers, equal parts in member order.
Where waits have no cycle here they have none in the plain form: a cycle there would be one here, calls being single steps. Steps of one
representative that nothing orders here may be ordered through other members in the plain form; they are then refused, never the reverse.
Calls among representatives only (stages that share a parameter) are written out.

A message to another member is two steps here: one (`SENT`) that reads what is sent, and one (`RECEIVED`) that writes the image that arrives. Where
waits have no cycle with every such pair joined, the plain form's have none: a cycle there would lead through the images of these pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import FormatError, Unsupported
from ...program.calls import inline
from ...program.fold import folded_axes, is_representative, plain_buffers, representative, require_folded
from ...program.program import FoldAxis, Kind, Part, Program
from ...program.tables import Calls, Comms, Csr, Ops, Steps
from ..training.rows import Move
from .messages import End, ends_of, linked

__all__ = ["ORBIT", "RECEIVED", "SENT", "OrbitCall", "Shadow", "shadow"]

ORBIT = "call"  # name of the ops that stand for collectives over a folded axis
SENT, RECEIVED = "message sent", "message received"  # of those that stand for the ends of messages to other members


@dataclass(frozen=True)
class OrbitCall:
    """`axis`: number of the folded axis, `kind`: the contract's operation, `buffer`: what it works on, whole and in place."""

    axis: int
    kind: str
    buffer: int
    comm: int


@dataclass(frozen=True)
class Shadow:
    """`calls`, `messages`: by op. `linked`: the program with every message's sending before its receipt, and that before the sending that needs its
    room. `shift`: the fold's, of the caller's buffers. `scratch_bytes`, `staging_bytes`: per actor, what callees need beside bound buffers, and for
    messages that are staged."""

    program: Program
    linked: Program
    axes: tuple[FoldAxis, ...]
    shift: np.ndarray[Any, Any]
    calls: dict[int, OrbitCall]
    messages: dict[int, End]
    scratch_bytes: np.ndarray[Any, Any]
    staging_bytes: np.ndarray[Any, Any]

    def message_steps(self) -> list[tuple[int, End]]:
        """Steps of `program` that stand for the ends of messages to other members."""
        s = self.program.steps
        steps = np.flatnonzero((s.kind == Kind.COMPUTE) & np.isin(s.op, list(self.messages))) if self.messages else np.zeros(0, np.int64)
        return [(step, self.messages[op]) for step, op in zip(steps.tolist(), s.op[steps].tolist(), strict=True)]

    def moves(self) -> list[Move]:
        """What is sent to other members, and comes of them."""
        return [Move(step, end.place[0], end.place[1], end.size) for step, end in self.message_steps()]


def shadow(program: Program, programs: Mapping[str, Program]) -> Shadow:
    """Raises: Unsupported where a representative cannot stand for the others in this way; FormatError for callees that are missing."""
    fold = require_folded(program)
    p = program
    if np.any(p.lanes.repeat > 1) or np.any(p.channels.route >= 0) or np.any(p.steps.parts & (Part.IN_SET | Part.OUT_SET)):
        raise Unsupported("a folded program with repeated lanes, pinned routes or channel sets is not proved folded", where=p.name)
    # Calls over a folded axis become one computing step each; calls among representatives stay calls and are written out below.
    reader = _Reader(p, programs)
    step = np.flatnonzero(p.steps.kind == Kind.CALL)
    actor = p.lanes.actor[p.lane_of_step()[step]]
    orbit = np.array([not reader.among_representatives(int(p.calls.comm[c])) for c in p.steps.op[step]], bool)
    kind, op = p.steps.kind.copy(), p.steps.op.copy()
    found: dict[int, OrbitCall] = {}
    rows: list[list[int]] = []
    names: list[str] = []
    for s, who in zip(step[orbit].tolist(), actor[orbit].tolist(), strict=True):
        call = int(p.steps.op[s])
        number = len(p.ops) + len(rows)
        found[number] = reader.read(call, who, s)
        rows.append([found[number].buffer, 0, int(p.buffers.chunks[found[number].buffer])])
        names.append(p.calls.names[int(p.calls.callee[call])])
        kind[s], op[s] = Kind.COMPUTE, number
    # So does every end of a message to another member.
    ends = ends_of(p)
    met: dict[int, End] = {}
    for end in ends.ends:
        number = len(p.ops) + len(rows)
        met[number] = end
        rows.append([*end.place])
        names.append(f"channel {end.channel}")
        kind[end.step], op[end.step] = Kind.COMPUTE, number
    # What is left of the table of calls is numbered anew.
    kept = p.steps.op[step[~orbit]]
    op[step[~orbit]] = np.arange(len(kept))
    calls = Calls(comm=p.calls.comm[kept], callee=p.calls.callee[kept], names=p.calls.names, binds=Csr.of([p.calls.binds[c].tolist() for c in kept]))
    used = sorted(set(calls.callee.tolist()))
    calls = replace(calls, names=tuple(p.calls.names[c] for c in used), callee=np.searchsorted(used, calls.callee).astype(np.int32))
    comms = Comms(name=p.comms.name, groups=p.comms.groups)
    steps = _without(replace(p.steps, kind=kind, op=op), [end.step for end in ends.ends])
    caller = replace(p, fold=None, contracts=(), calls=calls, comms=comms, ops=_with_calls(p.ops, names, rows, met), steps=steps)
    for name in calls.names:
        if name not in programs:
            raise FormatError(f"program {name[:16]!r} is called but not given", where=f"{p.name}.calls")
    flat = inline(caller, programs)
    where = {int(old): new for new, old in enumerate(flat.origin_step.tolist())} if met else {}
    staging = reader.staging_bytes() + ends.staging_bytes
    return Shadow(flat.program, linked(flat.program, where, ends), folded_axes(fold), fold.buffer_shift, found, met, reader.scratch, staging)


def _without(s: Steps, ends: list[int]) -> Steps:
    """Steps whose messages are no longer any."""
    none = {"size": -1, "parts": 0, "chan_in": -1, "chan_out": -1, "src_buffer": -1, "src_chunk": 0, "dst_buffer": -1, "dst_chunk": 0, "count": 0}
    columns = {name: getattr(s, name).copy() for name in none}
    for name, column in columns.items():
        column[ends] = none[name]
    return replace(s, **columns)


def _with_calls(o: Ops, names: list[str], rows: list[list[int]], ends: Mapping[int, End]) -> Ops:
    """Ops with one more for every call, which reads and writes a whole buffer, and for every end of a message, which does one of these."""
    n, first = len(rows), len(o)
    none, zero, one = np.full(n, -1, np.int32), np.zeros(n, np.int32), np.ones(n, np.int32)
    adds = np.array([number in ends and ends[number].adds for number in range(first, first + n)], np.int32)
    called = [(SENT if ends[number].sends else RECEIVED) if number in ends else ORBIT for number in range(first, first + n)]

    def joined(csr: Csr, skipped: str) -> Csr:
        more = Csr.of([[] if called[i] == skipped else row for i, row in enumerate(rows)])
        return Csr(np.concatenate([csr.ptr, more.ptr[1:] + csr.ptr[-1]]).astype(np.int32), np.concatenate([csr.values, more.values]))

    return Ops(
        name=(*o.name, *called), graph=(*o.graph, *names), module=(*o.module, *[""] * n), copy=np.concatenate([o.copy, zero]),
        stage=np.concatenate([o.stage, none]), microbatch=np.concatenate([o.microbatch, none]), part=np.concatenate([o.part, zero]),
        parts=np.concatenate([o.parts, one]), accumulate=np.concatenate([o.accumulate, adds]),
        workspace_bytes=np.concatenate([o.workspace_bytes, np.zeros(n, np.int64)]), reads=joined(o.reads, RECEIVED), writes=joined(o.writes, SENT),
    )  # fmt: skip


class _Reader:
    """Calls over a folded axis, and what their callees promise."""

    def __init__(self, p: Program, programs: Mapping[str, Program]) -> None:
        self.p, self.programs = p, programs
        self.fold = require_folded(p)
        self.axes = folded_axes(self.fold)
        self.alone: dict[int, bool] = {}
        self.axis_of: dict[int, int] = {}
        self.promise: dict[str, tuple[str, int]] = {}
        self.scratch = np.zeros(p.ranks + p.switches, np.int64)
        self.staged: dict[tuple[int, int, int], int] = {}  # (actor, comm, callee) -> largest bytes of messages that are staged
        self.resident: dict[tuple[int, int, int], int] = {}
        self.of_callee: dict[str, tuple[int, int]] = {}

    def among_representatives(self, comm: int) -> bool:
        if comm not in self.alone:
            self.alone[comm] = all(is_representative(self.fold, int(r)) for r in self.p.comms.groups[comm])
        return self.alone[comm]

    def read(self, call: int, actor: int, step: int) -> OrbitCall:
        p = self.p
        comm, callee = int(p.calls.comm[call]), p.calls.names[int(p.calls.callee[call])]
        axis = self._axis(comm)
        group = p.comms.groups[comm]
        kind, local = self._promise(callee, len(group))
        if actor != int(group[0]):
            text = f"rank {actor} calls on comm {p.comms.name[comm]!r}, whose first member is rank {int(group[0])}"
            raise FormatError(text, where=p.describe(step))
        binds = p.calls.binds[call].reshape(-1, 3).tolist()
        if len(binds) != 1 or binds[0][0] != local or binds[0][2] or int(p.buffers.actor[binds[0][1]]) != actor:
            raise Unsupported("a call that does not work in place on one whole buffer of its rank is not proved folded", where=p.describe(step))
        buffer = binds[0][1]
        q = self.programs[callee]
        mine = np.flatnonzero(q.buffers.actor == 0)
        chunks, theirs = int(p.buffers.chunks[buffer]), int(q.buffers.chunks[mine[local]])
        if chunks % theirs:
            raise FormatError(f"{p.buffer_name(buffer)} has {chunks} chunks, the callee needs a multiple of {theirs}", where=p.describe(step))
        # Member m's part of the buffer must be where the fold says that member m's chunks are.
        shift = int(self.fold.buffer_shift[axis, buffer])
        wanted = 0 if kind == "all-reduce" else chunks // len(group)
        if shift != wanted or (kind != "all-reduce" and chunks % len(group)):
            text = f"parts of {p.buffer_name(buffer)} move by {shift} chunks from member to member, {kind} needs {wanted}"
            raise Unsupported(text, where=p.describe(step))
        self._needs(actor, comm, callee, int(p.calls.callee[call]), chunks // theirs * int(p.buffers.chunk_bytes[buffer]), local)
        return OrbitCall(axis, kind, buffer, comm)

    def _axis(self, comm: int) -> int:
        if comm not in self.axis_of:
            group = self.p.comms.groups[comm]
            for number, axis in enumerate(self.axes):
                # The group must be the representative and its images in order of members, so that "part m" means the same to all.
                orbit = int(group[0]) + np.arange(axis.size) * axis.stride
                if axis.kind == "shift" and is_representative(self.fold, int(group[0])) and np.array_equal(orbit, group):
                    self.axis_of[comm] = number
                    break
            else:
                raise Unsupported(f"comm {self.p.comms.name[comm]!r} is no orbit of a representative along a folded axis", where=self.p.name)
        return self.axis_of[comm]

    def _promise(self, callee: str, members: int) -> tuple[str, int]:
        """(operation, local number of the buffer it works on) of a callee that treats its members alike."""
        if callee not in self.programs:
            raise FormatError(f"program {callee[:16]!r} is called but not given", where=f"{self.p.name}.calls")
        if callee in self.promise:
            return self.promise[callee]
        q = self.programs[callee]
        c = q.contract
        if q.ranks != members or c is None or c.ranks or c.op not in ("all-reduce", "all-gather", "reduce-scatter"):
            raise Unsupported(f"callee {q.name!r} promises no all-reduce, all-gather or reduce-scatter of {members} ranks", where=self.p.name)
        actor, stored = plain_buffers(q)  # a folded callee's contract speaks of its plain form
        named = [(m, b) for table in (c.inputs, c.outputs) for m, (b, _, _) in enumerate(table)]
        local = {int((actor[:b] == member).sum()) for member, b in named}
        chunks = {int(q.buffers.chunks[stored[b]]) for _, b in named}
        total = next(iter(chunks))
        each = total // members
        # In place and alike: whole buffers, or the m-th of equal parts at member m.
        tables = ((c.inputs, c.op == "all-gather"), (c.outputs, c.op == "reduce-scatter"))  # the second: in parts, by member
        fits = all(row[1:] == ((m * each, each) if apart else (0, total)) for table, apart in tables for m, row in enumerate(table))
        at_home = all(actor[b] == m for m, b in named)
        if len(local) != 1 or len(chunks) != 1 or not fits or not at_home or np.any(q.lanes.repeat > 1):
            raise Unsupported(f"callee {q.name!r} does not treat its members alike, in place", where=self.p.name)
        self.promise[callee] = c.op, local.pop()
        return self.promise[callee]

    def _needs(self, actor: int, comm: int, name: str, callee: int, chunk_bytes: int, local: int) -> None:
        """Count what a call needs beside its buffer: scratch once per communicator and callee, staging of its channels."""
        if name not in self.of_callee:
            q = self.programs[name]
            recv = (q.steps.parts & Part.RECV) != 0
            most = np.zeros(len(q.channels), np.int64)
            np.maximum.at(most, q.steps.chan_in[recv], q.steps.count[recv].astype(np.int64))
            per_member = np.zeros(q.ranks, np.int64)
            to = q.channels.dst if q.fold is None else representative(q.fold, q.channels.dst)
            np.add.at(per_member, to, most * q.channels.depth)
            mine = np.flatnonzero(q.buffers.actor == 0)
            spare = [int(q.buffers.chunks[b]) for i, b in enumerate(mine) if i != local]
            self.of_callee[name] = int(per_member.max()), sum(spare)
        # Calls of one callee on one communicator run one after another and share scratch; the largest counts.
        staged, besides = self.of_callee[name]
        key = actor, comm, callee
        self.staged[key] = max(self.staged.get(key, 0), staged * chunk_bytes)
        if besides * chunk_bytes > self.resident.get(key, 0):
            self.scratch[actor] += besides * chunk_bytes - self.resident.get(key, 0)
            self.resident[key] = besides * chunk_bytes

    def staging_bytes(self) -> np.ndarray[Any, Any]:
        out = np.zeros(self.p.ranks + self.p.switches, np.int64)
        for (actor, _, _), size in self.staged.items():
            out[actor] += size
        return out
