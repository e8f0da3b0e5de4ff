"""Candidates on one kind of device: every data, context, tensor and pipeline degree, micro-batch, recomputation and sharding level.

Cite: Narayanan et al., SC 2021 (grids of three degrees). Deviation: stages are uneven from the start (`split`), and nothing is pruned by rank:
every candidate that fits in memory is evaluated in closed form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ....cite import Cite
from ....profile.layer_profile import Entry
from ....profile.network import MAX_PASSES, ProfiledLayout, ProfiledStage, Replica
from ..grid import CITE as GRID_CITE
from .candidate import Candidate, Demands, Judged, LayersStrategy, Pool, Problem
from .split import split_layers

__all__ = ["LayerGrid", "grid_candidates"]


def grid_candidates(problem: Problem, pool: Pool, devices: int) -> Iterator[Candidate]:
    """All combinations on `devices` devices of one pool."""
    for entry, context, _ in sorted(problem.table.every(), key=lambda x: (x[1], x[0].tensor, x[0].microbatch)):
        if entry.device == pool.kind.name and devices % (entry.tensor * context) == 0 and problem.global_batch % entry.microbatch == 0:
            yield from _of_entry(problem, pool, devices, entry, context)


def _of_entry(problem: Problem, pool: Pool, devices: int, entry: Entry, context: int) -> Iterator[Candidate]:
    """Every pipeline degree of one micro-batch, tensor and context degree. Ranks that share samples are pipelines side by side."""
    kind, tensor, microbatch = pool.kind, entry.tensor, entry.microbatch
    a = problem.table.priced(entry, problem.choices[0]._replace(context=context), 1)
    times = a["forward_s"] + a["backward_s"]
    for stages in range(1, min(problem.table.layers, devices // (tensor * context)) + 1):
        data, rest = divmod(devices, tensor * context * stages)
        count, odd = divmod(problem.global_batch // microbatch, data) if data else (0, 0)
        if rest or odd or not count or stages * count * data * context > MAX_PASSES:
            continue
        replica, pipelines = Replica(device=kind.name, tensor=tensor, zone=kind.zone), data * context
        made = tuple(ProfiledStage(layers=n, replicas=(replica,) * pipelines) for n in split_layers([times] * stages))
        name = f"dp{data} cp{context} tp{tensor} pp{stages} mb{microbatch}" if context > 1 else f"dp{data} tp{tensor} pp{stages} mb{microbatch}"
        layout = ProfiledLayout(stages=made, microbatch=microbatch, microbatches=(count,) * pipelines, name=name, context=context)
        for choice in problem.choices:
            if choice.tensor in (0, tensor) and not (choice.sharding and pipelines == 1):
                yield Candidate(layout, (choice._replace(context=context),) * problem.table.layers, LayerGrid.name)


@dataclass(frozen=True, kw_only=True)
class LayerGrid(LayersStrategy):
    """Where time is not all that counts, fewer devices of a kind are tried too (halves, down to one). No options."""

    name: ClassVar[str] = "grid"
    cite: ClassVar[Cite] = GRID_CITE
    quick: ClassVar[bool] = True

    def plan(self, problem: Problem, demands: Demands, judged: Sequence[Judged] = ()) -> Iterable[Candidate]:
        for pool in problem.pools:
            sizes = [pool.kind.devices]
            while sizes[-1] > 1 and (demands.objective != "time" or demands.budget > 0):
                sizes.append(sizes[-1] // 2)
            for devices in sizes:
                yield from grid_candidates(problem, pool, devices)
