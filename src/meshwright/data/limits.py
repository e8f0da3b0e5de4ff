"""How much memory files may fill: of the limit of this process's control groups, or of the machine's memory."""

from __future__ import annotations

from ..errors import UsageError
from ..io.own_limits import memory_limit_bytes

__all__ = ["memory_budget_bytes"]

# Of the limit, left to the processes themselves, to sockets and to files on their way through. A default that depends on the limit alone is the
# same in every process of a node, so all of them choose the same members.
RESERVED_SHARE = 0.25


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
