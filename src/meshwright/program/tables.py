"""The tables of a program, see `program`: lanes, steps, channels, buffers, work, sizes, communicators and calls, one column per property.

Columns are numpy arrays; lists are CSR (`*_ptr`, values). All indices int32, bytes int64, -1 = none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Buffers", "Calls", "Channels", "Comms", "Csr", "I32", "I64", "Lanes", "Ops", "Sizes", "Steps"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


def _i32(values: Any = ()) -> I32:
    return np.ascontiguousarray(values, dtype=np.int32)


def _i64(values: Any = ()) -> I64:
    return np.ascontiguousarray(values, dtype=np.int64)


_E32 = _i32()


@dataclass(frozen=True)
class Csr:
    """Lists of equal-typed values: list i is `values[ptr[i]:ptr[i+1]]`."""

    ptr: I32 = field(default_factory=lambda: _i32([0]))
    values: I32 = field(default_factory=_i32)

    def __getitem__(self, i: int) -> I32:
        return self.values[self.ptr[i] : self.ptr[i + 1]]

    def __len__(self) -> int:
        return len(self.ptr) - 1

    @staticmethod
    def of(lists: Any) -> Csr:
        ptr = np.zeros(len(lists) + 1, np.int32)
        np.cumsum([len(x) for x in lists], out=ptr[1:])
        flat = [v for x in lists for v in x]
        return Csr(ptr, _i32(flat))


@dataclass(frozen=True, kw_only=True)
class Lanes:
    actor: I32
    unit: I32
    repeat: I32
    role: I32
    start: I32  # steps [start, end) of the lane; lanes tile the step table in order
    end: I32

    def __len__(self) -> int:
        return len(self.actor)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One entry per stored step. `op`: index into ops (compute) or calls (call), else -1. `count` is in chunks."""

    kind: I32
    parts: I32
    op: I32
    chan_in: I32
    chan_out: I32
    src_buffer: I32
    src_chunk: I32
    dst_buffer: I32
    dst_chunk: I32
    count: I32
    size: I32  # index into sizes for data-dependent messages, else -1
    after_ptr: I32
    after_step: I32
    after_lag: I32

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, kw_only=True)
class Channels:
    src: I32  # actor
    dst: I32
    tag: I32  # name space: -1 the program's own, else index into comms
    depth: I32  # messages, >= 1
    route: I32  # index into routes, -1 = the fabric's routing
    routes: tuple[tuple[str, ...], ...] = ()  # actor names of the fabric, from source to destination
    sets: Csr = field(default_factory=Csr)  # channel sets (switch multicast / aggregate)

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """`chunks` chunks of `chunk_bytes` each. `last`: steps after which the buffer is dead (empty: alive to the end)."""

    actor: I32
    space: I32
    role: I32  # index into BUFFER_ROLES
    chunks: I32
    chunk_bytes: I64
    size: I32  # symbol instead of chunk_bytes, else -1
    alias_of: I32  # buffer that this one lies in, else -1
    alias_offset_bytes: I64
    window: I32  # iterations resident at once: 0 each its own slice, k a ring of k slots
    persistent: I32  # 0 | 1
    last: Csr
    arena_offset: I64  # -1 until static packing fills it
    name: tuple[str, ...] = ()  # "" where unnamed; empty tuple when none is named

    def __len__(self) -> int:
        return len(self.actor)


@dataclass(frozen=True, kw_only=True)
class Ops:
    """Work of compute steps. `reads`/`writes` are CSR lists of (buffer, first chunk, count) triples, flattened.

    `name`: "F", "B", "I", "W", "optimizer", "loss", ...; `graph`: key of the operator-graph segment. `f"{graph}|{name}"` is
    the key by which `Cost` prices the op and by which an executor finds what to run. `part` of `parts`: tensor-parallel shard.
    An op named in `CHUNKWISE` makes the i-th chunk that it writes from chunks i, i + w, i + 2w, ... of those that it reads (w: how many it
    writes), adding them up: whatever it leaves out or packs, the chunk stays those ranks' contribution. Weights that an "expert" reads, and gradients
    that it writes (buffers of these roles), are no part of what it passes on.
    """

    name: tuple[str, ...]
    graph: tuple[str, ...]
    module: tuple[str, ...]
    copy: I32
    stage: I32
    microbatch: I32
    part: I32
    parts: I32
    accumulate: I32  # 1: writes are added to what is there
    workspace_bytes: I64
    reads: Csr
    writes: Csr

    def __len__(self) -> int:
        return len(self.name)

    def key(self, op: int) -> str:
        return f"{self.graph[op]}|{self.name[op]}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Symbols for data-dependent message sizes, in bytes per message. A step with a symbol still names the chunks whose contribution it moves."""

    name: tuple[str, ...] = ()
    lower: I64 = field(default_factory=_i64)
    expected: I64 = field(default_factory=_i64)
    upper: I64 = field(default_factory=_i64)
    producer: I32 = field(default_factory=_i32)

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, kw_only=True)
class Comms:
    """Communicators: a list of ranks each. Rank i of a callee is `groups[comm][i]` of the caller."""

    name: tuple[str, ...] = ()
    groups: Csr = field(default_factory=Csr)

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, kw_only=True)
class Calls:
    """One entry per (call site, member rank). The k-th call on a comm by one member matches the k-th by every other.

    `callee` indexes `names`, content hashes of other programs of the plan. The callee's buffer b of the member's own rank is
    bound to the caller's `buffer` from `chunk` on: `binds` is a CSR list of (callee buffer role index, caller buffer,
    first chunk) triples, where "callee buffer role index" counts that rank's buffers of the callee in table order.
    From the first chunk on, a bound buffer has as many chunks as the callee's or a multiple; chunk sizes are the caller's: a callee's own
    `chunk_bytes` is nominal.
    Callee buffers that are not bound are scratch: `scratch_scale` = caller chunk bytes / callee nominal chunk bytes.
    """

    comm: I32
    callee: I32
    names: tuple[str, ...]
    binds: Csr

    def __len__(self) -> int:
        return len(self.comm)

    @staticmethod
    def none() -> Calls:
        return Calls(comm=_E32, callee=_E32, names=(), binds=Csr())
