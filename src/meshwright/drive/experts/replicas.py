"""Copies of hot experts for measured loads of several layers, and whether their weights are worth sending on a fabric."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ...cost import assumed_cost
from ...decide.experts import ExpertProblem
from ...decide.experts.replicas import Replicas, moving_pays, place_replicas
from ...errors import Unsupported, UsageError
from ...graph.graph import Work
from ...plan.routing import Routing

__all__ = ["LayerReplicas", "replicas_of"]

ROWS = 1 << 12  # of an expert, at which the time of one is taken: enough for products to run at their rate


@dataclass(frozen=True, kw_only=True)
class LayerReplicas:
    """Of one layer. `pays`: moving from no copies to these does, within the steps asked for; seconds saved and seconds of weights on their way."""

    layer: str
    loads: tuple[int, ...]
    made: Replicas
    pays: bool
    saved_s: float
    moved_s: float

    def document(self) -> dict[str, Any]:
        m = self.made
        return {
            "layer": self.layer, "loads": list(self.loads), "copies": [list(c) for c in m.copies], "busiest_rows": m.busiest, "before_rows": m.before,
            "bound_rows": m.bound, "pays": self.pays, "saved_s": self.saved_s, "moved_s": self.moved_s,
        }  # fmt: skip


def replicas_of(problem: ExpertProblem, loads: Routing, *, spare: int, steps: int) -> list[LayerReplicas]:
    """Every measured layer of `loads` (rows of a step, over all ranks), with `spare` places a rank, for `steps` steps.

    Raises: Unsupported where ranks share experts, UsageError for a layer with another number of experts.
    """
    shape, fabric = problem.shape, problem.fabric
    if shape.experts < shape.ranks:
        text = f"{shape.experts} experts on {shape.ranks} ranks are shared already"
        raise Unsupported(text, where="--spare", hint="as many experts as ranks, or more")
    cost = problem.cost or assumed_cost(fabric)
    flops = 3 * 2 * shape.matrices * shape.model * shape.inner  # forward, and twice that backward
    device = fabric.device(problem.ranks[0])
    row_s = Fraction(cost.roofline(Work(flops=flops * ROWS, calls=3 * shape.matrices), device).time_s) / ROWS
    ends = [fabric.actor_of[problem.ranks[i]] for i in (0, -1)]
    rate_Bps = min((fabric.links[x].rate_Bps for x in fabric.route(ends[0], ends[1])), default=1) if ends[0] != ends[1] else 1
    size = shape.matrices * shape.model * shape.inner * shape.element_bytes
    found = []
    for layer, counts in loads.measured:
        if len(counts) != shape.experts:
            raise UsageError(f"{layer!r} was measured with {len(counts)} experts, the layer has {shape.experts}", where="--loads")
        made, none = place_replicas(counts, shape.ranks, spare), place_replicas(counts, shape.ranks, 0)
        pays, saved, moved = moving_pays(none, made, row_s=row_s, expert_bytes=size, rate_Bps=int(rate_Bps), steps=steps)
        found.append(LayerReplicas(layer=layer, loads=counts, made=made, pays=pays, saved_s=float(saved), moved_s=float(moved)))
    return found
