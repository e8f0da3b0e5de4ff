"""Wrong programs, made from right ones: a test instrument for anyone who writes a planner or a checker.

    for m in mutants(program, np.random.default_rng(0), per_operator=5):
        assert not check_program(m.program).ok or equivalent(m.program, program)

An operator changes one thing at a random place where it applies. Mutants are not validated: many break the tables' own rules. Some
mean the same as the original (a deeper channel than needed made shallower); telling those apart is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..program.program import Csr, Kind, Part, Program

__all__ = ["OPERATORS", "Mutant", "mutants", "mutate"]

Rng = np.random.Generator
Operator = Callable[[Program, Rng], "tuple[Program, str] | None"]

_COLUMNS = ("kind", "parts", "op", "chan_in", "chan_out", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "count", "size")


@dataclass(frozen=True)
class Mutant:
    operator: str
    what: str
    program: Program


def mutate(program: Program, operator: str, rng: Rng) -> Mutant | None:
    """One mutant, or None where the operator does not apply. Raises KeyError for an operator that does not exist."""
    made = OPERATORS[operator](program, rng)
    return Mutant(operator, made[1], made[0]) if made is not None else None


def mutants(program: Program, rng: Rng, *, per_operator: int) -> Iterator[Mutant]:
    """Up to `per_operator` different mutants of every operator, in the operators' order."""
    for name in OPERATORS:
        seen: set[str] = set()
        for _ in range(3 * per_operator):
            made = mutate(program, name, rng)
            if made is not None and made.what not in seen and len(seen) < per_operator:
                seen.add(made.what)
                yield made


# ---- pieces ------------------------------------------------------------------------------------------------------------
def _pick(rng: Rng, sites: Any) -> int | None:
    found = np.asarray(sites)
    found = np.flatnonzero(found) if found.dtype.kind == "b" else found
    return int(rng.choice(found)) if len(found) else None


def _has(p: Program, part: Part) -> NDArray[np.bool_]:
    out: NDArray[np.bool_] = (p.steps.kind == Kind.TRANSFER) & ((p.steps.parts & part) != 0)
    return out


def _set(table: Any, column: str, index: int, value: int) -> Any:
    values = getattr(table, column).copy()
    values[index] = value
    return replace(table, **{column: values})


def _steps(p: Program, index: int, **values: int) -> Program:
    steps = p.steps
    for column, value in values.items():
        steps = _set(steps, column, index, value)
    return replace(p, steps=steps)


def _csr(csr: Csr, index: int, values: Any) -> Csr:
    return Csr.of([values if i == index else csr[i].tolist() for i in range(len(csr))])


def _rearranged(p: Program, lanes: list[list[int]]) -> Program:
    """The program with these old steps in its lanes. Edges to steps that are gone fall away; a copy has the edges of its original."""
    flat = [s for lane in lanes for s in lane]
    new_of: dict[int, int] = {}
    for new, old in enumerate(flat):
        new_of.setdefault(old, new)
    s = p.steps
    at = np.array(flat, dtype=np.int64)
    edges: list[list[tuple[int, int]]] = [[] for _ in range(len(s))]
    for step, on, lag in _edge_list(p):
        if on in new_of:
            edges[step].append((new_of[on], lag))
    after = [edges[old] for old in flat]
    ends = np.cumsum([len(lane) for lane in lanes]).astype(np.int32)
    columns = {name: getattr(s, name)[at] for name in _COLUMNS}
    steps = replace(
        s, **columns, after_ptr=np.concatenate([[0], np.cumsum([len(x) for x in after])]).astype(np.int32),
        after_step=np.array([d for x in after for d, _ in x], np.int32), after_lag=np.array([lag for x in after for _, lag in x], np.int32),
    )  # fmt: skip
    last = Csr.of([[new_of[x] for x in p.buffers.last[i].tolist() if x in new_of] for i in range(len(p.buffers))])
    start = np.concatenate([[0], ends[:-1]]).astype(np.int32)
    return replace(p, steps=steps, lanes=replace(p.lanes, start=start, end=ends), buffers=replace(p.buffers, last=last))


def _lists(p: Program) -> list[list[int]]:
    return [list(range(int(a), int(b))) for a, b in zip(p.lanes.start, p.lanes.end, strict=True)]


def _edges(p: Program, edges: list[tuple[int, int, int]]) -> Program:
    """The program with these `after` edges: (step, waits for, lag)."""
    per: list[list[tuple[int, int]]] = [[] for _ in range(len(p.steps))]
    for step, on, lag in edges:
        per[step].append((on, lag))
    ptr = np.concatenate([[0], np.cumsum([len(x) for x in per])]).astype(np.int32)
    on_step, lags = np.array([d for x in per for d, _ in x], np.int32), np.array([lag for x in per for _, lag in x], np.int32)
    return replace(p, steps=replace(p.steps, after_ptr=ptr, after_step=on_step, after_lag=lags))


def _edge_list(p: Program) -> list[tuple[int, int, int]]:
    owner = np.repeat(np.arange(len(p.steps)), np.diff(p.steps.after_ptr))
    return list(zip(owner.tolist(), p.steps.after_step.tolist(), p.steps.after_lag.tolist(), strict=True))


# ---- order -------------------------------------------------------------------------------------------------------------
def _drop(p: Program, rng: Rng, kinds: Any) -> tuple[Program, str] | None:
    step = _pick(rng, kinds)
    return None if step is None else (_rearranged(p, [[x for x in lane if x != step] for lane in _lists(p)]), f"without step {step}")


def _again(p: Program, rng: Rng, kinds: Any) -> tuple[Program, str] | None:
    step = _pick(rng, kinds)
    if step is None:
        return None
    return _rearranged(p, [[y for x in lane for y in [x] * (1 + (x == step))] for lane in _lists(p)]), f"step {step} twice"


def _drop_step(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _drop(p, rng, (p.steps.kind == Kind.TRANSFER) | (p.steps.kind == Kind.COMPUTE))


def _duplicate_step(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _again(p, rng, (p.steps.kind == Kind.TRANSFER) | (p.steps.kind == Kind.COMPUTE))


def _named(p: Program, name: str) -> NDArray[np.bool_]:
    ops = np.array([x == name for x in p.ops.name] + [False])
    out: NDArray[np.bool_] = (p.steps.kind == Kind.COMPUTE) & ops[p.steps.op]
    return out


def _drop_backward(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _drop(p, rng, _named(p, "B"))


def _double_accumulate(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _again(p, rng, _named(p, "B"))


def _drop_call_member(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _drop(p, rng, p.steps.kind == Kind.CALL)


def _swapped(p: Program, a: int, b: int) -> Program:
    swap = {a: b, b: a}
    return _rearranged(p, [[swap.get(x, x) for x in lane] for lane in _lists(p)])


def _swap_adjacent(p: Program, rng: Rng) -> tuple[Program, str] | None:
    lane = p.lane_of_step()
    step = _pick(rng, lane[1:] == lane[:-1])
    return None if step is None else (_swapped(p, step, step + 1), f"steps {step} and {step + 1} swapped")


def _swap_two(p: Program, rng: Rng, sites: Any) -> tuple[Program, str] | None:
    """Two steps of one lane change places."""
    lane = p.lane_of_step()
    found = np.flatnonzero(sites)
    step = _pick(rng, found)
    if step is None:
        return None
    other = _pick(rng, [x for x in found if lane[x] == lane[step] and x != step])
    return None if other is None else (_swapped(p, step, other), f"steps {min(step, other)} and {max(step, other)} swapped")


def _swap_receives(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _swap_two(p, rng, _has(p, Part.RECV))


def _swap_calls(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _swap_two(p, rng, p.steps.kind == Kind.CALL)


def _move_step(p: Program, rng: Rng) -> tuple[Program, str] | None:
    lane = p.lane_of_step()
    step = _pick(rng, np.arange(len(p.steps)))
    if step is None:
        return None
    mine = int(lane[step])
    other = _pick(rng, (p.lanes.actor == p.lanes.actor[mine]) & (np.arange(len(p.lanes)) != mine))
    if other is None:
        return None
    lists = [[x for x in steps if x != step] for steps in _lists(p)]
    at = int(rng.integers(0, len(lists[other]) + 1))
    lists[other].insert(at, step)
    return _rearranged(p, lists), f"step {step} in lane {other} at {at}"


def _drop_after(p: Program, rng: Rng) -> tuple[Program, str] | None:
    edges = _edge_list(p)
    k = _pick(rng, np.arange(len(edges)))
    return None if k is None else (_edges(p, edges[:k] + edges[k + 1 :]), f"without edge {edges[k]}")


def _reverse_after(p: Program, rng: Rng) -> tuple[Program, str] | None:
    edges = _edge_list(p)
    k = _pick(rng, np.arange(len(edges)))
    return None if k is None else (_edges(p, [*edges, (edges[k][1], edges[k][0], 0)]), f"edge {edges[k]} also backwards")


def _change_lag(p: Program, rng: Rng, by: int) -> tuple[Program, str] | None:
    repeated = p.lanes.repeat[p.lane_of_step()] > 1
    edges = _edge_list(p)
    k = _pick(rng, [i for i, (step, _, lag) in enumerate(edges) if repeated[step] and lag + by >= 0])
    if k is None:
        return None
    step, on, lag = edges[k]
    return _edges(p, [*edges[:k], (step, on, lag + by), *edges[k + 1 :]]), f"edge {edges[k]} with lag {lag + by}"


# ---- transfers ---------------------------------------------------------------------------------------------------------
def _redirect(p: Program, rng: Rng, part: Part, column: str, end: str) -> tuple[Program, str] | None:
    step = _pick(rng, _has(p, part))
    if step is None:
        return None
    old = int(getattr(p.steps, column)[step])
    ends = getattr(p.channels, end)
    new = _pick(rng, [c for c in range(len(p.channels)) if c != old and ends[c] == ends[old]])
    new = _pick(rng, [c for c in range(len(p.channels)) if c != old]) if new is None else new
    return None if new is None else (_steps(p, step, **{column: new}), f"step {step} on channel {new}")


def _shift_chunk(p: Program, rng: Rng, side: str) -> tuple[Program, str] | None:
    b, s = getattr(p.steps, f"{side}_buffer"), p.steps
    if not len(p.buffers):
        return None
    room = p.buffers.chunks[np.maximum(b, 0)]
    step = _pick(rng, (b >= 0) & (room > s.count))
    if step is None:
        return None
    chunk = int((getattr(s, f"{side}_chunk")[step] + rng.choice([-1, 1])) % (room[step] - s.count[step] + 1))
    return _steps(p, step, **{f"{side}_chunk": chunk}), f"step {step} {side} chunk {chunk}"


def _wrong_buffer(p: Program, rng: Rng, side: str) -> tuple[Program, str] | None:
    b = p.buffers
    step = _pick(rng, getattr(p.steps, f"{side}_buffer") >= 0)
    if step is None:
        return None
    old = int(getattr(p.steps, f"{side}_buffer")[step])
    alike = [k for k in range(len(b)) if k != old and b.actor[k] == b.actor[old]]
    other = _pick(rng, alike or [k for k in range(len(b)) if k != old])
    if other is None:
        return None
    return _steps(p, step, **{f"{side}_buffer": other}), f"step {step} {side} buffer {other}"


def _reduce_to_copy(p: Program, rng: Rng) -> tuple[Program, str] | None:
    step = _pick(rng, _has(p, Part.ADD))
    if step is None:
        return None
    parts = int(p.steps.parts[step]) & ~Part.ADD
    if parts & Part.RECV:
        return _steps(p, step, parts=parts & ~Part.READ, src_buffer=-1, src_chunk=0), f"step {step} copies"
    return _steps(p, step, parts=parts), f"step {step} copies"


def _copy_to_reduce(p: Program, rng: Rng) -> tuple[Program, str] | None:
    s = p.steps
    step = _pick(rng, _has(p, Part.STORE) & ~_has(p, Part.ADD) & _has(p, Part.RECV))
    if step is None:
        return None
    parts = int(s.parts[step]) | Part.ADD | Part.READ
    return _steps(p, step, parts=parts, src_buffer=int(s.dst_buffer[step]), src_chunk=int(s.dst_chunk[step])), f"step {step} adds"


def _drop_part(p: Program, rng: Rng) -> tuple[Program, str] | None:
    step = _pick(rng, _has(p, Part.STORE) & _has(p, Part.SEND))
    if step is None:
        return None
    return _steps(p, step, parts=int(p.steps.parts[step]) & ~Part.STORE, dst_buffer=-1, dst_chunk=0), f"step {step} keeps nothing"


def _change_count(p: Program, rng: Rng) -> tuple[Program, str] | None:
    step = _pick(rng, (p.steps.kind == Kind.TRANSFER) & (p.steps.count > 0))
    if step is None:
        return None
    count = int(p.steps.count[step]) + int(rng.choice([-1, 1]))
    return _steps(p, step, count=count), f"step {step} moves {count} chunks"


# ---- tables ------------------------------------------------------------------------------------------------------------
def _lower_depth(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = _pick(rng, p.channels.depth > 1)
    if k is None:
        return None
    depth = int(p.channels.depth[k]) - 1
    return replace(p, channels=_set(p.channels, "depth", k, depth)), f"channel {k} of depth {depth}"


def _change_channel_end(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = _pick(rng, np.arange(len(p.channels)))
    if k is None or p.ranks < 3:
        return None
    end = str(rng.choice(["src", "dst"]))
    other = _pick(rng, [r for r in range(p.ranks) if r not in (int(p.channels.src[k]), int(p.channels.dst[k]))])
    return None if other is None else (replace(p, channels=_set(p.channels, end, k, other)), f"channel {k} {end} is {other}")


def _shrink_buffer(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = _pick(rng, p.buffers.chunks > 0)
    return None if k is None else (replace(p, buffers=_set(p.buffers, "chunks", k, int(p.buffers.chunks[k]) - 1)), f"buffer {k} a chunk smaller")


def _alias_buffers(p: Program, rng: Rng) -> tuple[Program, str] | None:
    b = p.buffers
    size = b.chunks * b.chunk_bytes
    pairs = [
        (i, j)
        for i in range(len(b))
        for j in range(len(b))
        if i != j and b.actor[i] == b.actor[j] and 0 < size[i] <= size[j] and b.alias_of[i] < 0 and b.alias_of[j] < 0 and b.window[i] == b.window[j]
    ]
    k = _pick(rng, np.arange(len(pairs)))
    return None if k is None else (replace(p, buffers=_set(b, "alias_of", pairs[k][0], pairs[k][1])), f"buffer {pairs[k][0]} lies in {pairs[k][1]}")


def _shorten_life(p: Program, rng: Rng) -> tuple[Program, str] | None:
    """The buffer dies before the step that now ends its life: after that step's predecessor in the lane."""
    lane, last = p.lane_of_step(), p.buffers.last
    sites = [k for k in range(len(p.buffers)) if len(last[k]) and any(x > p.lanes.start[lane[x]] for x in last[k].tolist())]
    k = _pick(rng, sites)
    if k is None:
        return None
    earlier = [x - 1 if x > p.lanes.start[lane[x]] else x for x in last[k].tolist()]
    return replace(p, buffers=replace(p.buffers, last=_csr(last, k, earlier))), f"buffer {k} dies after {earlier}"


def _change_window(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = _pick(rng, p.buffers.window > 1)
    return None if k is None else (replace(p, buffers=_set(p.buffers, "window", k, int(p.buffers.window[k]) - 1)), f"buffer {k} with a slot less")


def _change_repeat(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = _pick(rng, np.arange(len(p.lanes)))
    return None if k is None else (replace(p, lanes=_set(p.lanes, "repeat", k, int(p.lanes.repeat[k]) + 1)), f"lane {k} once more")


# ---- work --------------------------------------------------------------------------------------------------------------
def _ops(p: Program, k: int, column: str, value: int) -> Program:
    return replace(p, ops=_set(p.ops, column, k, value))


def _wrong_part(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = _pick(rng, p.ops.parts > 1)
    if k is None:
        return None
    part = int((p.ops.part[k] + 1) % p.ops.parts[k])
    return _ops(p, k, "part", part), f"op {k} computes part {part}"


def _wrong_microbatch(p: Program, rng: Rng) -> tuple[Program, str] | None:
    count = int(p.ops.microbatch.max(initial=-1)) + 1
    k = _pick(rng, p.ops.microbatch >= 0) if count > 1 else None
    if k is None:
        return None
    m = int((p.ops.microbatch[k] + 1) % count)
    return _ops(p, k, "microbatch", m), f"op {k} of micro-batch {m}"


def _drop_accumulate(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = _pick(rng, p.ops.accumulate > 0)
    return None if k is None else (_ops(p, k, "accumulate", 0), f"op {k} overwrites")


def _skip_optimizer_read(p: Program, rng: Rng) -> tuple[Program, str] | None:
    """The optimizer does not look at a gradient buffer."""
    sites = [i for i, name in enumerate(p.ops.name) if name == "optimizer"]
    k = _pick(rng, sites)
    if k is None:
        return None
    rows = p.ops.reads[k].reshape(-1, 3).tolist()
    kept = [row for row in rows if int(p.buffers.role[row[0]]) != 3]
    if len(kept) == len(rows):
        return None
    return replace(p, ops=replace(p.ops, reads=_csr(p.ops.reads, k, [v for row in kept for v in row]))), f"op {k} without gradients"


def _drop_write(p: Program, rng: Rng) -> tuple[Program, str] | None:
    k = _pick(rng, np.diff(p.ops.writes.ptr) > 0)
    if k is None:
        return None
    rows = p.ops.writes[k].reshape(-1, 3).tolist()
    gone = rows.pop(int(rng.integers(len(rows))))
    return replace(p, ops=replace(p.ops, writes=_csr(p.ops.writes, k, [v for row in rows for v in row]))), f"op {k} does not write {gone}"


def _wrong_bind(p: Program, rng: Rng) -> tuple[Program, str] | None:
    """A call works on another buffer of its rank."""
    b = p.buffers
    k = _pick(rng, [i for i in range(len(p.calls)) if len(p.calls.binds[i])])
    if k is None:
        return None
    rows = p.calls.binds[k].reshape(-1, 3).tolist()
    old = rows[0][1]
    other = _pick(rng, [j for j in range(len(b)) if j != old and b.actor[j] == b.actor[old] and b.chunks[j] >= b.chunks[old]])
    if other is None:
        return None
    rows[0][1] = other
    return replace(p, calls=replace(p.calls, binds=_csr(p.calls.binds, k, [v for row in rows for v in row]))), f"call {k} on buffer {other}"


OPERATORS: Mapping[str, Operator] = {
    "drop step": _drop_step,
    "duplicate step": _duplicate_step,
    "swap adjacent steps": _swap_adjacent,
    "swap two receives": _swap_receives,
    "move step to another lane": _move_step,
    "drop after edge": _drop_after,
    "add reversed after edge": _reverse_after,
    "raise lag": lambda p, rng: _change_lag(p, rng, 1),
    "lower lag": lambda p, rng: _change_lag(p, rng, -1),
    "redirect send": lambda p, rng: _redirect(p, rng, Part.SEND, "chan_out", "src"),
    "redirect receive": lambda p, rng: _redirect(p, rng, Part.RECV, "chan_in", "dst"),
    "shift source chunk": lambda p, rng: _shift_chunk(p, rng, "src"),
    "shift destination chunk": lambda p, rng: _shift_chunk(p, rng, "dst"),
    "wrong source buffer": lambda p, rng: _wrong_buffer(p, rng, "src"),
    "wrong destination buffer": lambda p, rng: _wrong_buffer(p, rng, "dst"),
    "reduce becomes copy": _reduce_to_copy,
    "copy becomes reduce": _copy_to_reduce,
    "fused step keeps nothing": _drop_part,
    "change count": _change_count,
    "lower depth": _lower_depth,
    "change channel end": _change_channel_end,
    "shrink buffer": _shrink_buffer,
    "alias two buffers": _alias_buffers,
    "shorten lifetime": _shorten_life,
    "lower window": _change_window,
    "change repeat": _change_repeat,
    "drop backward": _drop_backward,
    "double accumulate": _double_accumulate,
    "drop accumulate": _drop_accumulate,
    "wrong part": _wrong_part,
    "wrong micro-batch": _wrong_microbatch,
    "skip optimizer read": _skip_optimizer_read,
    "drop write": _drop_write,
    "drop call of a member": _drop_call_member,
    "swap calls": _swap_calls,
    "call on wrong buffer": _wrong_bind,
}
