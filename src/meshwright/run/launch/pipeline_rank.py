"""One rank of a rehearsed pipeline: measures what an action and a message cost, then walks the plan's program a number of times."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ...decide.pipeline.orders import message_bytes
from ...decide.pipeline.problem import PipelineProblem, Schedule
from ...drive.pipeline.pipelines import problem_of_plan, schedule_of_plan
from ...io.plan.plan import read_plan
from ...io.plan.run_names import PLAN
from ...plan.plan import Plan
from ...program.calls import inline
from ...program.tables import I32
from ..executor.device_time import device_time
from ..executor.executor import Executor
from ..executor.transport import Transport, own_device, own_transport
from ..machine.process import CALIBRATING, DONE, POSITION, STATE, STEP, TRAINING
from ..pipeline.host import WaitingTensors
from ..pipeline.memory import PipelineMemory
from ..pipeline.orders import meetings, pipeline_orders
from ..pipeline.second_order import Exchange, StageKFAC, worst_kfac_difference
from ..pipeline.stages import Given, PacedStage, given_stages, precise_sleep
from ..pipeline.times import fill_seconds, paced_times, with_pairs
from ..pipeline.work import StageWork, gradient_flats, stage_segment
from ..ranks.worker import RankLink, Seat
from ..steps.stand_in import as_they_are
from .setup import fetch_orders

__all__ = [
    "PipelineOptions", "RankResult", "RankStages", "Walk", "make_cycle", "make_walk", "message_time", "rehearsing_rank", "run_pipeline_rank",
    "worst_difference",
]  # fmt: skip

REPETITIONS = 5  # timed walks, after one that warms up
MESSAGES = 21  # timed, of which the median counts
START_DELAY_S = 0.01  # from the agreement on a start to the start, so that every rank hears of it in time
IDLE_S = 0.01  # between timed messages: in a pipeline they come one by one, and their receiver sleeps
LARGE_MESSAGE_BYTES = 4 << 20  # of the second size that is timed: the difference of both gives the rate


class PipelineOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a rehearsal is told, the same for all ranks. `stages`: a function that gives stage modules; "": paced ones."""

    steps: int
    stages: str = ""
    device: str = "cpu"
    timeout_s: float = 60.0
    verify: bool = False  # compare loss and gradients with a serial run of the given stages


class RankResult(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`action_s`: measured seconds by price key; `starts_s`, `ends_s`: of every measured step by this machine's clock.

    `digests`: of every stage's final gradients, "<stage>" -> hash, where the stage has copies or replicas. `worst`: largest relative
    difference from the serial run's loss and gradients; `worst_kfac` of a filled plan: from a serial K-FAC step's gradients, preconditioned.
    `kfac_done`: uses of layers whose curvature was collected, and inverses. `unused_peak`: most messages received or expected and not yet used.
    """

    rank: int
    action_s: dict[str, float] = {}
    message_s: float = 0.0  # of message_bytes
    message_bytes: int = 0
    rate_Bps: int = 0  # of large messages, 0: not measured on this rank
    starts_s: list[float] = []
    ends_s: list[float] = []
    step_starts_s: list[float] = []  # of the last pass, by position in `order`
    step_ends_s: list[float] = []
    order: list[int] = []
    loss: float | None = None
    digests: dict[str, str] = {}
    worst: float | None = None
    worst_kfac: float | None = None
    kfac_done: dict[str, int] = {}
    precondition_s: float = 0.0  # of all stages here, once, after the last step
    shared_s: float = 0.0  # sending and receiving inverses after the last cycle
    unused_peak: int = 0
    held_peak_bytes: int = 0


class RankStages:
    """The modules of one rank, given or paced, and the micro-batches of its replica."""

    def __init__(self, problem: PipelineProblem, schedule: Schedule, rank: int, given: Given | None, device: torch.device) -> None:
        self.problem, self.schedule, self.given = problem, schedule, given
        self.device = device
        self.replica = rank % problem.data
        self.held = schedule.hosted(rank // problem.data)
        count = schedule.microbatches
        if given is None:
            widths = [max(1, -(-message_bytes(problem, schedule, s) // 4)) for s in range(schedule.stages)]
            self.borders = {s: torch.empty(1, width, device=device) for s, width in enumerate(widths)}
            self.modules: dict[tuple[int, int], nn.Module] = {key: self.paced(*key).to(device) for key in self.held}
            self.inputs: Sequence[torch.Tensor] = [torch.ones(1, widths[0], device=device)] * count
            self.targets: Sequence[torch.Tensor] = [torch.zeros((), device=device)] * count
            self.loss: Any = lambda y, target: (y.mean() - target) ** 2
        else:
            self.borders = {s: border.to(device) for s, border in enumerate(given.borders())}
            self.modules = {key: deepcopy(given.modules[key[1]]).to(device) for key in self.held}
            mine = slice(self.replica * count, (self.replica + 1) * count)
            self.inputs, self.targets = [x.to(device) for x in given.inputs[mine]], [x.to(device) for x in given.targets[mine]]
            self.loss = given.loss
        self.share = 1.0 / (count * problem.data)
        self.segments = {
            (c, s): stage_segment(
                s, self.modules[c, s], self.loss if s == schedule.stages - 1 else None,
                differentiable=s > 0 or (problem.first_input_grad and given is None),
            )
            for c, s in self.held
        }  # fmt: skip

    def paced(self, copy: int, stage: int) -> nn.Module:
        before = self.borders[stage - 1] if stage else self.borders[0]
        return PacedStage(
            self.borders[stage].shape[-1], *paced_times(self.problem, self.schedule, copy, stage), same=before.shape == self.borders[stage].shape
        )

    def measured(self) -> dict[str, float]:
        """Median seconds of every kind of action, run alone on this rank; keys as `lower.price_table`'s."""
        found: dict[str, list[float]] = {}
        times = device_time(self.device)
        now = time.perf_counter if times is None else times.now
        for (c, s), segment in self.segments.items():
            x = self.inputs[0] if not s else torch.ones_like(self.borders[s - 1])
            top = s == self.schedule.stages - 1
            gradient = torch.tensor(self.share, device=self.device) if top else torch.ones_like(self.borders[s])
            graph = f"stage{s}" + (f":c{c}" if self.schedule.copies > 1 else "")
            for turn in range(REPETITIONS + 1):
                if times is not None:
                    times.begin()
                marks = [now()]
                segment.forward(-1, [x], self.targets[:1] if top else [])
                marks.append(now())
                if self.schedule.split:
                    segment.backward_input(-1, [gradient])
                    marks.append(now())
                    segment.backward_weight(-1)
                else:
                    segment.backward(-1, [gradient])
                marks.append(now())
                if times is not None:
                    times.settle(marks)
                for kind, a, b in zip("FIW" if self.schedule.split else "FB", marks[:-1], marks[1:], strict=True):
                    if turn:
                        found.setdefault(f"{graph}|{kind}", []).append(b - a)
            found |= self.measured_copies(c, s, graph, x)
        return with_pairs(self.schedule, {key: statistics.median(values) for key, values in found.items()})


    def measured_copies(self, copy: int, stage: int, graph: str, x: torch.Tensor) -> dict[str, list[float]]:
        """Seconds of copying what a stage saves to the host's memory and back, where the schedule asks for it; by this thread's clock."""
        asked = {(row.stage, self.schedule.copy_of[row.microbatch]) for rows in self.schedule.offloads for row in rows}
        if (stage, copy) not in asked:
            return {}
        segment, waiting = self.segments[copy, stage], WaitingTensors(self.modules[copy, stage])
        found: dict[str, list[float]] = {f"{graph}|O": [], f"{graph}|R": []}
        for turn in range(REPETITIONS + 1):
            waiting.begin(x)
            segment.refer = waiting.refer
            segment.forward(-1, [x], self.targets[:1] if stage == self.schedule.stages - 1 else [])
            for key, move in zip(found, (waiting.leave, waiting.come), strict=True):
                start = time.perf_counter()
                move()
                if self.device.type != "cpu":
                    torch.get_device_module(self.device.type).synchronize(self.device)
                found[key] += [time.perf_counter() - start] if turn else []
            segment.forget()
        segment.refer = as_they_are
        return found


@dataclass
class Walk:
    """One rank, ready: `step()` runs the program once on zeroed gradients."""

    stages: RankStages
    executor: Executor
    work: StageWork
    memory: PipelineMemory
    flats: dict[str, torch.Tensor]

    def step(self) -> tuple[float, float]:
        """(start, end) by `perf_counter`; gradients must be zero: see `clear`."""
        start = time.perf_counter()
        self.executor.run()
        return start, time.perf_counter()

    def clear(self) -> None:
        for flat in self.flats.values():
            flat.zero_()
        self.work.losses.clear()


def make_walk(
    plan: Plan, orders: Sequence[I32], rank: int, given: Given | None, transport: Transport, device: torch.device, progress: Any = None,
    *, before: Walk | None = None, sums: Transport | None = None,
) -> Walk:  # fmt: skip
    """Stages, buffers and the compiled walk of one rank of a pipeline plan. `before`: a walk of the same stages, another step of the plan's cycle.
    `sums`: for what K-FAC adds up, where the transport has no tags."""
    problem, schedule = problem_of_plan(plan), schedule_of_plan(plan)
    stages = RankStages(problem, schedule, rank, given, device) if before is None else before.stages
    program = inline(plan.main, plan.programs).program
    summed = given is not None and schedule.copies * problem.data > 1
    flats = gradient_flats(program, rank, stages.modules, schedule.copies, summed=summed) if before is None else before.flats
    memory = PipelineMemory(program, rank, device, stages.borders, flats)
    kfac = before.work.kfac if before is not None else None
    if before is None and given is not None and (fill := plan.job.get("fill")):
        kfac = StageKFAC(stages.modules, stages.share, fill["items"], fill["placements"], Exchange(sums or transport, rank))
    work = StageWork(
        program, stages.segments, stages.inputs, stages.targets, stages=schedule.stages, share=stages.share, fill_s=fill_seconds(plan), kfac=kfac,
        modules=stages.modules,
    )
    executor = Executor(
        program, orders, rank, memory=memory, transport=transport, work=work, progress=progress, sends_ahead=len(program.steps), sends_first=True,
        together=meetings(program),
    )  # fmt: skip
    return Walk(stages, executor, work, memory, flats)


def make_cycle(
    plan: Plan, orders: Sequence[I32], rank: int, given: Given | None, transport: Transport, device: torch.device, progress: Any = None,
    *, sums: Transport | None = None,
) -> list[Walk]:  # fmt: skip
    """Walks of all steps of a plan's cycle on the same stages; `orders` are those of its first step. Paced work repeats the first one alone."""
    walks = [make_walk(plan, orders, rank, given, transport, device, progress, sums=sums)]
    for entry in plan.cycle[1:] if walks[0].work.kfac is not None else ():
        own = replace(plan, cycle=(entry,))
        theirs = pipeline_orders(own, problem_of_plan(plan), schedule_of_plan(plan))[0]
        walks.append(make_walk(own, theirs, rank, given, transport, device, progress, before=walks[0]))
    return walks


def rehearsing_rank(seat: Seat) -> RankResult:
    """A rank that our launcher started."""
    options = msgspec.convert(seat.options, PipelineOptions)
    plan = read_plan(seat.folder / PLAN)
    link = seat.join(options.device, options.timeout_s)
    return run_pipeline_rank(plan, fetch_orders(link.store), seat.rank, options, link)


def run_pipeline_rank(plan: Plan, orders: Sequence[I32], rank: int, options: PipelineOptions, link: RankLink) -> RankResult:
    """Build the stages, measure, walk. `torch.distributed` is initialised. Raises what goes wrong, `StepFailed` inside a step."""
    torch.set_num_threads(1)
    precise_sleep()
    problem, schedule = problem_of_plan(plan), schedule_of_plan(plan)
    device = own_device(options.device, rank)
    given = given_stages(options.stages, schedule.stages, schedule.microbatches * problem.data) if options.stages else None
    transport = own_transport(rank, device)
    sums = own_transport(rank, device) if transport.grouped and "fill" in plan.job else None
    walks = make_cycle(plan, orders, rank, given, transport, device, link.progress, sums=sums)
    walk, kfac = walks[0], walks[0].work.kfac
    result = RankResult(rank=rank)
    link.go()
    link.progress[STATE] = CALIBRATING
    result.action_s = walk.stages.measured()
    if problem.devices > 1:
        border = max(walk.stages.borders.values(), key=torch.Tensor.numel)
        result.message_s, result.message_bytes = message_time(transport, rank, problem.data, border), border.numel() * border.element_size()
        large_s = message_time(transport, rank, problem.data, torch.empty(LARGE_MESSAGE_BYTES // 4, device=device))
        if large_s > result.message_s:
            result.rate_Bps = int(abs(LARGE_MESSAGE_BYTES - result.message_bytes) / (large_s - result.message_s)) or 1
    dist.barrier()
    link.progress[STATE] = TRAINING
    turns = options.steps + 1 + (-(options.steps + 1) % len(walks))  # whole cycles
    for step in range(turns):
        link.progress[STEP], link.progress[POSITION] = step, 0
        walk = walks[step % len(walks)]
        walk.clear()
        if kfac is not None:
            kfac.begin(first=step % len(walks) == 0)
        _common_start(link.store, step, rank)
        start, end = walk.step()
        if step:
            result.starts_s.append(start)
            result.ends_s.append(end)
        if kfac is not None and walk is walks[-1]:
            start = time.perf_counter()
            kfac.share_inverses()
            result.shared_s = time.perf_counter() - start
    result.order = list(walk.executor.order)
    result.step_starts_s, result.step_ends_s = list(walk.executor.starts), list(walk.executor.ends)
    result.unused_peak, result.held_peak_bytes = max(w.memory.unused_peak for w in walks), max(w.memory.peak_bytes for w in walks)
    if walk.work.losses:
        result.loss = sum(float(x) for x in walk.work.losses.values()) * walk.stages.share
    result.digests = digests(walk.flats)
    if options.verify and given is not None:
        result.worst = worst_difference(given, walk)
    if kfac is not None and given is not None:
        start = time.perf_counter()
        kfac.precondition()
        result.precondition_s = time.perf_counter() - start
        result.kfac_done = dict(kfac.done)
        result.worst_kfac = worst_kfac_difference(given, walk.stages.modules) if options.verify else None
    link.progress[STATE] = DONE
    return result


def message_time(transport: Transport, rank: int, data: int, like: torch.Tensor) -> float:
    """Median seconds from sending the largest border tensor between the first two devices to its arrival at a waiting receiver.

    Both are idle before, as they are in a pipeline: waking up is most of what a small message costs. One machine's clock; 0.0 on other ranks.
    """
    dist.barrier()
    found = 0.0
    marks = torch.zeros(MESSAGES, dtype=torch.float64, device=like.device)
    module: Any = torch.get_device_module(like.device.type)

    def over(work: Any) -> None:
        transport.wait(work)
        module.synchronize(like.device)

    if rank == 0:
        out = torch.zeros_like(like)
        for i in range(MESSAGES):
            time.sleep(IDLE_S)
            marks[i] = time.perf_counter()
            over(transport.send(out, data, 1))
        over(transport.send(marks, data, 2))
    elif rank == data:
        into, arrived = torch.empty_like(like), []
        for _ in range(MESSAGES):
            over(transport.receive(into, 0, 1))
            arrived.append(time.perf_counter())
        over(transport.receive(marks, 0, 2))
        found = statistics.median(b - a for a, b in zip(marks.tolist()[1:], arrived[1:], strict=True))
    dist.barrier()
    return found


def _common_start(store: Any, step: int, rank: int) -> None:
    """All ranks of this machine begin at one moment of its clock."""
    dist.barrier()
    key = f"start/{step}"
    if rank == 0:
        store.set(key, repr(time.perf_counter() + START_DELAY_S))
    left = float(store.get(key)) - time.perf_counter()
    if 0 < left <= START_DELAY_S:
        time.sleep(left)


def digests(flats: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Stage -> hash of its gradients' bits."""
    return {name.split(":")[1]: hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()[:16] for name, flat in flats.items()}


def worst_difference(given: Given, walk: Walk) -> float:
    """Largest difference from a serial run over all micro-batches, relative to the largest element of a tensor (or of the loss)."""
    modules = [deepcopy(m).cpu() for m in given.modules]
    total = 0.0
    for module in modules:
        module.zero_grad()
    for x, target in zip(given.inputs, given.targets, strict=True):
        y = x
        for module in modules:
            y = module(y)
        loss = given.loss(y, target) / len(given.inputs)
        loss.backward()
        total += float(loss.detach())
    worst = 0.0
    for (_, s), module in walk.stages.modules.items():
        for p, serial in zip(module.parameters(), modules[s].parameters(), strict=True):
            if serial.grad is not None and p.grad is not None:
                scale = max(float(serial.grad.abs().max()), 1e-30)
                worst = max(worst, float((p.grad.cpu() - serial.grad).abs().max()) / scale)
    losses = walk.work.losses
    if len(losses) == len(given.inputs):  # a rank that sees the loss of every micro-batch
        mine = sum(float(x) for x in losses.values()) / len(losses)
        worst = max(worst, abs(mine - total) / max(abs(total), 1e-30))
    return worst
