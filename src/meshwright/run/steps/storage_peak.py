"""Peak of live tensor storage over a piece of work, from the allocator's own events or statistics.

On a processor the profiler reports every allocation and release of tensor memory. What lives before counts with the size of its storages, each
once. It slows the work down, so a run does this on one step, which it marks. An accelerator's caching allocator keeps a peak by itself; that path was
tried on one device and on fakes only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["allocator_peak", "peak_of", "quiet_profile", "storage_bytes"]


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


def allocator_peak(work: Callable[[], None], device: torch.device, module: Any) -> int:
    """Most bytes that tensors of this process asked for on the device at once, by its allocator: without what it rounds up to and keeps in reserve.
    `module`: what `torch.get_device_module` gives for the device."""
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    work()
    module.synchronize(device)
    found = module.memory_stats(device)
    # Other allocators than the caching one do not count what was asked for.
    return int(found.get("requested_bytes.all.peak", found["allocated_bytes.all.peak"]))


def peak_of(work: Callable[[], None], resident: Iterable[torch.Tensor]) -> int:
    """Run `work`; returns the greatest number of bytes of tensor storage alive during it, `resident` included.

    On the device of `resident`: if any of it lies on an accelerator, all that this process has there counts, and nothing elsewhere.
    """
    kept = list(resident)
    device = next((t.device for t in kept if t.device.type != "cpu"), None)
    if device is not None:
        return allocator_peak(work, device, torch.get_device_module(device.type))
    before = storage_bytes(kept)
    with quiet_profile() as profile:
        work()
    changes = sorted(((e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e[0])
    live = peak = before
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak
