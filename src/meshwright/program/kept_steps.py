"""Some steps of a program, with everything renumbered that they use. What takes steps out answers for what is left; here it stays well formed.

Cost: O(steps).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .program import Kind, Program
from .tables import I32, Buffers, Calls, Csr, Ops, Steps
from .validate import validate

__all__ = ["kept_steps"]

NUMBERS = ("copy", "stage", "microbatch", "part", "parts", "accumulate", "workspace_bytes")  # columns of ops
Like = Callable[[int, int, int], int]


def kept_steps(p: Program, steps: NDArray[np.bool_], buffers: NDArray[np.bool_], like: Like | None = None) -> Program:
    """Only the steps and buffers that are marked. What waited for a step that is gone waits for the one that `like(step, first of its lane,
    last one left before it)` names, by default for the last one left before it in its lane: what a step waits for came before it all along, so no
    two steps wait for each other that did not."""
    n = len(p.steps)
    kept, held = np.flatnonzero(steps), np.flatnonzero(buffers)
    number = np.full(n + 1, -1, np.int64)
    number[kept] = np.arange(len(kept))
    before = np.maximum.accumulate(np.where(steps, np.arange(n), -1)) if n else np.zeros(0, np.int64)
    starts = np.repeat(p.lanes.start, p.lanes.end - p.lanes.start)
    left = np.where(before >= starts, before, -1)  # of every step: itself, or the last one left before it in its lane
    waiting = _rows(Csr(p.steps.after_ptr, p.steps.after_step), kept, np.arange(n + 1)).values
    if like is not None:
        for target in np.unique(waiting[~steps[waiting]]).tolist():
            left[target] = like(target, int(starts[target]), int(left[target]))
    stand = np.append(number[left], -1)
    to_buffer = np.full(len(p.buffers) + 1, -1, np.int64)
    to_buffer[held] = np.arange(len(held))
    s = p.steps
    kind = s.kind[kept]
    ops, calls = np.unique(s.op[kept][kind == Kind.COMPUTE]), np.unique(s.op[kept][kind == Kind.CALL])
    to_op, to_call = _numbers(ops, len(p.ops)), _numbers(calls, len(p.calls))
    columns = {f.name: getattr(s, f.name)[kept] for f in fields(Steps) if not f.name.startswith("after_")}
    columns["op"] = np.where(
        kind == Kind.COMPUTE, to_op[np.where(kind == Kind.COMPUTE, columns["op"], -1)], to_call[np.where(kind == Kind.CALL, columns["op"], -1)]
    ).astype(np.int32)
    for name in ("src_buffer", "dst_buffer"):
        columns[name] = to_buffer[columns[name]].astype(np.int32)
    edges = _rows(Csr(s.after_ptr, s.after_step), kept, stand)
    upto = np.concatenate([[0], np.cumsum(steps)])
    b, c, o = p.buffers, p.calls, p.ops
    plain = [f.name for f in fields(Buffers) if f.name not in ("alias_of", "last", "name")]
    numbers: dict[str, Any] = {name: getattr(o, name)[ops] for name in NUMBERS}
    texts: dict[str, Any] = {name: tuple(getattr(o, name)[i] for i in ops.tolist()) for name in ("name", "graph", "module")}
    made = replace(
        p,
        lanes=replace(p.lanes, start=_i32(upto[p.lanes.start]), end=_i32(upto[p.lanes.end])),
        steps=Steps(after_ptr=edges.ptr, after_step=edges.values, after_lag=np.zeros(len(edges.values), np.int32), **columns),
        buffers=replace(
            b, alias_of=_i32(to_buffer[b.alias_of[held]]), last=_rows(b.last, held, stand), name=tuple(b.name[i] for i in held.tolist()),
            **{name: getattr(b, name)[held] for name in plain},
        ),
        ops=Ops(
            **numbers, **texts,
            reads=_triples(o.reads, ops, to_buffer, 0), writes=_triples(o.writes, ops, to_buffer, 0),
        ),
        calls=Calls(comm=c.comm[calls], callee=c.callee[calls], names=c.names, binds=_triples(c.binds, calls, to_buffer, 1)),
        contracts=(), fold=replace(p.fold, buffer_shift=p.fold.buffer_shift[:, held]) if p.fold is not None else None,
    )  # fmt: skip
    validate(made)
    return made


def _i32(values: Any) -> I32:
    return np.asarray(values).astype(np.int32)


def _numbers(kept: Any, n: int) -> NDArray[np.int64]:
    out = np.full(n + 1, -1, np.int64)  # the last entry answers for -1
    out[kept] = np.arange(len(kept))
    return out


def _taken(csr: Csr, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(lengths of the rows, positions of their values one row after the other)."""
    width = np.diff(csr.ptr)[rows].astype(np.int64)
    first = np.concatenate([[0], np.cumsum(width)])[:-1]
    return width, np.arange(int(width.sum())) - np.repeat(first, width) + np.repeat(csr.ptr[rows].astype(np.int64), width)


def _rows(csr: Csr, rows: NDArray[np.int64], stand: NDArray[np.int64]) -> Csr:
    """Chosen lists of steps; those that nothing stands for fall away."""
    width, at = _taken(csr, rows)
    values = stand[csr.values[at]]
    there = values >= 0
    owner = np.repeat(np.arange(len(rows)), width)[there]
    return Csr(_i32(np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(rows)))])), _i32(values[there]))


def _triples(csr: Csr, rows: NDArray[np.int64], buffer: NDArray[np.int64], column: int) -> Csr:
    width, at = _taken(csr, rows)
    triples = csr.values[at].reshape(-1, 3).astype(np.int64)
    triples[:, column] = buffer[triples[:, column]]
    return Csr(_i32(np.concatenate([[0], np.cumsum(width)])), _i32(triples.reshape(-1)))
