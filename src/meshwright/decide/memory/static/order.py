"""Which storages are surely finished with before others begin: vector clocks of the operators, and the pairs that may be alive together.

Cite: CITE in `__init__` (SOMAS computes ancestor bitsets of operators). Deviation: streams run in order, so an operator's ancestors on a stream are a
prefix of it and one number per stream says which; a pair of storages costs as many comparisons as there are streams, whatever their consumers.
Invariant: `closes[a] <= opens[b]` on every stream iff every operator that touches a is an ancestor of every one that writes b. That relation is
transitive, so what may not share bytes is the incomparability graph of a partial order. Cost: O(edges · streams + pairs · streams).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....arena import ArenaProblem, Rows
from ....errors import Unsupported, UsageError
from ....kernels.compile import allocating

__all__ = ["Lifetimes", "conflicts", "lifetimes"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
FOREVER = np.int32(2**31 - 1)
# Pairs of storages that may be alive together, each listed twice at 4 bytes: 1.6 GB of memory.
MAX_PAIRS = 200_000_000


@dataclass(frozen=True)
class Lifetimes:
    """Per storage and stream: how many operators are done before it opens, and how many must be before its bytes are free. `size_bytes` is aligned.

    `position[op]` from 1 on its stream, `done[op, stream]`: operators of the stream that have finished before op starts.
    """

    opens: I32
    closes: I32
    size_bytes: I64
    position: I32
    done: I32

    def precedes(self, a: int, b: int) -> bool:
        return bool((self.closes[a] <= self.opens[b]).all())


@allocating
def _clocks(stream, starts, items, streams):  # type: ignore[no-untyped-def]
    ops = len(stream)
    position, done = np.zeros(ops, np.int32), np.zeros((ops, streams), np.int32)
    last = np.full(streams, -1, np.int32)
    # in the order of issue: what an operator waits for has its clock already
    for v in range(ops):
        s = stream[v]
        if last[s] >= 0:
            u = last[s]
            done[v] = done[u]
            done[v, s] = position[u]
            position[v] = position[u] + 1
        else:
            position[v] = 1
        last[s] = v
        for i in range(starts[v], starts[v + 1]):
            u = items[i]
            for k in range(streams):
                done[v, k] = max(done[v, k], done[u, k])
            done[v, stream[u]] = max(done[v, stream[u]], position[u])
    return position, done


def lifetimes(problem: ArenaProblem) -> Lifetimes:
    """Raises: UsageError when a consumer does not wait for a source of what it reads, both named."""
    streams = int(problem.stream.max()) + 1 if len(problem.stream) else 1
    position, done = _clocks(problem.stream, problem.after.starts, problem.after.items, streams)
    storages = len(problem.size_bytes)
    opens, closes = np.full((storages, streams), FOREVER, np.int32), np.zeros((storages, streams), np.int32)
    for what in (problem.sources, problem.consumers):
        owner = np.repeat(np.arange(storages), np.diff(what.starts))
        np.maximum.at(closes, (owner, problem.stream[what.items]), position[what.items])
    # it opens as soon as any of its writers may start, so per stream the least of their clocks counts
    owner = np.repeat(np.arange(storages), np.diff(problem.sources.starts))
    np.minimum.at(opens, owner, done[problem.sources.items])
    opens[sorted(problem.from_start)] = 0
    closes[sorted(problem.to_end)] = FOREVER
    _require_ordered(problem, position, done)
    unit = problem.alignment_bytes
    return Lifetimes(opens, closes, -(-problem.size_bytes // unit) * unit, position, done)


def _require_ordered(problem: ArenaProblem, position: I32, done: I32) -> None:
    """The first source of every storage is an ancestor of its consumers, or one of them."""
    first = np.array([int(problem.sources[t].min()) if len(problem.sources[t]) else -1 for t in range(len(problem.size_bytes))], np.int64)
    owner = np.repeat(np.arange(len(first)), np.diff(problem.consumers.starts))
    source, consumer = first[owner], problem.consumers.items
    known = (source >= 0) & (source != consumer)
    ready = done[consumer[known], problem.stream[source[known]]] >= position[source[known]]
    if not ready.all():
        at = np.flatnonzero(known)[int(np.flatnonzero(~ready)[0])]
        raise UsageError(
            f"operator {int(consumer[at])} reads it and does not wait for operator {int(source[at])}, which writes it",
            where=problem.name(int(owner[at])), hint="add the event between their streams to `after`",
        )  # fmt: skip


@allocating
def _pairs(opens, closes, size, order, count, starts, items):  # type: ignore[no-untyped-def]
    """Counts conflicts per storage into `count`, or with `items` writes them from `starts` on. `order`: by when a storage opens on stream 0."""
    n, streams = opens.shape
    write = len(items) > 0
    total = np.int64(0)
    for x in range(n):
        a = order[x]
        if size[a] == 0:
            continue
        for y in range(x + 1, n):
            b = order[y]
            if size[b] == 0:
                continue
            before = True
            for s in range(streams):
                if closes[a, s] > opens[b, s]:
                    before = False
                    break
            if before:
                if streams == 1:
                    break  # all later ones open later still
                continue
            after = True
            for s in range(streams):
                if closes[b, s] > opens[a, s]:
                    after = False
                    break
            if after:
                continue
            if write:
                items[starts[a] + count[a]] = b
                items[starts[b] + count[b]] = a
            count[a] += 1
            count[b] += 1
            total += 1
    return total


def conflicts(life: Lifetimes) -> Rows:
    """For every storage those that may be alive at the same time. Raises: Unsupported beyond MAX_PAIRS pairs."""
    n = len(life.size_bytes)
    order = np.lexsort((np.arange(n), life.opens[:, 0])).astype(np.int32)
    count, none = np.zeros(n, np.int64), np.zeros(0, np.int32)
    total = int(_pairs(life.opens, life.closes, life.size_bytes, order, count, count, none))
    if total > MAX_PAIRS:
        raise Unsupported(
            f"{total} pairs of storages may be alive together, more than {MAX_PAIRS}", where="arena",
            hint="split the storages over several arenas, or order the streams by more events", data={"pairs": total, "limit": MAX_PAIRS},
        )  # fmt: skip
    starts = np.zeros(n + 1, np.int64)
    np.cumsum(count, out=starts[1:])
    items = np.empty(int(starts[-1]), np.int32)
    if len(items):
        count[:] = 0
        _pairs(life.opens, life.closes, life.size_bytes, order, count, starts, items)
    return Rows(starts, items)
