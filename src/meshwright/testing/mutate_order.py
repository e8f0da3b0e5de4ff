"""Operators of `mutate` that change which steps a program has, and in which order: lanes and `after` edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..program.program import Kind, Part, Program
from ..program.tables import Csr
from .mutate_values import Rng, has, pick

_COLUMNS = ("kind", "parts", "op", "chan_in", "chan_out", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "count", "size")


def rearranged(p: Program, lanes: list[list[int]]) -> Program:
    """The program with these old steps in its lanes. Edges to steps that are gone fall away; a copy has the edges of its original."""
    flat = [s for lane in lanes for s in lane]
    new_of: dict[int, int] = {}
    for new, old in enumerate(flat):
        new_of.setdefault(old, new)
    s = p.steps
    at = np.array(flat, dtype=np.int64)
    edges: list[list[tuple[int, int]]] = [[] for _ in range(len(s))]
    for step, on, lag in edge_list(p):
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


def with_edges(p: Program, edges: list[tuple[int, int, int]]) -> Program:
    """The program with these `after` edges: (step, waits for, lag)."""
    per: list[list[tuple[int, int]]] = [[] for _ in range(len(p.steps))]
    for step, on, lag in edges:
        per[step].append((on, lag))
    ptr = np.concatenate([[0], np.cumsum([len(x) for x in per])]).astype(np.int32)
    on_step, lags = np.array([d for x in per for d, _ in x], np.int32), np.array([lag for x in per for _, lag in x], np.int32)
    return replace(p, steps=replace(p.steps, after_ptr=ptr, after_step=on_step, after_lag=lags))


def edge_list(p: Program) -> list[tuple[int, int, int]]:
    owner = np.repeat(np.arange(len(p.steps)), np.diff(p.steps.after_ptr))
    return list(zip(owner.tolist(), p.steps.after_step.tolist(), p.steps.after_lag.tolist(), strict=True))


def _drop(p: Program, rng: Rng, kinds: Any) -> tuple[Program, str] | None:
    step = pick(rng, kinds)
    return None if step is None else (rearranged(p, [[x for x in lane if x != step] for lane in _lists(p)]), f"without step {step}")


def _again(p: Program, rng: Rng, kinds: Any) -> tuple[Program, str] | None:
    step = pick(rng, kinds)
    if step is None:
        return None
    return rearranged(p, [[y for x in lane for y in [x] * (1 + (x == step))] for lane in _lists(p)]), f"step {step} twice"


def drop_step(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _drop(p, rng, (p.steps.kind == Kind.TRANSFER) | (p.steps.kind == Kind.COMPUTE))


def duplicate_step(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _again(p, rng, (p.steps.kind == Kind.TRANSFER) | (p.steps.kind == Kind.COMPUTE))


def _named(p: Program, name: str) -> NDArray[np.bool_]:
    ops = np.array([x == name for x in p.ops.name] + [False])
    out: NDArray[np.bool_] = (p.steps.kind == Kind.COMPUTE) & ops[p.steps.op]
    return out


def drop_backward(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _drop(p, rng, _named(p, "B"))


def double_accumulate(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _again(p, rng, _named(p, "B"))


def drop_call_member(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _drop(p, rng, p.steps.kind == Kind.CALL)


def _swapped(p: Program, a: int, b: int) -> Program:
    swap = {a: b, b: a}
    return rearranged(p, [[swap.get(x, x) for x in lane] for lane in _lists(p)])


def swap_adjacent(p: Program, rng: Rng) -> tuple[Program, str] | None:
    lane = p.lane_of_step()
    step = pick(rng, lane[1:] == lane[:-1])
    return None if step is None else (_swapped(p, step, step + 1), f"steps {step} and {step + 1} swapped")


def _swap_two(p: Program, rng: Rng, sites: Any) -> tuple[Program, str] | None:
    """Two steps of one lane change places."""
    lane = p.lane_of_step()
    found = np.flatnonzero(sites)
    step = pick(rng, found)
    if step is None:
        return None
    other = pick(rng, [x for x in found if lane[x] == lane[step] and x != step])
    return None if other is None else (_swapped(p, step, other), f"steps {min(step, other)} and {max(step, other)} swapped")


def swap_receives(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _swap_two(p, rng, has(p, Part.RECV))


def swap_calls(p: Program, rng: Rng) -> tuple[Program, str] | None:
    return _swap_two(p, rng, p.steps.kind == Kind.CALL)


def move_step(p: Program, rng: Rng) -> tuple[Program, str] | None:
    lane = p.lane_of_step()
    step = pick(rng, np.arange(len(p.steps)))
    if step is None:
        return None
    mine = int(lane[step])
    other = pick(rng, (p.lanes.actor == p.lanes.actor[mine]) & (np.arange(len(p.lanes)) != mine))
    if other is None:
        return None
    lists = [[x for x in steps if x != step] for steps in _lists(p)]
    at = int(rng.integers(0, len(lists[other]) + 1))
    lists[other].insert(at, step)
    return rearranged(p, lists), f"step {step} in lane {other} at {at}"


def drop_after(p: Program, rng: Rng) -> tuple[Program, str] | None:
    edges = edge_list(p)
    k = pick(rng, np.arange(len(edges)))
    return None if k is None else (with_edges(p, edges[:k] + edges[k + 1 :]), f"without edge {edges[k]}")


def reverse_after(p: Program, rng: Rng) -> tuple[Program, str] | None:
    edges = edge_list(p)
    k = pick(rng, np.arange(len(edges)))
    return None if k is None else (with_edges(p, [*edges, (edges[k][1], edges[k][0], 0)]), f"edge {edges[k]} also backwards")


def change_lag(p: Program, rng: Rng, by: int) -> tuple[Program, str] | None:
    repeated = p.lanes.repeat[p.lane_of_step()] > 1
    edges = edge_list(p)
    k = pick(rng, [i for i, (step, _, lag) in enumerate(edges) if repeated[step] and lag + by >= 0])
    if k is None:
        return None
    step, on, lag = edges[k]
    return with_edges(p, [*edges[:k], (step, on, lag + by), *edges[k + 1 :]]), f"edge {edges[k]} with lag {lag + by}"
