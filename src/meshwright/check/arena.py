"""Arenas: storages that share bytes are never in use together, in any interleaving; runs lie back to back; the stated bound is one.

Ancestors of every operator are kept as one bit each, closed over streams and events. Two storages that share a byte must be ordered: all operators
that touch the one are ancestors of all that write the other. The clique of the bound holds storages of which no two are ordered.
Cost: O(operators² / 8) bytes, and one look at the ancestors per pair of storages that share bytes and operator that touches one.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..arena import ArenaPlan, ArenaProblem
from .verdict import Finding, Verdict

__all__ = ["check_arena"]

MAX_OPERATORS = 65_536  # operators of one stream: the table of what precedes what grows with their square
CHUNK_PAIRS = 1 << 20  # pairs of storages looked at together, so that memory does not grow with the number of overlaps
Bits = NDArray[np.uint8]


def check_arena(problem: ArenaProblem, plan: ArenaPlan) -> Verdict:
    """Findings name the storages, their bytes, and the operator that may still use one while the other is written."""
    facts = {"arena_bytes": plan.arena_bytes, "bound_bytes": plan.bound_bytes, "storages": len(problem.size_bytes)}
    if len(plan.offset_bytes) != len(problem.size_bytes):
        return Verdict(findings=(_wrong(f"{len(plan.offset_bytes)} offsets for {len(problem.size_bytes)} storages"),), facts=facts)
    found = [*_places(problem, plan), *_runs(problem, plan)]
    if len(problem.stream) > MAX_OPERATORS:
        unknown = Finding(check="arena", message=f"{len(problem.stream)} operators, more than {MAX_OPERATORS}: safety not decided", status="unknown")
        return Verdict(findings=(*found, unknown), facts=facts)
    ancestors = _ancestors(problem)
    found += _shared(problem, plan, ancestors)
    found += _bound(problem, plan, ancestors)
    return Verdict(findings=tuple(found), facts=facts)


def _wrong(message: str, **witness: object) -> Finding:
    return Finding(check="arena", message=message, witness=witness)


def _places(problem: ArenaProblem, plan: ArenaPlan) -> list[Finding]:
    found = []
    for t, (at, size) in enumerate(zip(plan.offset_bytes.tolist(), problem.size_bytes.tolist(), strict=True)):
        if at < 0 or at + size > plan.arena_bytes:
            message = f"{problem.name(t)} lies at {at} to {at + size}, outside the arena of {plan.arena_bytes} bytes"
            found.append(_wrong(message, storage=t, offset_bytes=at))
        elif at % problem.alignment_bytes:
            found.append(_wrong(f"{problem.name(t)} lies at {at}, no multiple of {problem.alignment_bytes}", storage=t, offset_bytes=at))
    return found


def _runs(problem: ArenaProblem, plan: ArenaPlan) -> list[Finding]:
    found = []
    for run in problem.runs:
        for a, b in pairwise(run):
            unit = problem.alignment_bytes
            after = int(plan.offset_bytes[a]) + -(-int(problem.size_bytes[a]) // unit) * unit
            if int(plan.offset_bytes[b]) != after:
                message = f"{problem.name(b)} lies at {int(plan.offset_bytes[b])}, not behind {problem.name(a)} at {after}"
                found.append(_wrong(message, storage=b, before=a))
    return found


def _ancestors(problem: ArenaProblem) -> Bits:
    """Row per operator, one bit per operator that has surely ended before it starts."""
    ops = len(problem.stream)
    known = np.zeros((ops, (ops + 7) // 8), np.uint8)
    last: dict[int, int] = {}
    for v, stream in enumerate(problem.stream.tolist()):
        # Operators of a stream run in order, so the last one of the same stream counts as an explicit predecessor.
        before = problem.after[v].tolist()
        if stream in last:
            before.append(last[stream])
        for u in before:
            # Ancestors of an ancestor are ancestors: rows are complete because operators are numbered in launch order.
            known[v] |= known[u]
            known[v, u >> 3] |= 1 << (u & 7)
        last[stream] = v
    return known


class _Touched:
    """For every storage the operators that touch it and those that write it, as padded columns: pairs are then compared in bulk."""

    def __init__(self, problem: ArenaProblem, ancestors: Bits) -> None:
        self.problem, self.ancestors = problem, ancestors
        storages = len(problem.size_bytes)
        users = [[*problem.sources[t].tolist(), *problem.consumers[t].tolist()] for t in range(storages)]
        writers = [problem.sources[t].tolist() for t in range(storages)]
        self.users, self.writers = _padded(users), _padded(writers)
        self.first, self.last = np.zeros(storages, bool), np.zeros(storages, bool)
        self.first[sorted(problem.from_start)], self.last[sorted(problem.to_end)] = True, True

    def before(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether every operator that touches a[i] is an ancestor of every one that writes b[i]."""
        # What lives to the end is before nothing, and nothing is before what lives from the start.
        result = ~self.last[a] & ~self.first[b]
        for i in range(self.users.shape[1]):
            for j in range(self.writers.shape[1]):
                user, writer = self.users[a, i], self.writers[b, j]
                here = (user >= 0) & (writer >= 0) & result
                done = (self.ancestors[writer[here], user[here] >> 3] >> (user[here] & 7).astype(np.uint8)) & 1
                result[here] &= done.astype(bool)
        return result


def _padded(lists: list[list[int]]) -> NDArray[np.int64]:
    width = max((len(x) for x in lists), default=0)
    found = np.full((len(lists), width), -1, np.int64)
    for i, x in enumerate(lists):
        found[i, : len(x)] = x
    return found


def _shared(problem: ArenaProblem, plan: ArenaPlan, ancestors: Bits) -> list[Finding]:
    """By rising offset: every storage with those before it that reach over its start."""
    touched = _Touched(problem, ancestors)
    size = problem.size_bytes
    order = [t for t in np.lexsort((np.arange(len(size)), plan.offset_bytes)).tolist() if size[t]]
    ends = plan.offset_bytes + size
    live = np.zeros(0, np.int64)
    lefts: list[NDArray[np.int64]] = []
    rights: list[NDArray[np.int64]] = []
    waiting = 0
    found: list[Finding] = []

    def look() -> None:
        a, b = np.concatenate(lefts), np.concatenate(rights)
        wrong = ~(touched.before(a, b) | touched.before(b, a))
        for i in np.flatnonzero(wrong)[:16].tolist():
            x, y = int(a[i]), int(b[i])
            low, high = max(plan.offset_bytes[x], plan.offset_bytes[y]), min(ends[x], ends[y])
            message = f"{problem.name(x)} and {problem.name(y)} may be in use together and share bytes {int(low)} to {int(high)}"
            found.append(_wrong(message, storages=[x, y], begin_byte=int(low), end_byte=int(high)))
        lefts.clear()
        rights.clear()

    for t in order:
        # Sorted by offset, only storages that end beyond this start can share bytes with it.
        live = live[ends[live] > plan.offset_bytes[t]]
        if len(live):
            lefts.append(live)
            rights.append(np.full(len(live), t, np.int64))
            waiting += len(live)
        live = np.append(live, t)
        if waiting >= CHUNK_PAIRS:
            look()
            waiting = 0
            if found:
                return found
    if lefts:
        look()
    return found


def _bound(problem: ArenaProblem, plan: ArenaPlan, ancestors: Bits) -> list[Finding]:
    clique = np.array(plan.clique, np.int64)
    unit = problem.alignment_bytes
    if len(clique) and not (0 <= int(clique.min()) <= int(clique.max()) < len(problem.size_bytes) and len(set(plan.clique)) == len(clique)):
        return [_wrong("the bound's storages are not all different storages of the problem")]
    total = int((-(-problem.size_bytes[clique] // unit) * unit).sum()) if len(clique) else 0
    if total != plan.bound_bytes:
        return [_wrong(f"the bound is {plan.bound_bytes}, its storages hold {total}", bound_bytes=plan.bound_bytes)]
    touched = _Touched(problem, ancestors)
    a, b = np.triu_indices(len(clique), 1)
    # Pairwise in use together is enough: no order of time can place two of them on the same bytes.
    ordered = touched.before(clique[a], clique[b]) | touched.before(clique[b], clique[a])
    if ordered.any():
        i = int(np.flatnonzero(ordered)[0])
        x, y = int(clique[a[i]]), int(clique[b[i]])
        return [_wrong(f"the bound counts {problem.name(x)} and {problem.name(y)} together, which are never in use together", storages=[x, y])]
    if plan.arena_bytes < plan.bound_bytes:
        return [_wrong(f"an arena of {plan.arena_bytes} bytes lies below its bound {plan.bound_bytes}")]
    return []
