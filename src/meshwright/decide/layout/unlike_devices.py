"""Dividing a layout's work among devices of unlike speed: layers over stages, samples over replicas, heads and columns over tensor ranks.

A device's speed is one number, that of the whole model on it by the cost's roofline; operators that are bound by something else differ, and
the simulator, which prices each where it runs, says whether the division pays. A stage is as fast as the slowest of its groups for its part of
the samples, a replica as all its devices together.

Source: the rule that work be proportional to speed is old; uneven stages, micro-batch shares and tensor shares together, with placements of the
fast and the slow devices to choose among, are AMP's and Metis's search space (see `mixed`), cut here to what one layout can carry out.
Cost: O(devices) per placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ...cost import Cost
from ...fabric.fabric import Device, Fabric
from ...graph.graph import OpGraph, Work
from .tensor_shares import TensorOptions, largest_remainder

__all__ = ["EVEN", "Division", "device_orders", "divide", "moved", "relative_speeds"]


@dataclass(frozen=True, order=True, kw_only=True)
class Division:
    """What is not divided evenly; empty fields are. `stage_speeds`: of each stage, for the borders; `tensor_speeds`: of each tensor rank, the same
    in all groups; `microbatches`: of each data replica."""

    stage_speeds: tuple[float, ...] = ()
    tensor_speeds: tuple[float, ...] = ()
    microbatches: tuple[int, ...] = ()

    def options(self, options: TensorOptions) -> TensorOptions:
        """With these speeds of the tensor ranks."""
        return replace(options, speeds=self.tensor_speeds) if self.tensor_speeds else options

    def __str__(self) -> str:
        said = [f"stages by speed {_ratio(self.stage_speeds)}"] if self.stage_speeds else []
        said += [f"tensor ranks by speed {_ratio(self.tensor_speeds)}"] if self.tensor_speeds else []
        said += [f"micro-batches {' + '.join(map(str, self.microbatches))}"] if self.microbatches else []
        return ", ".join(said)


EVEN = Division()


def _ratio(speeds: Sequence[float]) -> str:
    return ":".join(f"{x / min(speeds):.3g}" for x in speeds)


def relative_speeds(fabric: Fabric, cost: Cost, graph: OpGraph) -> dict[str, float]:
    """Speed of every device at the whole model, the fastest being 1."""
    known: dict[tuple[object, ...], float] = {}
    found: dict[str, float] = {}
    for d in fabric.devices:
        kind = (tuple(sorted(d.flops.items())), d.memory_bandwidth_Bps, d.cpu_share)
        if kind not in known:
            known[kind] = sum(cost.roofline(w, d).time_s for n in graph.nodes for w in (n.forward, n.backward) if w != Work())
        found[d.name] = known[kind]
    least = min(found.values(), default=0.0)
    return {name: least / time_s if time_s else 1.0 for name, time_s in found.items()}


def device_orders(fabric: Fabric, speeds: dict[str, float]) -> list[tuple[str, tuple[Device, ...]]]:
    """(name, devices) of the orders in which unlike devices are worth placing: as they are, fastest first, slowest first; equal ones once."""
    found: dict[tuple[str, ...], tuple[str, tuple[Device, ...]]] = {}
    for name, sign in (("", 0), ("fastest first", -1), ("slowest first", 1)):
        devices = sorted(fabric.devices, key=lambda d: sign * speeds[d.name])
        found.setdefault(tuple(d.name for d in devices), (name, tuple(devices)))
    return list(found.values())


def divide(degrees: tuple[int, int, int], microbatches: int, speed_of: Callable[[int, int, int], float]) -> Division:
    """The division for (data, tensor, pipeline) degrees and so many micro-batches of all replicas; `speed_of(pipeline, data, tensor index)`."""
    data, tensor, pipeline = degrees
    cells = [[[speed_of(p, d, t) for t in range(tensor)] for d in range(data)] for p in range(pipeline)]
    parts = _same(min(cells[p][d][t] / max(cells[p][d]) for p in range(pipeline) for d in range(data)) for t in range(tensor))
    # a group is as fast as its ranks together where each gets its share, as its slowest one where all get the same
    group = [[sum(x) if parts else tensor * min(x) for x in row] for row in cells]
    totals = [sum(group[p][d] for p in range(pipeline)) for d in range(data)]
    counts: tuple[int, ...] = ()
    if len(set(totals)) > 1 and microbatches > data:
        counts = largest_remainder(microbatches, totals)
        counts = () if len(set(counts)) == 1 else counts
    load = [c / max(counts) for c in counts] or [1.0] * data
    stages = _same(min(group[p][d] / load[d] for d in range(data)) for p in range(pipeline))
    return Division(stage_speeds=stages, tensor_speeds=parts, microbatches=counts)


def _same(speeds: Iterable[float]) -> tuple[float, ...]:
    """Empty where all are the same, but for rounding."""
    found = tuple(speeds)
    return found if max(found) > min(found) * (1 + 1e-9) else ()


def moved(division: Division, source: int, target: int) -> Division | None:
    """One micro-batch from a replica to another; None where the source would have none."""
    counts = list(division.microbatches)
    if not counts or counts[source] < 2 or source == target:
        return None
    counts[source] -= 1
    counts[target] += 1
    return replace(division, microbatches=() if len(set(counts)) == 1 else tuple(counts))
