"""Types of the placement decision: which task runs on which device, and in which order each device runs its tasks.

Times are those of the fabric: a task takes work over the device's rate for its kind (`Device.runs`, or `flops`); a message takes the latencies of its
route and its bytes over the rate of the narrowest link, as the simulator has it. While a schedule is sought, messages share no links, or take turns
on them; what they really lose by sharing shows when the finished plan is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import Infeasible, UsageError
from ...fabric.fabric import Device, Fabric
from ...graph.tasks import ANY, TaskGraph
from ...kernels.tasks import timed
from ..strategies import Listed

__all__ = ["NO_ROUTES", "OBJECTIVES", "PlaceProblem", "PlaceStrategy", "Placement", "rate_of"]

OBJECTIVES = {"makespan": "s", "energy": "J", "cost": "s"}  # what a placement is chosen by, and its unit
MAX_ENTRIES = 50_000_000  # of the table of tasks by devices, 400 MB


def rate_of(device: Device, kind: str) -> int:
    """Operations per second of the device for tasks of this kind; 0: it cannot run them."""
    return device.rate_of("" if kind == ANY else kind)


class Arrays(NamedTuple):
    """What the kernels read, in their order: seconds of tasks on devices, parents with bytes, and messages' delay and seconds per byte."""

    dur: NDArray[np.float64]
    ptr: NDArray[np.int64]
    parent: NDArray[np.int64]
    size: NDArray[np.float64]
    delay: NDArray[np.float64]
    per_byte: NDArray[np.float64]


class Routes(NamedTuple):
    """Links of the route between two devices, by `from * devices + to`, and every link's seconds per byte; all empty: messages share no links."""

    ptr: NDArray[np.int64]
    link: NDArray[np.int64]
    per_byte: NDArray[np.float64]


NO_ROUTES = Routes(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, kw_only=True)
class PlaceProblem:
    """`start`: names of devices by task, where a placement is there already: searches start from it, and tasks of devices that have left are placed
    anew. `objective`: one of `OBJECTIVES`. Raises: Infeasible naming the task that no device can run; Disconnected; UsageError for a table that is
    too large."""

    graph: TaskGraph
    fabric: Fabric
    start: Mapping[str, str] | None = None
    objective: str = "makespan"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(f"there is no objective {self.objective[:32]!r}", where="objective", hint=", ".join(OBJECTIVES))
        tasks, devices = len(self.graph.tasks), len(self.fabric.devices)
        if tasks * devices > MAX_ENTRIES:
            raise UsageError(f"{tasks} tasks on {devices} devices are more than {MAX_ENTRIES} pairs", hint="merge tasks, or place on fewer devices")
        for task in self.graph.tasks:
            if not any(rate_of(d, task.kind) for d in self.fabric.devices):
                kinds = sorted({kind for d in self.fabric.devices for kind in (*d.flops, *d.runs)})
                raise Infeasible(
                    f"no device of {self.fabric.name} can run task {task.name}, which is of kind {task.kind!r}", where=f"task {task.name}",
                    hint=f"give a device `runs = {{ {task.kind} = RATE }}`; the fabric's devices run: {', '.join(kinds) or 'nothing'}",
                    data={"task": task.name, "kind": task.kind},
                )  # fmt: skip
        self.fabric.require_connected()

    @cached_property
    def arrays(self) -> Arrays:
        tasks, devices = self.graph.tasks, self.fabric.devices
        rates = {kind: np.array([rate_of(d, kind) for d in devices], np.float64) for kind in {t.kind for t in tasks}}
        with np.errstate(divide="ignore", invalid="ignore"):
            dur = np.array([np.where(rates[t.kind] > 0, t.work / rates[t.kind], np.inf) for t in tasks])
        pairs = np.array(self.graph.pairs, np.int64).reshape(-1, 2)
        by = np.argsort(pairs[:, 1], kind="stable")
        ptr = np.concatenate([[0], np.cumsum(np.bincount(pairs[:, 1], minlength=len(tasks)))])
        size = np.array([e.size_bytes for e in self.graph.edges], np.float64)
        delay, per_byte = self._messages()
        return Arrays(dur, ptr.astype(np.int64), pairs[by, 0].copy(), size[by], delay, per_byte)

    @cached_property
    def edge_numbers(self) -> NDArray[np.int64]:
        """Numbers of the graph's edges, in the order of `Arrays.parent`."""
        return np.argsort(np.array(self.graph.pairs, np.int64).reshape(-1, 2)[:, 1], kind="stable").astype(np.int64)

    @cached_property
    def children(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Children in CSR form."""
        pairs = np.array(self.graph.pairs, np.int64).reshape(-1, 2)
        by = np.argsort(pairs[:, 0], kind="stable")
        ptr = np.concatenate([[0], np.cumsum(np.bincount(pairs[:, 0], minlength=len(self.graph.tasks)))])
        return ptr.astype(np.int64), pairs[by, 1].copy()

    def _messages(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        devices = range(len(self.fabric.devices))
        costs = np.array([[self.fabric.message_costs(a, b) for b in devices] for a in devices])
        return np.ascontiguousarray(costs[..., 0]), np.ascontiguousarray(costs[..., 1])

    @cached_property
    def bursts(self) -> NDArray[np.float64]:
        """Bytes that a message may send at once where buckets of its route are full, at most, [devices, devices]."""
        devices = range(len(self.fabric.devices))
        return np.array([[max([self.fabric.links[x].burst_bytes for x in self.fabric.route(a, b)], default=0) for b in devices] for a in devices])

    @cached_property
    def routes(self) -> Routes:
        devices = range(len(self.fabric.devices))
        found = [self.fabric.route(a, b) for a in devices for b in devices]
        ptr = np.concatenate([[0], np.cumsum([len(r) for r in found])]).astype(np.int64)
        return Routes(ptr, np.array([x for r in found for x in r], np.int64), np.array([1 / x.rate_Bps for x in self.fabric.links]))

    def placement(self, strategy: PlaceStrategy, sequence: Any, on: Any, *, evaluations: int, notes: Mapping[str, Any] | None = None) -> Placement:
        """The placement of a sequence and a device for every task, timed."""
        seq, where = np.asarray(sequence, np.int64), np.asarray(on, np.int64)
        start, end, arrive = np.empty(len(where)), np.empty(len(where)), np.empty(len(self.arrays.parent))
        makespan_s = float(timed(seq, where, *self.arrays, *NO_ROUTES, start, end, arrive))
        return Placement(
            strategy=strategy.name, on=tuple(where.tolist()), sequence=tuple(seq.tolist()), start_s=tuple(start.tolist()),
            makespan_s=makespan_s, evaluations=evaluations, notes=dict(notes or {}),
        )  # fmt: skip

    def by_start(self, start: NDArray[np.float64]) -> NDArray[np.int64]:
        """The sequence of tasks that begin at these times."""
        place = np.empty(len(start), np.int64)
        place[list(self.graph.order)] = np.arange(len(start))
        return np.lexsort((place, start)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`on[task]`: number of its device. `sequence`: a topological order; each device runs its tasks in it. `start_s[task]` and `makespan_s` with
    messages that share no links. `evaluations`: schedules looked at."""

    strategy: str
    on: tuple[int, ...]
    sequence: tuple[int, ...]
    start_s: tuple[float, ...]
    makespan_s: float
    evaluations: int
    notes: Mapping[str, Any] = field(default_factory=dict)


class PlaceStrategy(Listed, Protocol):
    """A frozen dataclass of options."""

    def plan(self, problem: PlaceProblem, *, rng: np.random.Generator) -> Placement: ...
