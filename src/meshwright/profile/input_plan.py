"""How training jobs are fed: where files are kept, how many bytes of them, who prepares batches, with how many workers; predicted and bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from ..bound import Bound
from ..errors import UsageError
from .input_rates import InputRates

__all__ = ["MIN_HELD_SHARE", "InputPlan", "Kept", "Medium", "Place"]

Kept = Literal["", "here", "nodes"]
Medium = Literal["", "page-cache", "shared-memory"]
NO_LIMIT_BYTES = 1 << 60
DEFAULT_NETWORK_Bps = 1.25e9  # 10 Gbit/s
MIN_HELD_SHARE = 0.98  # of what was read, that a page cache must hold for files to be kept in it


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the jobs run. memory_bytes: what files and waiting batches may fill on a node; shared_bytes: free in its shared memory; jobs: equal ones
    on each node; network_Bps: of a node, one way. Raises: UsageError naming the field."""

    memory_bytes: int
    jobs: int = 1
    nodes: int = 1
    network_Bps: float = DEFAULT_NETWORK_Bps
    shared_bytes: int = NO_LIMIT_BYTES

    def __post_init__(self) -> None:
        for what, least in (("memory_bytes", 0), ("shared_bytes", 0), ("jobs", 1), ("nodes", 1)):
            if getattr(self, what) < least:
                raise UsageError(f"{getattr(self, what)}", where=what, hint=f"at least {least}")
        if not (math.isfinite(self.network_Bps) and self.network_Bps > 0):
            raise UsageError(f"{self.network_Bps} bytes/s", where="network_Bps", hint="a finite rate above 0")


class InputPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """kept: "" (a page cache that exchanges), "here", or "nodes" (each node a part); kept_bytes: of files, on each node; medium: where they lie.
    shared: every batch is prepared once for all jobs of a node, and `staged` of them wait at most; workers: processes of each job.

    epoch_s: predicted, limited by `limit`; storage_bytes, network_bytes: read and received by each node in an epoch, from the second on.
    bound: no way to feed these jobs takes less time for an epoch."""

    strategy: str
    rates: InputRates
    place: Place
    kept: Kept
    medium: Medium
    kept_bytes: int
    shared: bool
    workers: int
    staged: int
    epoch_s: float
    limit: str
    storage_bytes: int
    network_bytes: int
    seed: int = 0
    bound: Bound | None = None

    @property
    def words(self) -> str:
        """In a few words."""
        where = {"": "", "page-cache": " in the page cache", "shared-memory": " in shared memory"}[self.medium]
        said = [{"": "files as they are", "here": f"files kept{where}", "nodes": f"files kept by all nodes{where}"}[self.kept]]
        said += ["batches shared"] * self.shared
        return ", ".join([*said, f"{self.workers} workers"])
