"""An expert layer measured on real processes: every choice at every capacity, one process per device, on this machine or in a lab."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..decide.experts import Choice, ExpertProblem
from ..decide.experts.tutel import alignment_of
from ..io.fabric.document import fabric_document, fabric_from_document
from ..nn import FeedForward, GatedFeedForward, MoELayer
from ..run.ranks.answers import answer, answers, seated
from ..run.ranks.worker import Seat

__all__ = ["ExpertsRequest", "bench_experts", "experts_rank"]

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class ExpertsRequest(msgspec.Struct, kw_only=True):
    """`fabric`: its document; its devices are the ranks in order. Each measured `steps` times, after one that is not."""

    fabric: Any
    experts: int
    model: int
    inner: int
    matrices: int
    element_bytes: int
    choices: list[tuple[int, int, str]]
    capacities: list[int]
    steps: int = 5
    inference: bool = False
    seed: int = 0
    timeout_s: float = 300.0


def bench_experts(
    problem: ExpertProblem, choices: Sequence[Choice], *, steps: int = 5, seed: int = 0, lab: Any = None, timeout_s: float = 300.0
) -> dict[tuple[int, Choice], float]:
    """(capacity, choice) -> seconds of a step, forward and backward (or forward alone, as the problem says): median over steps of the slowest rank.

    k is 1, and every rank has tokens for exactly that capacity. Raises: what `LocalRanks.run` raises where a rank fails.
    """
    shape = problem.shape
    request = ExpertsRequest(
        fabric=msgspec.to_builtins(fabric_document(problem.fabric)), experts=shape.experts, model=shape.model, inner=shape.inner,
        matrices=shape.matrices, element_bytes=shape.element_bytes, choices=[(c.degree, c.chunks, c.algorithm) for c in choices],
        capacities=list(problem.capacities),
        steps=steps, inference=problem.passes == "inference", seed=seed, timeout_s=timeout_s,
    )  # fmt: skip
    found = answers(request, shape.ranks, experts_rank, list[list[float]], lab=lab, limit_hint="fewer steps or choices")
    keys = [(c, Choice(*x)) for c in problem.capacities for x in choices]
    slowest = [map(max, zip(*of_ranks, strict=True)) for of_ranks in zip(*found, strict=True)]
    return {key: statistics.median(each) for key, each in zip(keys, slowest, strict=True)}


def experts_rank(seat: Seat) -> list[list[float]]:
    """A rank that the launcher started."""
    return seated(seat, ExpertsRequest, _measured)


def _measured(request: ExpertsRequest) -> list[list[float]]:
    """By capacity and choice, seconds of every step on this rank."""
    torch.set_num_threads(1)
    fabric, dtype = fabric_from_document(request.fabric, where="fabric"), DTYPES[request.element_bytes]
    sizes = request.model, request.inner
    form = GatedFeedForward(*sizes) if request.matrices == 3 else FeedForward(*sizes, bias=False)
    torch.manual_seed(request.seed + dist.get_rank())
    found: list[list[float]] = []
    for capacity in request.capacities:
        for choice in request.choices:
            layer = MoELayer(form, request.experts, k=1, capacity_factor=1.0, choice=choice, fabric=fabric, seed=request.seed).to(dtype)
            layer.alignment = alignment_of(layer.shape.shares, (choice[1],))
            x = torch.randn(request.experts * capacity, request.model, dtype=dtype, requires_grad=not request.inference)
            times = [_step(layer, x, request.inference) for _ in range(request.steps + 1)]
            found.append(times[1:])
    return found


def _step(layer: MoELayer, x: torch.Tensor, inference: bool) -> float:
    dist.barrier()
    began = time.perf_counter()
    if inference:
        with torch.no_grad():
            layer(x)
    else:
        layer(x).sum().backward()
    return time.perf_counter() - began


if __name__ == "__main__":
    answer(Path(sys.argv[1]), ExpertsRequest, _measured)
