"""A job's precision while its model is traced and run: torch.autocast around what would have it around the forward pass and the loss.

A graph holds ATen calls as they are before dispatch, where autocast has not cast anything yet; traced under autocast, its values have the types that
autocast gives. So the same calls, run under autocast again, are what eager autocast runs, to the last bit, and plans count what is really stored.
Backward is run outside, as torch recommends: it follows the types of what forward kept.
Which operators are cast is the device's list. A plan for GPUs counts by theirs (`Recipe.casts`, `gpu_casts`), also where it is traced, compared or
rehearsed on processors. One that was made by the processors' list runs on a GPU where no size counts on it (`run.train.casts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch

from ..errors import UnknownName
from ..fabric.fabric import Fabric
from ..graph.graph import OpGraph
from ..job import Training
from .gpu_casts import gpu_casts

__all__ = ["PRECISIONS", "capture_and_trace_job", "capture_job", "cast_as", "casting", "trace_job"]

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}


def cast_as(job: Training, fabric: Fabric) -> Training:
    """The job with the list of operators that its devices cast, where it asks for autocast and names none."""
    asked = job.asked
    if asked.precision == "fp32" or asked.casts or any(d.kind != "gpu" for d in fabric.devices):
        return job
    return msgspec.structs.replace(job, recipe=msgspec.structs.replace(asked, casts="cuda"))


def casting(autocast: str, device: str = "cpu") -> AbstractContextManager[Any]:
    """Autocast on a device of this type, or nothing. `autocast`: as of `Recipe.autocast`, or a precision alone. Raises: UnknownName."""
    precision, _, casts = autocast.partition(":")
    if precision not in PRECISIONS or casts not in ("", "cuda"):
        what, known = ("precision", ", ".join(PRECISIONS)) if precision not in PRECISIONS else ("list of casts", "cuda, or leave it out")
        raise UnknownName(f"there is no {what} {casts if precision in PRECISIONS else precision!r}", where="--precision", hint=known)
    dtype = PRECISIONS[precision]
    if dtype is None:
        return nullcontext()
    return _as_on_gpus(dtype) if casts and device == "cpu" else torch.autocast(device, dtype=dtype)


@contextmanager
def _as_on_gpus(dtype: torch.dtype) -> Iterator[None]:
    with gpu_casts(), torch.autocast("cpu", dtype=dtype):
        yield


def capture_job(job: Training, **options: Any) -> OpGraph:
    """The operator graph of a job's model with its loss, in the job's precision; `options`: as of `capture`. Raises: as `capture`."""
    from .graph import capture

    with casting(job.asked.autocast):
        return capture(job.model, loss=job.loss, seed=job.seed, sizes=job.sizes or (), dtype=job.dtype, **options)


def capture_and_trace_job(job: Training, batch_size: int) -> tuple[OpGraph, Any]:
    """`capture_and_trace` of a job's model with its loss, in the job's precision."""
    from .graph import capture_and_trace

    with casting(job.asked.autocast):
        return capture_and_trace(job.model, loss=job.loss, batch_size=batch_size, seed=job.seed, sizes=job.sizes or (), dtype=job.dtype)


def trace_job(job: Training, **options: Any) -> Any:
    """`trace_forward` of a job's model with its loss, in the job's precision."""
    from .forward import trace_forward

    with casting(job.asked.autocast):
        return trace_forward(job.model, loss=job.loss, seed=job.seed, sizes=job.sizes or (), dtype=job.dtype, **options)
