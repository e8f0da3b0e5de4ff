"""How many pieces a tree's share is cut into: searched on the simulator, or by trial on a real machine.

Source: Blink (arXiv 1910.04940), section on automatic chunk size: multiplicative increase, additive decrease.
Deviations: on the simulator, which has no noise, the search doubles the number of pieces while the time falls, then tries between its best
and the neighbours; the published rule is `tuned_chunk_bytes`, for measured throughput.
"""

from __future__ import annotations

from collections.abc import Callable

from ....errors import UsageError

__all__ = ["fastest_count", "tuned_chunk_bytes"]


def fastest_count(time_of: Callable[[int], float], most: int, *, patience: int = 2) -> tuple[int, float]:
    """(count, time) of the least time among 1, 2, 4, ... up to `most` (until `patience` worse ones in a row) and the middles beside the best."""
    times: dict[int, float] = {}

    def look(count: int) -> float:
        if count not in times:
            times[count] = time_of(count)
        return times[count]

    count, worse = 1, 0
    best = 1
    look(1)
    while worse < patience and count < most:
        count = min(2 * count, most)
        if look(count) < times[best]:
            best, worse = count, 0
        else:
            worse += 1
    for other in (best * 3 // 4, min(best * 3 // 2, most)):
        if other >= 1:
            look(other)
    best = min(times, key=lambda c: (times[c], c))
    return best, times[best]


def tuned_chunk_bytes(
    throughput: Callable[[int], float], *, start_bytes: int = 1 << 20, step_bytes: int = 1 << 18, smallest_bytes: int = 4096,
    largest_bytes: int = 1 << 30, trials: int = 64,
) -> tuple[int, list[tuple[int, float]]]:  # fmt: skip
    """Chunk size by trial: double while the measured throughput rises; after a drop go down by `step_bytes` until it no longer rises.

    Args: `throughput(chunk_bytes)` runs the collective once and returns bytes per second.
    Returns: (best chunk size, all trials in order). Raises: UsageError for sizes that make no sense.
    """
    if not 0 < smallest_bytes <= start_bytes <= largest_bytes or step_bytes < 1 or trials < 1:
        raise UsageError(
            f"chunk sizes must satisfy 0 < {smallest_bytes} <= {start_bytes} <= {largest_bytes}, step {step_bytes} >= 1, trials {trials} >= 1",
            where="tuned_chunk_bytes",
        )
    size, tried = start_bytes, [(start_bytes, throughput(start_bytes))]
    while len(tried) < trials and size < largest_bytes:
        size = min(2 * size, largest_bytes)
        tried.append((size, throughput(size)))
        if tried[-1][1] <= tried[-2][1]:
            break
    last = tried[-1][1]
    fell = len(tried) > 1 and last <= tried[-2][1]
    while fell and len(tried) < trials and size - step_bytes >= smallest_bytes:
        size -= step_bytes
        now = throughput(size)
        tried.append((size, now))
        if now < last:
            break
        last = now
    return max(tried, key=lambda pair: (pair[1], -pair[0]))[0], tried
