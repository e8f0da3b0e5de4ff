"""The function that DDP calls per bucket. DDP reads its annotations as objects, so this file does not postpone them."""

import torch
import torch.distributed as dist

from .ddp import PlannedTraffic

__all__ = ["traffic_hook"]


def traffic_hook(state: PlannedTraffic, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `register_comm_hook`, with a `PlannedTraffic` as the state."""
    return state.bucket(bucket)
