"""Peak of live tensor storage over a piece of work, from the allocator's own events.

The profiler reports every allocation and release of tensor memory. What lives before counts with the size of its storages, each
once. It slows the work down, so a run does this on one step, which it marks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["peak_of", "quiet_profile", "storage_bytes"]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class _QuietStderr:
    """The profiler's start and stop write notices to the process's stderr; nothing else is lost: `pause` lets output through again."""

    def __enter__(self) -> _QuietStderr:
        self.kept = os.dup(2)
        self.resume()
        return self

    def resume(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)

    def pause(self) -> None:
        os.dup2(self.kept, 2)

    def __exit__(self, *_: object) -> None:
        self.pause()
        os.close(self.kept)


@contextlib.contextmanager
def quiet_profile() -> Iterator[Any]:
    """The profiler with memory events of the processor's allocator; its own notices to stderr are not shown."""
    events = torch.profiler.ProfilerActivity.CPU
    with _QuietStderr() as quiet, torch.profiler.profile(activities=[events], profile_memory=True) as profile:
        quiet.pause()
        yield profile
        quiet.resume()


def peak_of(work: Callable[[], None], resident: Iterable[torch.Tensor]) -> int:
    """Run `work`; returns the greatest number of bytes of tensor storage alive during it, `resident` included."""
    before = storage_bytes(resident)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        work()
        return int(torch.cuda.max_memory_allocated())
    with quiet_profile() as profile:
        work()
    changes = sorted(((e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e[0])
    live = peak = before
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak
