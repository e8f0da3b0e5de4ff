"""A collective on a grid of ranks: digits of a mixed radix, one stage per digit.

Position g of the grid has digits g = sum digit_j · stride_j, digit 0 fastest. Stage i exchanges along digit `order[i]` in every group of
positions that differ in that digit only. Blocks are named by the position that owns them; where a block lies in the buffer depends on
the operation: where ranks own parts by contract (reduce-scatter, all-gather, scatter, gather, all-to-all), block of position q lies at its
rank's place, so pieces are strided; otherwise blocks are numbered with the first stage's digit highest, so every piece is one stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from ....program.program import Contract, Program
from ..problem import CollectiveProblem
from .flow import Flow
from .stages import all_gather, collect, exchange_blocks, hand_out, reduce_scatter

__all__ = ["GridPlan", "grid_program", "in_rank_order"]


@dataclass(frozen=True)
class GridPlan:
    """`grid[g]`: rank at position g. `factors`: sizes of the digits, fastest first. `order`, `primitives`: per stage its digit and how."""

    grid: tuple[int, ...]
    factors: tuple[int, ...]
    order: tuple[int, ...]
    primitives: tuple[str, ...]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        return tuple(prod(self.factors[:j]) for j in range(len(self.factors)))

    def digit(self, position: int, j: int) -> int:
        return position // self.strides[j] % self.factors[j]

    def groups(self, j: int) -> list[list[int]]:
        """Positions by group of digit j, each in order of the digit."""
        stride, k = self.strides[j], self.factors[j]
        return [[g + m * stride for m in range(k)] for g in range(len(self.grid)) if self.digit(g, j) == 0]


def in_rank_order(op: str) -> bool:
    """Whether the contract says which rank owns which part."""
    return op in ("reduce-scatter", "all-gather", "scatter", "gather", "all-to-all")


def block_of(plan: GridPlan, op: str) -> list[int]:
    """Place of every position's block among the blocks."""
    if in_rank_order(op):
        return list(plan.grid)
    place = [0] * len(plan.grid)
    for j in plan.order:
        for g in range(len(place)):
            # The first stage's digit ends up highest: what a stage leaves a rank with is then one contiguous run.
            place[g] = place[g] * plan.factors[j] + plan.digit(g, j)
    return place


def grid_program(problem: CollectiveProblem, plan: GridPlan, *, slices: int, unroll: bool, reverse: bool) -> Program:
    """The program of one plan. `slices` follow each other through the stages."""
    n, op = len(problem.ranks), problem.op
    spans, repeat = (slices, 1) if unroll else (1, slices)
    elements = -(-problem.size_bytes // problem.element_bytes)
    chunk_bytes = -(-elements // (n * slices)) * problem.element_bytes
    role = "output" if op in ("all-gather", "broadcast", "gather") else "input"
    flow = Flow(ranks=n, chunks=n * spans, chunk_bytes=chunk_bytes, role=role, name=f"blueconnect {op}", repeat=repeat, depth=min(2, slices))
    place = block_of(plan, op)
    for t in range(spans):
        chunk = [b * spans + t if in_rank_order(op) else t * n + b for b in place]
        _stages(problem, plan, flow, chunk, reverse)
    return flow.build(_contract(problem, flow.buffers, spans))


def _stages(problem: CollectiveProblem, plan: GridPlan, flow: Flow, chunk: Sequence[int], reverse: bool) -> None:
    op, stages = problem.op, range(len(plan.order))
    root = plan.grid.index(problem.root)
    if op == "all-to-all":
        for i in stages:
            _transpose(plan, flow, i, chunk)
        return
    if op in ("all-reduce", "reduce-scatter", "reduce"):
        for i in stages:
            for group in plan.groups(plan.order[i]):
                reduce_scatter(flow, _ranks(plan, group), _pieces(plan, group, i, chunk), plan.primitives[i], ("rs", i))
    if op in ("broadcast", "scatter"):
        for i in stages:
            for group, holder in _held(plan, i, root):
                hand_out(flow, _ranks(plan, group), _pieces(plan, group, i, chunk), holder, plan.primitives[i], ("out", i))
    if op in ("all-reduce", "all-gather", "broadcast"):
        for i in reversed(stages):
            for group in plan.groups(plan.order[i]):
                all_gather(flow, _ranks(plan, group), _pieces(plan, group, i, chunk), plan.primitives[i], ("ag", i), reverse=reverse)
    if op in ("reduce", "gather"):
        for i in reversed(stages):
            for group, holder in _held(plan, i, root):
                collect(flow, _ranks(plan, group), _pieces(plan, group, i, chunk), holder, plan.primitives[i], ("in", i))


def _ranks(plan: GridPlan, group: Sequence[int]) -> list[int]:
    return [plan.grid[g] for g in group]


def _pieces(plan: GridPlan, group: Sequence[int], stage: int, chunk: Sequence[int]) -> list[list[int]]:
    """Chunks of every member's piece at a stage: blocks that agree with the member in this stage's digit and all earlier ones."""
    fixed, free = plan.order[: stage + 1], plan.order[stage + 1 :]
    out = []
    for g in group:
        # Before stage i a rank's range is what agrees with it in all earlier digits; the stage narrows it by one more.
        base = sum(plan.digit(g, j) * plan.strides[j] for j in fixed)
        every = product(*(range(plan.factors[j]) for j in free))
        out.append(sorted(chunk[base + sum(d * plan.strides[j] for d, j in zip(digits, free, strict=True))] for digits in every))
    return out


def _held(plan: GridPlan, stage: int, root: int) -> list[tuple[list[int], int]]:
    """Groups in which the root's data are spread at a stage, and the member that has them: later digits equal the root's."""
    j, later = plan.order[stage], plan.order[stage + 1 :]
    return [(group, plan.digit(root, j)) for group in plan.groups(j) if all(plan.digit(group[0], x) == plan.digit(root, x) for x in later)]


def _transpose(plan: GridPlan, flow: Flow, stage: int, chunk: Sequence[int]) -> None:
    """Swap one digit between rank and slot: before, the slot's digit says where a block goes; afterwards, where it came from."""
    j = plan.order[stage]
    # After a swap of every digit each block has moved from slot (destination) at rank (source) to slot (source) at rank (destination).
    slots = [[chunk[q] for q in range(len(plan.grid)) if plan.digit(q, j) == m] for m in range(plan.factors[j])]
    for group in plan.groups(j):
        exchange_blocks(flow, _ranks(plan, group), slots, ("a2a", stage))


def _contract(problem: CollectiveProblem, buffers: Sequence[int], spans: int) -> Contract:
    n, op = len(buffers), problem.op
    whole = tuple((b, 0, n * spans) for b in buffers)
    block = tuple((b, r * spans, spans) for r, b in enumerate(buffers))
    only_root = tuple((b, 0, n * spans if r == problem.root else 0) for r, b in enumerate(buffers))
    inputs = block if op in ("all-gather", "gather") else only_root if op == "scatter" else whole
    outputs = block if op in ("reduce-scatter", "scatter") else whole
    return Contract(op=op, inputs=inputs, outputs=outputs, root=problem.root if op in ("broadcast", "reduce", "scatter", "gather") else -1)
