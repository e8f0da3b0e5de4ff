"""One of two ranks that train through a switch; prints the digest of its weights and how far they are from training over gloo."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.run.aggregate.client import Seat
from meshwright.run.aggregate.fallback import GlooHosts, Reducer
from meshwright.run.aggregate.hook import average_bucket
from meshwright.run.aggregate.sockets import parse_address


def trained(reducer: Reducer | None) -> Any:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)))
    if reducer is not None:
        model.register_comm_hook(reducer, average_bucket)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(10):
        inputs, targets = torch.randn(16, 20), torch.randint(0, 3, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seat = Seat(job="ddp", worker=rank, children=2, words=64, silence_s=10)
    reducer = Reducer.join(parse_address(sys.argv[1]), seat, GlooHosts(dist.group.WORLD), rank)
    ours, plain = trained(reducer), trained(None)
    reducer.close()
    sys.stdout.write(f"{hashlib.sha256(ours.numpy().tobytes()).hexdigest()} {float((ours - plain).abs().max())} {reducer.why} {os.getpid()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # DDP keeps gloo's threads, which may still let go tensors: that aborts an interpreter that ends in the ordinary way
