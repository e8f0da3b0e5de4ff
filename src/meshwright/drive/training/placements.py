"""Placements of a layout's ranks that are worth judging.

Replicas, or those that divide experts or positions, often fill some servers and a part of one, or a part of each: 64 ranks in servers of 8, say. In
rank order the step from one to the next then stays in a server at some ranks and leaves it at others, so no two ranks are alike. *Spread*, neighbours
are in different servers, and ranks so many apart as there are servers share one: where servers and their devices are alike, the step from each to the
next is a symmetry of the fabric, and one rank of every stage tells of all. A ring in rank order moves as much over every NIC that it uses as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, permutations

from ...fabric.fabric import Device, Fabric
from ...plan.context import neighbours
from ...plan.plan import TrainingLayout

__all__ = ["placements_of"]


def placements_of(
    layout: TrainingLayout, fabric: Fabric, orders: Sequence[tuple[str, Sequence[Device]]] = (), *, alike: bool = False
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Ranks on devices: every nesting of the axes in every one of the orders (the fabric's, if none is given), equal ones once; innermost first.

    `alike`: for layouts of which one rank of every stage is lowered; each nesting spread over servers first, where that is another one.
    """
    sizes = {"tensor": layout.tensor, "data": layout.data, "pipeline": layout.pipeline}
    axes = [a for a in ("tensor", "data", "pipeline") if sizes[a] > 1]
    seen: set[tuple[str, ...]] = set()
    for called, devices in orders or [("", fabric.devices)]:
        server = _server_size(devices) if alike else 1
        for nesting in permutations(axes):
            plain, spread = (_place(layout, devices, nesting, server=n) for n in (1, server))
            for how, placement in (("spread over servers", spread), ("", plain)) if spread != plain else (("", plain),):
                if placement not in seen:
                    seen.add(placement)
                    yield ", ".join(filter(None, (" in ".join(nesting) or "single device", how, called))), placement


def _server_size(devices: Sequence[Device]) -> int:
    """Devices of every server, where these follow each other and have equally many; else 1."""
    runs = [len(list(found)) for _, found in groupby(devices, lambda d: d.group)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len({d.group for d in devices}) else 1


def _place(layout: TrainingLayout, devices: Sequence[Device], nesting: Sequence[str], *, server: int) -> tuple[str, ...]:
    """`server`: devices of each, over which axes but the pipeline's are spread that neither fit into one nor fill whole ones; 1: none is."""
    near = neighbours(layout)[1]
    of = {
        "tensor": [("tensor", layout.tensor)], "data": [("near", near), ("far", layout.data // near)], "pipeline": [("pipeline", layout.pipeline)],
    }  # fmt: skip
    names = []
    for rank in range(layout.ranks):
        pipeline, data, tensor = layout.coordinates(rank)
        at = {"pipeline": pipeline, "far": data // near, "near": data % near, "tensor": tensor}
        index, stride = 0, 1
        for axis, size in (x for name in nesting for x in of[name]):
            place, each = at[axis], server // stride  # of the axis in a server
            if axis != "pipeline" and stride < server < stride * size and not server % stride and not size % each:
                servers = size // each
                place = place % servers * each + place // servers
            index += place * stride
            stride *= size
        names.append(devices[index].name)
    return tuple(names)
