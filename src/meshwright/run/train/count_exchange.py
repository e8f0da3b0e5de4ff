"""What the loss of a whole batch is divided by, where every rank has the samples of its own replica only: the ranks add up what theirs count.

A small all-reduce on a process group of the processor beside the plan's messages, from the start of a step until the loss needs it. The plan does not
hold it: it is as long as the loss has counted values, and no number of a tensor's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...plan.plan import TrainingLayout
from ..executor.held_groups import holds_group
from ..steps.forward_graph import ForwardGraph
from .loss_counts import LossCounts, counted_values
from .loss_terms import loss_terms

__all__ = ["CountExchange", "count_exchange"]


@dataclass(frozen=True)
class CountExchange:
    """`values`: what is counted, in one order on all ranks; `group`: of the ranks that compute some of the loss, in all replicas; `segments`: those
    that need the sum, by key."""

    values: tuple[str, ...]
    replicas: int
    replica: int
    group: Any
    segments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        holds_group(self)

    def __call__(self, counts: LossCounts, batches: Iterable[Sequence[torch.Tensor]]) -> dict[str, float]:
        """Counts of the whole batch; `batches`: the micro-batches of this rank's replica. All ranks of the group call it."""
        return self.begin(counts, batches)()

    def begin(self, counts: LossCounts, batches: Iterable[Sequence[torch.Tensor]]) -> Callable[[], dict[str, float]]:
        """The same, whose result is waited for where it is asked for.

        Several ranks count the same samples (tensor-parallel ones, copies of a stage): a replica's counts are the mean of what they say.
        """
        found = torch.zeros(self.replicas, len(self.values), 2, dtype=torch.float64)
        for value, count in counts.sums(batches).items():
            found[self.replica, self.values.index(value)] = torch.tensor([count, 1.0], dtype=torch.float64)
        work = self.group.allreduce([found])  # without the checks of `dist.all_reduce`, which take as long

        def ended() -> dict[str, float]:
            work.wait()
            of_replicas = found[..., 0] / found[..., 1].clamp(min=1.0)
            return dict(zip(self.values, of_replicas.sum(0).tolist(), strict=True))

        return ended


def count_exchange(graph: ForwardGraph, layout: TrainingLayout, rank: int) -> CountExchange | None:
    """None on ranks that need none: one replica has the whole batch, or nothing of the loss is counted. All ranks of the world call it."""
    terms = loss_terms(graph)
    values = counted_values(terms)
    if layout.data == 1 or not values:
        return None
    keys = {s.key for s in layout.segments if terms.keys() & set(s.nodes)}
    members = [r for r in range(layout.ranks) if keys & set(layout.held(layout.coordinates(r)[0]).segments)]
    group = dist.new_group(members, backend="gloo")
    return CountExchange(values, layout.data, layout.coordinates(rank)[1], group, tuple(sorted(keys))) if rank in members else None
