"""The group's own gloo context for point-to-point messages.

It is a context of its own, so tags never meet the user's sends. One connection per pair carries all channels between two ranks: one flow per
direction. gloo cannot be polled and a wait cannot be interrupted, except in one way: a wait that times out closes all pairs of its context, and
every other wait on it ends with an error. `abort` does that on purpose.

A message longer than the receive that it matches makes gloo end the whole process, a shorter one passes for right. So tags are mixed with `mask`,
a number made of the collective's place in the sequence and its program: messages of ranks that differ in either never meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import MeshwrightError
from ..executor.tags import TAG_BITS, ReservedTag
from ..executor.transport import posted

__all__ = ["GlooMessages", "all_connect", "end_waits", "mask_of"]

_AT_ONCE = timedelta(milliseconds=1)  # gloo takes no wait of 0


def mask_of(number: int, call: int, size_bytes: int, program: int) -> int:
    """What tags of a collective are mixed with. Any difference changes half of the bits, so tags of two collectives never come close."""
    digest = hashlib.blake2b(struct.pack("<4q", number, call, size_bytes, program), digest_size=4).digest()
    return int.from_bytes(digest, "little") & ((1 << TAG_BITS) - 1)


class GlooMessages:
    """`send` and `receive` post and return a work to be waited on exactly once."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self.mask = 0
        self.group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        self._send, self._recv = self.group.send, self.group.recv

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return posted(self._send, tensor, peer, tag ^ self.mask)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return posted(self._recv, tensor, peer, tag ^ self.mask)

    def wait(self, work: Any, limit: timedelta) -> None:
        """Raises RuntimeError: a lost peer, an abort, the deadline."""
        work.wait(limit)

    def abort(self) -> None:
        """End every wait of this context with an error, from any thread."""
        end_waits(self.group, self.rank, self.size, ReservedTag.ABORT)


def all_connect(store: Any, rank: int, size: int, wait_for: Callable[[str], None], check: Callable[[], None]) -> bool:
    """Whether this rank, and all others, may make a `GlooMessages`: all do or none.

    Connecting waits inside the store, where no verdict reaches it. So all ranks come first; one that called something else does not. A rank that is
    told of the group's end while it waits for the last one leaves, and that one would then connect alone, until its deadline. So the first word in
    the store counts: the one of the rank that saw all come, or the one of the rank that left. Who leaves too late connects with the others.
    Raises: what `wait_for` and `check` raise, where nobody connects.
    """
    store.set(f"messages/{rank}", b"1")
    try:
        for other in range(size):
            if other != rank:
                wait_for(f"messages/{other}")
        check()
    except MeshwrightError:
        with contextlib.suppress(RuntimeError):  # of a store that ended with its rank
            if store.compare_set("messages/all", "", "none") == b"all":
                return True
        raise
    return bool(store.compare_set("messages/all", "", "all") == b"all")


def end_waits(group: Any, rank: int, size: int, tag: int) -> None:
    """Close all connections of a gloo group: by a wait on any peer, whose own connection is still open, that times out."""
    for step in range(1, size):
        try:
            work = group.recv([torch.empty(1)], (rank + step) % size, tag)
        except RuntimeError:  # this one is closed already, which leaves the others open
            continue
        try:
            # Nobody sends this tag, so the wait times out, and gloo then closes all pairs of the context.
            work.wait(_AT_ONCE)
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return
