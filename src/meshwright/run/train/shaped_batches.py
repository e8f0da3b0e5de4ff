"""Batches of a run whose plan has several shapes: of every step all ranks take the smallest shape that holds the whole global batch.

A rank reads the samples of its replica, filled up to the longest of them (`padding.Together`), and asks the others by one small exchange which shapes
hold theirs. Which samples a step has does not depend on their lengths: a resumed run goes on where the first one stopped, in any layout. Whoever
wants batches of alike lengths orders them in the data (a sampler).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...errors import UsageError
from ...plan.plan import TrainingLayout
from ..steps.forward_graph import TensorInfo
from .data import Dataset, rows_of, source_line
from .loader import Loaded, Streamed
from .padding import Together, filled, fits

__all__ = ["OfShape", "ShapedBatches"]


@dataclass
class ShapedBatches:
    """Of one rank. `layout`: of the largest shape; all agree in samples of a replica. `shapes`: the inputs of each shape's graph, the largest first.
    `reads`: whether this rank reads any sample; `group`: of all ranks, None for one."""

    dataset: Dataset
    layout: TrainingLayout
    rank: int
    shapes: Sequence[Sequence[TensorInfo]]
    device: torch.device
    reads: bool
    group: Any
    _rows: tuple[torch.Tensor, ...] = field(default=(), init=False)

    @property
    def values(self) -> tuple[float, ...] | None:
        """What is padded with, for each input."""
        padding = getattr(self.dataset, "padding", None) or getattr(getattr(self.dataset, "collate", None), "together", None)
        return padding.values if isinstance(padding, Together) else None

    def fetch(self, step: int) -> list[bool]:
        """Which shapes hold this rank's samples of a step. Raises: UsageError for samples of other dtypes, or unlike ones in one batch."""
        if not self.reads:
            return [True] * len(self.shapes)
        layout, replica = self.layout, self.layout.coordinates(self.rank)[1]
        own = layout.first_sample(replica, 0)
        end = layout.first_sample(replica, layout.microbatches_of(replica) - 1) + layout.microbatch_size
        first = step * layout.global_batch + own
        self._rows = rows_of(self.dataset, first, end - own)
        kinds, wanted = [str(x.dtype).removeprefix("torch.") for x in self._rows], [x.dtype for x in self.shapes[0]]
        if kinds != wanted:
            raise UsageError(
                f"the batch from sample {first} on has tensors of {', '.join(kinds)}, the model takes {', '.join(wanted)}",
                where=source_line(self.dataset), hint="return a tuple of tensors in the order of the model's inputs, target last",
            )  # fmt: skip
        return [fits(self._rows, [x.shape[1:] for x in inputs], self.values is not None) for inputs in self.shapes]

    def choose(self, step: int) -> int:
        """The number of the step's shape, whose micro-batches are then there. All ranks call it. Raises: as `fetch`; UsageError where none fits."""
        common = torch.tensor([int(x) for x in self.fetch(step)])
        if self.group is not None:
            dist.all_reduce(common, dist.ReduceOp.MIN, group=self.group)
        if not common.any():
            given = ", ".join(str(tuple(x.shape)) for x in self._rows) or "samples of other ranks"
            known = "; ".join(", ".join(str(("N", *x.shape[1:])) for x in inputs).replace("'", "") for inputs in self.shapes)
            hint = "plan with a larger one (--shapes)" if self.values is not None else "say what is filled up with: --data NAME?pad=VALUE,..."
            raise UsageError(
                f"no shape of the plan holds the batch of step {step}: this rank has {given}, the plan {known}", where=source_line(self.dataset),
                hint=hint, data={"step": step},
            )  # fmt: skip
        chosen = max(i for i, fit in enumerate(common.tolist()) if fit)
        if self.values is not None and self.reads:
            pairs = zip(self._rows, self.shapes[chosen], self.values, strict=True)
            self._rows = tuple(filled(x, (int(x.shape[0]), *info.shape[1:]), value) for x, info, value in pairs)
        return chosen

    def of(self, layout: TrainingLayout) -> OfShape:
        """For the work of one shape's step."""
        return OfShape(self, layout)

    def microbatch(self, layout: TrainingLayout, replica: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        first = layout.first_sample(replica, microbatch) - layout.first_sample(replica, 0)
        return tuple(x[first : first + layout.microbatch_size].to(self.device) for x in self._rows)

    def close(self) -> None:
        """End what fetches ahead."""
        if isinstance(self.dataset, (Loaded, Streamed)):
            self.dataset.close()


@dataclass(frozen=True)
class OfShape:
    """Micro-batches of the step that was chosen last, which is of this shape."""

    batches: ShapedBatches
    layout: TrainingLayout

    def microbatch(self, step: int, replica: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        return self.batches.microbatch(self.layout, replica, microbatch)
