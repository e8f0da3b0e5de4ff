"""Ports for processes that are started and listen later."""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port"]

# Below what the system gives away by itself (from 32768 on): nobody else gets a port between the moment it is found and the moment somebody listens.
FIRST, EACH, RANGES = 15_000, 1000, 12
_next = itertools.count(os.getpid() * 37)


def free_port() -> int:
    """A TCP port that nobody listens on. Every worker has a range of its own, and gives a port again after all others of it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw11").removeprefix("gw")) % RANGES
    for number in itertools.islice(_next, EACH):
        port = FIRST + worker * EACH + number % EACH
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no port from {FIRST + worker * EACH} on is free")
