"""One training step of the owner's model, as the plan says: what `parallelize` gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...errors import MeshwrightError, RankFailed, RunError, in_python
from ...plan.plan import Plan
from ..executor.executor import Executor, StepFailed
from ..executor.held_groups import holds_group
from ..train.segments import RankModule
from ..train.update import Update
from ..train.work import TrainingWork
from .as_traced import AsTraced
from .batches import OwnBatches
from .owned import OwnOptimizer
from .recipe import require_own_rates, require_plain_surroundings
from .shapes import Shapes, StepShape, mean_of_ranks
from .state import average_state, load_model, load_optimizer, model_state, optimizer_state
from .step_loss import StepLoss

__all__ = ["ParallelStep"]


@dataclass(kw_only=True, repr=False)
class ParallelStep:
    """`loss = step(batch)`: forward, backward and the optimizer's update of one global batch. All ranks call it the same number of times.

    `steps`: training steps done; random draws depend on it. `rank`: of the plan, and of the world. `compared`: what the gate found before
    the first step (`GateReport.to_json`); None where it was not asked.
    """

    plan: Plan
    rank: int
    model: nn.Module
    optimizer: OwnOptimizer
    update: Update
    module: RankModule
    shapes: Shapes
    group: Any
    as_traced: AsTraced
    steps: int = 0
    compared: dict[str, Any] | None = None
    _failed: str = ""
    _running: StepShape = field(init=False)  # the last that did something
    _gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)  # tensors whose `.grad` is a view of a buffer of the plan

    def __post_init__(self) -> None:
        holds_group(self)
        self._running = self.shapes.of[0]
        tensors = [p.tensor for p in self.module.parameters.values()] + [x for _, x, _ in self.module.updated()]
        self._gradients = [(x, x.grad) for x in tensors if x.grad is not None]

    @in_python
    def __call__(self, batch: Any) -> torch.Tensor:
        """The mean loss of the global batch before the update, the same on every rank: a float64 scalar on the processor, without a graph
        (its `backward` is refused by name: a loop that accumulates gradients gives the samples of an update together).

        batch: of the form that was planned; the global batch, or the part of this rank's data replica: samples in the order of the replicas. Ranks of
        one replica (stages, tensor-parallel ranks) are given the same.
        Raises: UsageError for a batch of another form, shape or number of samples, for a loop that does what the plan does (autocast, a scheduler
        beside the plan's), and for a module or loss that has changed since it was traced (`AsTraced`), before anything has happened; RankFailed for
        what fails within the step, on this rank or another (the step cannot go on then: start again from a saved state).
        """
        self._require_alive()
        require_plain_surroundings(self.executor.memory.device)
        require_own_rates(self.update)
        self.as_traced.require()
        shape = self._running = self.shapes.take(batch)
        self.optimizer.begin()
        for tensor, gradient in self._gradients:
            if tensor.grad is not gradient:  # `zero_grad` sets them to None
                tensor.grad = gradient
        try:
            self.shapes.try_padding(shape)
            shape.work.begin(self.steps)
            shape.executor.run()
            found = mean_of_ranks(shape.work.loss(), self.group)
        except BaseException as error:
            raise self._failure(error) from error
        self.steps += 1
        shape.batches.forget()
        return found.as_subclass(StepLoss)

    @in_python
    def evaluate(self, batch: Any) -> torch.Tensor:
        """The mean loss of a batch in evaluation mode, as of the owner's module after `eval()`: forward passes alone, on the weights as they are. The
        same on every rank, and all ranks call it; training goes on as if it had not been called.

        batch: as of a step. Raises: as a step; Unsupported where the plan's stages do not fit what the module computes in evaluation mode.
        """
        self._require_alive()
        if torch.is_autocast_enabled(self.executor.memory.device.type):
            require_plain_surroundings(self.executor.memory.device)
        self.as_traced.require(training=False)
        shape = self._running = self.shapes.take(batch)
        shape.evaluation.ready(shape.module, shape.batches, shape.executor.transport)
        try:
            self.shapes.try_padding(shape)
            found = mean_of_ranks(shape.evaluated(), self.group)
        except BaseException as error:
            raise self._failure(error) from error
        shape.batches.forget()
        return found

    def metrics(self) -> dict[str, float]:
        """Of the last step, where the plan computes them: `gradient_norm` (before clipping), `loss_scale` (of the next)."""
        return self._running.work.said()

    @property
    def executor(self) -> Executor:
        """Of the step that ran last."""
        return self._running.executor

    @property
    def batches(self) -> OwnBatches:
        return self._running.batches

    @property
    def work(self) -> TrainingWork:
        """Of the largest shape, as is the plan's layout."""
        return self.shapes.of[0].work

    def changing(self) -> Mapping[str, int]:
        """By buffer that training, or an evaluation so far, changes: the first rank that does."""
        return {name: rank for x in self.shapes.of for name, rank in x.evaluation.changing().items()}

    def _require_alive(self) -> None:
        if self._failed:
            raise RunError(f"an earlier step failed: {self._failed}", where=f"rank {self.rank}", hint="start again from a saved state")

    def _failure(self, error: BaseException) -> BaseException:
        """What is raised for it; the step is unusable afterwards."""
        self._failed = f"{type(error).__name__}: {error}"
        if not isinstance(error, StepFailed):
            return error if isinstance(error, (MeshwrightError, KeyboardInterrupt, SystemExit)) else self._named(error, "", -1)
        cause = error.__cause__ or error
        self._failed = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, MeshwrightError):
            return cause
        place = self.executor.program.describe(error.step) if error.step >= 0 else ""
        return self._named(cause, place, error.waiting_for - 1)

    def _named(self, cause: BaseException, place: str, peer: int) -> RankFailed:
        lines = str(cause).strip().splitlines() or ["no message"]
        what = f"rank {self.rank} lost rank {peer}" if peer >= 0 else f"rank {self.rank} failed"
        return RankFailed(
            f"{what} in training step {self.steps}: {type(cause).__name__}: {lines[0]}", where=place or f"rank {self.rank}",
            hint="the other rank's own error says why" if peer >= 0 else "", data={"rank": self.rank, "step": self.steps, "peer": peer},
        )  # fmt: skip

    # ---- state -------------------------------------------------------------------------------------------------
    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """What this rank holds of parameters and buffers, for `load_state_dict` of the same rank of the same plan.

        full: the whole model's state instead, equal to `model.state_dict()` of a model that is trained in one process, on every rank's processor;
        all ranks call it. Raises: Unsupported for sharded state under a plan with gradient codecs, whose memory it does not hold.
        """
        return model_state(self, full=full)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, sharded or full, or any state of the whole model. Raises: PlanMismatch for another plan's or rank's part,
        UsageError for a missing or foreign name or another shape."""
        load_model(self, state)

    def optimizer_state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """What this rank's optimizer keeps, with its groups' options, and what the plan's recipe keeps (masters, averages, schedule, loss scale);
        full: as the owner's optimizer would give it over the whole model; all ranks call it then."""
        return optimizer_state(self, full=full)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state_dict` gave, sharded or full, or a `state_dict` of the owner's optimizer over the whole model. Raises as
        `load_state_dict`."""
        load_optimizer(self, state)

    def average_state_dict(self) -> dict[str, Any]:
        """The whole model's state with the plan's moving averages in place of the weights; all ranks call it. Raises: UsageError without one."""
        return average_state(self)

    def __repr__(self) -> str:
        layout = self.plan.layout
        assert layout is not None
        split = f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}"
        return f"ParallelStep({type(self.model).__name__}, rank {self.rank} of {layout.ranks}, {split}, {self.steps} steps done)"
