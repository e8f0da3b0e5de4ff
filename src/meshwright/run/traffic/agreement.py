"""All ranks hold the same traffic plan, or none begins: ranks whose k or groups differ would add up what does not belong together."""

from __future__ import annotations

import hashlib

import msgspec
import torch
import torch.distributed as dist

from ...errors import PlanMismatch
from ...traffic import TrafficPlan

__all__ = ["agree", "digest"]


def digest(plan: TrafficPlan) -> bytes:
    """Of what ranks must have in common: tensors, their order, groups and codecs; not of times."""
    tensors = [(t.name, t.shape) for t in plan.profile.tensors]
    groups = [(g.first, g.last, g.codec) for g in plan.groups]
    return hashlib.sha256(msgspec.json.encode([tensors, groups, plan.profile.ranks, plan.leave])).digest()


def agree(mine: bytes, group: dist.ProcessGroup, rank: int) -> None:
    """Raises: PlanMismatch on every rank, naming the ranks that differ from rank 0."""
    world = dist.get_world_size(group)
    every = torch.empty(world * len(mine), dtype=torch.uint8)
    dist.all_gather_single(every, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=group)
    rows = every.view(world, -1)
    other = [r for r in range(world) if not torch.equal(rows[r], rows[0])]
    if other:
        raise PlanMismatch(
            f"ranks {', '.join(map(str, other))} hold another traffic plan than rank 0", where=f"rank {rank}", hint="give all ranks one plan file",
            data={"ranks": other},
        )  # fmt: skip
