"""Placements of a layout's ranks that are worth judging.

Replicas, or those that divide experts or positions, often fill some servers and a part of one, or a part of each: 64 ranks in servers of 8, say. In
rank order the step from one to the next then stays in a server at some ranks and leaves it at others, so no two ranks are alike. *Spread*, neighbours
are in different servers, and ranks so many apart as there are servers share one: where servers and their devices are alike, the step from each to the
next is a symmetry of the fabric, and one rank of every stage tells of all. A ring in rank order moves as much over every NIC that it uses as before.
Replicas that fill servers and divide weights or state are two axes: neighbours share a server, and 1 / neighbours of a gather goes over each NIC.
So it is with replicas that divide experts, where their copies (those with the same) can share a server: then 1 / copies goes over each NIC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, permutations

import msgspec

from ...fabric.fabric import Device, Fabric
from ...plan.context import neighbours
from ...plan.plan import TrainingLayout

__all__ = ["placements_of", "with_server_replicas"]


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
            inside = _place(layout, devices, nesting, server=server, inside=True) if _fit_inside(layout, nesting, server) else ()
            if inside and inside not in seen:
                seen.add(inside)
                yield ", ".join(filter(None, (" in ".join(nesting), "copies of experts in servers", called))), inside
            plain, spread = (_place(layout, devices, nesting, server=n) for n in (1, server))
            if with_server_replicas(layout, plain, fabric).server_replicas:
                spread = plain
            for how, placement in (("spread over servers", spread), ("", plain)) if spread != plain else (("", plain),):
                if placement not in seen:
                    seen.add(placement)
                    yield ", ".join(filter(None, (" in ".join(nesting) or "single device", how, called))), placement


def with_server_replicas(layout: TrainingLayout, placement: Sequence[str], fabric: Fabric) -> TrainingLayout:
    """The layout with the number of neighbouring replicas that share a server, where a placement has equally many in each, and they divide weights or
    state and nothing else; and whether those with the same experts share one."""
    here = {d.name: d.group for d in fabric.devices}
    runs = [len(list(found)) for _, found in groupby(here[placement[layout.rank(0, d, 0)]] for d in range(layout.data))]
    alike = layout.zero_level and layout.context == layout.expert == 1 and len(set(runs)) == 1 and 1 < runs[0] < layout.data
    copies = [{here[placement[layout.rank(0, d, 0)]] for d in range(c, layout.data, layout.expert)} for c in range(layout.expert)]
    inside = layout.zero_level and layout.context == 1 < layout.expert < layout.data and all(len(x) == 1 for x in copies)
    return msgspec.structs.replace(
        layout, server_replicas=runs[0] if alike else msgspec.UNSET, copies_in_servers=True if inside else msgspec.UNSET
    )  # fmt: skip


def _server_size(devices: Sequence[Device]) -> int:
    """Devices of every server, where these follow each other and have equally many; else 1."""
    runs = [len(list(found)) for _, found in groupby(devices, lambda d: d.group)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len({d.group for d in devices}) else 1


def _fit_inside(layout: TrainingLayout, nesting: Sequence[str], server: int) -> bool:
    """Whether replicas with the same experts share a server where they are placed first, and those that divide experts do not fit into one."""
    outer = 1  # ranks that lie closer together
    for axis in nesting[: nesting.index("data")] if "data" in nesting else ():
        outer *= layout.tensor if axis == "tensor" else layout.pipeline
    copies = layout.data // layout.expert
    divided = layout.zero_level > 0 and layout.context == 1 < layout.expert and copies > 1
    return divided and server % (outer * copies) == 0 and server < outer * layout.expert


def _place(
    layout: TrainingLayout, devices: Sequence[Device], nesting: Sequence[str], *, server: int, inside: bool = False
) -> tuple[str, ...]:  # fmt: skip
    """`server`: devices of each, over which axes but the pipeline's are spread that neither fit into one nor fill whole ones; 1: none is. `inside`:
    replicas in one place among neighbours come closest together."""
    near = neighbours(layout)[1]
    of = {
        "tensor": [("tensor", layout.tensor)], "data": [("near", near), ("far", layout.data // near)], "pipeline": [("pipeline", layout.pipeline)],
    }  # fmt: skip
    of["data"] = of["data"][::-1] if inside else of["data"]
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
