"""Costs of the machine a run really has, measured at its start in its own ranks, under its own pacing.

All ranks time messages together; then each runs its own steps of the plan's program for real with its messages left out
(`run.calibrate.rank_times`), all at the same time, so shared caches and memory are as contended as in the run. Prices of a segment are
the mean over the ranks that have it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...cost import Cost, Priced, RankThread
from ...fabric.fabric import Fabric
from ...program.program import Program
from ...program.tables import I32
from ..executor.device_time import device_time
from ..executor.executor import Executor
from ..executor.memory import RankMemory
from ..executor.transport import Transport
from ..machine.pacing import Pacing, machine_facts
from ..train.count_exchange import CountExchange
from ..train.work import TrainingWork
from .message_times import MessageTimes
from .rank_times import RankTimes, SilentRank, merged_prices
from .transport import Calibration, calibration_of, laptop_shape

__all__ = ["MESSAGE_SIZES", "RankCosts", "cost_of_ranks", "time_rank"]

MESSAGE_SIZES = tuple(16 * 8**i for i in range(7))  # 16 B ... 4 MiB
MESSAGE_BUDGET_S = 0.06  # for each size, in all batches together
REPEATS = 3  # steps that are timed, at least
MAX_WAIT_S = 2e-3  # that a silent message is waited for where ranks take turns on the cores: the shortest one as measured, or less


class RankCosts(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What one rank measured: CPU seconds of its steps, and its part of the message times. `share`: its device's, of a core; 0: as all have.
    `waits_in`: ops that need the small sum."""

    rank: int
    times: RankTimes
    messages: dict[str, Any] = {}
    share: float = 0.0
    waits_in: tuple[str, ...] = ()


def time_rank(
    program: Program, orders: Sequence[I32], rank: int, make: Callable[[], tuple[TrainingWork, RankMemory]], transport: Transport | None,
    device: torch.device, counting: CountExchange | None = None, *, share: float,
) -> RankCosts:  # fmt: skip
    """Measure on this rank, on its device. Collective with a transport, whose messages are timed: all ranks of the default group call it at once.
    `counting`: the small sum that begins a step, on its ranks.

    `make` gives work and memory that may be spoilt.
    """
    parts: dict[str, Any] = {}
    if transport is not None:
        timing = MessageTimes(sizes=MESSAGE_SIZES, budget_s=MESSAGE_BUDGET_S, batches=3, transport=transport, device=device)
        parts = timing.run(counting and counting.group)
    work, memory = make()
    crowded = bool(parts) and device.type == "cpu" and len(orders) > machine_facts(rank=True).cores
    wait_s = min(float(parts["ring"][0]["wall_s"]), MAX_WAIT_S) if crowded else 0.0
    silent = SilentRank(program, rank, device_time(device), wait_s=wait_s)
    executor = Executor(program, orders, rank, memory=memory, transport=silent.transport, work=silent.timed(work), times=silent.times)
    silent.leave_sums(executor.schedule)
    together = _together if transport is not None else bool
    times = silent.measure(executor.run, begin=work.begin, repeats=REPEATS, together=together)
    waits_in = tuple(f"{key}|F" for key in counting.segments) if counting else ()
    return RankCosts(rank=rank, times=times, messages=parts, share=share, waits_in=waits_in)


def _together(more: bool) -> bool:
    """Ranks begin a step at the same time, as after a sum of gradients; whether one of them wants more steps."""
    wanted = torch.tensor([float(more)])
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
    return bool(wanted)


def cost_of_ranks(base: Cost, costs: Sequence[RankCosts], pacing: Pacing, *, seconds: float = 0.0) -> tuple[Fabric, Cost, Calibration | None]:
    """(run fabric, its cost, the fitted calibration or None for one rank) from what all ranks measured. Times of the table hold at `pacing.share`;
    devices of unlike shares take them in proportion."""
    cpu = merged_prices({c.rank: c.times for c in costs})
    table = {key: Priced(p.cpu_s / pacing.share, p.evidence, p.cpu_s) for key, p in cpu.items()}  # wall time = CPU time / share of a core
    source = "measured at the start of the run"
    if len(costs) < 2:
        return laptop_shape(1), base.with_table(table, source=source), None
    costs = sorted(costs, key=lambda c: c.rank)
    shares = [c.share or pacing.share for c in costs]
    calibration = calibration_of([c.messages for c in costs], pacing, shares, seconds=seconds)
    per_step = statistics.median(c.times.per_step_s for c in costs)
    share = pacing.share if pacing.mode == "quota" else 1.0
    transport = msgspec.structs.replace(calibration.transport, per_step_s=per_step / share)
    waits_s = [float(c.messages["small_sum_s"]) for c in costs if "small_sum_s" in c.messages]
    begin_s = statistics.fmean(c.times.begin_s for c in costs)
    waits_in = tuple(sorted({key for c in costs for key in c.waits_in}))
    sums_s = [float(c.messages.get("small_sum_cpu_s", 0.0)) for c in costs if "small_sum_s" in c.messages]
    waits = {"begin_wait_s": statistics.median(waits_s), "sum_cpu_s": statistics.median(sums_s)} if waits_s else {}
    thread = RankThread(begin_s=begin_s, waits_in=waits_in, **waits)
    priced = base.with_table(table, source=source, transport=transport, share=pacing.share if len(set(shares)) > 1 else 0.0)
    return calibration.fabric, msgspec.structs.replace(priced, thread=thread), calibration
