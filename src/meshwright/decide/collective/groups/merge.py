"""One program out of several that run side by side: collectives of different groups on one fabric.

Columns are laid behind each other and every number that points somewhere (steps, channels, channel sets, routes, buffers, ranks) is moved by
what lies before it. Nothing joins the parts: no edge, no channel. So each keeps its values, and they share nothing but links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ....errors import Unsupported
from ....program.builder import ProgramBuilder
from ....program.program import Contract, Part, Program
from ....program.tables import Buffers, Calls, Channels, Csr, Lanes, Steps
from ....program.validate import validate

__all__ = ["merge_programs"]

UNROLL = "plan it with explicit pieces (unroll), or with equal numbers of pieces"


def merge_programs(ranks: int, parts: Sequence[tuple[Program, Sequence[int]]], *, name: str) -> Program:
    """All parts side by side: rank r of a part is rank `members[r]` of the whole; the contracts follow in the order of the parts.

    Raises: Unsupported for parts with folds, calls, compute, symbolic sizes or switch actors; and for parts whose lanes repeat unlike often,
    because iterations are those of the whole program.
    """
    merge = _Merge()
    repeats: set[int] = set()
    for part, members in parts:
        if part.fold is not None or len(part.calls) or len(part.ops) or len(part.sizes) or part.switches:
            raise Unsupported(f"{part.name or 'a program'} cannot run beside others: it folds, calls, computes or uses switches", hint=UNROLL)
        repeats |= set(np.unique(part.lanes.repeat).tolist())
        if len(repeats) > 1:
            raise Unsupported(f"lanes repeat {' and '.join(map(str, sorted(repeats)))} times: one program has one number of iterations", hint=UNROLL)
        merge.add(part, tuple(members))
    return merge.program(ranks, name)


class _Merge:
    def __init__(self) -> None:
        self.steps = self.channels = self.buffers = 0
        self.columns: dict[tuple[str, str], list[Any]] = {}
        self.routes: list[tuple[str, ...]] = []
        self.sets: list[list[int]] = []
        self.last: list[list[int]] = []
        self.names: list[str] = []
        self.contracts: list[Contract] = []

    def put(self, table: str, **columns: Any) -> None:
        for name, values in columns.items():
            self.columns.setdefault((table, name), []).append(values)

    def add(self, part: Program, members: tuple[int, ...]) -> None:
        actor = np.array(members, np.int32)
        lanes, s, c, b = part.lanes, part.steps, part.channels, part.buffers
        self.put("lanes", actor=actor[lanes.actor], unit=lanes.unit, repeat=lanes.repeat, role=lanes.role)
        self.put("lanes", start=lanes.start + self.steps, end=lanes.end + self.steps)
        plain = ("kind", "parts", "op", "src_chunk", "dst_chunk", "count", "size", "after_lag")
        self.put("steps", **{name: getattr(s, name) for name in plain}, after_step=s.after_step + self.steps, after_ptr=np.diff(s.after_ptr))
        for name, is_set in (("chan_in", s.parts & Part.IN_SET), ("chan_out", s.parts & Part.OUT_SET)):
            column = getattr(s, name)
            self.put("steps", **{name: np.where(is_set != 0, _moved(column, len(self.sets)), _moved(column, self.channels))})
        self.put("steps", src_buffer=_moved(s.src_buffer, self.buffers), dst_buffer=_moved(s.dst_buffer, self.buffers))
        self.put("channels", src=actor[c.src], dst=actor[c.dst], tag=c.tag, depth=c.depth, route=_moved(c.route, len(self.routes)))
        moved = ("actor", "alias_of", "last", "name")
        self.put("buffers", **{f.name: getattr(b, f.name) for f in fields(Buffers) if f.name not in moved})
        self.put("buffers", actor=actor[b.actor], alias_of=_moved(b.alias_of, self.buffers))
        self.sets += [[int(x) + self.channels for x in c.sets[i]] for i in range(len(c.sets))]
        self.routes += list(c.routes)
        self.last += [[int(x) + self.steps for x in b.last[i]] for i in range(len(b.last))]
        self.names += list(b.name or [""] * len(b))
        self.contracts += [self._promise(promised, members, part.ranks) for promised in part.contracts]
        self.steps, self.channels, self.buffers = self.steps + len(s), self.channels + len(c), self.buffers + len(b)

    def _promise(self, c: Contract, members: tuple[int, ...], ranks: int) -> Contract:
        def there(ranges: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
            return tuple((buffer + self.buffers, chunk, count) for buffer, chunk, count in ranges)

        return replace(c, inputs=there(c.inputs), outputs=there(c.outputs), ranks=tuple(members[r] for r in c.members(ranks)))

    def program(self, ranks: int, name: str) -> Program:
        empty = ProgramBuilder(ranks=ranks, name=name).build(validate=False)

        def table(word: str, kind: Any, like: Any, **known: Any) -> Any:
            joined = {}
            for f in fields(kind):
                if f.name not in known:
                    first = getattr(like, f.name)[:0]
                    joined[f.name] = np.concatenate([first, *self.columns.get((word, f.name), [])]).astype(first.dtype)
            return kind(**joined, **known)

        counts = np.concatenate([np.zeros(1, np.int32), *self.columns.get(("steps", "after_ptr"), [])])
        merged = replace(
            empty,
            lanes=table("lanes", Lanes, empty.lanes),
            steps=table("steps", Steps, empty.steps, after_ptr=np.cumsum(counts).astype(np.int32)),
            channels=table("channels", Channels, empty.channels, routes=tuple(self.routes), sets=Csr.of(self.sets)),
            buffers=table("buffers", Buffers, empty.buffers, last=Csr.of(self.last), name=tuple(self.names) if any(self.names) else ()),
            calls=Calls.none(),
            contracts=tuple(self.contracts),
        )
        validate(merged)
        return merged


def _moved(values: Any, by: int) -> Any:
    """Numbers moved by `by`; -1 (none) stays."""
    return np.where(values >= 0, values + by, values).astype(values.dtype)
