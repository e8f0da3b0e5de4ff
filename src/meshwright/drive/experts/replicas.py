"""Copies of hot experts for measured loads of several layers, and whether their weights are worth sending on a fabric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ...cost import assumed_cost
from ...decide.experts import ExpertProblem
from ...decide.experts.replicas import Replicas, moving_pays, place_replicas
from ...errors import Infeasible, Unsupported, UsageError
from ...fabric.fabric import Fabric
from ...graph.graph import Work
from ...plan.routing import Routing

__all__ = ["LayerReplicas", "rate_between", "replicas_of", "require_room"]

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


def rate_between(fabric: Fabric, first: str, last: str) -> float:
    """Bytes/s of the slowest link between two devices; of memory on one."""
    ends = [fabric.actor_of[name] for name in (first, last)]
    return float(min((fabric.links[x].rate_Bps for x in fabric.route(*ends)), default=fabric.device(first).memory_bandwidth_Bps))


def require_room(fabric: Fabric, ranks: Sequence[str], expert_bytes: int, local: int, spare: int) -> None:
    """Raises: Infeasible where the `local` experts of a rank and `spare` copies, of so many bytes each, are more than a device's memory."""
    least = min((fabric.device(r).memory_bytes for r in ranks), default=0)
    if spare and least and (local + spare) * expert_bytes > least:
        fits = max(0, least // expert_bytes - local)
        raise Infeasible(
            f"{local} experts and {spare} copies of {expert_bytes:,} bytes each do not fit in a device's {least:,} bytes", where="spare",
            hint=f"spare {fits}" if fits else "more ranks, or smaller experts: not even one copy fits", data={"fits": fits},
        )  # fmt: skip


def replicas_of(problem: ExpertProblem, loads: Routing, *, spare: int, steps: int) -> list[LayerReplicas]:
    """Every measured layer of `loads` (rows of a step, over all ranks), with `spare` places a rank, for `steps` steps.

    Raises: Unsupported where ranks share experts, UsageError for a layer with another number of experts.
    """
    shape, fabric = problem.shape, problem.fabric
    if shape.experts < shape.ranks:
        text = f"{shape.experts} experts on {shape.ranks} ranks are shared already"
        raise Unsupported(text, where="--spare", hint="as many experts as ranks, or more")
    cost = problem.cost or assumed_cost(fabric)
    passes = 1 if problem.passes == "inference" else 3  # forward, and twice that backward
    flops = passes * 2 * shape.matrices * shape.model * shape.inner
    device = fabric.device(problem.ranks[0])
    row_s = Fraction(cost.roofline(Work(flops=flops * ROWS, calls=passes * shape.matrices), device).time_s) / ROWS
    rate_Bps = int(rate_between(fabric, problem.ranks[0], problem.ranks[-1]))
    row_bytes = (2 if passes > 1 else 1) * (shape.model + shape.output) * shape.element_bytes
    row_s += Fraction(row_bytes * (shape.ranks - 1), rate_Bps * shape.ranks)  # a rank's own rows stay
    size = shape.matrices * shape.model * shape.inner * shape.element_bytes
    require_room(fabric, problem.ranks, size, shape.local, spare)
    found = []
    for layer, counts in loads.measured:
        if len(counts) != shape.experts:
            raise UsageError(f"{layer!r} was measured with {len(counts)} experts, the layer has {shape.experts}", where="--loads")
        made, none = place_replicas(counts, shape.ranks, spare), place_replicas(counts, shape.ranks, 0)
        pays, saved, moved = moving_pays(
            none, made, ranks=shape.ranks, row_s=row_s, expert_bytes=size, rate_Bps=rate_Bps, steps=steps, step_bytes=2 * size if passes > 1 else 0
        )
        found.append(LayerReplicas(layer=layer, loads=counts, made=made, pays=pays, saved_s=float(saved), moved_s=float(moved)))
    return found
