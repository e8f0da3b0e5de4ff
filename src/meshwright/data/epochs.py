"""Epochs of a loader as they are: seconds, items, and bytes that really came from storage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Epoch", "run_epochs"]


@dataclass(frozen=True)
class Epoch:
    """`read_bytes`: what this process and its children made the kernel fetch from storage (`/proc/PID/io`)."""

    time_s: float
    items: int
    read_bytes: int


def run_epochs(loader: Any, epochs: int, step: Callable[[Any], object] | None = None, size: Callable[[Any], int] | None = None) -> list[Epoch]:
    """Iterates over the loader so many times. `size(batch)`: how many items it has (default: `loader.batch_size`, the last of an epoch less).

    A worker that ended takes what it read with it, so the loader must keep its workers (`persistent_workers`) for the bytes to be whole.
    """
    found = []
    for _ in range(epochs):
        before, begin, items = _read_bytes(), time.perf_counter(), 0
        total = len(loader.dataset)
        for batch in loader:
            items += size(batch) if size else min(loader.batch_size or 1, total - items)
            if step is not None:
                step(batch)
        found.append(Epoch(time.perf_counter() - begin, items, _read_bytes() - before))
    return found


def _read_bytes() -> int:
    total, waiting = 0, ["self"]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                if line.startswith("read_bytes:"):
                    total += int(line.split()[1])
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting.extend((task / "children").read_text().split())
    return total
