"""One rank of `test_waves.test_programs_on_gpus`: collectives and DDP on CUDA tensors, run by programs over NCCL."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import meshwright.torch


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    meshwright.torch.configure(fabric="laptop:2", builtin=False, min_bytes=0, strategies=("forestcoll", "ring", "direct"))
    dist.init_process_group("meshwright")
    n = dist.get_world_size()
    for count in (1, 13, 100_000):
        x = torch.full((count,), float(rank + 1), device="cuda")
        works = [dist.all_reduce(x, async_op=True) for _ in range(2)]  # the second sums what the first made
        for work in works:
            assert work is not None
            work.wait()
        assert (x == n * n * (n + 1) / 2).all(), x
        out = torch.empty(n * count, device="cuda")
        dist.all_gather_into_tensor(out, torch.full((count,), float(rank), device="cuda"))
        assert (out.view(n, count) == torch.arange(n, device="cuda")[:, None]).all(), out
    torch.manual_seed(0)
    plain = torch.nn.Linear(33, 65).cuda()
    model = DistributedDataParallel(plain, device_ids=[rank])
    given = torch.randn(n, 4, 33, generator=torch.Generator().manual_seed(1)).cuda()
    model(given[rank]).square().mean().backward()
    assert plain.weight.grad is not None
    mine = plain.weight.grad.clone()
    plain.zero_grad()
    (sum(plain(x).square().mean() for x in given) / n).backward()
    assert torch.allclose(mine, plain.weight.grad, atol=1e-6)
    planned = meshwright.torch.report()["planned"]
    assert {"all-reduce", "all-gather"} <= set(planned), meshwright.torch.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
