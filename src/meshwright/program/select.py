"""Some ranks of a program, with everything renumbered that they use."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .program import Kind, Program
from .tables import I32, Calls, Comms, Csr, Lanes, Ops, Steps

__all__ = ["select"]

Ints = NDArray[np.int64]


def select(p: Program, ranks: NDArray[np.bool_], channel: Ints) -> Program:
    """Lanes, buffers, ops, calls and communicators of the chosen ranks, in order; `channel[c]` is used in place of channel c (-1 unused).

    Ranks keep their numbers. `after` and `last` must stay inside the chosen ranks, as they do in every valid program.
    """
    lanes, buffers = np.flatnonzero(ranks[p.lanes.actor]), np.flatnonzero(ranks[p.buffers.actor])
    steps = np.flatnonzero(np.repeat(ranks[p.lanes.actor], p.lanes.end - p.lanes.start))
    s = p.steps
    used = np.unique(channel[np.concatenate([s.chan_in[steps][s.chan_in[steps] >= 0], s.chan_out[steps][s.chan_out[steps] >= 0]])])
    compute, call = steps[s.kind[steps] == Kind.COMPUTE], steps[s.kind[steps] == Kind.CALL]
    ops, calls = np.unique(s.op[compute]), np.unique(s.op[call])
    comms = np.unique(np.concatenate([p.calls.comm[calls], p.channels.tag[used][p.channels.tag[used] >= 0]]))
    to = {
        "step": _numbers(steps, len(s)), "buffer": _numbers(buffers, len(p.buffers)), "channel": _numbers(used, len(p.channels)),
        "op": _numbers(ops, len(p.ops)), "call": _numbers(calls, len(p.calls)), "comm": _numbers(comms, len(p.comms)),
    }  # fmt: skip
    c = p.channels
    kept_channels = replace(
        c, src=c.src[used], dst=c.dst[used], tag=_through(to["comm"], c.tag[used]), depth=c.depth[used], route=c.route[used]
    )
    b = p.buffers
    plain = ("actor", "space", "role", "chunks", "chunk_bytes", "size", "alias_offset_bytes", "window", "persistent", "arena_offset")
    kept_buffers = replace(
        b, alias_of=_through(to["buffer"], b.alias_of[buffers]), last=_lists(b.last, buffers, to["step"]),
        name=tuple(b.name[int(i)] for i in buffers) if b.name else (), **{name: getattr(b, name)[buffers] for name in plain},
    )  # fmt: skip
    return replace(
        p, lanes=_lanes(p, lanes), steps=_steps(p, steps, channel, to), channels=kept_channels, buffers=kept_buffers, ops=_ops(p, ops, to["buffer"]),
        comms=Comms(name=tuple(p.comms.name[int(i)] for i in comms), groups=_lists(p.comms.groups, comms, None)),
        calls=_calls(p, calls, to), contracts=(),
    )  # fmt: skip


def _numbers(kept: Any, n: int) -> Ints:
    out = np.full(n + 1, -1, np.int64)  # the last entry answers for -1
    out[kept] = np.arange(len(kept))
    return out


def _through(to: Ints, values: Any) -> I32:
    out: I32 = to[values].astype(np.int32)
    return out


def _lists(csr: Csr, rows: Any, to: Ints | None) -> Csr:
    lists = [csr[int(i)] if to is None else to[csr[int(i)]] for i in rows]
    return Csr.of([x.tolist() for x in lists])


def _lanes(p: Program, lanes: Any) -> Lanes:
    end = np.cumsum(p.lanes.end[lanes] - p.lanes.start[lanes]).astype(np.int32)
    start = (end - (p.lanes.end[lanes] - p.lanes.start[lanes])).astype(np.int32)
    return Lanes(
        actor=p.lanes.actor[lanes], unit=p.lanes.unit[lanes], repeat=p.lanes.repeat[lanes], role=p.lanes.role[lanes], start=start, end=end
    )


def _steps(p: Program, steps: Any, channel: Ints, to: dict[str, Ints]) -> Steps:
    s = p.steps
    columns = {f.name: getattr(s, f.name)[steps] for f in fields(Steps) if not f.name.startswith("after_")}
    kind = columns["kind"]
    op = np.maximum(columns["op"], -1)
    columns["op"] = np.where(
        kind == Kind.COMPUTE, to["op"][np.where(kind == Kind.COMPUTE, op, -1)], to["call"][np.where(kind == Kind.CALL, op, -1)]
    ).astype(np.int32)
    whole = np.append(channel, -1)
    for name in ("chan_in", "chan_out"):
        columns[name] = _through(to["channel"], whole[columns[name]])
    for name in ("src_buffer", "dst_buffer"):
        columns[name] = _through(to["buffer"], columns[name])
    width = np.diff(s.after_ptr)[steps]
    ptr = np.concatenate([[0], np.cumsum(width)]).astype(np.int32)
    at = np.arange(int(width.sum())) - np.repeat(ptr[:-1], width) + np.repeat(s.after_ptr[steps], width)
    return Steps(after_ptr=ptr, after_step=_through(to["step"], s.after_step[at]), after_lag=s.after_lag[at], **columns)


def _ranges(csr: Csr, rows: Any, buffer: Ints, column: int) -> Csr:
    out = []
    for i in rows:
        triples = csr[int(i)].reshape(-1, 3).astype(np.int64)
        triples[:, column] = buffer[triples[:, column]]
        out.append(triples.reshape(-1).tolist())
    return Csr.of(out)


def _ops(p: Program, ops: Any, buffer: Ints) -> Ops:
    o = p.ops
    columns = ("copy", "stage", "microbatch", "part", "parts", "accumulate", "workspace_bytes")
    numbers: dict[str, Any] = {name: getattr(o, name)[ops] for name in columns}
    texts: dict[str, Any] = {name: tuple(getattr(o, name)[int(i)] for i in ops) for name in ("name", "graph", "module")}
    return Ops(reads=_ranges(o.reads, ops, buffer, 0), writes=_ranges(o.writes, ops, buffer, 0), **numbers, **texts)


def _calls(p: Program, calls: Any, to: dict[str, Ints]) -> Calls:
    c = p.calls
    return Calls(comm=_through(to["comm"], c.comm[calls]), callee=c.callee[calls], names=c.names, binds=_ranges(c.binds, calls, to["buffer"], 1))
