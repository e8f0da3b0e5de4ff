"""Random sequences of collective calls, the same at all ranks, one of which may do something else once.

Inputs are small whole numbers, so sums are exact in any order and in any type, and every rank's are a function of (seed, call, rank).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["DIVERGENCES", "SETTINGS", "One", "Sequence", "drawn", "made", "same_call"]

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
OPS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single",
    "all_to_all", "gather", "scatter", "barrier", "all_gather_object", "send",
)  # fmt: skip
DTYPES = ("float32", "float64", "int32", "int64", "uint8", "bfloat16", "float16")
OPERATORS = ("SUM", "MAX", "MIN", "PRODUCT")
SIZES = (1, 2, 3, 17, 50, 257, 1000, 9001, 20000)
MAX_CALLS = 24
# What the group is told. "measured": small ones are tried. "small": also the smallest calls have plans; "some": those from
# 4 KiB on; "none": everything goes to gloo.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {}, "measured": {"small": True}, "small": {"min_bytes": 0, "builtin": False, "strategies": ("direct",)},
    "some": {"min_bytes": 4096, "builtin": False, "strategies": ("ring", "halving-doubling", "direct")},
}  # fmt: skip
DIVERGENCES = ("operator", "type", "size", "root", "operation", "left out", "twice", "order", "splits")


@dataclass(frozen=True)
class One:
    """`splits[i][j]`: elements from rank i to rank j, or None where all are equal. `root`: of a `send` the sender; the receiver is the next rank."""

    op: str
    dtype: str = "float32"
    operator: str = "SUM"
    elements: int = 4
    root: int = 0
    splits: tuple[tuple[int, ...], ...] | None = None
    waits: bool = True


@dataclass(frozen=True)
class Sequence:
    """`odd`: the rank that diverges at call `at`, by `how`; -1 where all do the same. `calls(rank)`: what it calls, with the call that it is for."""

    seed: int
    ranks: int
    setting: str
    line: tuple[One, ...]
    odd: int = -1
    at: int = -1
    how: str = ""

    def calls(self, rank: int) -> list[tuple[int, One]]:
        line = list(enumerate(self.line))
        if rank != self.odd:
            return line
        return _diverged(line, self.at, self.how, self.ranks, np.random.default_rng((self.seed, 7)))


def drawn(seed: int, ranks: int) -> Sequence:
    rng = np.random.default_rng((seed, 3))
    count = int(rng.integers(3, MAX_CALLS))
    repeats = bool(rng.random() < 0.5)  # a loop, as training is: its calls are foreseen
    few = [_one(rng, ranks) for _ in range(int(rng.integers(1, 5)))]
    line = tuple(few[k % len(few)] if repeats else _one(rng, ranks) for k in range(count))
    setting = str(rng.choice(list(SETTINGS)))
    plain = Sequence(seed, ranks, setting, line)
    if rng.random() < 0.4:
        return plain
    how, odd, at = str(rng.choice(DIVERGENCES)), int(rng.integers(ranks)), int(rng.integers(count))
    # A rank inside a message of its own to another one calls nothing that could be compared: sequences with an odd rank have none.
    line = tuple(replace(c, op="barrier") if c.op == "send" else c for c in line)
    found = replace(plain, line=line, odd=odd, at=at, how=how)
    # What is not another call to the others is none: an order of equal calls, say.
    mine, theirs = [c for _, c in found.calls(odd)], list(line)
    alike = len(mine) == len(theirs) and all(same_call(a, b, odd) for a, b in zip(mine, theirs, strict=True))
    return plain if alike else found


def _one(rng: np.random.Generator, ranks: int) -> One:
    op = str(rng.choice(OPS))
    size = int(rng.choice(SIZES)) if rng.random() < 0.96 else 0
    splits = None
    if op in ("all_to_all_single", "all_to_all") and rng.random() < 0.5:
        splits = tuple(tuple(int(x) for x in rng.integers(0, 2 + size % 97, ranks)) for _ in range(ranks))
    return One(
        op, str(rng.choice(DTYPES)), str(rng.choice(OPERATORS)), size, int(rng.integers(ranks)), splits, bool(rng.random() < 0.6)
    )  # fmt: skip


def same_call(a: One, b: One, rank: int) -> bool:
    """Do the other ranks see no difference between these calls of `rank`?"""

    def seen(x: One) -> tuple[object, ...]:
        if x.op in ("barrier", "all_gather_object"):
            return (x.op,)
        if x.op == "send":
            return x.op, x.root, x.dtype, x.elements
        op = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor", "all_to_all": "all_to_all_single"}.get(x.op, x.op)
        size: object = x.elements
        if x.splits is not None and op == "all_to_all_single":
            others = [r for r in range(len(x.splits)) if r != rank]  # what a rank sends itself is its own affair
            pairs = [(x.splits[rank][r], x.splits[r][rank]) for r in others]
            size = pairs if len({count for pair in pairs for count in pair}) > 1 else pairs[0][0]
        return op, x.dtype, x.operator if op in REDUCING or op == "reduce_scatter_tensor" else "", size, x.root if op in ROOTED else -1

    return seen(a) == seen(b)


def _diverged(line: list[tuple[int, One]], at: int, how: str, ranks: int, rng: np.random.Generator) -> list[tuple[int, One]]:
    own, (number, call) = list(line), line[at]
    if how == "left out":
        del own[at]
    elif how == "twice":
        own.insert(at + 1, (-1, call))  # the first of the two is what the others wait for
    elif how == "order":
        if at + 1 < len(own):
            own[at], own[at + 1] = own[at + 1], own[at]
    else:
        other = {
            "operator": lambda: replace(call, operator="MAX" if call.operator != "MAX" else "SUM"),
            "type": lambda: replace(call, dtype="float32" if call.dtype != "float32" else "int32"),
            "size": lambda: replace(call, elements=call.elements + 1 + int(rng.integers(3)), splits=None),
            "root": lambda: replace(call, root=(call.root + 1) % ranks),
            "operation": lambda: replace(call, op="broadcast" if call.op != "broadcast" else "all_reduce", splits=None),
            "splits": lambda: replace(call, splits=tuple(tuple(int(x) for x in rng.integers(0, 9, ranks)) for _ in range(ranks))),
        }[how]()
        own[at] = (-1, other) if other != call else (number, call)
    return own


# ---- what a call does --------------------------------------------------------------------------------------------------------
def _given(key: tuple[int, ...], count: int, dtype: str) -> torch.Tensor:
    values = np.random.default_rng(key).integers(1, 3, count)
    return torch.from_numpy(values).to(getattr(torch, dtype))


def made(
    call: One, rank: int, ranks: int, group: Any, key: tuple[int, ...], *, gaps: bool = False, waits: bool = True, joined: bool = False
) -> tuple[Any, Callable[[], list[torch.Tensor]]]:  # fmt: skip
    """The call's work (None where it was waited for), and what then holds its results. `gaps`: hand over views with gaps. `joined`: lists of
    unequal tensors as one tensor with splits: gloo's own call for lists waits for ever there."""

    def held(tensor: torch.Tensor) -> torch.Tensor:
        if not gaps:
            return tensor
        wide = torch.zeros((tensor.numel(), 2), dtype=tensor.dtype)
        wide[:, 0] = tensor
        return wide[:, 0]

    def given(count: int, *more: int) -> torch.Tensor:
        return held(_given((*key, rank, *more), count, call.dtype))

    def empty(count: int) -> torch.Tensor:
        return held(torch.zeros(count, dtype=getattr(torch, call.dtype)))

    n, operator, later = call.elements, getattr(dist.ReduceOp, call.operator), {"group": group, "async_op": not waits}
    results: list[torch.Tensor] = []
    work: Any = None
    if call.op == "all_reduce":
        x = given(n)
        work, results = dist.all_reduce(x, operator, **later), [x]
    elif call.op == "broadcast":
        x = given(n)
        work, results = dist.broadcast(x, group_src=call.root, **later), [x]
    elif call.op == "reduce":
        x = given(n)
        work, results = dist.reduce(x, op=operator, group_dst=call.root, **later), [x] if rank == call.root else []
    elif call.op == "all_gather":
        results = [empty(n) for _ in range(ranks)]
        work = dist.all_gather(results, given(n), **later)
    elif call.op == "all_gather_into_tensor":
        results = [empty(n * ranks)]
        work = dist.all_gather_into_tensor(results[0], given(n), **later)
    elif call.op == "reduce_scatter":
        results = [empty(n)]
        work = dist.reduce_scatter(results[0], [given(n, i) for i in range(ranks)], operator, **later)
    elif call.op == "reduce_scatter_tensor":
        results = [empty(n)]
        work = dist.reduce_scatter_tensor(results[0], given(n * ranks), operator, **later)
    elif call.op == "all_to_all_single":
        if call.splits is None:
            results = [empty(n * ranks)]
            work = dist.all_to_all_single(results[0], given(n * ranks), **later)
        else:
            sends, takes = list(call.splits[rank]), [row[rank] for row in call.splits]
            results = [empty(sum(takes))]
            work = dist.all_to_all_single(results[0], given(sum(sends)), takes, sends, **later)
    elif call.op == "all_to_all":
        rows = call.splits or tuple((n,) * ranks for _ in range(ranks))
        results = [empty(row[rank]) for row in rows]
        parts = [given(count, i) for i, count in enumerate(rows[rank])]
        if joined:
            whole, sends, takes = empty(sum(t.numel() for t in results)), list(rows[rank]), [row[rank] for row in rows]
            dist.all_to_all_single(whole, torch.cat(parts), takes, sends, group=group)
            results = list(whole.split(takes))
        else:
            work = dist.all_to_all(results, parts, **later)
    elif call.op == "gather":
        results = [empty(n) for _ in range(ranks)] if rank == call.root else []
        work = dist.gather(given(n), results or None, group_dst=call.root, **later)
    elif call.op == "scatter":
        results = [empty(n)]
        own = [given(n, i) for i in range(ranks)] if rank == call.root else None
        work = dist.scatter(results[0], own, group_src=call.root, **later)
    elif call.op == "barrier":
        work = dist.barrier(**later)
    elif call.op == "all_gather_object":
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, [rank, *key], group=group)
        results = [torch.tensor(x) for x in found]
    elif rank == call.root:
        dist.send(given(n), group_dst=(rank + 1) % ranks, group=group)
    elif rank == (call.root + 1) % ranks:
        results = [empty(n)]
        dist.recv(results[0], group_src=call.root, group=group)
    return work, lambda: results
