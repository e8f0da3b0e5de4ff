"""Placements of a layout's ranks that are worth judging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from ...fabric.fabric import Device, Fabric
from ...plan.plan import TrainingLayout

__all__ = ["placements_of"]


def placements_of(
    layout: TrainingLayout, fabric: Fabric, orders: Sequence[tuple[str, Sequence[Device]]] = ()
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Ranks on devices: every nesting of the axes in every one of the orders (the fabric's, if none is given), equal ones once; innermost first."""
    sizes = {"tensor": layout.tensor, "data": layout.data, "pipeline": layout.pipeline}
    axes = [a for a in ("tensor", "data", "pipeline") if sizes[a] > 1]
    seen: set[tuple[str, ...]] = set()
    for called, devices in orders or [("", fabric.devices)]:
        for nesting in permutations(axes):
            placement = _place(layout, devices, nesting)
            if placement not in seen:
                seen.add(placement)
                yield ", ".join(filter(None, (" in ".join(nesting) or "single device", called))), placement


def _place(layout: TrainingLayout, devices: Sequence[Device], nesting: Sequence[str]) -> tuple[str, ...]:
    sizes = {"tensor": layout.tensor, "data": layout.data, "pipeline": layout.pipeline}
    names = []
    for rank in range(layout.ranks):
        pipeline, data, tensor = layout.coordinates(rank)
        at = {"pipeline": pipeline, "data": data, "tensor": tensor}
        index, stride = 0, 1
        for axis in nesting:
            index += at[axis] * stride
            stride *= sizes[axis]
        names.append(devices[index].name)
    return tuple(names)


