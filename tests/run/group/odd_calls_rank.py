"""One rank of a job whose calls differ from rank to rank, or hand over views with gaps, or are wrong."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import meshwright.torch
from meshwright.errors import RankDiverged, UsageError

DEADLINE = timedelta(seconds=90)
LONG_BEFORE_A_DEADLINE_S = 60
PLANNED, SMALL = 30000, 50  # elements: the group has plans for the one size and not for the other


def views_with_gaps(r: int, n: int, group: Any = None) -> None:
    """Every operation on columns of a matrix: what lies between them stays as it is."""
    for size in (SMALL, PLANNED):

        def column(value: float) -> torch.Tensor:
            base = torch.full((size, 3), -1.0)
            base[:, 1] = value
            return base[:, 1]

        def holds(tensor: torch.Tensor, value: float) -> None:
            base = tensor._base
            assert base is not None and tensor.eq(value).all() and base[:, 0].eq(-1).all() and base[:, 2].eq(-1).all(), (size, value)

        total = sum(range(n))
        x = column(r)
        dist.all_reduce(x, group=group)
        holds(x, total)
        x = column(r)
        dist.all_reduce(x, async_op=True, group=group).wait()
        holds(x, total)
        x = column(r)
        dist.broadcast(x, 2, group=group)
        holds(x, 2)
        x = column(r)
        dist.reduce(x, 1, group=group)
        if r == 1:
            holds(x, total)
        outs = [column(0) for _ in range(n)]
        dist.all_gather(outs, column(r), group=group)
        for i, out in enumerate(outs):
            holds(out, i)
        out = column(0)
        dist.reduce_scatter(out, [column(r + i) for i in range(n)], group=group)
        holds(out, total + n * r)
        outs = [column(0) for _ in range(n)]
        dist.all_to_all(outs, [column(10 * r + i) for i in range(n)], group=group)
        for i, out in enumerate(outs):
            holds(out, 10 * i + r)
        outs = [column(0) for _ in range(n)] if r == 1 else []
        dist.gather(column(r), outs or None, 1, group=group)
        for i, out in enumerate(outs):
            holds(out, i)
        out = column(0)
        dist.scatter(out, [column(i) for i in range(n)] if r == 2 else None, 2, group=group)
        holds(out, r)
        wide = torch.zeros(2 * n * size)[::2]
        dist.all_gather_into_tensor(wide, column(r), group=group)
        assert wide.reshape(n, size).eq(torch.arange(n).view(n, 1)).all()
        every_second = torch.arange(2.0 * n * size)[::2]
        out = column(0)
        dist.reduce_scatter_tensor(out, every_second, group=group)
        assert torch.equal(out, n * every_second.reshape(n, size)[r])
        dist.all_to_all_single(wide, every_second + r, group=group)
        assert torch.equal(wide.reshape(n, size), torch.stack([every_second.reshape(n, size)[r] + i for i in range(n)]))
        turned = (torch.arange(6.0 * size).view(size, 6) + r).t()
        dist.all_reduce(turned, group=group)
        assert torch.equal(turned, (torch.arange(6.0 * size).view(size, 6) * n + total).t())
        try:
            dist.all_reduce(torch.ones(1).expand(size), group=group)
        except UsageError as error:
            assert "share memory" in str(error)
        else:
            raise AssertionError("a tensor whose elements share memory was reduced")


def uneven_splits(r: int, n: int) -> None:
    """Rank 0's splits are equal and the others' are not; then some ranks say that all are equal and others say nothing."""
    for b in (SMALL, PLANNED):
        sends = [[b, b, b], [b, 2 * b, b], [b, b // 2, 3 * b]]  # sends[from][to]
        given, taken = sends[r], [row[r] for row in sends]
        x = torch.cat([torch.full((k,), 10.0 * r + to) for to, k in enumerate(given)])
        y = torch.empty(sum(taken))
        dist.all_to_all_single(y, x, taken, given)
        right = torch.cat([torch.full((k,), 10.0 * come + r) for come, k in enumerate(taken)])
        assert torch.equal(y, right)
        parts = [torch.empty(k) for k in taken]
        dist.all_to_all(parts, list(x.split(given)))
        assert torch.equal(torch.cat(parts), right)
        x, y = torch.arange(3.0 * b) + r, torch.empty(3 * b)
        if r == 0:
            dist.all_to_all_single(y, x)
        else:
            dist.all_to_all_single(y, x, [b] * n, [b] * n)
        assert torch.equal(y, torch.cat([(torch.arange(3.0 * b) + i)[r * b : (r + 1) * b] for i in range(n)]))


def unlike_lists(r: int, n: int) -> None:
    """Lists of unlike lengths, the same at all ranks: gloo gathers none and refuses at every rank, and scatters sums of them. The group goes on."""
    for b in (SMALL, PLANNED):
        try:
            dist.all_gather([torch.empty(b + k) for k in range(n)], torch.ones(b + r))
        except RankDiverged:
            raise
        except RuntimeError as error:
            assert "invalid tensor size" in str(error), error
        else:
            raise AssertionError("gloo gathers unlike lengths now: plans may, too")
        out = torch.empty(b + r)
        dist.reduce_scatter(out, [torch.full((b + k,), float(r + k)) for k in range(n)])
        assert out.eq(sum(range(n)) + n * r).all()


def splits_without_plans(r: int, n: int) -> None:
    """A group that has no plan exchanges and refuses the same."""
    meshwright.torch.configure(fabric="")
    group = dist.new_group(timeout=DEADLINE)
    parts = [torch.empty(10 + come) for come in range(n)]
    dist.all_to_all(parts, [torch.full((10 + r,), 1.0 * to) for to in range(n)], group=group)
    assert all(t.eq(r).all() and t.numel() == 10 + come for come, t in enumerate(parts))
    try:
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 1, 1], [0, 2, 1] if r == 2 else [1, 1, 1], group=group)
    except RankDiverged as error:
        assert error.data["rank"] == 2 and "sends 0 elements to rank 0" in str(error), error
    else:
        raise AssertionError("splits that do not fit passed")
    meshwright.torch.configure(fabric="laptop:3")


def unlike_messages(r: int, n: int) -> None:
    """What rank 0 sends is not what rank 1 expects: longer, shorter, of another type. Equal ones, from anybody too, arrive."""
    if r == 2:
        dist.send(torch.full((4,), 7.0), 1, tag=3)
    if r == 1:
        x = torch.zeros(4)
        assert dist.recv(x, tag=3) == 2 and x.eq(7).all()
    for sent, taken in ((6, 4), (3, 4), (4, 4)):
        group = dist.new_group(timeout=DEADLINE)
        dist.barrier()  # who still makes the group when the others find out hears of it there
        begin = time.monotonic()
        try:
            for count, dtype in ((2, torch.float32), (sent, torch.int32)):
                if r == 0:
                    dist.send(torch.ones(count, dtype=dtype), 1, group=group)
                elif r == 1:
                    dist.recv(torch.empty(2 if dtype == torch.float32 else taken), 0, group=group)
            while time.monotonic() < begin + LONG_BEFORE_A_DEADLINE_S:
                dist.all_reduce(torch.ones(4), group=group)
        except RankDiverged as error:
            assert f"calls send int32 {4 * sent} bytes to rank 1, which calls recv float32 {4 * taken} bytes (message 2" in str(error), error
        else:
            raise AssertionError("a message that is not what was expected passed")


def wrong_arguments(r: int, n: int) -> None:
    """What one rank gets wrong is an error there, before anything is sent. Asked again rightly, the others have waited for it."""
    x = torch.ones(PLANNED)
    empty = [torch.empty(PLANNED) for _ in range(n)]

    def once_wrong(wrong: Callable[[], Any], right: Callable[[], Any]) -> None:
        if r == 1:
            try:
                wrong()
            except UsageError as error:
                assert isinstance(error, RuntimeError)  # as torch's own backends raise
            else:
                raise AssertionError("was not refused")
        right()

    once_wrong(lambda: dist.all_gather(empty[1:], x), lambda: dist.all_gather(empty, x))
    big = torch.empty(n * PLANNED)
    once_wrong(lambda: dist.all_gather_into_tensor(big[1:], x), lambda: dist.all_gather_into_tensor(big, x))
    once_wrong(lambda: dist.reduce_scatter_tensor(x.clone(), big[1:]), lambda: dist.reduce_scatter_tensor(x.clone(), big))
    once_wrong(lambda: dist.reduce_scatter(x.clone(), empty[1:]), lambda: dist.reduce_scatter(x.clone(), empty))
    once_wrong(lambda: dist.all_to_all(empty, [x] * (n - 1)), lambda: dist.all_to_all(empty, [x] * n))
    once_wrong(lambda: dist.all_to_all_single(big.clone(), big, [5] * n, [5] * n), lambda: dist.all_to_all_single(big.clone(), big))
    once_wrong(lambda: dist.broadcast(x, 7), lambda: dist.broadcast(x, 0))
    once_wrong(lambda: dist.gather(x, empty[1:], 1), lambda: dist.gather(x, empty if r == 1 else None, 1))
    once_wrong(lambda: dist.scatter(x.clone(), empty[1:], 1), lambda: dist.scatter(x.clone(), empty if r == 1 else None, 1))
    few = [torch.ones(3) for _ in range(n)]
    once_wrong(lambda: dist.scatter(x.clone(), few, 1), lambda: dist.scatter(x.clone(), empty if r == 1 else None, 1))
    once_wrong(lambda: dist.gather(x, few, 1), lambda: dist.gather(x, empty if r == 1 else None, 1))
    x = torch.ones(PLANNED)
    dist.all_reduce(x)
    assert x.eq(n).all()


def nans(r: int, n: int) -> None:
    """Under MAX and MIN: planned, NaN stays wherever it comes from; by the built-in backend, what gloo itself makes of it."""
    gloo = dist.new_group(backend="gloo", timeout=DEADLINE)
    for operator in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        for holder in range(n):

            def given(size: int, holder: int = holder) -> torch.Tensor:
                return torch.full((size,), float("nan") if r == holder else float(r))

            x = given(PLANNED)
            dist.all_reduce(x, operator)
            assert x.isnan().all()
            for size in (1, SMALL):
                x, y = given(size), given(size)
                dist.all_reduce(x, operator)
                dist.all_reduce(y, operator, group=gloo)
                assert torch.equal(x.nan_to_num(-7.0), y.nan_to_num(-7.0))
                assert size > 1 or x.isnan().item() == (holder == 0), "as docs/running.md says of torch 2.13"


def many_lengths() -> None:
    """Lengths that never come twice: the group forgets what it kept for the oldest."""
    from meshwright.run.group import routes

    kept, routes.MAX_ROUTES = routes.MAX_ROUTES, 8
    group: Any = dist.distributed_c10d._get_default_group()
    for extra in range(20):
        x = torch.ones(PLANNED + extra)
        dist.all_reduce(x)
        assert x.eq(dist.get_world_size()).all()
    assert len(group._routes) <= 8 and len(group.engine._signatures) <= 8
    routes.MAX_ROUTES = kept


def divergence(r: int, n: int) -> None:
    """Rank 1 calls something else than the others, planned or not, waited for or over at once: all hear of it, whoever waits."""

    def reduces(size: int, operator: Any) -> Callable[[Any], Any]:
        return lambda group: dist.all_reduce(torch.ones(size), op=operator, group=group)

    def broadcasts(size: int, root: int) -> Callable[[Any], Any]:
        return lambda group: dist.broadcast(torch.ones(size), root, group=group)

    def exchanges(sends: list[int], takes: list[int]) -> Callable[[Any], Any]:
        return lambda group: dist.all_to_all_single(torch.empty(sum(takes)), torch.ones(sum(sends)), takes, sends, group=group)

    def exchanges_lists(sends: list[int], takes: list[int]) -> Callable[[Any], Any]:
        return lambda group: dist.all_to_all([torch.empty(k) for k in takes], [torch.ones(k) for k in sends], group=group)

    most, total = dist.ReduceOp.MAX, dist.ReduceOp.SUM
    even, unlike = [SMALL] * n, [SMALL - 1, SMALL + 1, SMALL]
    sent = f"splits {unlike} and sends {SMALL - 1} elements to rank 0, which calls it with splits {even} of what comes and expects {SMALL}"
    cases = (
        (exchanges(unlike, even), exchanges(even, even), f"rank 1 calls all-to-all float32 with {sent}"),
        (exchanges_lists(unlike, even), exchanges_lists(even, even), f"rank 1 calls all-to-all float32 with {sent}"),
        (reduces(SMALL, most), reduces(SMALL, total), "calls all-reduce max float32 200 bytes as collective 1 where the others call"),
        (reduces(PLANNED, most), reduces(PLANNED, total), "calls all-reduce max float32 117.2 KiB as collective 1 where the others call"),
        (broadcasts(PLANNED, 0), reduces(PLANNED, total), "calls broadcast float32 root 0 117.2 KiB as collective 1 where the others call"),
        (broadcasts(SMALL, 1), broadcasts(SMALL, 0), "calls broadcast float32 root 1 200 bytes as collective 1 where the others call broadcast"),
        (reduces(PLANNED - 99, total), reduces(PLANNED, total), "calls all-reduce sum float32 116.8 KiB as collective 1 where the others call"),
    )
    for wrong, right, text in cases:
        group = dist.new_group(timeout=DEADLINE)
        begin = time.monotonic()
        try:
            (wrong if r == 1 else right)(group)
            while time.monotonic() < begin + LONG_BEFORE_A_DEADLINE_S:
                dist.all_reduce(torch.ones(4), group=group)
                time.sleep(0.02)
        except RankDiverged as error:
            assert text in str(error) and error.data["rank"] == 1, (text, str(error))
        else:
            raise AssertionError(f"nobody noticed that rank 1 {text}")
    x = torch.ones(PLANNED)
    dist.all_reduce(x)  # the other group goes on
    assert x.eq(n).all()


def main() -> None:

    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    meshwright.torch.configure(fabric="laptop:3", builtin=False)
    dist.init_process_group("meshwright", timeout=DEADLINE)
    for case in (views_with_gaps, uneven_splits, unlike_lists, wrong_arguments):
        case(rank, n)
    splits_without_plans(rank, n)
    unlike_messages(rank, n)
    nans(rank, n)
    many_lengths()
    divergence(rank, n)
    planned = meshwright.torch.report()
    assert "all-to-all" in str(planned) and "unequal splits" in str(planned), planned
    meshwright.torch.configure(fabric="")
    views_with_gaps(rank, n, dist.new_group(timeout=DEADLINE))
    dist.destroy_process_group()
    sys.stdout.write("all right\n")


main()
