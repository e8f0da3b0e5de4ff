"""What a rank's part in a sparse all-reduce asks of the network: a generator yields requests, whoever runs it answers.

So the arithmetic never sees a transport: `transport` runs one rank over torch.distributed, `testing.sparse_twin` all ranks of one in a single
thread, with deliveries in any order. A request blocks or not, as it says; messages between two ranks arrive in the order in which they were posted.
Both ends know every length before they post (it was gathered), and messages of length 0 are not posted at all.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["AllGather", "AllReduce", "Message", "Post", "Protocol", "Request", "Wait"]

T = TypeVar("T")
Words = NDArray[Any]  # one-dimensional and contiguous


class Message(NamedTuple):
    """A message to or from `peer`: the array that is sent, or filled."""

    peer: int
    data: Words


class Post(NamedTuple):
    """Start these messages; answers with a ticket at once. Arrays stay as they are until the ticket was waited for."""

    phase: str
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Wait(NamedTuple):
    """Wait until all messages of a ticket are complete; every ticket is waited for once."""

    ticket: Any


class AllGather(NamedTuple):
    """Answers with the equally long rows of all ranks, as one array of shape (ranks, length)."""

    phase: str
    row: NDArray[np.int64]


class AllReduce(NamedTuple):
    """Adds the arrays of all ranks, in place."""

    phase: str
    data: Words


Request = Post | Wait | AllGather | AllReduce
Protocol = Generator[Request, Any, T]
