"""`run_placement`: a placement on processes, of this machine or a lab, measured beside simulated; where a device is lost, the rest is replanned.

The prediction is the simulator's for the machine's own speeds: in a lab its measured links, and the quotas that devices stand still under.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...decide.place.remaining import AT, remaining
from ...decide.place.search import Search
from ...drive.place import devices_of, plan_placement, tasks_of
from ...drive.plans import check_plan, cost_of, fabric_of, simulate_plan, write_plan
from ...errors import MeshwrightError, RankDied, RankFailed, UsageError
from ...fabric.edit import without
from ...fabric.fabric import Fabric
from ...graph.tasks import TaskGraph
from ...plan.plan import Plan
from ...program.program import Kind
from ...timeline import Spans, Timeline
from ..executor.lanes import fuse_lanes
from ..ranks.launcher import LocalRanks, scratch_folder
from .rank import PLAN, PlaceReport, PlaceRequest, place_rank, times_of

__all__ = ["PlacementRun", "Round", "measured_work", "run_placement"]


@dataclass(frozen=True, kw_only=True)
class Round:
    """What ran between two losses. `measured`: spans of tasks, from the moment at which all devices were there, of the run of median time or of the
    one that ended early; `runs_s`: of every whole run. `took_s`: of every task that ended, what its device needs for it: its processor time over the
    device's share of a core, or its time where the device has no share; median of the runs. `lost`: the device that then died."""

    plan: Plan
    simulated: Timeline
    measured: Timeline
    runs_s: tuple[float, ...]
    finished: tuple[str, ...]
    took_s: Mapping[str, float] = field(default_factory=dict)
    lost: str = ""


@dataclass(frozen=True, kw_only=True)
class PlacementRun:
    """Rounds: one, unless devices were lost."""

    rounds: tuple[Round, ...]

    @property
    def measured_s(self) -> float:
        """From the first round's beginning to the last task's end, without the time in which processes start and plans are made again."""
        return sum(r.measured.makespan_s for r in self.rounds)

    @property
    def simulated_s(self) -> float:
        """Of the plan that it began with."""
        return self.rounds[0].simulated.makespan_s


def run_placement(
    plan: Plan, *, work: str = "", lab: Any = None, runs: int = 1, timeout_s: float = 300.0, replan: bool = True, seed: int = 0,
    told: Callable[[str], None] | None = None,
) -> PlacementRun:  # fmt: skip
    """Runs every task once, on the process of its device.

    Args:
        work: FILE.py:function, called (task, inputs by parent, outputs by child; arrays of bytes to read and to fill); "": each task takes as much
            processor time as its device gives it in the time that the plan says.
        lab: a `Lab` of the plan's devices: shaped links, and their shares of cores. Without: loopback, and quotas of the devices' own.
        runs: one after the other, by the same processes. After a loss the rest is run once.
        replan: where a device dies, run on without it what it leaves undone; else RankDied.

    Raises: RankDied, RankFailed (a task's function failed), RunTimeout; where a device is lost and the others cannot go on,
    what `remaining` raises."""
    if runs < 1:
        raise UsageError(f"must be at least 1, got {runs}", where="--runs")
    done: list[Round] = []
    with ExitStack() as stack:
        held: dict[str, str] = {}
        while True:
            folder = stack.enter_context(scratch_folder("place"))
            one, lost = _round(plan, folder, work, lab, 1 if done else runs, timeout_s, held)
            done.append(one)
            if lost is None:
                return PlacementRun(rounds=tuple(done))
            if not replan:
                raise lost
            if told is not None:
                told(f"device {one.lost} is lost after {len(one.finished)} tasks: planning again without it")
            plan, held = _again(one, folder, held, seed)


def _again(one: Round, folder: Path, held: Mapping[str, str], seed: int) -> tuple[Plan, dict[str, str]]:
    """The plan of what remains, and files of results that remain, by edge."""
    on, graph = devices_of(one.plan), tasks_of(one.plan)
    left = remaining(graph, without(fabric_of(one.plan), [one.lost]), on, one.finished)
    plan, _, _ = plan_placement(left, [Search()], seed=seed)
    files = {f"{e.src}>{e.dst}": str(folder / f"buffer-{b}") for e, b in zip(graph.edges, _made(one.plan), strict=True)}
    needed = {t.name for t in left.graph.tasks if t.kind.startswith(AT)}
    return plan, {**held, **{k: f for k, f in files.items() if any(k.startswith(f"{n}>") for n in needed)}}


def _made(plan: Plan) -> list[int]:
    """Of every edge the buffer that its task writes."""
    p = plan.main
    writes = {p.ops.graph[op]: p.ops.writes[op].tolist()[::3] for op in range(len(p.ops))}
    return [writes[e.src].pop(0) for e in tasks_of(plan).edges]


def _round(
    plan: Plan, folder: Path, work: str, lab: Any, runs: int, timeout_s: float, held: Mapping[str, str]
) -> tuple[Round, MeshwrightError | None]:
    check_plan(plan)
    fabric = fabric_of(plan) if lab is None else lab.as_measured(fabric_of(plan))
    simulated = simulate_plan(plan, target=fabric)
    p, ranks = plan.main, plan.main.ranks
    start, end = np.zeros(len(p.steps)), np.zeros(len(p.steps))
    start[simulated.spans.step], end[simulated.spans.step] = simulated.spans.start_s, simulated.spans.end_s
    orders = fuse_lanes(p, start, end, late_receives=True)
    shares = [fabric.device(name).cpu_share for name in plan.placement[:ranks]]
    request = PlaceRequest(
        orders=[o.tolist() for o in orders], shares=shares, quotas=lab is None, work=_absolute(work), runs=runs, held=dict(held), timeout_s=timeout_s
    )
    write_plan(folder / PLAN, plan)
    (folder / "request.json").write_bytes(msgspec.json.encode(request))
    lost = _ran(plan, folder, lab, timeout_s)
    gone = "" if lost is None else plan.placement[int(lost.data["rank"])]
    times, measured, runs_s = _measured(plan, folder, fabric, runs, whole=lost is None)
    took_s = _took_s(times, measured.spans, shares)
    return Round(plan=plan, simulated=simulated, measured=measured, runs_s=runs_s, finished=tuple(took_s), took_s=took_s, lost=gone), lost


def _absolute(work: str) -> str:
    place, _, function = work.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if place.endswith(".py") else work


def _ran(plan: Plan, folder: Path, lab: Any, timeout_s: float) -> MeshwrightError | None:
    """The death of a device, or None where all ended well."""
    names = plan.placement[: plan.main.ranks]
    if lab is None:
        try:
            LocalRanks(len(names), folder, place_rank, {}, limit_s=timeout_s, limit_hint="raise --timeout").run()
        except RankDied as died:
            return _named(names, int(died.data["rank"]), died.message) if int(died.data.get("exit", 0)) < 0 else _raised(died)
        return None
    at = [lab.device_number(name) for name in names]
    try:
        line = [sys.executable, "-m", f"{__package__}.rank", str(folder)]
        lab.run(line, ranks=at, order=at, timeout_s=timeout_s, env={"OMP_NUM_THREADS": "1"})
    except RankFailed as failed:
        first, codes = int(failed.data["rank"]), list(failed.data["returncodes"])
        killed = [r for r, code in enumerate(codes) if code < 0 and code != -signal.SIGTERM]  # survivors are ended by SIGTERM
        if not killed:
            raise
        rank = first if first in killed else killed[0]
        return _named(names, rank, f"its process was killed by signal {-codes[rank]}")
    return None


def _named(names: tuple[str, ...], rank: int, what: str) -> MeshwrightError:
    return RankDied(f"device {names[rank]} was lost: {what}", where=names[rank], hint="leave out --no-replan to run the rest without it",
                    data={"rank": rank, "device": names[rank]})  # fmt: skip


def _raised(error: MeshwrightError) -> MeshwrightError:
    raise error


def _measured(
    plan: Plan, folder: Path, fabric: Fabric, runs: int, *, whole: bool
) -> tuple[NDArray[np.float64], Timeline, tuple[float, ...]]:
    """([runs, tasks that ended in one run, 3] as ranks wrote it, spans of that run, seconds of whole runs): where all ended well the run of median
    time, else the last."""
    p, graph = plan.main, tasks_of(plan)
    steps = np.flatnonzero(p.steps.kind == int(Kind.COMPUTE))
    lanes = p.lane_of_step()[steps]
    ranks, names = p.lanes.actor[lanes], [p.ops.graph[int(p.steps.op[s])] for s in steps.tolist()]
    times = np.zeros((runs, len(steps), 3))
    for n, (rank, name) in enumerate(zip(ranks.tolist(), names, strict=True)):
        if (folder / f"times-{rank:03d}").exists():
            times[:, n] = times_of(folder, rank, runs, len(graph.tasks))[:, graph.number_of[name]]
    reports = [msgspec.json.decode(f.read_bytes(), type=PlaceReport).began_s for f in sorted(folder.glob("rank-*.json"))]
    began = times[..., 0].min(1, where=times[..., 0] > 0, initial=np.inf) if not reports else np.array(reports).min(0)
    runs_s = times[..., 1].max(1) - began if whole else np.zeros(0)
    run = int(np.argsort(runs_s)[len(runs_s) // 2]) if whole else int(np.flatnonzero(times.any((1, 2)))[-1]) if times.any() else 0
    ended = times[run, :, 1] > 0
    start_s, end_s = (times[run, ended, :2].T - began[run]) if ended.any() else np.zeros((2, 0))
    ran = [name for name, there in zip(names, ended.tolist(), strict=True) if there]
    spans = Spans(
        rank=ranks[ended].astype(np.int32), lane=lanes[ended].astype(np.int32), step=steps[ended].astype(np.int32),
        iteration=np.zeros(len(ran), np.int32), start_s=start_s, end_s=end_s, name=ran,
    )  # fmt: skip
    timeline = Timeline(origin="measured", run_fabric=fabric.name, spans=spans, makespan_s=float(end_s.max(initial=0.0)))
    return times[:, ended], timeline, tuple(runs_s.tolist())


def _took_s(times: NDArray[np.float64], spans: Spans, shares: list[float]) -> dict[str, float]:
    found = {}
    for n, name in enumerate(spans.name):
        begin_s, end_s, cpu_s = times[times[:, n, 1] > 0, n].T
        share = shares[int(spans.rank[n])]
        found[name] = float(np.median(cpu_s / share if 0 < share < 1 else end_s - begin_s))
    return found


def measured_work(found: PlacementRun) -> TaskGraph:
    """The tasks that were planned, with the work that each took on its device in the first round: a plan of these has costs that were measured where
    tasks run, beside the others. What did not end there, and what has no work, is as planned."""
    first = found.rounds[0]
    graph, table, ops = tasks_of(first.plan), cost_of(first.plan).table, first.plan.main.ops
    planned_s = {ops.graph[op]: table[key].time_s for op in range(len(ops)) if (key := f"{ops.graph[op]}|{ops.name[op]}") in table}
    tasks = []
    for task in graph.tasks:
        before_s = planned_s.get(task.name, 0.0)
        more = first.took_s[task.name] / before_s if task.name in first.took_s and before_s > 0 else 1.0
        tasks.append(msgspec.structs.replace(task, work=task.work * more))
    return msgspec.structs.replace(graph, tasks=tuple(tasks))
