"""How a rank of a training is built, of runs, the gate and `parallelize` alike: its module, what updates it, what its steps do, where bytes lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...job import Training
from ...plan.plan import TrainingLayout
from ...plan.shards import local_values
from ...program.program import Program
from ..executor.memory import RankMemory
from ..steps.forward_graph import ForwardGraph
from .checks import BatchChecks
from .count_exchange import CountExchange
from .segments import RankModule, build_rank_module, module_of_shape
from .update import Update, make_update
from .work import BatchSource, TrainingWork, gradient_bytes

__all__ = ["RankBuilder"]


@dataclass(frozen=True, kw_only=True)
class RankBuilder:
    """Of one rank. `program`: inlined; `opaque`: what the one node of an untraced model calls; `seed`: the plan's, of random draws."""

    program: Program
    layout: TrainingLayout
    graph: ForwardGraph
    job: Training
    rank: int
    device: torch.device
    seed: int
    opaque: Callable[..., Any] | None = None

    def module(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], **options: Any) -> RankModule:
        """`options`: `clock`, `adopt`, `values`, of `build_rank_module`, which says what is raised."""
        return build_rank_module(
            self.graph, self.layout, self.rank, parameters, buffers, device=self.device, gradient_bytes=gradient_bytes(self.program, self.rank),
            opaque=self.opaque, precision=self.job.asked.autocast, **options,
        )  # fmt: skip

    def module_beside(self, trained: RankModule) -> RankModule:
        """For batches of another shape, on what `trained` holds. Raises: as `module_of_shape`."""
        return module_of_shape(
            self.graph, self.layout, self.rank, trained, device=self.device, gradient_bytes=gradient_bytes(self.program, self.rank),
            opaque=self.opaque, precision=self.job.asked.autocast,
        )  # fmt: skip

    def update(self, module: RankModule, parameters: Mapping[str, torch.Tensor]) -> Update:
        """The job's optimizer on what the rank updates. `parameters`: of the whole model."""
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        return make_update(self.job, [(p.name, tensor) for p, tensor, _ in module.updated()], whole=trained)

    def work(
        self, module: RankModule, update: Any, data: BatchSource, *, exchange: CountExchange | None = None, alone: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[TrainingWork, RankMemory]:  # fmt: skip
        """What the steps do, and their memory. `dtype`: of values that the layout does not name, as those of sums under way; None: of gradients. The
        rest as of `TrainingWork`."""
        dtype = dtype or next((g.dtype for g in module.gradients.values()), torch.float32)
        work = TrainingWork(
            self.program, self.layout, self.rank, module, data, update, seed=self.seed, exchange=exchange, alone=alone,
            checks=BatchChecks(self.graph),
        )  # fmt: skip
        memory = RankMemory(
            self.program, self.rank, self.device, local_values(self.layout, self.rank), module.flats, dtype, layout=self.layout
        )  # fmt: skip
        return work, memory
