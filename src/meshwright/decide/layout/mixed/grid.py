"""Candidates on one kind of device: every data, tensor and pipeline degree, micro-batch, recomputation and sharding level.

Cite: Narayanan et al., SC 2021 (grids of three degrees). Deviation: stages are uneven from the start (`split`), and nothing is pruned by rank:
every candidate that fits in memory is evaluated in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....layer_profile import Entry
from ....profile_layout import MAX_PASSES, ProfiledLayout, ProfiledStage, Replica
from .candidate import Candidate, Pool, Problem
from .split import split_layers

__all__ = ["grid_candidates"]


def grid_candidates(problem: Problem, pool: Pool, devices: int) -> Iterator[Candidate]:
    """All combinations on `devices` devices of one pool."""
    kind = pool.kind
    for tensor in problem.tensors(kind.name):
        if devices % tensor or tensor > devices:
            continue
        for microbatch in problem.microbatches:
            entry = Entry(kind.name, microbatch, tensor)
            if entry not in problem.table.rows or problem.global_batch % microbatch:
                continue
            a = problem.arrays(entry, problem.choices[0], 1)
            times = a["forward_s"] + a["backward_s"]
            for stages in range(1, min(problem.table.layers, devices // tensor) + 1):
                data, rest = divmod(devices, tensor * stages)
                count, odd = divmod(problem.global_batch // microbatch, data)
                if rest or odd or not count or stages * count * data > MAX_PASSES:
                    continue
                replica = Replica(device=kind.name, tensor=tensor, zone=kind.zone)
                made = tuple(ProfiledStage(layers=n, replicas=(replica,) * data) for n in split_layers([times] * stages))
                name = f"dp{data} tp{tensor} pp{stages} mb{microbatch}"
                layout = ProfiledLayout(stages=made, microbatch=microbatch, microbatches=(count,) * data, name=name)
                for choice in problem.choices:
                    if choice.tensor in (0, tensor) and not (choice.sharding and data == 1):
                        yield Candidate(layout, (choice,) * problem.table.layers, "grid")
