"""Placements chosen by energy or cost: does what the plan states add up from who runs what, and is the bound one of these sums?

Energy is watts of a device times its seconds for a task, and joules per byte of every link between two tasks' devices; cost is seconds of tasks and
of messages. The bound's certificate moves parts of messages' sums to their tasks; whatever it moves, the least of every task and of every message
alone add up to no more than any placement. Shares nothing with the planner but the types of job and fabric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from ..bound import Bound
from ..fabric.fabric import Device, Fabric
from ..graph.tasks import ANY, TaskGraph
from .verdict import Finding

__all__ = ["Objective", "check_objective"]

TOLERANCE = 1e-9  # of sums of floats, relative
UNITS = {"energy": "J", "cost": "s"}


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`job.objective` of a placement: `value` of the plan and `bound` of all, in `unit`."""

    name: str
    unit: str
    value: float
    bound: Bound


def check_objective(said: Objective, graph: TaskGraph, devices: Sequence[Device], fabric: Fabric, on: Mapping[str, int]) -> list[Finding]:
    """`on`: number of each task's device among `devices`."""
    if UNITS.get(said.name) != said.unit or (said.bound.quantity, said.bound.unit) != (f"placement {said.name}", said.unit):
        text = f"there is no objective {said.name[:32]} in {said.unit[:8]}, with such a bound"
        return [Finding(check="values", message=text, witness={"field": "job.objective"})]
    task, message = _tables(said.name, graph, devices, fabric)
    total = sum(float(task[i, on[t.name]]) for i, t in enumerate(graph.tasks))
    total += sum(float(message(e.size_bytes)[on[e.src], on[e.dst]]) for e in graph.edges)
    found = []
    if abs(total - said.value) > TOLERANCE * max(abs(total), 1e-300):
        text = f"the placement's {said.name} is {total:.6g} {said.unit}, the plan says {said.value:.6g}"
        found.append(Finding(check="values", message=text, witness={"field": "job.objective.value"}))
    try:
        data = said.bound.certificate.data
        proved = _proved(task, message, graph, data["moved"]) if data["form"] == "messages" and data["objective"] == said.name else None
    except (KeyError, TypeError, ValueError) as error:
        return [*found, Finding(check="certificate", message=f"the bound of {said.name} lacks or mangles {error}", witness={"kind": "placement"})]
    if proved is None or said.bound.exact > Fraction(max(0.0, proved)) * (1 - Fraction(TOLERANCE) / 2):
        text = f"the certificate proves {0.0 if proved is None else proved:.9g} {said.unit} of {said.name}, claimed is {float(said.bound):.9g}"
        found.append(Finding(check="certificate", message=text, witness={"value": said.bound.value}))
    return found


def _tables(name: str, graph: TaskGraph, devices: Sequence[Device], fabric: Fabric) -> tuple[Any, Any]:
    """[tasks, devices] of tasks, infinite where they cannot run, and of a message's bytes [devices, devices]."""
    rates = np.array([[d.rate_of("" if t.kind == ANY else t.kind) for d in devices] for t in graph.tasks], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(rates > 0, np.array([t.work for t in graph.tasks])[:, None] / rates, np.inf)
    actors = [fabric.actor_of[d.name] for d in devices]
    if name == "energy":
        of_links = np.array([[sum(fabric.links[x].joules_per_byte for x in fabric.route(a, b)) for b in actors] for a in actors])
        return seconds * np.array([d.watts for d in devices]), lambda size: size * of_links
    costs = np.array([[fabric.message_costs(a, b) for b in actors] for a in actors])
    return seconds, lambda size: costs[..., 0] + size * costs[..., 1]


def _proved(task: Any, message: Any, graph: TaskGraph, moved: Any) -> float:
    """Raises: ValueError for messages of another shape, or no numbers."""
    edges, devices = len(graph.edges), task.shape[1]
    given = np.array(moved, np.float64).reshape(-1, 2, devices) if moved else np.zeros((edges, 2, devices))
    if given.shape != (edges, 2, devices) or not np.isfinite(given).all():
        raise ValueError("moved")
    can, left, total = np.isfinite(task), task.copy(), 0.0
    for (i, j), edge, (first, second) in zip(graph.pairs, graph.edges, given, strict=True):
        left[i] += first
        left[j] += second
        rest = message(edge.size_bytes) - first[:, None] - second[None, :]
        total += float(rest[np.ix_(can[i], can[j])].min())
    return total + float(left.min(1).sum())
