"""A DAG of tasks that exchange data: what is placed on devices of different kinds. Times come from a fabric's devices, transfers from its links."""

from __future__ import annotations

import math
from functools import cached_property

import msgspec

from ..errors import UsageError

__all__ = ["ANY", "MAX_TASKS", "Task", "TaskEdge", "TaskGraph"]

ANY = "any"  # kind of a task that every device can run, at the highest of its rates
MAX_TASKS = 100_000
MAX_EDGES = 1_000_000


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`work`: operations. `kind`: what a device must have a rate for (`Device.runs`, or `flops`): a data type, or any
    word such as "camera" or "decoder"."""

    name: str
    work: float
    kind: str = ANY


class TaskEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`dst` needs `size_bytes` of what `src` makes; 0: it only comes later."""

    src: str
    dst: str
    size_bytes: int = 0


class TaskGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Tasks in any order. Raises: UsageError for equal or empty names, ends that are no task, double edges, work that is no finite number >= 0, a
    cycle (which is named), or more than `MAX_TASKS` tasks or `MAX_EDGES` edges."""

    tasks: tuple[Task, ...]
    edges: tuple[TaskEdge, ...] = ()
    name: str = "tasks"

    def __post_init__(self) -> None:
        if not 1 <= len(self.tasks) <= MAX_TASKS or len(self.edges) > MAX_EDGES:
            hint = "merge small tasks that follow each other"
            raise UsageError(f"{len(self.tasks)} tasks and {len(self.edges)} edges, must be 1..{MAX_TASKS} and at most {MAX_EDGES}", hint=hint)
        for i, task in enumerate(self.tasks):
            where = f"tasks[{i}]"
            if not task.name or self.number_of[task.name] != i:
                raise UsageError(f"the name {task.name!r} is empty or taken", where=where, hint="give every task a name of its own")
            if not (math.isfinite(task.work) and task.work >= 0):
                raise UsageError(f"work of {task.work}", where=f"{where}.work", hint="operations, a finite number from 0 on")
        seen = set()
        for i, edge in enumerate(self.edges):
            where = f"edges[{i}]"
            for end in (edge.src, edge.dst):
                if end not in self.number_of:
                    raise UsageError(f"there is no task {end[:64]!r}", where=where)
            if edge.size_bytes < 0 or (edge.src, edge.dst) in seen:
                raise UsageError(f"{edge.src} to {edge.dst}: of {edge.size_bytes} bytes, or twice", where=where, hint="one edge between two tasks")
            seen.add((edge.src, edge.dst))
        self.order  # noqa: B018  # finds cycles

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The first task of each name."""
        found: dict[str, int] = {}
        for i, task in enumerate(self.tasks):
            found.setdefault(task.name, i)
        return found

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The tasks of every edge, by number."""
        return tuple((self.number_of[e.src], self.number_of[e.dst]) for e in self.edges)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order: of those that could come next always the one of the smallest number. Raises: UsageError naming a cycle."""
        import heapq

        children: list[list[int]] = [[] for _ in self.tasks]
        waits = [0] * len(self.tasks)
        for a, b in self.pairs:
            children[a].append(b)
            waits[b] += 1
        ready = [i for i, n in enumerate(waits) if not n]
        found = []
        while ready:
            i = heapq.heappop(ready)
            found.append(i)
            for j in children[i]:
                waits[j] -= 1
                if not waits[j]:
                    heapq.heappush(ready, j)
        if len(found) < len(self.tasks):
            names = " > ".join(self.tasks[i].name for i in self._cycle(set(range(len(self.tasks))) - set(found)))
            raise UsageError(f"tasks wait for each other in a circle: {names}", where="edges", hint="a task graph has no cycles: take one edge out")
        return tuple(found)

    def _cycle(self, left: set[int]) -> list[int]:
        """Tasks of a cycle among those that no order reaches, the first one again at the end."""
        before = {b: a for a, b in self.pairs if a in left and b in left}
        at, seen = next(iter(before)), dict[int, int]()
        while at not in seen:
            seen[at] = len(seen)
            at = before[at]
        chain = [*seen][seen[at] :]
        return [*reversed(chain), chain[-1]]
