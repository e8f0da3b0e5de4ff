"""What forward keeps of the first batch (`if self.count is None: self.count = x.shape[1]`) and computes with for batches of other shapes.

A plan of several shapes traces each by itself. The owner's loop goes on with what its first batch left. So forward is run on fakes of one shape after
another: each call that it then makes must be one that it makes for that shape alone, where what is kept is made as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.errors import Unsupported

from .as_before import as_before
from .diagnose import quiet
from .forward import build_objective
from .live import standing
from .live_job import LiveJob
from .losses import Objective
from .side_effects import is_plain, line_that_changes
from .torch_private import DispatchRecorder, fake_like, flat_tree

__all__ = ["refuse_kept_by_shape"]

_ROWS = 2
Inputs = Sequence[torch.Tensor]


def refuse_kept_by_shape(jobs: Sequence[LiveJob]) -> None:
    """`jobs`: of one model, the largest shape first. Raises: Unsupported where forward goes by what a batch of another shape left, naming what holds
    it and the line; as `build_objective`."""
    job = jobs[0].job
    with standing(jobs[0].stands_for):
        objective, source, mode = build_objective(
            job.model, loss=job.loss, batch_size=_ROWS, seed=job.seed, device="fake", sizes=job.sizes or (), dtype=job.dtype
        )  # fmt: skip
    assert mode is not None
    kinds = [x.dtype for x in source.inputs]
    given = [
        [fake_like(mode, torch.empty(_ROWS, *size[1:], dtype=d, device="meta")) for (size, _), d in zip(j.batch.inputs, kinds, strict=True)]
        for j in jobs
    ]  # fmt: skip
    for other in range(1, len(jobs)):
        for first, then in ((0, other), (other, 0)):
            found = _goes_by(objective, mode, given[first], given[then])
            if found is not None:
                raise Unsupported(
                    f"forward keeps {found or 'something'} of its first batch, and computes with it for batches of another shape "
                    f"({jobs[then].batch.shape} after {jobs[first].batch.shape}); the steps of a plan would not",
                    where=line_that_changes(objective.model, [found.split()[-1].rpartition(".")[2]] if found else [], objective.code),
                    hint="make it anew for every batch, or of something that all shapes have; or pad to one shape, and plan that",
                    data={"kept": found},
                )  # fmt: skip


def _goes_by(objective: Objective, mode: Any, first: Inputs, then: Inputs) -> str | None:
    """What is kept of `first` and matters to `then`, in words, "" where that is not known; None where nothing does."""
    with quiet(), mode:
        try:
            alone, kept = _calls(objective, [then])
            _calls(objective, [first])
        except Exception:  # capture says it better
            return None
        try:
            after, left = _calls(objective, [first, then])
        except Exception:
            after, left = None, _calls(objective, [first])[1]
    if after is not None and after <= alone:
        return None
    numbers = [said for said, value in left.items() if kept.get(said, value) != value]
    return next(iter([*numbers, *left]), "")


def _calls(objective: Objective, batches: Sequence[Inputs]) -> tuple[set[str], dict[str, Any]]:
    """The calls of the last of these runs, without their tensors; what holds another value after it than before the first: numbers, else a shape."""
    found: set[str] = set()

    def seen(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        plain = ["" if isinstance(x, torch.Tensor) else x for x in flat_tree((args, kwargs))[0]]
        found.add(f"{operator} {plain} {getattr(result, 'shape', '')}")

    with as_before(objective.model, objective.code) as places:
        for inputs in batches:
            found.clear()
            with DispatchRecorder(seen):
                objective(*inputs)
        return set(found), {said: x if is_plain(x) else str(getattr(x, "shape", "")) for said, x in places.given().items()}
