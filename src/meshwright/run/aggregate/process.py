"""The aggregator as a process of its own: until it is asked to end. For the command line and for labs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from .injector import injector
from .operators import Operator
from .server import Aggregator
from .sockets import Address

__all__ = ["run_aggregator"]


def run_aggregator(
    listen: Address, *, slots: int, words: int, span: int = 1 << 14, places: int = 1 << 12, own: Operator | None = None, lost: float = 0.0,
    doubled: float = 0.0, late: float = 0.0, seed: int = 0,
    ready: Callable[[Aggregator], None] = lambda aggregator: None,
) -> dict[str, int]:  # fmt: skip
    """Serve until SIGINT or SIGTERM; the counters of packets. Raises: PortInUse, UsageError, Unsupported."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    faults = injector(4 * words, lost=lost, doubled=doubled, kept=late, seed=seed)
    with Aggregator(listen, slots=slots, words=words, span=span, places=places, faults=faults, own=own) as aggregator:
        ready(aggregator)
        aggregator.serve(stop.is_set)
        return aggregator.status().counters
