"""Which degrees of a large grid are worth building: predicted program sizes, and the order that the layer table gives.

Building a layout operator by operator costs seconds for a large model, and a cluster has hundreds of degrees. Programs that would be too large are
left out before anything is built; where what is left is still much, layers priced once (`layer_table`) put the degrees in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .cost import Cost
from .decide.layout.layer_costs import FULL
from .decide.layout.megatron import search_regions
from .decide.layout.problem import Degrees
from .drive_layout_search import LayoutFindings, find_layouts
from .errors import Infeasible
from .fabric import Fabric
from .graph import OpGraph

__all__ = ["BUILT_AT_ONCE", "WORTH_BUILDING", "by_layer_table", "predicted_steps", "steps_of"]

BUILT_AT_ONCE = 60_000  # operators times candidates that are built without asking the layer table first
WORTH_BUILDING = 12  # degrees that are built where it was asked


def predicted_steps(data: int, tensor: int, pipeline: int, microbatches: int, segments: int, sums: int, *, folded: bool = False) -> int:
    """About how many steps the inlined program has: computes, pipeline messages, and ring steps of every call.

    `sums`: all-reduces of tensor-parallel regions per micro-batch, forward and backward. `folded`: of one rank of every stage.
    """
    if folded:
        return microbatches * (2 * segments + 4 * pipeline + sums * 4 * tensor) + pipeline * 4 * data
    per_microbatch = tensor * (2 * segments + 4 * pipeline + sums * 4 * tensor)
    return data * microbatches * per_microbatch + data * tensor * pipeline * 4 * data


def steps_of(graph: OpGraph, global_batch: int, *, folded: bool = False) -> Callable[[Degrees], int]:
    """Predicts the steps of degrees from the graph's regions, before a layout is built."""
    regions = search_regions(graph)[0]
    sums = sum(len(r.rows) + len(r.entries) for r in regions)

    def steps(d: Degrees) -> int:
        split = d.tensor > 1
        segments = d.pipeline + (len(regions) if split else 0)
        microbatches = global_batch // (d.data * d.microbatch_size)
        return predicted_steps(d.data, d.tensor, d.pipeline, microbatches, segments, sums if split else 0, folded=folded)

    return steps


def by_layer_table(
    graph_at: Callable[[int], OpGraph], fabric: Fabric, cost: Cost, global_batch: int, allowed: Iterable[Degrees]
) -> tuple[dict[Degrees, float], LayoutFindings | None]:
    """Closed-form seconds of those degrees that the table covers and whose layouts fit, recomputing if need be; and what the search found.

    Nothing where the fabric has servers of several kinds, or nothing fits: then there is no order.
    """
    wanted = set(allowed)
    if not wanted:
        return {}, None
    try:
        found = find_layouts(
            graph_at, fabric, cost, global_batch=global_batch, precision=FULL, sequence=False, levels=(0,), methods=("grid",), simulated=4, refine=0,
            microbatches=sorted({d.microbatch_size for d in wanted}),
            tensors=[t for t in sorted({d.tensor for d in wanted}) if t <= max_group(fabric)],
        )  # fmt: skip
    except Infeasible:
        return {}, None
    seconds: dict[Degrees, float] = {}
    for j in (*found.found.ranked, *found.found.others):
        layout = j.candidate.layout
        d = Degrees(layout.data, layout.stages[0].replicas[0].tensor, len(layout.stages), layout.microbatch)
        if d in wanted and j.estimate.over_bytes <= 0:
            seconds[d] = min(seconds.get(d, float("inf")), j.estimate.time_s)
    return seconds, found


def max_group(fabric: Fabric) -> int:
    """Devices of the largest server."""
    sizes: dict[str, int] = {}
    for d in fabric.devices:
        sizes[d.group or d.name] = sizes.get(d.group or d.name, 0) + 1
    return max(sizes.values(), default=1)
