"""One rank of `test_group`: everything torch offers, run by our group and by gloo, compared. Prints {"ok": ...} or dies."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import meshwright.torch
from meshwright.errors import GroupFailed, MeshwrightError
from meshwright.run.group.group import MeshwrightGroup
from meshwright.run.group.streams import DeviceRunner

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
OPERATORS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND,
             dist.ReduceOp.BOR, dist.ReduceOp.BXOR]  # fmt: skip


def outcome(run: Callable[[], Any]) -> Any:
    """A result, or the kind of error."""
    try:
        return run()
    except MeshwrightError:
        raise
    except Exception as error:
        return type(error).__name__


def same(ours: Any, gloo: Any, what: object) -> None:
    if isinstance(gloo, torch.Tensor) and isinstance(ours, torch.Tensor):
        close = torch.allclose(ours.double(), gloo.double(), rtol=2e-2 if ours.dtype in FLOATS[:2] else 1e-6, atol=1e-6, equal_nan=True)
        assert ours.dtype == gloo.dtype and ours.shape == gloo.shape and close, (what, ours, gloo)
    elif isinstance(gloo, list) and isinstance(ours, list):
        for a, b in zip(ours, gloo, strict=True):
            same(a, b, what)
    else:
        assert ours == gloo, (what, ours, gloo)


def values(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).to(dtype)


def operations(rank: int, n: int) -> dict[str, Callable[[Any, torch.dtype, Any, int], Any]]:
    """name -> f(group, dtype, operator, elements): what this rank has in the end."""

    def all_reduce(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        x = values(count, dtype, rank)
        dist.all_reduce(x, op, group=group)
        return x

    def reduce(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        x = values(count, dtype, rank)
        dist.reduce(x, op=op, group=group, group_dst=1)
        return x if rank == 1 else None

    def reduce_scatter(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        out = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, values(n * count, dtype, rank), op, group=group)
        return out

    def reduce_scatter_list(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        out = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter(out, [values(count, dtype, rank + i) for i in range(n)], op, group=group)
        return out

    def broadcast(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        x = values(count, dtype, rank)
        dist.broadcast(x, group=group, group_src=n - 1)
        return x

    def all_gather(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        out = [torch.zeros(count, dtype=dtype) for _ in range(n)]
        dist.all_gather(out, values(count, dtype, rank), group=group)
        return out

    def all_gather_tensor(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        out = torch.zeros(n * count, dtype=dtype)
        dist.all_gather_into_tensor(out, values(count, dtype, rank), group=group)
        return out

    def all_to_all_single(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        out = torch.zeros(n * count, dtype=dtype)
        dist.all_to_all_single(out, values(n * count, dtype, rank), group=group)
        return out

    def all_to_all_uneven(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        sends = [i + 1 for i in range(n)]
        out = torch.zeros(n * (rank + 1), dtype=dtype)
        dist.all_to_all_single(out, values(sum(sends), dtype, rank), [rank + 1] * n, sends, group=group)
        return out

    def all_to_all(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        out = [torch.zeros(count, dtype=dtype) for _ in range(n)]
        dist.all_to_all(out, [values(count, dtype, rank * n + i) for i in range(n)], group=group)
        return out

    def gather(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        out = [torch.zeros(count, dtype=dtype) for _ in range(n)] if rank == 1 else None
        dist.gather(values(count, dtype, rank), out, group=group, group_dst=1)
        return out

    def scatter(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        out = torch.zeros(count, dtype=dtype)
        dist.scatter(out, [values(count, dtype, i) for i in range(n)] if rank == 0 else None, group=group, group_src=0)
        return out

    def transposed(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        x = values(2 * count, dtype, rank).view(2, count).t()
        dist.all_reduce(x, op, group=group)
        return x.contiguous()

    def asynchronous(group: Any, dtype: torch.dtype, op: Any, count: int) -> Any:
        rows = [values(count, dtype, rank + i) for i in range(3)]
        works = [dist.all_reduce(x, op, group=group, async_op=True) for x in rows]
        failed: list[RuntimeError] = []
        for work in works:  # all of them: gloo's barrier fails for one that is still on its way to fail
            try:
                work.wait()
            except RuntimeError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return rows

    return {k: v for k, v in locals().items() if callable(v)}


def compare(rank: int, n: int, ours: Any, gloo: Any) -> None:
    reducing = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list", "transposed", "asynchronous"}
    for name, run in operations(rank, n).items():
        operators = OPERATORS if name in ("all_reduce", "reduce_scatter") else OPERATORS[:2] if name in reducing else [None]
        for (i, dtype), (j, op) in itertools.product(enumerate([*FLOATS, *INTEGERS, torch.bool]), enumerate(operators)):
            if name == "reduce_scatter" and (dtype == torch.bool or (op not in OPERATORS[:1] and dtype not in (torch.float32, torch.int32))):
                continue  # where the two differ only in how many types gloo takes
            for count in (1, 13) if dtype in (torch.float32, torch.int32) else ((1, 13)[(i + j) % 2],):  # other types: one or the other
                wanted = outcome(lambda: run(gloo, dtype, op, count))
                found = outcome(lambda: run(ours, dtype, op, count))
                same(found, wanted, (name, dtype, op, count))
    empty = torch.zeros(0)
    dist.all_reduce(empty, group=ours)
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank}, group=ours)
    assert [o["rank"] for o in objects] == list(range(n))
    dist.barrier(ours)
    if rank < 2:
        x = torch.full((3,), float(rank))
        dist.send(x, 1 - rank, ours) if rank == 0 else dist.recv(x, 0, ours)
        assert (x == 0).all()


def train(rank: int, group: Any) -> None:
    """DDP and FSDP2 end with the parameters that gloo gives, and nothing of theirs escapes our group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def steps(model: torch.nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            torch.manual_seed(10 * i + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 33)).square().mean().backward()
            optimizer.step()
        return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.ReLU(), torch.nn.Linear(65, 7))

    gloo = dist.new_group(backend="gloo")
    meshwright.torch.configure(min_bytes=0)
    ours = dist.new_group(backend="meshwright")
    same(steps(DistributedDataParallel(build(), process_group=ours)), steps(DistributedDataParallel(build(), process_group=gloo)), "ddp")
    world = list(range(dist.get_world_size()))
    rows = []
    for one in (ours, gloo):
        model = build()
        fully_shard(model, mesh=DeviceMesh.from_group(one, "cpu", mesh=world, mesh_dim_names=("data",)))
        rows.append(steps(model))
    same(*rows, "fsdp2")
    report = meshwright.torch.report(ours)
    escaped = {op: why for op, why in report["builtin"].items() if set(why) - {"no elements", "operator and type"}}
    assert not escaped and {"all-reduce", "all-gather", "reduce-scatter"} <= set(report["planned"]), report


def tensor_parallel(rank: int) -> None:
    """DTensor's own collectives, through a mesh on our backend."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    n = dist.get_world_size()
    ours = dist.new_group(backend="meshwright")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 4 * n), torch.nn.ReLU(), torch.nn.Linear(4 * n, 6))
    given = torch.randn(5, 12)
    wanted = model(given).detach()
    mesh = DeviceMesh.from_group(ours, "cpu", mesh=list(range(n)), mesh_dim_names=("tensor",))
    split = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    same(split(given).detach(), wanted, "tensor parallel")
    assert meshwright.torch.report(ours)["planned"].get("all-reduce"), meshwright.torch.report(ours)


def endings(rank: int) -> None:
    """A destroyed group says so; a new one works; so does a second world in this process."""
    group = dist.new_group(backend="meshwright")
    x = torch.ones(5000)
    dist.all_reduce(x, group=group)
    keep = group
    dist.destroy_process_group(group)
    try:
        keep.allreduce([torch.ones(3)]).wait()
        raise AssertionError("a destroyed group went on")
    except GroupFailed:
        pass


class GlooWaves:
    """Groups of calls over gloo: what NCCL's do on GPUs, waited for at once."""

    def __init__(self, group: Any) -> None:
        self.group, self.waves = group, 0

    def __call__(self, sends: Any, receives: Any) -> None:
        self.waves += 1
        works = [self.group.recv([t], peer, 0) for t, peer in receives] + [self.group.send([t], peer, 0) for t, peer in sends]
        for work in works:
            work.wait()


def on_waves() -> list[GlooWaves]:
    """All groups made from now on run their programs as accelerators do, on this processor."""
    made: list[GlooWaves] = []
    usual = MeshwrightGroup.__init__

    def init(group: MeshwrightGroup, engine: Any, builtin: Any) -> None:
        usual(group, engine, builtin)
        own = dist.ProcessGroupGloo(dist.PrefixStore("waves", engine.store), engine.rank, engine.size, timedelta(seconds=60))
        made.append(GlooWaves(own))
        group.add_runner("cpu", DeviceRunner("cpu", made[-1], engine.size, lambda device: None, engine.over))

    MeshwrightGroup.__init__ = init  # type: ignore[method-assign]
    return made


def main() -> None:
    torch.set_num_threads(1)
    waves = on_waves() if "waves" in sys.argv else None
    some = ("forestcoll", "ring", "direct", "hierarchical")
    meshwright.torch.configure(fabric=sys.argv[1], builtin=False, min_bytes=0, plan_s=20.0, strategies=some)
    dist.init_process_group("meshwright")
    rank, n = dist.get_rank(), dist.get_world_size()
    compare(rank, n, dist.group.WORLD, dist.new_group(backend="gloo"))
    ends = dist.new_group([0, n - 1], backend="meshwright")
    if rank in (0, n - 1):
        x = torch.full((1000,), float(rank))
        dist.all_reduce(x, group=ends)
        assert (x == n - 1).all()
    train(rank, dist.group.WORLD)
    tensor_parallel(rank)
    endings(rank)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = sys.argv[2]
    dist.init_process_group("meshwright")
    x = torch.ones(777)
    dist.all_reduce(x)
    assert (x == n).all()
    dist.destroy_process_group()
    assert waves is None or all(w.waves for w in waves if w.group.size() > 1)
    if rank == 0:
        sys.stdout.write(json.dumps({"ok": True}) + "\n")


if __name__ == "__main__":
    main()
