"""Which degrees of a large grid are worth building: predicted program sizes, and the order that the layer table gives.

Building a layout operator by operator costs seconds for a large model, and a cluster has hundreds of degrees. Programs that would be too large are
left out before anything is built; where what is left is still much, layers priced once (`profile.layer_table`) put the degrees in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ...cost import Cost
from ...decide.layout.grid import degrees_of
from ...decide.layout.layer_costs import FULL, Precision
from ...decide.layout.problem import Degrees
from ...errors import Infeasible
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ..layout.search import LayoutFindings, find_layouts
from .context import Context
from .folded import MAX_FOLDED_STEPS
from .program_sizes import MAX_PROGRAM_STEPS, MAX_SMALL_OPERATORS, steps_of
from .wishes import PrecisionWanted

__all__ = [
    "MAX_BUILT_DEGREES", "MAX_BUILT_OPERATORS", "MAX_FOLDED_DEGREES", "MAX_PLANNED_DEVICES", "LeftOut", "Refusal", "by_layer_table", "sizes",
    "table_order",
]  # fmt: skip

# Operators times candidates that are built without asking the layer table first.
MAX_BUILT_OPERATORS = 60_000
# Degrees that are built where the layer table was asked, best by it first; of models with more than MAX_SMALL_OPERATORS operators half as many: the
# search judges two or three of them in its work.
MAX_BUILT_DEGREES = 12
# Degrees that are built of those whose programs are too large to write out, best by the layer table first.
MAX_FOLDED_DEGREES = 2
# Samples of a micro-batch up to which such degrees are considered.
MAX_FOLDED_MICROBATCH = 8
# Devices up to which collectives are planned; with more they are rings, since planning those of every group costs minutes.
MAX_PLANNED_DEVICES = 256


@dataclass(frozen=True)
class LeftOut:
    """Why not all degrees were built. `too_large`: steps of the smallest program that is too large, 0: none is."""

    too_large: int = 0
    findings: LayoutFindings | None = None  # of the layer table, where it was asked


class Refusal:
    """Which degrees are not built, and why: programs too large to simulate; where many are left, all but the layer table's best."""

    def __init__(self, context: Context) -> None:
        self.context, self.left_out = context, LeftOut()
        small, large = sizes(context)
        if len(context.fabric.devices) <= MAX_PLANNED_DEVICES and small:
            large = {}
        many = len(small) > MAX_BUILT_DEGREES and len(small) * len(context.graph.nodes) > MAX_BUILT_OPERATORS
        self.best: dict[Degrees, float] = {}
        if many or len(large) > MAX_FOLDED_DEGREES:
            self.best, findings = table_order(context, [*small, *large])
            self.left_out = LeftOut(findings=findings)
        order = sorted(self.best, key=lambda d: (self.best[d], d))
        self.small, self.large = small, large
        self.steps = steps_of(context.graph, context.job.global_batch)  # once: it looks for regions in the whole graph
        self.most = MAX_BUILT_DEGREES // 2 if len(context.graph.nodes) > MAX_SMALL_OPERATORS else MAX_BUILT_DEGREES
        self.keep = {*[d for d in order if d in small][: self.most], *[d for d in order if d in large][:MAX_FOLDED_DEGREES]}

    def __call__(self, degrees: Degrees) -> str:
        d = replace(degrees, sequence=False, exchange="", expert=1, copied=False)
        if d not in self.small and d not in self.large:
            known = self.steps(d)
            self.left_out = replace(self.left_out, too_large=min(self.left_out.too_large or known, known))
            return f"not built: about {known:,} program steps, at most {MAX_PROGRAM_STEPS:,}"
        if self.best and d not in self.keep and d.context == 1:  # the table knows none
            return f"not built: not among the {self.most if d in self.small else MAX_FOLDED_DEGREES} best by the layer table"
        return "not built: the time limit" if self.context.clock.late else ""


def sizes(context: Context) -> tuple[dict[Degrees, int], dict[Degrees, int]]:
    """Predicted steps of degrees whose programs can be written out, and of those that can be lowered folded only."""
    whole, folded = (steps_of(context.graph, context.job.global_batch, folded=x) for x in (False, True))
    small: dict[Degrees, int] = {}
    large: dict[Degrees, int] = {}
    most, priced = max_group(context.fabric), context.evaluator.prices is not None
    for d in degrees_of(context.problem):
        if (steps := whole(d)) <= MAX_PROGRAM_STEPS:
            small[d] = steps
        elif d.tensor <= most and d.microbatch_size <= MAX_FOLDED_MICROBATCH and not priced and folded(d) <= MAX_FOLDED_STEPS:
            large[d] = folded(d)
    return small, large


def table_order(context: Context, degrees: list[Degrees]) -> tuple[dict[Degrees, float], LayoutFindings | None]:
    """Seconds by the layer table; nothing where it has no answer."""
    precision = context.wish(PrecisionWanted).precision or FULL
    return by_layer_table(context.evaluator.graph_at, context.fabric, context.cost, context.job.global_batch, degrees, precision=precision)


def by_layer_table(
    graph_at: Callable[[int], OpGraph], fabric: Fabric, cost: Cost, global_batch: int, allowed: Iterable[Degrees], precision: Precision = FULL
) -> tuple[dict[Degrees, float], LayoutFindings | None]:
    """Closed-form seconds of those degrees that the table covers and whose layouts fit, recomputing if need be; and what the search found.

    Nothing where the fabric has servers of several kinds, or nothing fits: then there is no order.
    """
    wanted = set(allowed)
    if not wanted:
        return {}, None
    try:
        found = find_layouts(
            graph_at, fabric, cost, global_batch=global_batch, precision=precision, sequence=False, levels=(0,), methods=("grid",), simulated=4,
            refine=0,
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
