"""About how many steps the program of a layout will have, before anything is built or lowered."""

from __future__ import annotations

from collections.abc import Callable

from ...decide.layout.megatron import search_regions
from ...decide.layout.problem import Degrees
from ...graph.graph import OpGraph
from ...plan.plan import TrainingLayout

__all__ = ["MAX_PROGRAM_STEPS", "MAX_SMALL_OPERATORS", "MAX_SMALL_STEPS", "expected_steps", "predicted_steps", "steps_of"]

# Steps of the inlined program, over all ranks, beyond which a candidate is not simulated: 6 s of counted work each (`evaluate`).
MAX_PROGRAM_STEPS = 300_000
# Steps up to which every candidate is judged with all that may make it fit, at most 1 s of counted work each.
MAX_SMALL_STEPS = 50_000
# The same of operators of the model: choosing what to compute again in layers of sixty takes 25 s.
MAX_SMALL_OPERATORS = 1_000


def predicted_steps(data: int, tensor: int, pipeline: int, microbatches: int, segments: int, sums: int, *, folded: bool = False) -> int:
    """About how many steps the inlined program has: computes, pipeline messages, and ring steps of every call.

    `sums`: all-reduces of tensor-parallel regions per micro-batch, forward and backward. `folded`: of one rank of every stage.
    """
    if folded:
        return microbatches * (2 * segments + 4 * pipeline + sums * 4 * tensor) + pipeline * 4 * data
    per_microbatch = tensor * (2 * segments + 4 * pipeline + sums * 4 * tensor)
    return data * microbatches * per_microbatch + data * tensor * pipeline * 4 * data


def expected_steps(layout: TrainingLayout, *, folded: bool = False) -> int:
    sums = sum(len(s.sum_writes) + len(s.sum_grads) + len(s.gathers) for s in layout.segments)
    return predicted_steps(layout.data, layout.tensor, layout.pipeline, layout.microbatches, len(layout.segments), sums, folded=folded)


def steps_of(graph: OpGraph, global_batch: int, *, folded: bool = False) -> Callable[[Degrees], int]:
    """Predicts the steps of degrees from the graph's regions, before a layout is built."""
    regions = search_regions(graph)[0]
    sums = sum(len(r.rows) + len(r.entries) for r in regions)

    def steps(d: Degrees) -> int:
        split = d.tensor > 1
        segments = d.pipeline + (len(regions) if split else 0)
        microbatches = global_batch // (d.data * d.microbatch_size)
        return predicted_steps(d.replicas, d.tensor, d.pipeline, microbatches, segments, sums if split else 0, folded=folded)

    return steps
