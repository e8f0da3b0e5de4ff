"""The loss on other samples while a run goes on: the plan's own forward passes, in evaluation mode, on the weights as they lie on the ranks.

An evaluation is `batches` global batches, always the same samples, taken as one: a loss that is no mean over samples is divided by the counts of all
of them, as one process would that is given them at once. No gradients are computed, normalisation reads its running statistics and changes nothing,
and the generators of torch, numpy and `random` are afterwards as they were: training goes on with the bits that it would have had. Buffers that a
module changes in evaluation mode too are changed as by one call on a whole batch (`changed_buffers`).
The program is the training program's forward part (`program.forward_only`), walked by an executor of its own on the same transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ...errors import UsageError
from ...plan.plan import Plan
from ...plan.shards import local_values
from ...program.calls import inline
from ...program.forward_only import forward_only
from ...program.program import Program
from ..executor.executor import Executor, StepFailed
from ..executor.lanes import fuse_lanes
from ..executor.memory import RankMemory
from ..executor.transport import Transport
from ..machine.process import POSITION
from ..steps.forward_graph import ForwardGraph
from .changed_buffers import refuse_changed, refuse_following, unseen_buffers
from .checks import BatchChecks
from .count_exchange import CountExchange
from .data import Dataset, samples_in
from .loader import seeded
from .segments import RankModule, evaluation_module, random_seed
from .work import BatchSource, TrainingWork

__all__ = ["DEFAULT_BATCHES", "Evaluation", "batches_of", "evaluation_program"]

DEFAULT_BATCHES = 8  # of data without a length
PLACE = "evaluation"  # what its random draws are seeded with, beside the plan's seed


def batches_of(dataset: Dataset, asked: int, global_batch: int, where: str) -> int:
    """Global batches of an evaluation. `asked` 0: all whole ones of data that has a length. Raises: UsageError where the data has not so many."""
    known = samples_in(dataset)
    count = asked or (known // global_batch if known else DEFAULT_BATCHES)
    if known and (not count or count * global_batch > known):
        wanted = f"{count} batches of {global_batch}" if count else f"a batch of {global_batch}"
        raise UsageError(
            f"the evaluation data has {known} samples, fewer than {wanted}", where=where, hint="ask for fewer --evaluation-batches, or give more data"
        )
    return count


def evaluation_program(plan: Plan) -> Program:
    """The plan's forward passes as one program without calls."""
    return inline(forward_only(plan.main), plan.programs).program


class _Beside:
    """Where a rank is, for those who watch: positions of an evaluation are told below zero."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress

    def __setitem__(self, word: int, value: int) -> None:
        self.progress[word] = -1 - value if word == POSITION else value

    def __getitem__(self, word: int) -> int:
        return int(self.progress[word])


@dataclass
class _Work(TrainingWork):
    """Forward passes alone. Batch k of the evaluation is step k of its data."""

    def compile(self, op: int, memory: RankMemory) -> Callable[[], None]:
        act = super().compile(op, memory)
        segment = self.module.segments[self.program.ops.graph[op]]

        def forward() -> None:
            act()
            segment.forget()

        return forward

    def _count(self, *_: Any) -> None:
        """Counted before the first batch, of all (`Evaluation.count`)."""


class Samples(BatchSource, Protocol):
    """Where an evaluation's samples come from; batch k of it is step k."""

    device: torch.device


class Evaluation:
    """Of one rank. `module`: what is trained; `graph`: of `evaluation_graph`; `batches`: of `batches_of`."""

    def __init__(
        self, plan: Plan, graph: ForwardGraph, rank: int, module: RankModule, data: Samples, batches: int, transport: Transport, *,
        opaque: Callable[..., Any] | None = None, precision: str = "fp32", exchange: CountExchange | None = None, progress: Any = None,
    ) -> None:  # fmt: skip
        assert plan.layout is not None
        own, layout = evaluation_module(graph, plan.layout, rank, module, device=data.device, opaque=opaque, precision=precision)
        self.layout, self.rank, self.data, self.batches, self.exchange = layout, rank, data, batches, exchange
        program = evaluation_program(plan)
        refuse_following(graph, layout)
        self.unseen = [b for b in unseen_buffers(graph, layout) if b in own.buffers]
        self.work = _Work(program, layout, rank, own, data, None, seed=random_seed(plan.seed, PLACE), checks=BatchChecks(graph))
        memory = RankMemory(program, rank, data.device, local_values(layout, rank), module.flats, layout=layout)
        self.executor = Executor(
            program, fuse_lanes(program), rank, memory=memory, transport=transport, work=self.work,
            progress=None if progress is None else _Beside(progress),
        )  # fmt: skip
        self.counted = False

    def run(self) -> float | None:
        """This rank's part of the loss, as `TrainingWork.loss`. Raises: StepFailed, whose cause says what failed; as `refuse_changed`."""
        found: list[float] = []
        buffers = self.work.module.buffers
        before = {name: buffers[name].clone() for name in self.unseen}
        with seeded(self.work.seed), torch.no_grad():
            self.count()
            for batch in range(self.batches):
                self.work.begin(batch)
                try:
                    self.executor.run()
                except StepFailed as error:
                    raise StepFailed(-1, error.waiting_for) from error.__cause__
                loss = self.work.loss()
                found += [] if loss is None else [loss]
        refuse_changed(before, buffers)
        return sum(found) / self.batches if found else None

    def count(self) -> None:
        """What the loss is divided by, of all batches together; once, since the samples stay the same."""
        counts, lay = self.work.module.counts, self.layout
        if counts is None or self.counted:
            return
        replicas: Sequence[int] = [lay.coordinates(self.rank)[1]] if self.exchange is not None else range(lay.data)
        mine = [partial(self.data.microbatch, k, d, mb) for k in range(self.batches) for d in replicas for mb in range(lay.microbatches_of(d))]
        batches = (fetch() for fetch in mine)
        sums = counts.sums(batches) if self.exchange is None else self.exchange(counts, batches)
        # members of a context group have the same samples, and each counted them
        counts.fill({v: x / lay.context for v, x in sums.items()}, lay.all_microbatches * self.batches)
        self.counted = True
