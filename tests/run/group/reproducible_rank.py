"""One rank of `test_reproducible`: sums by the backend against folds and exact sums written from their definitions. Prints {"ok": true} or dies."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

import meshwright.torch
from meshwright.bench.digest import digest_of, uneven
from meshwright.errors import Unsupported
from meshwright.run.group.group import MeshwrightGroup

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def heavy(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of which nearly every order of addition gives other bits."""
    made = torch.Generator().manual_seed(1000 * count + rank)
    spread = 6 if dtype in FLOATS[:2] else 12
    return (torch.randn(count, generator=made) * torch.exp2(torch.randint(-spread, spread, (count,), generator=made).float())).to(dtype)


def fold(rows: list[torch.Tensor], combine: Any = torch.add) -> torch.Tensor:
    while len(rows) > 1:
        rows = [combine(rows[i], rows[i + 1]) if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2)]
    return rows[0]


def same(a: torch.Tensor, b: torch.Tensor, what: object) -> None:
    assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8)), what


def tree(group: Any, rank: int, n: int) -> None:
    """All-reduce, reduce-scatter (both forms) and reduce, all types, lengths that no rank count divides, in the order of the tree."""
    operators = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.PRODUCT: torch.mul, dist.ReduceOp.MAX: torch.maximum}
    for count in (1, 5, 4099):
        for dtype in FLOATS if count == 5 else FLOATS[2:3]:
            rows = [heavy(r, count, dtype) for r in range(n)]
            for op, combine in operators.items():
                x = rows[rank].clone()
                dist.all_reduce(x, op, group=group)
                same(x, fold(rows, combine), ("all-reduce", count, dtype, op))
            x = rows[rank].clone()
            dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
            same(x, fold(rows) / n, ("average", dtype))
            x = rows[rank].clone()
            dist.reduce(x, group=group, group_dst=n - 1)
            if rank == n - 1:
                same(x, fold(rows), ("reduce", dtype))
        wide = [heavy(r, n * count) for r in range(n)]
        want = fold(wide)[rank * count : (rank + 1) * count]
        out = torch.empty(count)
        dist.reduce_scatter_tensor(out, wide[rank], group=group)
        same(out, want, ("reduce-scatter", count))
        dist.reduce_scatter(out.zero_(), list(wide[rank].split(count)), group=group)
        same(out, want, ("reduce-scatter of a list", count))
    given = [heavy(rank, 100 * k) for k in range(1, 4)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in given]
    for k, work in enumerate(works, 1):
        work.wait()
        same(given[k - 1], fold([heavy(r, 100 * k) for r in range(n)]), "asynchronous")
    integers = torch.arange(6) * (rank + 1)
    dist.all_reduce(integers, group=group)  # their order is nobody's business
    assert integers.tolist() == [i * n * (n + 1) // 2 for i in range(6)]
    refused(lambda: dist.all_reduce(torch.zeros(4), dist.ReduceOp.BAND, group=group), "no program folds")
    dist.all_reduce(torch.empty(0), group=group)
    want_bits = fold([uneven(7, r, 1001, torch.float32) for r in range(n)]).numpy().tobytes()
    for op in ("all-reduce", "reduce"):
        assert digest_of(op, 4004, "float", "sum", 0, 7, group, dist.group.WORLD) == hashlib.sha256(want_bits).hexdigest(), op
    assert digest_of("reduce-scatter", 4000, "float", "sum", 0, 7, group, dist.group.WORLD)


def exact(group: Any, rank: int, n: int) -> None:
    """Correct to the bound against rational sums; equal bits whichever rank has which contribution."""
    for count, dtype in ((1, torch.float32), (700, torch.float32), (700, torch.bfloat16), (700, torch.float64)):
        rows = [heavy(r, count, dtype) for r in range(n)]
        x, turned = rows[rank].clone(), rows[(rank + 1) % n].clone()
        dist.all_reduce(x, group=group)
        dist.all_reduce(turned, group=group)
        same(x, turned, ("order", dtype))
        exactly = [sum(Fraction(float(row[i])) for row in rows) for i in range(count)]
        for i, (got, want) in enumerate(zip(x.tolist(), exactly, strict=True)):
            block = slice(i // 256 * 256, i // 256 * 256 + 256)
            top = max(float(row[block].abs().max()) for row in rows)
            bound = Fraction(n * n, 2) * Fraction(2) ** (math.frexp(top)[1] - 62 + 1)
            rounding = abs(want) * Fraction(float(torch.finfo(dtype).eps)) * Fraction(51, 100)
            assert abs(Fraction(got) - want) <= bound + rounding, (i, got, float(want))
    rows = [heavy(r, n * 300) for r in range(n)]
    whole, part = rows[rank].clone(), torch.empty(300)
    dist.all_reduce(whole, dist.ReduceOp.AVG, group=group)
    dist.reduce_scatter_tensor(part, rows[rank].clone(), dist.ReduceOp.AVG, group=group)
    assert torch.allclose(part, whole[rank * 300 : (rank + 1) * 300], rtol=1e-6)
    dist.reduce_scatter(part, list(rows[rank].split(300)), dist.ReduceOp.AVG, group=group)
    assert torch.allclose(part, whole[rank * 300 : (rank + 1) * 300], rtol=1e-6)
    edges = torch.tensor([0.0, 2.0**-149, -(2.0**-149), 3.0e38 / n, -0.0])
    x = edges.clone()
    dist.all_reduce(x[:3].clone(), group=group)
    small = edges[:3].clone()
    dist.all_reduce(small, group=group)
    assert small.tolist() == [0.0, n * 2.0**-149, -n * 2.0**-149]
    zeros = torch.zeros(513)
    dist.all_reduce(zeros, group=group)
    assert not zeros.any()
    bad = torch.ones(600)
    if rank == 1:
        bad[599] = float("nan")
    refused(lambda: dist.all_reduce(bad, group=group), "not finite|infinite or not numbers")
    assert bool((bad[:599] == 1).all()), "nothing is sent"
    refused(lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.PRODUCT, group=group), "SUM and AVG")
    x = heavy(rank, 40)
    dist.reduce(x, group=group, group_dst=0)
    if rank == 0:
        assert torch.allclose(x.double(), sum(heavy(r, 40).double() for r in range(n)), rtol=1e-6)


def refused(run: Any, words: str) -> None:
    try:
        run()
    except Unsupported as error:
        assert any(word in error.message for word in words.split("|")) and error.hint, error
    else:
        raise AssertionError(f"not refused: {words}")


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    for level, run in (("tree", tree), ("exact", exact)):
        for fabric in sys.argv[1:]:
            meshwright.torch.configure(reproducible=level, fabric="" if fabric == "none" else fabric)
            group = dist.new_group(backend="meshwright")
            run(group, rank, n)
            assert isinstance(group, MeshwrightGroup)
            fell = [op for op, reason in group.tally.builtin if level == "tree" and op in ("all-reduce", "reduce", "reduce-scatter")]
            assert len(fell) <= 1, (fell, group.tally.builtin)  # no elements
            dist.destroy_process_group(group)
    for level in ("tree", "run"):  # the same sums by the fold and by gloo's ring, written down
        meshwright.torch.configure(reproducible=level, fabric="", record_bits=f"{os.environ['BITS']}/{level}")
        group = dist.new_group(backend="meshwright")
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(heavy(rank, 300), group=group)
        out = torch.empty(20)
        dist.reduce_scatter_tensor(out, heavy(rank, 20 * n), group=group)
        dist.reduce_scatter(out, list(heavy(rank, 20 * n).split(20)), group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 0:
        sys.stdout.write('{"ok": true}\n')
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("MESHWRIGHT_CACHE", "0")
    sys.exit(main())
