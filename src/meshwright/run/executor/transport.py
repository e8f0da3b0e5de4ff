"""Messages of the executor over a torch process group: one by one with tags, or in groups without.

gloo (torch 2.13): a send is a rendezvous even for 4 bytes, `isend` does not copy, finished work cannot be seen without `wait`,
and `wait` may be called exactly once: callers keep each work in one place and wait on it once. One tag is a FIFO for any number
of posted receives.

NCCL has no tags, and a call that is in no group makes a communicator for its pair of ranks at its first use, at which the hosts of both stand still
until the other comes: receives posted ahead of sends then wait for each other in a circle. So `GroupedTransport` has one communicator, made at all
ranks at once before the first step, and issues whole groups of calls, in the order of `rounds`. `check.issued` proves that order. NCCL itself was
never run by this project between two GPUs: none were at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...errors import Unsupported, UsageError
from .held_groups import holds_group

__all__ = [
    "Broken", "GroupedTransport", "Messages", "TaggedTransport", "Transport", "connected", "grouped_calls", "own_device", "own_stream",
    "own_transport", "posted",
]  # fmt: skip

Messages = Sequence[tuple[torch.Tensor, int, int]]  # tensor, peer, tag


class Broken(RuntimeError):
    """The connection to `peer` is closed: nothing could be posted."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


def posted(call: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> Any:
    """The work of a process group's send or receive. Raises: Broken."""
    try:
        return call([tensor], peer, tag)
    except RuntimeError as error:
        raise Broken(peer, str(error)) from error


class Transport(Protocol):
    """Non-blocking messages. Tensors are contiguous and stay alive until waited on.

    `grouped`: messages have no tags and are matched by order; they are issued by `exchange` alone, in one order at all ranks, and a work may be
    waited on several times. Otherwise every work is waited on exactly once.
    """

    grouped: bool

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...
    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...
    def exchange(self, sends: Messages, receives: Messages) -> Sequence[Any]:
        """All of these at once; the works to wait on."""
        ...

    def wait(self, work: Any) -> None: ...


class TaggedTransport:
    """gloo: tag = channel · TAG_WINDOW + message number mod TAG_WINDOW."""

    grouped = False

    def __init__(self, group: Any) -> None:
        self.group = group
        holds_group(self)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return posted(self.group.send, tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return posted(self.group.recv, tensor, peer, tag)

    def exchange(self, sends: Messages, receives: Messages) -> Sequence[Any]:
        works = [self.receive(*one) for one in receives]
        return [*works, *(self.send(*one) for one in sends)]

    def wait(self, work: Any) -> None:
        work.wait()


def grouped_calls(backend: Any, sends: Sequence[tuple[Any, ...]], receives: Sequence[tuple[Any, ...]]) -> Any:
    """Point-to-point calls, given as (tensor, peer, ...), as one group on the backend's own communicator, which must exist (`connected`); the work
    of the whole group."""
    backend._start_coalescing()
    for one in sends:
        backend.send([one[0]], one[1], 0)
    for one in receives:
        backend.recv([one[0]], one[1], 0)
    return backend._end_coalescing()


def own_stream(device: torch.device) -> Any:
    """A new stream of that device, whatever the current one is."""
    module = torch.get_device_module(device.type)
    return module.Stream() if device.type == "cpu" else module.Stream(device=device)


def connected(backend: Any, device: torch.device) -> Any:
    """The backend, with its communicator made, by a call that all ranks make: a first call of only some would wait for the others."""
    backend.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()
    torch.get_device_module(device.type).synchronize(device)
    return backend


class GroupedTransport:
    """NCCL: groups of calls on one communicator, on a stream of the transport's own, so that what the device computes next does not wait for them.

    `backend` is connected (`connected`). A group comes after all that the device's current stream was given before it; `wait` makes what the stream
    is given next wait for the group, and returns at once.
    """

    grouped = True

    def __init__(self, backend: Any, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self.module: Any = torch.get_device_module(device.type)
        self.stream: Any = own_stream(device)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return self.exchange([(tensor, peer, tag)], [])[0]

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return self.exchange([], [(tensor, peer, tag)])[0]

    def exchange(self, sends: Messages, receives: Messages) -> Sequence[Any]:
        # The backend's own stream waits for the current one at every call: so that is ours here, which waits for no more than it must.
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            return [grouped_calls(self.backend, sends, receives)]

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
    torch.cuda.set_device(device)  # before any communicator is made: NCCL takes the current device
    return device


def own_transport(rank: int, device: torch.device) -> Transport:
    """Messages of a rank over the world group, or over a group made for it; every rank must call this at the same point."""
    if device.type == "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:  # alone: nothing is sent
        return TaggedTransport(dist.group.WORLD)
    made = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
    return GroupedTransport(connected(made._get_backend(device), device), device)
