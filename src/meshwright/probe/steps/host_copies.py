"""Rates of copies between a device and its host, measured: what it costs to let a result wait outside the device.

By the same calls that the executor makes (`run.steps.variants.host` and back): pinned memory and the device's stream for an accelerator; for a
processor, whose memory is the host's, a plain copy out of torch's allocator and into it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...errors import UsageError
from ...run.steps.variants import host, unpacked

__all__ = ["CopyRates", "measured_rates"]

SIZE_BYTES = 32 << 20  # larger than caches: what waits is as a rule read long after it was made
ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class CopyRates:
    """Bytes per second. Raises: UsageError for a rate that is not above 0."""

    to_host_Bps: float
    from_host_Bps: float

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            if not rate > 0:
                raise UsageError(f"a copy rate of {rate} B/s", where=name, hint="bytes per second, above 0")


def measured_rates(device: str = "cpu", *, size_bytes: int = SIZE_BYTES, rounds: int = ROUNDS) -> CopyRates:
    """Medians of some copies each way, the first of which, that allocates, is left out."""
    x = torch.ones(size_bytes // 4, device=device)

    def seconds(copy: Callable[[], Any]) -> tuple[float, Any]:
        if x.device.type == "cpu":
            start = time.thread_time()
            made = copy()
            return time.thread_time() - start, made
        torch.cuda.synchronize(x.device)
        start = time.perf_counter()
        made = copy()
        torch.cuda.synchronize(x.device)
        return time.perf_counter() - start, made

    there, back = [], []
    for _ in range(rounds + 1):
        taken, kept = seconds(partial(host, x))
        there.append(taken)
        back.append(seconds(partial(unpacked, kept, x.device))[0])
    size = x.numel() * 4
    least = size / 1e13  # a clock that did not move
    return CopyRates(
        to_host_Bps=size / max(statistics.median(there[1:]), least), from_host_Bps=size / max(statistics.median(back[1:]), least)
    )  # fmt: skip
