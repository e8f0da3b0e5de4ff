"""`step.evaluate(batch)`: the plan's forward passes in evaluation mode, on the weights as the ranks have them.

The module is traced in evaluation mode when it is first asked for, from a description of it without values: its own parameters may lie elsewhere by
then. Modules that could not be traced run as they are, so their copies are made with the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...capture.live import standing
from ...capture.live_job import LiveJob
from ...errors import MeshwrightError
from ...plan.plan import Plan
from ..executor.transport import Transport
from ..launch.outcome import evaluation_graph_of, opaque_function
from ..steps.forward_graph import ForwardGraph
from ..train.count_exchange import count_exchange
from ..train.evaluation import Evaluation
from ..train.segments import RankModule
from .batches import OwnBatches
from .buffers import changed_on
from .first_rank import FirstRank

__all__ = ["OwnEvaluation"]


@dataclass
class OwnEvaluation:
    """Of one rank. `live`: the job with the owner's module, or a description of it; `graph`: of training."""

    plan: Plan
    live: LiveJob
    rank: int
    graph: ForwardGraph
    device: torch.device
    first_rank: FirstRank
    name: str = "evaluation"  # of its graph among what rank 0 works out
    _traced: tuple[ForwardGraph, Callable[..., Any] | None] | None = field(default=None, init=False)
    _refused: MeshwrightError | None = field(default=None, init=False)
    _made: Evaluation | None = field(default=None, init=False)

    def trace(self) -> None:
        """Now, or keep what `ready` then says: training may go on without evaluation. All ranks call it."""
        layout = self.plan.layout
        assert layout is not None
        try:
            with standing(self.live.stands_for):
                found = self.first_rank.gives(self.name, lambda: evaluation_graph_of(self.plan, layout, self.graph).to_json())
                graph = ForwardGraph.from_json(found)
                self._traced = graph, opaque_function(self.live.job, graph, layout, str(self.device), evaluation=True)
        except MeshwrightError as error:
            self._refused = error

    def ready(self, module: RankModule, batches: OwnBatches, transport: Transport) -> None:
        """`module`: what is trained. All ranks call it. Raises: Unsupported where the plan's stages do not fit what evaluation mode computes."""
        if self._made is not None:
            return
        if self._traced is None and self._refused is None:
            self.trace()
        if self._traced is None:
            assert self._refused is not None
            raise self._refused
        (graph, opaque), layout = self._traced, self.plan.layout
        assert layout is not None
        self._made = Evaluation(
            self.plan, graph, self.rank, module, batches, 1, transport, precision=self.live.job.asked.autocast, opaque=opaque,
            exchange=count_exchange(graph, layout, self.rank) if layout.ranks > 1 else None,
        )  # fmt: skip

    def changing(self) -> dict[str, int]:
        """By buffer that the training step, or evaluation where it was made, changes: the first rank that does."""
        layout = self.plan.layout
        assert layout is not None
        found = changed_on(self.graph, layout)
        if self._made is not None and self._traced is not None:
            found = changed_on(self._traced[0], self._made.layout) | found
        return found

    def run(self) -> float | None:
        """This rank's part of the loss of the batch that `batches` has taken. All ranks call it, after `ready`."""
        assert self._made is not None
        self._made.counted = False  # other samples than the last time
        return self._made.run()
