"""Plans for a job's collectives, made before the job: what its first calls would otherwise wait for lies in the user's cache.

A job asks the cache by fabric, devices, operation, size class and settings (`plan_cache`). Whoever warms it has to be told the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...errors import UsageError
from ...fabric.fabric import Fabric
from .plans import Chosen, GroupPlans, size_class
from .settings import Settings

__all__ = ["Warmed", "ddp_buckets", "warm"]

DDP_BUCKET_BYTES = 25 << 20  # `bucket_cap_mb` of torch's DistributedDataParallel unless it is given


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """The answer for one operation and size class: a program, or in words why the job runs the built-in backend. `kept`: it lay there already."""

    op: str
    size_bytes: int
    answer: Chosen | str
    kept: bool


def warm(
    fabric: Fabric, devices: Sequence[str], wanted: Iterable[tuple[str, int]], settings: Settings, *, ranks_per_core: float = 1.0,
    say: Callable[[Warmed], None] = lambda _: None,
) -> list[Warmed]:  # fmt: skip
    """Plan every (operation, bytes) once per size class, as the group's first rank would, and keep the answers; rooted operations for root 0.

    Args: devices: of the ranks, in their order. settings: the job's. ranks_per_core: ranks of a machine over its cores; below 1 is as 1.
    Raises: UsageError (no cache, fewer than two ranks), what planners raise.
    """
    plans = GroupPlans(settings, dist.HashStore(), 0, len(devices), devices=devices, fabric=fabric, timeout_s=0.0)
    plans.ranks_per_core = ranks_per_core
    if plans.cache.folder is None:
        raise UsageError("nothing would be kept: the cache is off", where="MESHWRIGHT_CACHE", hint="name a folder, or unset it")
    if len(devices) < 2:
        raise UsageError(f"a collective needs at least 2 ranks, got {len(devices)}", where="--devices")
    done = []
    for op, size_bytes in sorted({(op, size_class(size)) for op, size in wanted}):
        kept = plans.is_kept(op, 0, size_bytes)
        row = Warmed(op=op, size_bytes=size_bytes, answer=plans.choose(op, 0, size_bytes), kept=kept)
        say(row)
        done.append(row)
    return done


def ddp_buckets(module: torch.nn.Module) -> list[int]:
    """Bytes of the all-reduces that DistributedDataParallel makes of a module's gradients: all at once in the first step, then in buckets, the first
    small, the others of up to 25 MiB, last layers first."""
    tensors = [p for p in module.parameters() if p.requires_grad][::-1]
    if not tensors:
        return []
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    sizes = [sum(tensors[i].nbytes for i in bucket) for bucket in buckets]
    return [sum(sizes), *sizes]
