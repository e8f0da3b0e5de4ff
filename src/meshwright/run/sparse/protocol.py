"""What a rank's step asks of whoever runs it: a generator yields requests, messages are posted through a port that it was given.

So the arithmetic never sees a transport: `transport` runs one rank over torch.distributed, `testing.sparse_twin` all ranks of one in a single
thread, with deliveries in any order. Both walk the checked program (`walk`) and nothing else.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from ..group.walk import Wait
from .walk import Words

__all__ = ["AllReduce", "Protocol", "Request"]

T = TypeVar("T")


class AllReduce(NamedTuple):
    """Adds the arrays of all ranks, in place: the backend's own."""

    phase: str
    data: Words


Request = Wait | AllReduce
Protocol = Generator[Request, Any, T]
