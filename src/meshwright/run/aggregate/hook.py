"""DistributedDataParallel over a switch: a communication hook that averages each bucket of gradients through a `Reducer`.

DDP reads the hook's annotations, which must therefore not be texts.
"""

import torch
import torch.distributed as dist

from ...errors import UsageError
from .fallback import Reducer

__all__ = ["average_bucket"]


def average_bucket(reducer: Reducer, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`model.register_comm_hook(reducer, average_bucket)`: float32 gradients in the host's memory. Returns the future that DDP asks for.

    Raises: UsageError for gradients elsewhere or of another type; what `Reducer.all_reduce` raises.
    """
    gradients = bucket.buffer()
    if gradients.device.type != "cpu" or gradients.dtype != torch.float32:
        raise UsageError(f"gradients of {gradients.dtype} on {gradients.device}", where="average_bucket", hint="float32 on the CPU")
    reducer.all_reduce(gradients.numpy())
    gradients.div_(reducer.workers)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done
