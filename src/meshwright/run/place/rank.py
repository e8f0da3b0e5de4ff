"""One device of a placement that runs: the executor walks its column of the program; a task is calibrated work, or a user's function.

What tasks make lies in files that are mapped: a process that dies leaves what it made, and when each of its tasks ran. Whether that may still be used
is for the launcher to say: of a device that was lost it may not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...capture.resolve import resolve_function
from ...decide.place.remaining import AT
from ...drive.place import tasks_of
from ...drive.plans import cost_of, read_plan
from ...kernels.garbage import kept_memory
from ...plan.plan import Plan
from ..executor.executor import Executor
from ..executor.memory import RankMemory
from ..executor.transport import TaggedTransport
from ..machine.cpu_quota import CpuQuota
from ..ranks.answers import answer, seated
from ..ranks.worker import Seat

__all__ = ["PLAN", "PlaceReport", "PlaceRequest", "place_rank", "times_of"]

Bytes = NDArray[np.uint8]
PLAN = "plan.json"


class PlaceRequest(msgspec.Struct, kw_only=True):
    """`orders`: every rank's walk; `shares`: of a core, by rank, 0 for a whole one; `quotas`: whether ranks keep their shares themselves;
    `work`: FILE.py:function, "" for calibrated work; `held`: files of results that are there already, by
    edge."""

    orders: list[list[int]]
    shares: list[float]
    quotas: bool
    work: str = ""
    runs: int = 1
    held: dict[str, str] = {}
    timeout_s: float = 300.0


class PlaceReport(msgspec.Struct, kw_only=True):
    """`began_s`: of every run, by the machine's monotonic clock, when all devices were there."""

    began_s: list[float]


def times_of(folder: Path, rank: int, runs: int, tasks: int, *, create: bool = False) -> NDArray[np.float64]:
    """[runs, tasks, 3]: seconds of the monotonic clock at which a task of this rank began and ended, 0: not yet, and of its process's processor time;
    a mapped file."""
    return np.memmap(folder / f"times-{rank:03d}", np.float64, "w+" if create else "r", shape=(runs, tasks, 3))


class _Tasks:
    """What compute steps of a placement do. `program`: the plan's, its buffers named by number, as the executor's memory wants them."""

    def __init__(self, request: PlaceRequest, plan: Plan, folder: Path, rank: int) -> None:
        self.share, self.held = request.shares[rank] or 1.0, request.held
        self.plan, b = plan, plan.main.buffers
        self.program = replace(plan.main, buffers=replace(b, name=tuple(f"buffer{i}" for i in range(len(b)))))
        self.graph = tasks_of(plan)
        self.time_s = {key: priced.time_s for key, priced in cost_of(plan).table.items()}
        self.run, self.times = 0, times_of(folder, rank, request.runs, len(self.graph.tasks), create=True)
        self.work: Callable[..., Any] | None = resolve_function(request.work, what="work") if request.work else None
        self.tensors: dict[str, torch.Tensor] = {}
        for i in np.flatnonzero(b.actor == rank).tolist():
            size = int(b.chunks[i]) * int(b.chunk_bytes[i])
            self.tensors[f"buffer{i}"] = torch.from_file(str(folder / f"buffer-{i}"), shared=True, size=size, dtype=torch.uint8)

    def compile(self, op: int, memory: RankMemory) -> Callable[[], None]:
        ops, graph = self.program.ops, self.graph
        task, number = ops.graph[op], graph.number_of[ops.graph[op]]
        reads, writes = ([self.tensors[f"buffer{b}"].numpy() for b in x[op].tolist()[::3]] for x in (ops.reads, ops.writes))
        # In the order of the job's edges (`decide.place.lower`).
        inputs = dict(zip([e.src for e in graph.edges if e.dst == task], reads, strict=True))
        outputs = dict(zip([e.dst for e in graph.edges if e.src == task], writes, strict=True))
        run = self._work(task, f"{task}|{ops.name[op]}", inputs, outputs)

        def timed() -> None:
            before_s = time.process_time()
            self.times[self.run, number, 0] = time.monotonic()
            run()
            self.times[self.run, number, 2] = time.process_time() - before_s
            self.times[self.run, number, 1] = time.monotonic()

        return timed

    def _work(self, task: str, key: str, inputs: Mapping[str, Bytes], outputs: Mapping[str, Bytes]) -> Callable[[], None]:
        if self.graph.tasks[self.graph.number_of[task]].kind.startswith(AT):
            return lambda: self._fetch(task, outputs)
        if self.work is not None:
            work = self.work
            return lambda: work(task, inputs, outputs)
        cpu_s = self.time_s[key] * self.share
        return lambda: _burn(cpu_s)

    def _fetch(self, task: str, outputs: Mapping[str, Bytes]) -> None:
        """What the task made before a device was lost."""
        for child, out in outputs.items():
            out[:] = np.fromfile(self.held[f"{task}>{child}"], np.uint8)


def _burn(cpu_s: float) -> None:
    """Calibrated work: so much of this thread's processor time."""
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def place_rank(seat: Seat) -> PlaceReport:
    """A rank that the launcher started."""
    return seated(seat, PlaceRequest, lambda request: _run(request, seat.folder))


def _run(request: PlaceRequest, folder: Path) -> PlaceReport:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    tasks = _Tasks(request, read_plan(folder / PLAN), folder, rank)
    memory = RankMemory(tasks.program, rank, torch.device("cpu"), {}, tasks.tensors, torch.uint8)
    orders = [np.array(o, np.int32) for o in request.orders]
    executor = Executor(tasks.program, orders, rank, memory=memory, transport=TaggedTransport(dist.group.WORLD), work=tasks)
    share = request.shares[rank] if request.quotas else 0.0
    quota = CpuQuota(share) if share else None
    try:
        if quota is not None:
            quota.attach(os.getpid())
        began: list[float] = []
        with kept_memory():  # else a task takes longer where no other has run before it in its process
            for tasks.run in range(request.runs):
                dist.barrier()
                began.append(time.monotonic())
                executor.run()
            dist.barrier()
    finally:
        if quota is not None:
            quota.close()
    return PlaceReport(began_s=began)


def main(folder: Path) -> None:
    """A rank that a lab started."""
    answer(folder, PlaceRequest, lambda request: _run(request, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
