"""Rehearses a pipeline plan on processes of this machine: what an action and a message cost is measured first, then the schedule runs.

Prediction and measurement meet in one document: the plan's program is simulated once more with the measured times.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ...cost import Cost, Priced
from ...decide.pipeline.lower import price_table
from ...decide.pipeline.problem import PipelineProblem, Schedule
from ...drive.pipeline.pipelines import problem_of_plan, relowered, schedule_of_plan
from ...errors import Unsupported, UsageError
from ...io.plan.plan import write_plan
from ...io.plan.run_names import PLAN
from ...plan.plan import Plan
from ...program.calls import inline
from ...program.tables import I32
from ..pipeline.orders import pipeline_orders
from ..pipeline.stages import Given, given_stages
from ..ranks.launcher import LocalRanks, scratch_folder
from .pipeline_rank import PipelineOptions, RankResult, rehearsing_rank

__all__ = ["Rehearsal", "measured_cost", "pipeline_orders", "rehearse", "with_real_sizes"]

GRADIENT_MULTIPLE_BYTES = 840 * 8  # whole float64s in 1 to 8 equal parts: gradient buffers are cut for any usual number of members


class Rehearsal(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`planned_s`: of the plan, messages and actions costing what it says; `simulated_s`: with the measured costs; `measured_s`: per step, from the
    first start to the last end over ranks. `copies_equal`: gradients of all copies and replicas of every stage have the same bits.
    """

    schema: str = "meshwright.pipeline-run"
    version: int = 1
    strategy: str
    options: dict[str, Any]
    ranks: int
    microbatches: int
    stages: str  # "paced" or the function that gave them
    message_s: float
    action_overhead_s: float | None  # paced: beyond what an action should last, median over kinds and ranks
    planned_s: float
    simulated_s: float
    measured_s: list[float]
    median_s: float
    unused_peak: list[int]
    held_peak_bytes: list[int]
    copies_equal: bool | None
    loss: float | None
    worst_difference: float | None
    kfac_difference: float | None = None  # of a filled plan on given stages: preconditioned gradients from those of a serial K-FAC step
    precondition_s: float = 0.0  # after each step, on the slowest rank
    shared_s: float = 0.0  # after each cycle: inverses go to the other ranks that hold the stage, on the slowest rank
    kfac_done: dict[str, int] = {}  # uses of layers whose curvature was collected, sums over holders, and inverses, over all ranks and cycles


def rehearse(
    plan: Plan, *, stages: str = "", steps: int = 7, device: str = "cpu", timeout_s: float = 60.0, port: int = 0, verify: bool = True
) -> Rehearsal:
    """Run a pipeline plan `steps` times after one pass that is not counted.

    Args:
        stages: a function that gives modules (`stages.given_stages`); without it stages are paced: they last as long as the plan says.
        verify: of given stages, compare gradients and loss with a serial run of the whole model, on every rank.

    Raises: UsageError, Unsupported for given stages of a schedule that shards weights, Infeasible where the given stages' real sizes do not fit, and
    RankDied, RankFailed, RunTimeout, Interrupted of the run.
    """
    if steps < 1:
        raise UsageError(f"must be at least 1, got {steps}", where="--steps")
    if timeout_s <= 0:
        raise UsageError(f"must be positive, got {timeout_s:g}", where="--timeout")
    problem, schedule = problem_of_plan(plan), schedule_of_plan(plan)
    strategy = str(plan.decisions["pipeline"]["strategy"])
    planned_s = plan.prediction.time_s if plan.prediction else 0.0
    if stages and any(c.kind != "all-reduce" for row in schedule.collectives for c in row):
        raise Unsupported(
            "gathers weights and leaves each replica a part of the gradients; given stages hold theirs whole", where=strategy,
            hint="plan without `--option sharded=true`, or leave out --stages to rehearse the messages alone",
        )  # fmt: skip
    if stages and (other := sorted({i["kind"] for i in plan.job.get("fill", {}).get("items", ())} - {"curvature", "inverse", "sync"})):
        raise Unsupported(
            f"work in idle time of kind {other[0]!r} runs paced only", where="--stages", hint="leave --stages out; K-FAC's work is done for real"
        )
    if stages and "fill" not in plan.job:
        given = given_stages(stages, schedule.stages, schedule.microbatches * problem.data)
        plan = with_real_sizes(plan, given)
        problem = problem_of_plan(plan)
    program = inline(plan.main, plan.programs).program
    orders: list[I32] = []

    def prepare(store: Any) -> None:
        from .setup import put_orders

        orders.extend(pipeline_orders(plan, problem, schedule)[0])
        put_orders(store, orders)

    def describe(rank: int, position: int) -> str:
        if rank >= len(orders) or not len(orders[rank]):
            return f"rank {rank}"
        return program.describe(int(orders[rank][min(position, len(orders[rank]) - 1)]))

    options = PipelineOptions(steps=steps, stages=_absolute(stages), device=device, timeout_s=timeout_s, verify=verify and bool(stages))
    with scratch_folder("pipeline") as folder:
        write_plan(folder / PLAN, plan)
        ranks = LocalRanks(program.ranks, folder, rehearsing_rank, options, port=port, timeout_s=timeout_s, describe=describe)
        ranks.run(prepare)
        results = ranks.results(RankResult)
    return _document(plan, problem, schedule, results, strategy, stages, planned_s)


def _absolute(stages: str) -> str:
    place, _, function = stages.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if place.endswith(".py") else stages


def with_real_sizes(plan: Plan, given: Given) -> Plan:
    """The plan made anew for the sizes of real messages and gradients: per device share of the model its largest stage's, times the stages.

    Raises: Infeasible when that does not fit, naming schedules that do.
    """
    problem, schedule = problem_of_plan(plan), schedule_of_plan(plan)
    v = schedule.chunks
    message = [y.numel() * y.element_size() for y in given.borders()]
    gradient = [sum(p.numel() * p.element_size() for p in m.parameters() if p.requires_grad) for m in given.modules]
    gradient = [-(-g // GRADIENT_MULTIPLE_BYTES) * GRADIENT_MULTIPLE_BYTES for g in gradient]

    def largest(values: Sequence[int], times: int) -> tuple[int, ...]:
        return tuple(times * max(values[d * v : (d + 1) * v]) for d in range(schedule.devices))

    real = replace(problem, message_bytes=largest(message, schedule.parts), gradient_bytes=largest(gradient, v), first_input_grad=False)
    return relowered(plan, real)


def measured_cost(problem: PipelineProblem, schedule: Schedule, results: Sequence[RankResult]) -> Cost:
    """Prices of a rank's actions as it measured them; of a forward that runs several micro-batches, as often."""
    found: dict[str, list[float]] = {}
    for r in results:
        for key, seconds in r.action_s.items():
            found.setdefault(key, []).append(seconds)
    table: dict[str, Priced] = {}
    for key in price_table(problem, schedule).table:
        graph, _, kind = key.partition("|")
        base, _, times = graph.partition(":x")
        table[key] = Priced(statistics.median(found[f"{base}|{kind}"]) * int(times or 1), "measured")
    return Cost(name="measured", table=table, source="measured before the first step")


def _document(
    plan: Plan, problem: PipelineProblem, schedule: Schedule, results: Sequence[RankResult], strategy: str, stages: str, planned_s: float
) -> Rehearsal:
    message_s, rate_Bps = max(r.message_s for r in results), min((r.rate_Bps for r in results if r.rate_Bps), default=1 << 62)
    latency_s = max(0.0, message_s - max((r.message_bytes for r in results), default=0) / rate_Bps)
    connected = replace(problem, p2p_latency_s=(latency_s,) * problem.devices, p2p_rate_Bps=(rate_Bps,) * problem.devices)
    sharded = any(c.kind != "all-reduce" for row in schedule.collectives for c in row)
    cost = measured_cost(problem, schedule, results)
    _, timeline = pipeline_orders(plan, connected, schedule, cost)
    asked = price_table(problem, schedule).table
    over = [cost.table[key].time_s - asked[key].time_s for key in asked if asked[key].time_s > 0]
    steps = [max(ends) - min(starts) for starts, ends in zip(_columns(results, "starts_s"), _columns(results, "ends_s"), strict=True)]
    losses = [r.loss for r in results if r.loss is not None]
    known = [r.worst for r in results if r.worst is not None]
    return Rehearsal(
        strategy=strategy, options=dict(plan.decisions["pipeline"]["options"]), ranks=len(results), microbatches=schedule.microbatches,
        stages=stages or "paced", message_s=message_s, action_overhead_s=None if stages or not over else statistics.median(over), planned_s=planned_s,
        simulated_s=timeline.makespan_s, measured_s=steps, median_s=statistics.median(steps), unused_peak=[r.unused_peak for r in results],
        held_peak_bytes=[r.held_peak_bytes for r in results], copies_equal=None if sharded else _equal(results), loss=sum(losses) if losses else None,
        worst_difference=max(known) if known else None,
        kfac_difference=max((r.worst_kfac for r in results if r.worst_kfac is not None), default=None),
        precondition_s=max(r.precondition_s for r in results), shared_s=max(r.shared_s for r in results),
        kfac_done={k: sum(r.kfac_done[k] for r in results) for k in results[0].kfac_done},
    )  # fmt: skip


def _columns(results: Sequence[RankResult], field: str) -> list[list[float]]:
    return [list(column) for column in zip(*(getattr(r, field) for r in results), strict=True)]


def _equal(results: Sequence[RankResult]) -> bool | None:
    """Whether all holders of each stage have the same gradients; None where each stage has one holder."""
    holders: dict[str, list[str]] = {}
    for r in results:
        for stage, digest in r.digests.items():
            holders.setdefault(stage, []).append(digest)
    shared: Mapping[str, list[str]] = {s: d for s, d in holders.items() if len(d) > 1}
    return all(len(set(d)) == 1 for d in shared.values()) if shared else None
