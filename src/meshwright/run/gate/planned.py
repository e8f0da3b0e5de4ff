"""The same step as the plan runs it: all ranks of its program, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ...capture.regions import REGION
from ...job import Training
from ...plan.plan import TrainingLayout
from ...program.program import Program
from ..executor.executor import Executor, StepFailed
from ..executor.lanes import fuse_lanes
from ..executor.transport import Transport
from ..steps.forward_graph import OPAQUE, ForwardGraph
from ..train.masters import MASTER
from ..train.rank_builder import RankBuilder
from ..train.segments import RankModule
from ..train.update import AVERAGE, Update
from ..train.work import BatchSource
from .together import ranks_together
from .widened import Widened

__all__ = ["Held", "RankStep", "planned_step"]


@dataclass(frozen=True)
class Held:
    """Elements of a parameter, as a rank has them: `first` is the place of the first in the rank's own (flattened) part of it."""

    name: str
    first: int
    values: torch.Tensor


@dataclass
class RankStep:
    """What a rank's steps leave. `losses`: of every step, as `TrainingWork.loss`; `buffers`: those that its segments use; `recipe`: what the recipe
    keeps of parameters, by name (`train.update.AVERAGE`, `train.masters.MASTER`)."""

    losses: list[float | None] = field(default_factory=list)
    gradients: list[Held] = field(default_factory=list)
    parameters: list[Held] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    recipe: dict[str, list[Held]] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        return self.losses[-1]


def _watch(update: Update, module: RankModule, found: list[Held]) -> None:
    """Note the gradients that an update is given, before it clips them."""
    given = update.clipped_step

    def noting(weights: Sequence[torch.nn.Parameter], norm: Callable[[], torch.Tensor] | None) -> None:
        for p, tensor, piece in module.updated():
            if tensor.grad is not None:
                found.append(Held(p.name, piece.first if piece else 0, tensor.grad.detach().reshape(-1).clone()))
        given(weights, norm)

    update.clipped_step = noting  # type: ignore[method-assign]


def planned_step(
    program: Program, layout: TrainingLayout, graph: ForwardGraph, job: Training, *, parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor], data: BatchSource, seed: int, dtype: torch.dtype, opaque: Callable[..., Any] | None = None, steps: int = 1,
) -> list[RankStep]:  # fmt: skip
    """The first steps of an inlined program, by rank: gradients and loss of the last. Raises: what a rank raises, without the executor's wrapping."""
    orders: Sequence[Any] = fuse_lanes(program)
    device = torch.device("cpu")
    own_code = any(n.target in (REGION, OPAQUE) for n in graph.nodes)

    def body(rank: int, transport: Transport) -> RankStep:
        built = RankBuilder(program=program, layout=layout, graph=graph, job=job, rank=rank, device=device, seed=seed, opaque=opaque)
        module = built.module(parameters, buffers)
        found = RankStep()
        update = built.update(module, parameters)
        _watch(update, module, found.gradients)
        work, memory = built.work(module, update, data, dtype=dtype)
        executor = Executor(program, orders, rank, memory=memory, transport=transport, work=work)
        for step in range(steps):
            found.gradients.clear()
            work.begin(step)
            with Widened() if dtype is torch.float64 and own_code else nullcontext():
                executor.run()
            found.losses.append(work.loss())
        found.parameters = [Held(p.name, piece.first if piece else 0, t.detach().reshape(-1).clone()) for p, t, piece in module.kept()]
        states = {id(weight): state for weight, state in update.state.items()}
        for p, t, piece in module.updated():
            for key in {AVERAGE, MASTER} & states.get(id(t), {}).keys():
                value = states[id(t)][key].detach().reshape(-1).clone()
                found.recipe.setdefault(key, []).append(Held(p.name, piece.first if piece else 0, value))
        used = {id(c) for s in module.segments.values() for c in s.constants}
        found.buffers = {n: b for n, b in module.buffers.items() if id(b) in used}
        return found

    try:
        return ranks_together(layout.ranks, body)
    except StepFailed as error:
        raise error.__cause__ or error from None
