"""Point-to-point messages of the executor, over a torch process group.

gloo (torch 2.13): a send is a rendezvous even for 4 bytes, `isend` does not copy, finished work cannot be seen without `wait`,
and `wait` may be called exactly once: callers keep each work in one place and wait on it once. One tag is a FIFO for any number
of posted receives.

NCCL has no tags: messages match in order per pair. `TaglessTransport` therefore demands that receives from a peer are posted in
the order of that peer's sends (`schedule.compile_schedule(..., pair_order=True)`), and uses one process group per direction (to
higher ranks, to lower ranks), because a send kernel occupies its communicator until it is matched. The order is tested on gloo
with a single tag; NCCL itself is untested here.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...errors import Unsupported, UsageError

__all__ = ["TaggedTransport", "TaglessTransport", "Transport", "own_device", "own_transport"]



class Transport(Protocol):
    """Non-blocking messages. Tensors are contiguous and stay alive until waited on; every work is waited on exactly once."""

    pair_order: bool

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...
    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...
    def wait(self, work: Any) -> None: ...


class TaggedTransport:
    """gloo: tag = channel · TAG_WINDOW + message number mod TAG_WINDOW."""

    pair_order = False

    def __init__(self, group: Any) -> None:
        self.group = group

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return self.group.send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return self.group.recv([tensor], peer, tag)

    def wait(self, work: Any) -> None:
        work.wait()


class TaglessTransport:
    """For NCCL: order per pair instead of tags. `up` carries messages to higher ranks, `down` to lower ones."""

    pair_order = True

    def __init__(self, rank: int, up: Any, down: Any) -> None:
        self.rank, self.up, self.down = rank, up, down

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return (self.up if peer > self.rank else self.down).send([tensor], peer, 0)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return (self.down if peer > self.rank else self.up).recv([tensor], peer, 0)

    def wait(self, work: Any) -> None:
        work.wait()


def own_device(name: str, rank: int) -> torch.device:
    """What a rank of this machine computes on; a CUDA device becomes its current one. Raises: UsageError (unknown), Unsupported (none there)."""
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise UsageError(f"unknown device {name!r}", hint="cpu or cuda")
    if not torch.cuda.is_available():
        raise Unsupported("this torch sees no CUDA device", hint="use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    return device


def own_transport(rank: int, device: torch.device) -> Transport:
    """Messages of a rank over the world group, or over groups made for it; every rank must call this."""
    if dist.get_world_size() == 1 or device.type == "cpu":
        return TaggedTransport(dist.group.WORLD)
    everyone = list(range(dist.get_world_size()))
    return TaglessTransport(rank, dist.new_group(everyone), dist.new_group(everyone))
