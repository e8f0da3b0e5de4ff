"""What a rank of a sequence-parallel step keeps for backward, counted where autograd saves it."""

from __future__ import annotations

from typing import Any

import torch
from rig import graph_of
from tensor_rig import Case, Outcome, run_case

from meshwright.lower.kept_values import kept_values
from meshwright.plan.shards import local_values


def run_counting(rank: int, group: Any, case: Case) -> tuple[Outcome, int]:
    """`run_case`, and the bytes of all storages that autograd was given to keep in the step, parameters left out. One micro-batch."""
    kept: dict[int, torch.Tensor] = {}
    real = torch.autograd.graph.saved_tensors_hooks

    def count(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter) and not (x._is_view() and isinstance(x._base, torch.nn.Parameter)):
            kept[x.untyped_storage()._cdata] = x.detach()
        return x

    def counting(pack: Any, unpack: Any) -> Any:
        return real(lambda x: count(pack(x)), unpack)

    torch.autograd.graph.saved_tensors_hooks = counting
    try:
        with real(count, lambda x: x):
            outcome = run_case(rank, group, case)
    finally:
        torch.autograd.graph.saved_tensors_hooks = real
    return outcome, sum(x.untyped_storage().nbytes() for x in kept.values())


def planned_bytes(case: Case, rank: int) -> int:
    """The same by the plan: what segments save, and the border values that autograd keeps, each as the rank holds it."""
    lay = case.layout
    stage = lay.stages[lay.coordinates(rank)[0]]
    graph = graph_of(case.model, lay.microbatch_size, case.loss)
    keeps, local = kept_values(graph, lay), local_values(lay, rank)
    kept = {v for key in stage.segments for v in keeps[key]}
    return sum(s.saved_bytes for s in lay.segments if s.stage == stage.index) + sum(local[v].size_bytes for v in kept)
