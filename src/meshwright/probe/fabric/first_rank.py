"""Bytes that rank 0 of a group has, on all of its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["first_rank_bytes"]


def first_rank_bytes(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """Rank 0's `data`; what the others give is ignored."""
    size = int(_broadcast(torch.tensor([len(data)], dtype=torch.int64), group))
    if dist.get_rank(group) == 0:
        found = torch.frombuffer(bytearray(data), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    else:
        found = torch.empty(size, dtype=torch.uint8)
    return bytes(_broadcast(found, group).numpy())


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if tensor.numel():
        dist.broadcast(tensor, dist.get_global_rank(group, 0) if group is not None else 0, group)
    return tensor
