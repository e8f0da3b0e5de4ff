"""How much of the injection can be uniform all-to-all traffic: the linear program of all flows at once, folded by the network's translations.

Every accelerator sends f to every other over any ways; f is as large as the links allow. Flows to one destination are one commodity. Where moving all
boards by some rows and columns maps the network onto itself, destinations of one board stand for all: the load of a link is the sum, over the links
that it is moved to, of the flows to that board. Answers are floats of a linear program; the cut beside them is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....errors import Unsupported
from ....fabric.fabric import Fabric
from ....kernels import highs
from .strategy import LINKS, Mesh

__all__ = ["MAX_COLUMNS", "global_share", "mesh_share"]

MAX_COLUMNS = 40_000  # destinations · links of one program: 256 accelerators of Hx2Mesh take 6,144, Hx4Mesh 17,408


def mesh_share(mesh: Mesh) -> float:
    """Of a HammingMesh's injection. Raises: Unsupported for a program that is too large."""
    from .network import Builder

    builder = Builder(1, 0.0)
    mesh.build(builder)
    fabric = builder.fabric(mesh.name, "one plane")

    def kind(name: str) -> str:
        """What is the same in every board: the place on it, or the row or column of accelerators."""
        return name.partition("/")[2] or "".join(c for c in name if c.isalpha()) + name.partition(".")[2]

    first = [i for i, d in enumerate(fabric.devices) if d.group == "b0.0"]
    return global_share(fabric, links=LINKS, orbit=lambda k: (kind(fabric.links[k].src), kind(fabric.links[k].dst)), destinations=first)


def global_share(fabric: Fabric, *, links: int, orbit: Callable[[int], object] | None = None, destinations: Sequence[int] | None = None) -> float:
    """Of the injection, which is `links` times the rate 1. `orbit`: equal for links that a translation maps onto each other (default: each alone);
    `destinations`: devices that stand for all (default: all). Raises: Unsupported for a program that is too large."""
    devices, arcs = len(fabric.devices), list(fabric.link_ends)
    goals = list(range(devices)) if destinations is None else list(destinations)
    columns = len(goals) * len(arcs)
    if columns > MAX_COLUMNS:
        raise Unsupported(f"{columns} flows make too large a linear program, of at most {MAX_COLUMNS}", where="bandwidth", hint="take the cut")
    keys: dict[object, int] = {}
    orbits = np.array([keys.setdefault(k if orbit is None else orbit(k), len(keys)) for k in range(len(arcs))])
    rates = np.zeros(len(keys))
    rates[orbits] = [x.rate_Bps for x in fabric.links]
    lp = highs.solver()
    upper = np.full(columns + 1, np.inf)
    for i, goal in enumerate(goals):
        upper[[1 + i * len(arcs) + k for k in fabric.out_links[goal]]] = 0.0  # what has arrived stays
    lp.addVars(columns + 1, np.zeros(columns + 1), upper)
    lp.changeColCost(0, -1.0)
    for row in range(len(keys)):
        own = np.flatnonzero(orbits == row)
        _row(lp, -np.inf, float(rates[row]), (1 + own[None, :] + len(arcs) * np.arange(len(goals))[:, None]).ravel(), np.ones(len(own) * len(goals)))
    for i, goal in enumerate(goals):
        for node in range(len(fabric.actor_names)):
            if node != goal:
                out, into = fabric.out_links[node], fabric.in_links[node]
                index = np.array([0, *(1 + i * len(arcs) + k for k in (*out, *into))])
                _row(lp, 0.0, 0.0, index, np.array([-1.0 * (node < devices), *[1.0] * len(out), *[-1.0] * len(into)]))
    highs.require_optimal(lp, what="the flow of all pairs")
    return float(highs.values(lp)[0]) * (devices - 1) / links


def _row(lp: Any, low: float, high: float, index: Any, values: Any) -> None:
    lp.addRow(low, high, len(index), np.asarray(index, np.int32), np.asarray(values, np.float64))
