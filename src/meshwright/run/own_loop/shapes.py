"""Which of a plan's steps a batch takes, and what it is padded with.

A plan has a step for each of a few shapes (`plan.shapes`). Each has its own graph, segments and walk of the program; parameters, gradients, buffers
and the optimizer are one. Of the shapes that take every rank's batch all ranks choose the smallest, by one small exchange before the step. A batch
that is smaller is filled up at the end of its dimensions.

What padding means is the owner's: the loss must not count it, and nothing before it may look at it. That is tried once, on real samples: the first
batch that is padded is also padded further, and its loss in evaluation mode must stay. So a model that looks at padding is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...capture.live import BatchForm
from ...errors import MeshwrightError, Unsupported, UsageError
from ...plan.plan import Plan
from ..executor.executor import Executor
from ..executor.held_groups import holds_group
from ..steps.forward_graph import ForwardGraph
from ..train.padding import filled, fits, refuse_counted
from ..train.segments import RankModule
from ..train.work import TrainingWork
from .batches import OwnBatches
from .evaluation import OwnEvaluation

__all__ = ["Pad", "Shapes", "StepShape", "mean_of_ranks", "pad_values"]

Pad = Sequence[float] | Mapping[str, float] | None
# Share by which the loss of the same samples may differ where they are padded further: what the gate allows, and rounding to eight bits.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
NARROW_TOLERANCE = 2e-2


@dataclass(kw_only=True)
class StepShape:
    """What runs batches of one shape on one rank. `plan`: of that shape alone."""

    plan: Plan
    graph: ForwardGraph
    module: RankModule
    executor: Executor
    work: TrainingWork
    batches: OwnBatches
    evaluation: OwnEvaluation

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Of one sample's tensors."""
        return [tuple(x.shape[1:]) for x in self.graph.inputs]

    @property
    def text(self) -> str:
        return ", ".join(f"({', '.join(map(str, ('N', *size)))})" for size in self.sizes)

    def evaluated(self) -> float | None:
        """This rank's part of the loss of the batch that was taken, in evaluation mode. All ranks call it."""
        self.evaluation.ready(self.module, self.batches, self.executor.transport)
        return self.evaluation.run()


def mean_of_ranks(own: float | None, group: Any) -> torch.Tensor:
    """Of the ranks that have something."""
    pair = torch.tensor([own or 0.0, 0.0 if own is None else 1.0], dtype=torch.float64)
    if group is not None:
        group.allreduce([pair]).wait()  # without the checks of `dist.all_reduce`, which take as long
    return pair[0] / pair[1]


def pad_values(pad: Pad, form: BatchForm, shapes: Sequence[ForwardGraph]) -> tuple[float, ...] | None:
    """A value for each tensor of a batch, in the model's order; None where nothing is padded.

    Raises: UsageError for values that are not one for each, or do not fit a tensor; Unsupported where statistics of the batch would count padding.
    """
    if pad is None:
        return None
    names, inputs = form.names, shapes[0].inputs
    if len(shapes) < 2:
        raise UsageError("the plan has one shape", where="pad", hint="plan with shapes= for batches of several, or pad them before step(batch)")
    if isinstance(pad, Mapping) != bool(names) or (set(pad) != set(names) if isinstance(pad, Mapping) else len(pad) != len(inputs)):
        wanted = f"a dictionary with values for {', '.join(names)}" if names else f"{len(inputs)} numbers, target last"
        raise UsageError(f"{pad!r} is not a value for each tensor of a batch", where="pad", hint=f"give {wanted}")
    values = tuple(float(pad[n]) for n in names) if isinstance(pad, Mapping) else tuple(map(float, pad))
    for value, x in zip(values, inputs, strict=True):
        if not x.dtype.startswith(("float", "bfloat")) and value != int(value):
            raise UsageError(f"{value:g} does not fit a tensor of {x.dtype}", where="pad", hint="a whole number")
    refuse_counted(shapes, "pad")
    return values


class Shapes:
    """Of one rank; `of`: the largest first. `group`: of all ranks, None for one."""

    def __init__(self, of: Sequence[StepShape], pad: Pad, group: Any) -> None:
        self.of, self.group = of, group
        holds_group(self)
        self.form = of[0].batches.form
        self.pad = pad_values(pad, self.form, [x.graph for x in of])
        self._untried = self.pad is not None
        self._given: tuple[torch.Tensor, ...] = ()
        self._padded = False

    def take(self, batch: Any) -> StepShape:
        """The step for a batch, which it has then. All ranks call it. Raises: UsageError, on all ranks, where no shape takes all ranks' batches; as
        `OwnBatches.take`."""
        if len(self.of) == 1:
            self.of[0].batches.take(batch)
            return self.of[0]
        wrong: UsageError | None = None
        try:
            self._given = self.form.tensors(batch)
        except UsageError as error:
            wrong, self._given = error, ()
        fits = [int(wrong is None and self._fits(x)) for x in self.of]
        smallest = max((i for i, fit in enumerate(fits) if fit), default=0)
        common = torch.tensor(fits)
        if self.group is not None:
            dist.all_reduce(common, dist.ReduceOp.MIN, group=self.group)
        if wrong is not None:
            raise wrong
        if not common.any():
            raise self._refusal(any(fits))
        chosen = self.of[max(i for i, fit in enumerate(common.tolist()) if fit)]
        self._padded = chosen is not self.of[smallest] or [tuple(x.shape[1:]) for x in self._given] != chosen.sizes
        chosen.batches.take_tensors(self._filled(self._given, chosen))
        return chosen

    def try_padding(self, chosen: StepShape) -> None:
        """Once, at the first batch that a rank pads: whether its loss stays where it is padded further. All ranks call it.

        Raises: Unsupported, on all ranks, where it does not.
        """
        if not self._untried:
            return
        padded = torch.tensor([int(self._padded)])
        if self.group is not None:
            dist.all_reduce(padded, dist.ReduceOp.MAX, group=self.group)
        if not int(padded):
            return
        largest = self.of[0]
        less, given = (chosen, self._given) if chosen is not largest else (self.of[1], self._cut(self.of[1]))
        losses = []
        for shape in (less, largest):
            shape.batches.take_tensors(self._filled(given, shape))
            losses.append(float(mean_of_ranks(shape.evaluated(), self.group)))
            shape.batches.forget()
        chosen.batches.take_tensors(self._filled(self._given, chosen))
        if not all(map(math.isfinite, losses)):
            return
        self._untried = False
        if abs(losses[0] - losses[1]) > self._tolerance(largest) * max(map(abs, losses)):
            raise Unsupported(
                f"padding changes the loss: the same samples have {losses[0]:.6g} at {less.text} and {losses[1]:.6g} at {largest.text}", where="pad",
                hint="targets of padding must be a value that the loss ignores, and the model must not look at padding (a causal mask, or an input)",
                data={"losses": losses},
            )  # fmt: skip

    def _fits(self, shape: StepShape) -> bool:
        """Whether the step takes this rank's batch: as it is, or padded where there are values to pad with. Rows and dtypes are looked at later."""
        return fits(self._given, shape.sizes, self.pad is not None)

    def _filled(self, given: Sequence[torch.Tensor], shape: StepShape) -> list[torch.Tensor]:
        if self.pad is None:
            return list(given)
        return [filled(x, (int(x.shape[0]), *size), value) for x, size, value in zip(given, shape.sizes, self.pad, strict=True)]

    def _cut(self, shape: StepShape) -> tuple[torch.Tensor, ...]:
        """The last positions, as many as a shape takes: there the longest sample has targets."""
        found = list(self._given)
        for i, size in enumerate(shape.sizes):
            for dim, most in enumerate(size, start=1):
                length = int(found[i].shape[dim])
                found[i] = found[i].narrow(dim, max(0, length - most), min(length, most))
        return tuple(found)

    def _tolerance(self, shape: StepShape) -> float:
        kinds = {p.tensor.dtype for p in shape.module.parameters.values()}
        wide = shape.plan.job["training"].get("recipe", {}).get("precision", "fp32") == "fp32"
        return max((TOLERANCES.get(k, NARROW_TOLERANCE) for k in kinds), default=NARROW_TOLERANCE) if wide else NARROW_TOLERANCE

    def _refusal(self, fits: bool) -> MeshwrightError:
        known = "; ".join(x.text for x in self.of)
        if fits:
            return UsageError("no step takes the batches of all ranks", where="batch", hint=f"the plan has {known}; every rank's batch must fit one")
        given = [list(x.shape) for x in self._given]
        what = ", ".join(f"({', '.join(map(str, x))})" for x in given)
        hint = "plan with a larger one, or cut the batch" if self.pad is not None else "pad to one of them, or say with what: parallelize(pad=...)"
        return UsageError(
            f"no step of the plan takes a batch of {what}: it has {known}", where="batch", hint=hint,
            data={"given": given, "planned": [[list(size) for size in x.sizes] for x in self.of]},
        )  # fmt: skip
