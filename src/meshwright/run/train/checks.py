"""What the owner's forward checks of its batch, of every micro-batch before a step: where it would raise, the step is refused with its line."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from ...errors import UsageError
from ..steps.forward_graph import ForwardGraph
from .loss_counts import GivenValues

__all__ = ["BatchChecks"]


class BatchChecks:
    """`graph`: of a micro-batch, with the checks that its trace found (`capture.checks`)."""

    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = msgspec.structs.replace(graph, nodes=graph.checks)
        self.checks = [n for n in graph.checks if n.target == "meshwright.checked.default"]
        self.read = {int(v.removeprefix("input:")) for n in graph.checks for v in n.inputs if v.startswith("input:")}
        self.constants = {n: c.tensor() for n, c in graph.constants.items()} if self.checks else {}

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises: UsageError for a micro-batch with which the owner's forward raises."""
        if not self.checks:
            return
        known = GivenValues(self.graph, [x.cpu() if i in self.read else torch.empty(0) for i, x in enumerate(inputs)], self.constants, {})
        for n in self.checks:
            condition, answer, where, text = n.args
            if bool(known(condition["value"])) != answer:
                raise UsageError(
                    f"forward raises for this batch: it checks `{text}`", where=where, data={"asked": text},
                    hint="look at the samples; where micro-batches fail what the whole batch would not, plan larger ones",
                )  # fmt: skip
