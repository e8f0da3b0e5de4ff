"""The shape of a program: every column has the right length, every index is in range.

Whether a program is *right* (delivers, cannot deadlock, fits) is the business of `meshwright.check`.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import FormatError
from .program import BUFFER_ROLES, COLLECTIVES, MAX_ACTORS, MAX_EXECUTED_STEPS, REPRODUCIBLE, Contract, Kind, Part, Program, Role, Space
from .tables import I32, Csr

__all__ = ["refuse_too_many_executed", "validate"]

_E32 = np.zeros(0, np.int32)


def validate(program: Program) -> None:
    """Raise FormatError unless every column has the right length and every index is in range."""
    n_actor, n_step = program.ranks + program.switches, len(program.steps)
    if program.ranks < 1:
        raise FormatError(f"must be >= 1, got {program.ranks}", where="program.ranks")
    if n_actor > MAX_ACTORS:
        raise FormatError(f"{n_actor} ranks and switches, the limit is {MAX_ACTORS}", where="program.ranks")
    for table_name in ("lanes", "steps", "channels", "buffers", "ops"):
        table = getattr(program, table_name)
        length = len(table)
        for column in fields(table):
            values = getattr(table, column.name)
            if column.name in ("after_ptr", "after_step", "after_lag", "routes", "sets") or isinstance(values, Csr):
                continue
            if column.name == "name" and table_name == "buffers" and not values:
                continue
            if len(values) != length:
                raise FormatError(f"has {len(values)} entries, expected {length}", where=f"program.{table_name}.{column.name}")
    s, b, la = program.steps, program.buffers, program.lanes
    _csr_ok("steps.after_ptr", s.after_ptr, n_step, len(s.after_step))
    if len(s.after_lag) != len(s.after_step):
        raise FormatError(f"has {len(s.after_lag)} entries, expected {len(s.after_step)}", where="program.steps.after_lag")
    expected_start = np.concatenate([np.zeros(1, np.int32), la.end[:-1]]) if len(la) else _E32
    if len(la) and (np.any(la.start != expected_start) or la.end[-1] != n_step or np.any(la.end < la.start)):
        raise FormatError("lanes must tile the step table in order", where="program.lanes.start")
    if not len(la) and n_step:
        raise FormatError("steps without lanes", where="program.lanes")
    _in_range("lanes.actor", la.actor, 0, n_actor)
    _in_range("lanes.repeat", la.repeat, 1, 1 << 31)
    _in_range("lanes.unit", la.unit, -1, 1 << 15)
    _in_range("lanes.role", la.role, 0, len(Role))
    _in_range("steps.kind", s.kind, 0, len(Kind))
    _in_range("steps.parts", s.parts, 0, 128)
    n_op = np.where(s.kind == Kind.COMPUTE, len(program.ops), np.where(s.kind == Kind.CALL, len(program.calls), 0))
    works = (s.kind == Kind.COMPUTE) | (s.kind == Kind.CALL)
    _in_range("steps.op", s.op, np.where(works, 0, -1), np.where(works, n_op, 0))
    n_in = np.where(s.parts & Part.IN_SET, len(program.channels.sets), len(program.channels))
    n_out = np.where(s.parts & Part.OUT_SET, len(program.channels.sets), len(program.channels))
    _in_range("steps.chan_in", s.chan_in, np.where(s.parts & Part.RECV, 0, -1), np.where(s.parts & Part.RECV, n_in, 0))
    _in_range("steps.chan_out", s.chan_out, np.where(s.parts & Part.SEND, 0, -1), np.where(s.parts & Part.SEND, n_out, 0))
    for side in ("src", "dst"):
        buffer, chunk = getattr(s, f"{side}_buffer"), getattr(s, f"{side}_chunk")
        _in_range(f"steps.{side}_buffer", buffer, -1, len(b))
        has = buffer >= 0
        chunks = b.chunks[np.maximum(buffer, 0)] if len(b) else np.zeros(n_step, np.int32)
        bad = has & ((chunk < 0) | (chunk.astype(np.int64) + s.count > chunks))
        if bad.any():
            i = int(np.argmax(bad))
            span = f"{int(chunk[i])}..{int(chunk[i]) + int(s.count[i])}"
            raise FormatError(f"chunks {span} of a buffer with {int(chunks[i])}", where=f"program.steps.{side}_chunk[{i}]")
    _in_range("steps.count", s.count, 0, 1 << 31)
    _in_range("steps.size", s.size, -1, len(program.sizes))
    _in_range("steps.after_step", s.after_step, 0, n_step)
    _in_range("steps.after_lag", s.after_lag, 0, 1 << 31)
    c = program.channels
    _in_range("channels.src", c.src, 0, n_actor)
    _in_range("channels.dst", c.dst, 0, n_actor)
    if program.fold is None and (c.src == c.dst).any():
        i = int(np.argmax(c.src == c.dst))
        raise FormatError("a channel to oneself: a local hand-over is an `after` edge", where=f"program.channels.dst[{i}]")
    _in_range("channels.depth", c.depth, 1, 1 << 31)
    _in_range("channels.tag", c.tag, -1, len(program.comms))
    _in_range("channels.route", c.route, -1, len(c.routes))
    _csr("channels.sets", c.sets, len(c.sets), 0, len(c))
    _in_range("buffers.actor", b.actor, 0, n_actor)
    _in_range("buffers.role", b.role, 0, len(BUFFER_ROLES))
    _in_range("buffers.space", b.space, 0, len(Space))
    _in_range("buffers.chunks", b.chunks, 0, 1 << 31)
    _in_range("buffers.chunk_bytes", b.chunk_bytes, 0, 1 << 50)
    _in_range("buffers.size", b.size, -1, len(program.sizes))
    _in_range("buffers.alias_of", b.alias_of, -1, len(b))
    _in_range("buffers.window", b.window, 0, 1 << 31)
    _csr("buffers.last", b.last, len(b), 0, n_step)
    for name, triples in (("reads", program.ops.reads), ("writes", program.ops.writes)):
        _csr(f"ops.{name}", triples, len(program.ops), 0, 1 << 31)
        if (np.diff(triples.ptr) % 3).any():
            raise FormatError("lists must be (buffer, first chunk, count) triples", where=f"program.ops.{name}")
        _in_range(f"ops.{name}", triples.values[::3], 0, len(b))
        over = triples.values[1::3].astype(np.int64) + triples.values[2::3] > b.chunks[triples.values[::3]]
        if over.any():
            raise FormatError("range beyond the buffer's chunks", where=f"program.ops.{name}[{int(np.argmax(over))}]")
    _csr("comms.groups", program.comms.groups, len(program.comms), 0, program.ranks)
    _in_range("calls.comm", program.calls.comm, 0, len(program.comms))
    _in_range("calls.callee", program.calls.callee, 0, len(program.calls.names))
    calls = program.calls
    if len(calls.callee) != len(calls):
        raise FormatError(f"has {len(calls.callee)} entries, expected {len(calls)}", where="program.calls.callee")
    _csr("calls.binds", calls.binds, len(calls), 0, 1 << 31)
    if (np.diff(calls.binds.ptr) % 3).any():
        raise FormatError("lists must be (callee buffer, buffer, first chunk) triples", where="program.calls.binds")
    _sizes(program)
    _fold(program)
    _contract(program)


def refuse_too_many_executed(program: Program) -> None:
    """Files only: a few bytes of `repeat` must not stand for more steps than any reader can write out. Raises FormatError naming the lane."""
    la = program.lanes
    executed = (la.end - la.start).astype(np.int64) * la.repeat
    total = int(executed.sum())  # at most MAX_STEPS steps, 2**31 times each: it cannot wrap
    if total > MAX_EXECUTED_STEPS:
        i = int(np.argmax(executed))
        raise FormatError(
            f"lanes execute {total} steps with their repeats, the limit is {MAX_EXECUTED_STEPS}; this one "
            f"{int(la.end[i] - la.start[i])} steps {int(la.repeat[i])} times",
            where=f"program.lanes.repeat[{i}]", hint="cut messages into fewer slices",
        )  # fmt: skip


def _sizes(program: Program) -> None:
    sizes = program.sizes
    for column in ("lower", "expected", "upper", "producer"):
        if len(getattr(sizes, column)) != len(sizes):
            raise FormatError(f"has {len(getattr(sizes, column))} entries, expected {len(sizes)}", where=f"program.sizes.{column}")
    _in_range("sizes.lower", sizes.lower, 0, 1 << 50)
    _in_range("sizes.expected", sizes.expected, sizes.lower, 1 << 50)
    _in_range("sizes.upper", sizes.upper, sizes.expected, 1 << 50)
    _in_range("sizes.producer", sizes.producer, -1, len(program.steps))


def _fold(program: Program) -> None:
    if program.fold is None:
        return
    size = 1
    for i, axis in enumerate(program.fold.axes):
        if axis.size < 1 or axis.stride < 1:
            raise FormatError("size and stride must be >= 1", where=f"program.fold.axes[{i}]")
        if axis.kind == "xor" and axis.size & (axis.size - 1):
            raise FormatError(f"an xor axis needs a power of two, got {axis.size}", where=f"program.fold.axes[{i}].size")
        size *= axis.size
    fixed = program.fold.fixed
    if any(a >= b for a, b in pairwise((-1, *fixed, program.ranks))):
        raise FormatError(f"must be different ranks 0..{program.ranks - 1}, rising", where="program.fold.fixed")
    if size != program.ranks - len(fixed):
        raise FormatError(f"axes of {size} ranks in a program of {program.ranks}, of which {len(fixed)} stay", where="program.fold.axes")
    if program.fold.by_rank and np.any((program.buffers.chunks % program.ranks != 0) | (program.buffers.chunks < 1)):
        raise FormatError(f"needs buffers of one block for each of {program.ranks} ranks", where="program.fold.by_rank")
    folded = sum(axis.kind != "plain" for axis in program.fold.axes)
    if program.fold.buffer_shift.shape != (folded, len(program.buffers)):
        raise FormatError(f"must be {folded} x {len(program.buffers)}, got {program.fold.buffer_shift.shape}", where="program.fold.buffer_shift")


def _contract(program: Program) -> None:
    for number, promised in enumerate(program.contracts):
        _promise(program, promised, "program.contract" if len(program.contracts) == 1 else f"program.contracts[{number}]")


def _promise(program: Program, promised: Contract, where: str) -> None:
    if promised.op not in COLLECTIVES:
        raise FormatError(f"unknown operation {promised.op[:64]!r}", where=f"{where}.op")
    for i, rank in enumerate(promised.ranks):
        if not 0 <= rank < program.ranks or rank in promised.ranks[:i]:
            raise FormatError(f"must be different ranks 0..{program.ranks - 1}, got {rank}", where=f"{where}.ranks[{i}]")
    members = len(promised.members(program.ranks))
    if not -1 <= promised.root < members:
        raise FormatError(f"must be -1..{members - 1}, got {promised.root}", where=f"{where}.root")
    if len(promised.peers) != (members if promised.op == "permute" else 0):
        wanted = f"one per rank ({members})" if promised.op == "permute" else f"none for {promised.op}"
        raise FormatError(f"has {len(promised.peers)} entries, expected {wanted}", where=f"{where}.peers")
    for i, peer in enumerate(promised.peers):
        if not -1 <= peer < members:
            raise FormatError(f"must be -1..{members - 1}, got {peer}", where=f"{where}.peers[{i}]")
    if promised.reproducible not in REPRODUCIBLE:
        raise FormatError(f"must be {', '.join(REPRODUCIBLE)}, got {promised.reproducible[:64]!r}", where=f"{where}.reproducible")
    if promised.numbers and sorted(promised.numbers) != list(range(members)):
        raise FormatError(f"must hold every number 0..{members - 1} once", where=f"{where}.numbers")
    # a contract speaks of every rank, so of the plain form's buffers: those of member 0, of member 1, ... (`fold.expand`)
    b, fold = program.buffers, program.fold
    plain = len(b) if fold is None else fold.plain_buffers(b.actor)
    for field in ("inputs", "outputs"):
        ranges = getattr(promised, field)
        if len(ranges) != members:
            raise FormatError(f"has {len(ranges)} entries, expected one per rank ({members})", where=f"{where}.{field}")
        named = np.array([buffer for buffer, _, _ in ranges], np.int64).reshape(-1)
        if np.any(bad := (named < 0) | (named >= plain)):
            i = int(np.argmax(bad))
            raise FormatError(f"must be a buffer 0..{plain - 1}, got {named[i]}", where=f"{where}.{field}[{i}]")
        held = b.chunks[named if fold is None else fold.stored_buffers(b.actor, named)[0]].tolist()
        for i, ((_, first, count), chunks) in enumerate(zip(ranges, held, strict=True)):
            if first < 0 or count < 0 or first + count > chunks:
                raise FormatError(f"chunks {first}..{first + count} of a buffer with {chunks}", where=f"{where}.{field}[{i}]")


def _in_range(where: str, values: Any, low: Any, high: Any) -> None:
    bad = (values < low) | (values >= high)
    if bad.any():
        i = int(np.argmax(bad))
        low_i = int(np.broadcast_to(low, np.shape(values))[i])
        high_i = int(np.broadcast_to(high, np.shape(values))[i])
        raise FormatError(f"must be {low_i}..{high_i - 1}, got {int(values[i])}", where=f"program.{where}[{i}]")


def _csr_ok(where: str, ptr: I32, rows: int, values: int) -> None:
    if len(ptr) != rows + 1 or ptr[0] != 0 or ptr[-1] != values or (ptr[1:] < ptr[:-1]).any():  # not diff: it would wrap
        raise FormatError("row pointers must rise from 0 to the number of values", where=f"program.{where}")


def _csr(where: str, csr: Csr, rows: int, low: int, high: int) -> None:
    _csr_ok(where, csr.ptr, rows, len(csr.values))
    _in_range(where, csr.values, low, high)
