"""A job's precision while its model is traced and run: torch.autocast around what would have it around the forward pass and the loss.

A graph holds ATen calls as they are before dispatch, where autocast has not cast anything yet; traced under autocast, its values have the types that
autocast gives. So the same calls, run under autocast again, are what eager autocast runs, to the last bit, and plans count what is really stored.
Backward is run outside, as torch recommends: it follows the types of what forward kept.
Limit: which operators are cast is the processor's list; a GPU's is another. There, eager autocast of that device runs, and the plan's sizes of what
is kept are those of processors; plans whose ranks exchange values of the model count on them, and run on processors only (`run.train.casts`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..errors import UnknownName
from ..graph.graph import OpGraph
from ..job import Training

__all__ = ["PRECISIONS", "capture_and_trace_job", "capture_job", "casting", "trace_job"]

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}


def casting(precision: str, device: str = "cpu") -> AbstractContextManager[Any]:
    """Autocast on a device of this type, or nothing. Raises: UnknownName."""
    if precision not in PRECISIONS:
        raise UnknownName(f"there is no precision {precision!r}", where="--precision", hint=", ".join(PRECISIONS))
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def capture_job(job: Training, **options: Any) -> OpGraph:
    """The operator graph of a job's model with its loss, in the job's precision; `options`: as of `capture`. Raises: as `capture`."""
    from .graph import capture

    with casting(job.asked.precision):
        return capture(job.model, loss=job.loss, seed=job.seed, sizes=job.sizes or (), **options)


def capture_and_trace_job(job: Training, batch_size: int) -> tuple[OpGraph, Any]:
    """`capture_and_trace` of a job's model with its loss, in the job's precision."""
    from .graph import capture_and_trace

    with casting(job.asked.precision):
        return capture_and_trace(job.model, loss=job.loss, batch_size=batch_size, seed=job.seed, sizes=job.sizes or ())


def trace_job(job: Training, **options: Any) -> Any:
    """`trace_forward` of a job's model with its loss, in the job's precision."""
    from .forward import trace_forward

    with casting(job.asked.precision):
        return trace_forward(job.model, loss=job.loss, seed=job.seed, sizes=job.sizes or (), **options)
