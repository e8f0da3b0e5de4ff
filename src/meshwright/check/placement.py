"""Placements: is every task of the job run once, on a device that can, after the data that it needs has come; and is the bound one of these tasks?

What a task makes for its i-th edge (in the order of the job's edges) is the i-th range that its op writes. A read range holds what its one writer
left there: a task's op, or a receive, which holds what its message was read from. Shares nothing with the planner but the types of job and fabric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from ..bound import Bound
from ..fabric.fabric import Device, Fabric
from ..graph.tasks import ANY, TaskGraph
from ..plan.plan import Plan
from ..program.program import Kind, Part, Program
from .placement_sums import Objective, check_objective
from .program.order import Order, messages
from .program.wellformed import witness
from .verdict import MAX_FINDINGS_OF_A_KIND, Finding

__all__ = ["Placed", "check_placement_bound", "check_tasks", "placed_tasks"]

TOLERANCE = 1e-9  # of sums of floats, relative


@dataclass(frozen=True)
class Placed:
    """The job's tasks, the device of every rank, the seconds that the plan says a task takes, by op key, and what it was chosen by, if not by
    time."""

    graph: TaskGraph
    devices: tuple[Device, ...]
    prices_s: Mapping[str, float]
    fabric: Fabric
    objective: Objective | None = None


def placed_tasks(plan: Plan, fabric: Fabric) -> Placed:
    """Raises: ValueError, KeyError or TypeError for a job that states no tasks, or not so."""
    graph = msgspec.convert(plan.job["tasks"], TaskGraph)
    by_name = {d.name: d for d in fabric.devices}
    devices = tuple(by_name[name] for name in plan.placement[: plan.main.ranks])
    prices = {str(key): float(entry["time_s"] if isinstance(entry, Mapping) else entry[0]) for key, entry in plan.job["cost"]["table"].items()}
    asked = plan.job.get("objective")
    return Placed(graph, devices, prices, fabric, None if asked is None else msgspec.convert(asked, Objective))


def _rate(device: Device, kind: str) -> int:
    return device.rate_of("" if kind == ANY else kind)


def check_tasks(p: Program, job: Placed, order: Order) -> list[Finding]:
    """Findings about who runs what, and whether every edge's bytes are there in time; `order` of the program's one turn."""
    step_of, found = _steps(p, job)
    if found:
        return found[:MAX_FINDINGS_OF_A_KIND]
    writers = _writers(p)
    written = dict.fromkeys(step_of, 0)
    lacks: list[str] = []
    waits: list[tuple[int, int, int]] = []  # (edge, step, step that must come after it)
    for n, edge in enumerate(job.graph.edges):
        child, number = step_of[edge.dst], written[edge.src]
        written[edge.src] += 1
        why, steps = _brought(p, writers, (step_of[edge.src], number), child, max(1, edge.size_bytes))
        lacks.append(why)
        waits += [(n, a, b) for a, b in steps]
    if waits:  # all at once: each question of the order costs a look at the whole of it
        of, first, second = (np.array(column) for column in zip(*waits, strict=True))
        for n in of[~order.before(order.node(first, 0), order.node(second, 0))].tolist():
            lacks[n] = lacks[n] or "nothing makes it wait for them"
    if job.objective is not None:
        lane_of = p.lane_of_step()
        on = {name: int(p.lanes.actor[lane_of[step]]) for name, step in step_of.items()}
        found += check_objective(job.objective, job.graph, job.devices, job.fabric, on)
    for edge, why in zip(job.graph.edges, lacks, strict=True):
        if why:
            text = f"task {edge.dst} needs {edge.size_bytes} bytes of task {edge.src}: {why}"
            found.append(Finding(check="values", message=text, witness=witness(p, step_of[edge.dst], edge=[edge.src, edge.dst])))
    return found[:MAX_FINDINGS_OF_A_KIND]


def _steps(p: Program, job: Placed) -> tuple[dict[str, int], list[Finding]]:
    """The step of every task, and what is wrong with who runs it."""
    found: list[Finding] = []
    step_of: dict[str, int] = {}
    lane_of = p.lane_of_step()
    for step in np.flatnonzero(p.steps.kind == int(Kind.COMPUTE)).tolist():
        op = int(p.steps.op[step])
        name, device = p.ops.graph[op], job.devices[int(p.lanes.actor[lane_of[step]])]
        number = job.graph.number_of.get(name)
        why = ""
        if number is None:
            why = "the job has no such task"
        elif name in step_of or int(p.lanes.repeat[lane_of[step]]) != 1:
            why = "it is run more than once"
        elif not _rate(device, job.graph.tasks[number].kind):
            why = f"device {device.name} cannot run tasks of kind {job.graph.tasks[number].kind!r}"
        else:
            takes, says = job.graph.tasks[number].work / _rate(device, job.graph.tasks[number].kind), job.prices_s.get(p.ops.key(op), -1.0)
            if abs(says - takes) > TOLERANCE * max(takes, 1e-300):
                why = f"device {device.name} takes {takes:.6g} s for it, the plan says {says:.6g} s"
        if why:
            found.append(Finding(check="values", message=f"task {name[:64]}: {why}", witness=witness(p, step, task=name)))
        step_of.setdefault(name, step)
    missing = [t.name for t in job.graph.tasks if t.name not in step_of]
    found += [Finding(check="values", message=f"no device runs task {name}", witness={"task": name}) for name in missing]
    return step_of, found


Writers = dict[int, list[tuple[int, int]]]  # buffer -> (step, number of the range among those that its op writes, or the sending step of a message)


def _writers(p: Program) -> Writers:
    found: Writers = {}
    for step in np.flatnonzero(p.steps.kind == int(Kind.COMPUTE)).tolist():
        for n, buffer in enumerate(p.ops.writes[int(p.steps.op[step])].tolist()[::3]):
            found.setdefault(buffer, []).append((step, n))
    m = messages(p)
    for send, recv in zip(m.send.tolist(), m.recv.tolist(), strict=True):
        if int(p.steps.dst_buffer[recv]) >= 0:
            found.setdefault(int(p.steps.dst_buffer[recv]), []).append((recv, send))
    return found


def _brought(p: Program, writers: Writers, wanted: tuple[int, int], child: int, size_bytes: int) -> tuple[str, list[tuple[int, int]]]:
    """How the child comes by what is wanted, (parent's step, number of the range it writes): pairs of steps that must follow each other; or why no
    range that it reads holds it."""
    why = "it reads nothing of it"
    reads = p.ops.reads[int(p.steps.op[child])].tolist()
    for buffer, count in zip(reads[::3], reads[2::3], strict=True):
        at, reader, pairs = buffer, child, list[tuple[int, int]]()
        while at >= 0 and len(made := writers.get(at, [])) == 1 and len(pairs) <= len(p.steps):
            step, detail = made[0]
            pairs.append((step, reader))
            if int(p.steps.kind[step]) == int(Kind.COMPUTE):
                held = count * int(p.buffers.chunk_bytes[buffer])
                if (step, detail) == wanted and held >= size_bytes:
                    return "", pairs
                why = f"it reads {held} bytes of it" if (step, detail) == wanted else why
                break
            if int(p.steps.parts[step]) & int(Part.ADD) or min(int(p.steps.count[step]), int(p.steps.count[detail])) < count:
                break
            at, reader = int(p.steps.src_buffer[detail]), detail
    return why, []


def check_placement_bound(bound: Bound, job: Placed, fabric: Fabric) -> list[Finding]:
    """The bound's own tasks, devices and links give at least what it claims."""
    data = bound.certificate.data
    try:
        proved = _path_s(job, fabric) if data["form"] == "path" else _load_s(job, dict(data["weights"]))
    except (KeyError, TypeError, ValueError) as error:
        return [Finding(check="certificate", message=f"the placement bound lacks or mangles {error}", witness={"kind": "placement"})]
    if bound.quantity != "placement time" or bound.unit != "s" or bound.parts:
        return [Finding(check="certificate", message="a placement has a bound on its time in seconds, without parts", witness={"unit": bound.unit})]
    if bound.exact > Fraction(proved) * (1 - Fraction(TOLERANCE) / 2):
        text = f"the certificate proves {proved:.9g} s, claimed is {float(bound):.9g} s"
        return [Finding(check="certificate", message=text, witness={"value": bound.value, "form": str(data["form"])[:32]})]
    return []


def _seconds(job: Placed) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[tasks, devices], infinite where a device cannot run a task."""
    return np.array([[t.work / r if (r := _rate(d, t.kind)) else np.inf for d in job.devices] for t in job.graph.tasks])


def _path_s(job: Placed, fabric: Fabric) -> float:
    """The earliest that the last task can end if every task had each device to itself and could choose for each of its children anew."""
    actors = [fabric.actor_of[d.name] for d in job.devices]
    costs = np.array([[fabric.message_costs(a, b) for b in actors] for a in actors])
    latency, per_byte = costs[..., 0], costs[..., 1]
    at_once = np.array([[max([fabric.links[x].burst_bytes for x in fabric.route(a, b)], default=0) for b in actors] for a in actors])
    seconds = _seconds(job)
    into: list[list[tuple[int, int]]] = [[] for _ in job.graph.tasks]
    for (i, j), edge in zip(job.graph.pairs, job.graph.edges, strict=True):
        into[j].append((i, edge.size_bytes))
    ends: dict[int, Any] = {}
    for j in job.graph.order:
        arrives = [(ends[i][:, None] + latency + np.maximum(size - at_once, 0) * per_byte).min(0) for i, size in into[j]]
        ends[j] = seconds[j] + np.max(arrives, 0) if arrives else seconds[j]
    return float(max(e.min() for e in ends.values()))


def _load_s(job: Placed, weights: Mapping[str, Any]) -> float:
    """Of any weights that are not negative: devices are busy for no longer than the makespan, so neither is their weighted mean."""
    y = np.array([float(weights[d.name]) for d in job.devices])
    if len(weights) != len(y) or not (np.isfinite(y).all() and (y >= 0).all() and y.sum() > 0):
        raise ValueError("weights")
    seconds = _seconds(job)
    weighted = np.where(np.isfinite(seconds), np.where(np.isfinite(seconds), seconds, 0) * (y / y.sum()), np.inf)
    return float(weighted.min(1).sum())
