"""One rank of `training.py`: the example GPT by DDP (one bucket, default buckets), FSDP2 and tensor parallelism, on gloo and on our backend."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt

import meshwright.torch

EQUAL_STEPS, WARM, TIMED = 4, 2, 7
BATCH = 1


def build() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module, (tokens, targets) = gpt.build(vocabulary=256, sequence=64, layers=4, width=256, heads=8, batch=BATCH)
    return module, tokens, targets


def ddp(group: Any, one_bucket: bool) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(build()[0], process_group=group, bucket_cap_mb=1000 if one_bucket else 25)


def fsdp2(group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    module, mesh = build()[0], DeviceMesh.from_group(group, "cpu", mesh=list(range(dist.get_world_size())), mesh_dim_names=("data",))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def tensor_parallel(group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(dist.get_world_size())), mesh_dim_names=("tensor",))
    split = {f"blocks.{i}.mlp.{name}": kind() for i in range(4) for name, kind in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    return parallelize_module(build()[0], mesh, split)


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "DDP, one bucket": lambda group: ddp(group, True), "DDP, default buckets": lambda group: ddp(group, False), "FSDP2": fsdp2,
    "tensor parallel": tensor_parallel,
}  # fmt: skip


def train(module: nn.Module, rank: int, control: Any, same_data: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters after EQUAL_STEPS steps, and seconds of the steps after these and WARM, each as long as at its slowest rank."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    kept: list[torch.Tensor] = []
    times = []
    for step in range(EQUAL_STEPS + WARM + TIMED):
        generator = torch.Generator().manual_seed(1000 * step + (0 if same_data else rank))
        tokens = torch.randint(256, (BATCH, 65), generator=generator)
        dist.barrier(control)
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        lasted = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(lasted, dist.ReduceOp.MAX, group=control)
        if step + 1 == EQUAL_STEPS:
            kept = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in module.parameters()]
        if step >= EQUAL_STEPS + WARM:
            times.append(float(lasted))
    return kept, times


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    rank, control = dist.get_rank(), dist.group.WORLD
    # FSDP2 and DTensor demand a process group of the backend that they are given: ours beside the plain one.
    gloo = dist.new_group(backend="gloo")
    for name, way in WAYS.items():
        ddp_way = name.startswith("DDP")  # where speed is asked for, gloo may be chosen; elsewhere every plan is used, to see that none escapes
        meshwright.torch.configure(min_bytes=1 << 15 if ddp_way else 0, builtin=ddp_way)
        ours = dist.new_group(backend="meshwright")
        plain, slow = train(way(gloo), rank, control, name == "tensor parallel")
        found, fast = train(way(ours), rank, control, name == "tensor parallel")
        apart = max(float((a - b).abs().max()) for a, b in zip(plain, found, strict=True))
        row = {
            "way": name, "gloo_s": statistics.median(slow), "ours_s": statistics.median(fast), "gloo_all_s": slow, "ours_all_s": fast,
            "parameters_apart": apart, "report": meshwright.torch.report(ours), "gradient_bytes": sum(p.numel() * 4 for p in plain),
        }  # fmt: skip
        if rank == 0:
            sys.stdout.write(json.dumps({"row": row}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
