"""How much memory files may fill: of the limit of this process's control groups, or of the machine's memory."""

from __future__ import annotations

import warnings

from ..errors import UsageError
from ..io.own_limits import memory_limit_bytes, memory_room_bytes
from ..io.quantity import show_size

__all__ = ["memory_budget_bytes", "room_budget_bytes"]

# Of the limit, left to the processes themselves, to sockets and to files on their way through. A default that depends on the limit alone is the
# same in every process of a node, so all of them choose the same members.
RESERVED_SHARE = 0.25
# Of the limit: a budget by what is held now is a multiple, so that processes which start one after the other mostly find the same one, and at least
# one part stays free, as the kernel begins to take pages before a group is full.
ROOM_PARTS = 128
PASSING_ITEMS = 3  # items on their way through: the pages of one that is no member, its bytes, and those that the caller still has


def memory_budget_bytes(asked_bytes: int | None = None, *, reserve_bytes: int | None = None, limit_bytes: int | None = None) -> int:
    """Bytes of files that may stay in memory: what was asked for, or the limit less `reserve_bytes` (default: a quarter of it).

    Raises: UsageError for a budget that the limit does not hold, or a reserve that leaves nothing.
    """
    limit = memory_limit_bytes() if limit_bytes is None else limit_bytes
    if asked_bytes is not None:
        if not 0 <= asked_bytes < limit:
            raise UsageError(
                f"{asked_bytes} bytes of cache are asked for, this process's memory limit is {limit}", where="budget_bytes",
                hint=f"at most {round(limit * (1 - RESERVED_SHARE))} leave a quarter to the processes; a container's limit counts, not the machine's",
                data={"asked_bytes": asked_bytes, "limit_bytes": limit},
            )  # fmt: skip
        return asked_bytes
    left = limit - (round(limit * RESERVED_SHARE) if reserve_bytes is None else reserve_bytes)
    if left < 0:
        raise UsageError(f"a reserve of {reserve_bytes} bytes is more than the memory limit of {limit}", where="reserve_bytes", hint="reserve less")
    return left


def room_budget_bytes(asked_bytes: int | None, item_bytes: int) -> int:
    """As `memory_budget_bytes`, for files of which the largest item is `item_bytes`; below a limit of this process's groups the default is what they
    do not hold now, less items on their way. A budget for which there is no room is warned of: members would be read again and again.

    Raises: as `memory_budget_bytes`."""
    budget, limit, room = memory_budget_bytes(asked_bytes), memory_limit_bytes(), memory_room_bytes()
    if room is None:
        return budget
    part = max(1, limit // ROOM_PARTS)
    passing_bytes = PASSING_ITEMS * item_bytes
    fits = max(0, (room - passing_bytes) // part - 1) * part
    if asked_bytes is None:
        return fits
    if asked_bytes > room - passing_bytes:
        warnings.warn(
            f"a cache of {show_size(asked_bytes)} does not stay in memory: of the limit of {show_size(limit)} processes hold"
            f" {show_size(limit - room)} and items on their way {show_size(passing_bytes)}; at most {show_size(fits)} stay: ask for less",
            stacklevel=3,
        )  # fmt: skip
    return budget
