"""Each collective of the bench: its buffers, the torch call, out of place and in place, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError
from .data import contribution, expected, wrong_elements

__all__ = ["OPERATIONS", "REDUCING", "Case", "make_case", "reduce_operator"]

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "scatter", "gather")
REDUCING = ("all-reduce", "reduce-scatter", "reduce")
_OPS = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "avg": dist.ReduceOp.AVG}


def reduce_operator(reduction: str) -> Any:
    """torch's, by the bench's name."""
    return _OPS[reduction]


@dataclass(frozen=True)
class Case:
    """`fill` puts the inputs in place (not timed), `call` is the collective (timed), `wrong` counts elements that are not as they should be."""

    fill: Callable[[], None]
    call: Callable[[], None]
    wrong: Callable[[], int]


def make_case(
    op: str, size_bytes: int, dtype: torch.dtype, reduction: str, root: int, *, in_place: bool, seed: int, group: Any = None
) -> Case | None:  # fmt: skip
    """None where torch has no such form (all-to-all in place). Sizes as in nccl-tests: see DESIGN; rounded down to whole blocks.

    Raises: UsageError for an operation that there is not.
    """
    if op not in OPERATIONS:
        raise UsageError(f"no operation {op!r} in the bench", hint=f"operations: {', '.join(OPERATIONS)}")
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    total = size_bytes // dtype.itemsize
    block = total // n
    made = _Maker(op, n, rank, total, block, dtype, reduction, root, seed, group)
    if op == "all-to-all" and in_place:
        return None
    return made.case(in_place)


class _Maker:
    def __init__(
        self, op: str, n: int, rank: int, total: int, block: int, dtype: torch.dtype, reduction: str, root: int, seed: int, group: Any
    ) -> None:  # fmt: skip
        self.op, self.n, self.rank, self.total, self.block = op, n, rank, total, block
        self.dtype, self.reduction, self.root, self.seed, self.group = dtype, reduction, root, seed, group

    def mine(self, rank: int, first: int, count: int) -> torch.Tensor:
        kind = self.reduction if self.op in REDUCING else "plain"
        return contribution(self.seed, rank, self.n, first, count, self.dtype, kind)

    def sums(self, first: int, count: int) -> torch.Tensor:
        return expected(self.seed, self.n, first, count, self.dtype, self.reduction)

    def case(self, in_place: bool) -> Case:
        build = getattr(self, "_" + self.op.replace("-", "_"))
        case: Case = build(in_place)
        return case

    def _one_buffer(self, in_place: bool, call: Callable[[torch.Tensor], Any], wanted: Callable[[], torch.Tensor | None]) -> Case:
        """all-reduce, broadcast, reduce: torch works in place; out of place is a copy first, as a caller would write it."""
        source = self.mine(self.rank, 0, self.total)
        target = source.clone()

        def run() -> None:
            if not in_place:
                target.copy_(source)
            call(target)

        def wrong() -> int:
            want = wanted()
            return 0 if want is None else wrong_elements(target, want)

        return Case(_quietly(target.copy_, source), run, wrong)

    def _all_reduce(self, in_place: bool) -> Case:
        op = _OPS[self.reduction]
        return self._one_buffer(in_place, lambda t: dist.all_reduce(t, op, group=self.group), lambda: self.sums(0, self.total))

    def _broadcast(self, in_place: bool) -> Case:
        def call(tensor: torch.Tensor) -> None:
            dist.broadcast(tensor, group=self.group, group_src=self.root)

        return self._one_buffer(in_place, call, lambda: self.mine(self.root, 0, self.total))

    def _reduce(self, in_place: bool) -> Case:
        op, here = _OPS[self.reduction], self.rank == self.root

        def wanted() -> torch.Tensor | None:
            return self.sums(0, self.total) if here else None

        return self._one_buffer(in_place, lambda t: dist.reduce(t, op=op, group=self.group, group_dst=self.root), wanted)

    def _all_gather(self, in_place: bool) -> Case:
        source = self.mine(self.rank, self.rank * self.block, self.block)
        target = torch.zeros(self.n * self.block, dtype=self.dtype)
        own = target[self.rank * self.block : (self.rank + 1) * self.block]
        given = own if in_place else source

        def fill() -> None:
            target.zero_()
            if in_place:
                own.copy_(source)

        def wrong() -> int:
            return wrong_elements(target, torch.cat([self.mine(r, r * self.block, self.block) for r in range(self.n)]))

        return Case(fill, _quietly(dist.all_gather_into_tensor, target, given, group=self.group), wrong)

    def _reduce_scatter(self, in_place: bool) -> Case:
        kept = self.mine(self.rank, 0, self.n * self.block)
        source = kept.clone()
        target = source[self.rank * self.block : (self.rank + 1) * self.block] if in_place else torch.zeros(self.block, dtype=self.dtype)
        op = _OPS[self.reduction]

        def fill() -> None:
            source.copy_(kept)

        return Case(
            fill, _quietly(dist.reduce_scatter_tensor, target, source, op, group=self.group),
            lambda: wrong_elements(target, self.sums(self.rank * self.block, self.block)),
        )  # fmt: skip

    def _all_to_all(self, in_place: bool) -> Case:
        source = self.mine(self.rank, 0, self.n * self.block)
        target = torch.zeros_like(source)

        def wrong() -> int:
            return wrong_elements(target, torch.cat([self.mine(r, self.rank * self.block, self.block) for r in range(self.n)]))

        return Case(_quietly(target.zero_), _quietly(dist.all_to_all_single, target, source, group=self.group), wrong)

    def _scatter(self, in_place: bool) -> Case:
        here = self.rank == self.root
        source = self.mine(self.root, 0, self.n * self.block) if here else None
        parts = list(source.split(self.block)) if source is not None and self.block else None
        target = parts[self.rank] if in_place and parts is not None else torch.zeros(self.block, dtype=self.dtype)

        def wrong() -> int:
            return wrong_elements(target, self.mine(self.root, self.rank * self.block, self.block))

        return Case(lambda: None, _quietly(dist.scatter, target, parts, group=self.group, group_src=self.root), wrong)

    def _gather(self, in_place: bool) -> Case:
        here = self.rank == self.root
        source = self.mine(self.rank, self.rank * self.block, self.block)
        target = torch.zeros(self.n * self.block, dtype=self.dtype) if here else None
        parts = list(target.split(self.block)) if target is not None and self.block else None
        given = parts[self.rank] if in_place and parts is not None else source

        def fill() -> None:
            if target is not None:
                target.zero_()
                if given is not source:
                    given.copy_(source)

        def wrong() -> int:
            if target is None:
                return 0
            return wrong_elements(target, torch.cat([self.mine(r, r * self.block, self.block) for r in range(self.n)]))

        return Case(fill, _quietly(dist.gather, given, parts, group=self.group, group_dst=self.root), wrong)


def _quietly(function: Callable[..., Any], *args: Any, **named: Any) -> Callable[[], None]:
    def call() -> None:
        function(*args, **named)

    return call
