"""The steps that a rank of a run has: one, or one for each of the plan's shapes, on the same weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist

from ...job import Training
from ...plan.plan import Plan, TrainingLayout
from ..executor.executor import Executor
from ..steps.forward_graph import ForwardGraph
from ..train.count_exchange import count_exchange
from ..train.data import open_data
from ..train.metrics import Metrics, tokens_of
from ..train.padding import refuse_counted
from ..train.rank_builder import RankBuilder
from ..train.segments import RankModule
from ..train.shaped_batches import ShapedBatches
from ..train.update import Update
from ..train.utilisation import model_flops
from ..train.work import TrainingWork
from .setup import Setup

__all__ = ["ShapedStep", "ShapedSteps", "shaped_batches"]


@dataclass(frozen=True)
class ShapedStep:
    graph: ForwardGraph
    layout: TrainingLayout
    work: TrainingWork
    executor: Executor


@dataclass
class ShapedSteps:
    """Of one rank; `of`: the largest shape first. `batches`: None for a plan of one shape. `number`: of the step that began last."""

    plan: Plan
    batches: ShapedBatches | None
    of: list[ShapedStep]
    number: int = 0

    def add(self, builder: RankBuilder, plan: Plan, setup: Setup, module: RankModule, update: Update, beside: Executor) -> None:
        """The step for one more shape; `plan`: of it alone, `module`: of the largest, `beside`: its executor. All ranks call it."""
        layout, rank = builder.layout, builder.rank
        assert self.batches is not None
        exchange = count_exchange(setup.graph, layout, rank) if layout.ranks > 1 else None
        work, memory = builder.work(builder.module_beside(module), update, self.batches.of(layout), exchange=exchange)
        executor = Executor(
            builder.program, setup.orders, rank, memory=memory, transport=beside.transport, work=work, clock=beside.clock, progress=beside.progress,
            times=beside.times,
        )  # fmt: skip
        self.of.append(ShapedStep(setup.graph, layout, work, executor))

    def begin(self, step: int) -> ShapedStep:
        """The step for the samples of training step `step`, which it has then. All ranks call it. Raises: as `ShapedBatches.choose`."""
        self.number = self.batches.choose(step) if self.batches is not None else 0
        now = self.of[self.number]
        now.work.begin(step)
        return now

    def tell(self, metrics: Metrics) -> None:
        """What a step of this shape counts as."""
        if len(self.of) > 1:
            now = self.of[self.number]
            metrics.tokens = tokens_of(now.graph.inputs)
            if metrics.utilisation is not None:
                metrics.utilisation = replace(metrics.utilisation, model_flops=model_flops(now.layout))


def shaped_batches(
    plan: Plan, setups: Sequence[Setup], rank: int, module: RankModule, data: str, examples: Sequence[torch.Tensor], device: torch.device
) -> ShapedBatches | None:
    """None for a plan of one shape. All ranks call it. Raises: as `open_data`; Unsupported where padding would be counted (`refuse_counted`)."""
    layout = plan.layout
    assert layout is not None
    if not plan.shapes:
        return None
    job = msgspec.convert(plan.job["training"], Training)
    group = dist.new_group(backend="gloo") if layout.ranks > 1 else None
    reads = module.counts is not None or any(s.inputs for s in module.segments.values())
    found = ShapedBatches(
        open_data(data, examples, job.seed, job.global_batch, together=True), layout, rank, [s.graph.inputs for s in setups], device, reads, group
    )
    if found.values is not None:
        refuse_counted([s.graph for s in setups], "?pad")
    return found
