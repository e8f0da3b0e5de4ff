"""One rank of a job in which rank 1 hands the built-in backend other byte counts than the others: gloo itself would end the process."""

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
from meshwright.errors import RankDiverged, RunTimeout

DEADLINE = timedelta(seconds=90)
LONG, SHORT = 64, 4  # elements
Act = Callable[[Any], Any]


def calls(r: int, n: int) -> dict[str, Callable[[int], Act]]:
    """Operation -> length -> what to do on a group."""
    return {
        "all-reduce sum float32": lambda k: lambda g: dist.all_reduce(torch.ones(k, dtype=torch.complex64), group=g),
        "broadcast float32 root 0": lambda k: lambda g: dist.broadcast(torch.ones(k), 0, group=g),
        "reduce sum float32 root 2": lambda k: lambda g: dist.reduce(torch.ones(k), 2, group=g),
        "all-gather float32": lambda k: lambda g: dist.all_gather_into_tensor(torch.empty(n * k), torch.ones(k), group=g),
        "all-gather int64": lambda k: lambda g: dist.all_gather([torch.ones(k, dtype=torch.int64) for _ in range(n)], torch.ones(k).long(), group=g),
        "reduce-scatter sum float32": lambda k: lambda g: dist.reduce_scatter_tensor(torch.empty(k), torch.ones(n * k), group=g),
        "gather float32 root 0": lambda k: lambda g: dist.gather(torch.ones(k), [torch.ones(k) for _ in range(n)] if r == 0 else None, 0, group=g),
        "scatter float32 root 0": lambda k: lambda g: dist.scatter(torch.ones(k), [torch.ones(k) for _ in range(n)] if r == 0 else None, 0, group=g),
        "all-reduce sum float16": lambda k: lambda g: dist.all_reduce(torch.ones(k, dtype=torch.float16), group=g, async_op=True).wait(),
    }  # fmt: skip


def diverges(r: int, act: Act, right: Act, words: list[str]) -> None:
    """`right` at all ranks three times, then `act` at rank 1 where the others go on: everybody hears of both calls, long before the deadline."""
    group = dist.new_group(timeout=DEADLINE)
    begin = time.monotonic()
    try:
        for _ in range(3):
            right(group)
        (act if r == 1 else right)(group)
        while time.monotonic() < begin + DEADLINE.total_seconds() / 2:
            dist.barrier(group=group)
            time.sleep(0.01)
    except RankDiverged as error:
        assert error.data["rank"] == 1 and all(word in str(error) for word in words), (words, str(error))
        return
    raise AssertionError(f"nobody noticed: {words}")


def unlike_bytes(r: int, n: int) -> None:
    for i, (name, made) in enumerate(calls(r, n).items()):
        wrong, right = (LONG, SHORT) if i % 2 else (SHORT, LONG)
        diverges(r, made(wrong), made(right), [name, f"as collective 4 where the others call {name}"])


def first_call(r: int) -> None:
    """Nothing is known of earlier calls."""
    group = dist.new_group(timeout=DEADLINE)
    try:
        dist.all_reduce(torch.ones(LONG if r == 1 else SHORT), group=group)
    except RankDiverged as error:
        assert "sum float32 256 bytes as collective 1 where the others call all-reduce sum float32 16 bytes" in str(error), str(error)
    else:
        raise AssertionError("nobody noticed")


def left_out(r: int) -> None:
    """A loop that all ranks have gone through before: rank 1 leaves out its first call, whose place another length takes."""
    group = dist.new_group(timeout=DEADLINE)
    try:
        for turn in range(8):
            for size in (LONG, SHORT, LONG, LONG):
                if r != 1 or turn < 7 or size != LONG:
                    dist.all_reduce(torch.ones(size), group=group)
        dist.barrier(group=group)
    except RankDiverged as error:
        assert "as collective 29 where the others call all-reduce sum float32 256 bytes" in str(error) and error.data["rank"] == 1, str(error)
    else:
        raise AssertionError("nobody noticed")


def like_bytes(r: int, n: int) -> None:
    """Calls that do not wait, between messages of the caller's own: a new call holds up nobody who has not waited for it."""
    group = dist.new_group(timeout=DEADLINE)
    for size in (LONG, SHORT, 7, LONG):
        x, word = torch.full((size,), float(r)), torch.zeros(1)
        if r == 0:
            work = dist.all_reduce(x, group=group, async_op=True)
            for peer in range(1, n):
                dist.send(word + size, peer, group=group)
        else:
            dist.recv(word, 0, group=group)
            assert word.item() == size
            work = dist.all_reduce(x, group=group, async_op=True)
        y = torch.ones(size + 1)
        dist.all_reduce(y, group=group)
        work.wait()
        assert x.eq(n * (n - 1) / 2).all() and y.eq(n).all()
        work = dist.all_reduce(torch.ones(size + 2), group=group, async_op=True)
        assert work.get_future().wait()[0].eq(n).all()


def own_splits(r: int, n: int) -> None:
    """Splits are a rank's own: equal ones at rank 0 alone are no divergence."""
    group = dist.new_group(timeout=DEADLINE)
    for _ in range(3):
        sends = [[1 if a == 0 or b == 0 else a + b for b in range(n)] for a in range(n)]
        given, taken = sends[r], [row[r] for row in sends]
        y = torch.empty(sum(taken))
        dist.all_to_all_single(y, torch.full((sum(given),), float(r)), taken, given, group=group)
        assert torch.equal(y, torch.cat([torch.full((k,), float(a)) for a, k in enumerate(taken)]))


def monitored_barriers(r: int, n: int) -> None:
    group = dist.new_group(timeout=DEADLINE)
    for _ in range(3):
        dist.monitored_barrier(group, timeout=timedelta(seconds=60))
    begin = time.monotonic()
    try:
        if r != 1:
            dist.monitored_barrier(group, timeout=timedelta(seconds=1), wait_all_ranks=True)
        else:
            while time.monotonic() < begin + DEADLINE.total_seconds() / 2:
                group.engine.raise_if_failed()
                time.sleep(0.01)
    except RunTimeout as error:
        assert "rank 1 has not come to collective 4 (monitored-barrier)" in str(error) and error.data["rank"] == 1, str(error)
    else:
        raise AssertionError("nobody was missed")


def main() -> None:
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    meshwright.torch.configure(fabric=sys.argv[1], builtin=False)
    dist.init_process_group("meshwright", timeout=DEADLINE)
    first_call(rank)
    left_out(rank)
    unlike_bytes(rank, n)
    like_bytes(rank, n)
    own_splits(rank, n)
    monitored_barriers(rank, n)
    x = torch.ones(LONG)
    dist.all_reduce(x)  # the other group goes on
    assert x.eq(n).all()
    dist.destroy_process_group()
    sys.stdout.write("all right\n")


main()
