"""The owner's batches as micro-batches: rows of the tensors that a step is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...capture.live import BatchForm
from ...errors import UsageError
from ...plan.plan import TrainingLayout
from ..steps.forward_graph import TensorInfo

__all__ = ["OwnBatches"]


@dataclass
class OwnBatches:
    """A rank's batch of the current step. `inputs`: what the model was traced with, one micro-batch of it; `read`: numbers of the inputs that this
    rank reads (the others are looked at, too, and not moved to its device)."""

    layout: TrainingLayout
    rank: int
    form: BatchForm
    inputs: Sequence[TensorInfo]
    device: torch.device
    read: frozenset[int]
    _tensors: tuple[torch.Tensor, ...] = field(default=(), init=False)
    _whole: bool = field(default=True, init=False)  # is what was given the global batch?

    @property
    def part(self) -> int:
        """Samples of this rank's data replica."""
        return self.layout.microbatches_of(self.layout.coordinates(self.rank)[1]) * self.layout.microbatch_size

    def take(self, batch: Any) -> None:
        """The batch of the next step: the global one, or the part of this rank's data replica; which, its rows say.

        Raises: UsageError for another form, other rows, shapes or dtypes; naming what was planned.
        """
        self.take_tensors(self.form.tensors(batch))

    def take_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """The same of a batch's tensors in the model's order."""
        if len(tensors) != len(self.inputs):
            raise UsageError(f"the batch has {len(tensors)} tensors, the plan was made for {len(self.inputs)}", where="batch", hint="target last")
        rows = [int(x.shape[0]) if x.dim() else 0 for x in tensors]
        whole, part = self.layout.global_batch, self.part
        if rows[0] not in (whole, part):
            both = f"{whole} samples" if whole == part else f"{whole} samples (the global batch) or {part} (this rank's part)"
            raise UsageError(
                f"the batch has {rows[0]} samples, the plan was made for {both}", where="batch",
                hint="leave incomplete batches out (DataLoader: drop_last=True), or plan for another global batch",
                data={"rows": rows[0], "global_batch": whole, "part": part},
            )  # fmt: skip
        for i, (x, info) in enumerate(zip(tensors, self.inputs, strict=True)):
            if rows[i] != rows[0] or tuple(x.shape[1:]) != info.shape[1:] or str(x.dtype) != f"torch.{info.dtype}":
                name = self.form.names[i] if self.form.names else f"tensor {i}"
                expected = (rows[0], *info.shape[1:])
                raise UsageError(
                    f"{name} of the batch is {tuple(x.shape)} {x.dtype}, the plan was made for {expected} torch.{info.dtype}", where="batch",
                    hint="batches of one plan have one shape: pad them, or plan again", data={"given": list(x.shape), "planned": list(expected)},
                )  # fmt: skip
        self._tensors = tuple(x.to(self.device, non_blocking=True) if i in self.read else x for i, x in enumerate(tensors))
        self._whole = rows[0] == whole

    def microbatch(self, step: int, replica: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Views of the rows of a micro-batch."""
        first = self.layout.first_sample(replica, microbatch) if self._whole else microbatch * self.layout.microbatch_size
        return tuple(x[first : first + self.layout.microbatch_size] for x in self._tensors)

    def forget(self) -> None:
        self._tensors = ()
