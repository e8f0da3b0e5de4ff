"""Which decisions there are on a training step, in which order they are made, and who makes, verifies and leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

from ...cite import Cite
from ...cost import Cost, assumed_cost
from ...decide.layout.grid import degrees_of
from ...decide.layout.problem import LayoutProblem
from ...errors import CheckFailed, TimeLimit, UsageError
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ...job import Training
from ...kernels.effort import Budget, Cut
from ...kernels.stages import stage
from ...plan.narrowed import in_precision
from .collective_choice import Collectives, CollectivesWanted
from .collectives import CollectivePlanner
from .compress import Compression
from .context import Context, Decision, Found, Made, SearchBudget
from .division import Division
from .evaluate import Evaluator
from .evaluated import Evaluated
from .layout import Layout
from .memory import Memory
from .no_plan import no_plan
from .order import MAX_PLANNED_DEVICES
from .pipeline import Schedule
from .recompute import Recompute
from .room import require_room
from .sharding import Sharding, ShardingWanted, as_wanted
from .step_end import at_peak_of, statistics_of
from .wishes import LayoutWanted, PrecisionWanted, StepPrices, Wishes

__all__ = ["DECISIONS", "begin", "choose", "cites_of", "context_of", "finish", "refine", "require_asked"]

# In this order, among all that was judged and then on the winner:
DECISIONS: tuple[Decision, ...] = (
    Layout(),  # first: every other decision is about a layout. Candidates come with what recomputation, memory and division make of them
    Sharding(),  # before the schedule: the stages that a schedule asks for are cut with the level and the overlap that did best
    Schedule(),  # of the layouts that did best, sharded or not: to simulate every schedule of every layout would take too long
    Recompute(),  # of every candidate, as soon as it turns out that it does not fit: one that fits only so may still be the fastest
    Memory(),  # as recomputation, after it, so that whole stages are planned for what it leaves; and the last resort where nothing fits
    Division(),  # of the winner: single micro-batches are moved by its simulated timeline
    Collectives(),  # of the winner: they share links with the rest of the step, which must stand before strategies are compared in it
    Compression(),  # last: codecs are worth their time only where the sums, as they are now, are what the step waits for
)


def context_of(
    job: Training, fabric: Fabric, cost: Cost | None = None, *, graph: OpGraph, wishes: Iterable[object] = (), budget: SearchBudget | None = None,
    without: Collection[str] = (), clock: Budget | None = None, watch: Callable[[Made], None] | None = None,
) -> Context:  # fmt: skip
    """`without`: decisions that are not made; `clock`: one that runs already; `watch`: told of each decision.

    Raises: UsageError for a decision to leave out that is none, or that all others need.
    """
    _require_names(without)
    asked, cost = Wishes.these(wishes), at_peak_of(cost or assumed_cost(fabric), job, fabric)
    precision = asked.of(PrecisionWanted).precision
    strategy = asked.of(CollectivesWanted).strategy
    strategy = "ring" if strategy == "auto" and len(fabric.devices) > MAX_PLANNED_DEVICES else strategy
    planner = CollectivePlanner(fabric=fabric, transport=cost.transport, strategy=strategy, seed=job.seed, reproducible=job.asked.reproducible)
    evaluator = Evaluator(
        fabric=fabric, cost=cost, graph=graph, planner=planner, prices=asked.of(StepPrices).of, routing=asked.of(LayoutWanted).routing,
        precision=precision, statistics_of=statistics_of(job),
    )  # fmt: skip
    budget = budget or SearchBudget()
    return Context(
        job=job, fabric=fabric, cost=cost, graph=in_precision(graph, precision), evaluator=evaluator, wishes=asked, budget=budget,
        decisions=DECISIONS, clock=clock or Budget(1, time_limit_s=budget.time_limit_s), without=frozenset(without), watch=watch,
    )  # fmt: skip


def require_asked(job: Training, fabric: Fabric, wishes: Wishes, without: Collection[str] = ()) -> None:
    """What can be refused without the graph, before it is captured. Raises: UsageError for a batch, degrees or names that cannot be."""
    _require_names(without)
    wish = wishes.of(LayoutWanted)
    if wish.spare and wish.expert == 1:
        text = "copies of hot experts lie on ranks that divide the experts, and none do"
        raise UsageError(text, where="--spare", hint="--ep 2 or more, or --ep auto; or --spare 0")
    problem = LayoutProblem(
        graph_at=_not_captured, fabric=fabric, cost=assumed_cost(fabric), global_batch=job.global_batch, fixed=wish.fixed, context=wish.context,
        expert=wish.expert,
    )  # fmt: skip
    next(degrees_of(problem), None)


def _not_captured(batch: int) -> OpGraph:
    raise AssertionError("degrees are counted without the graph")


def _require_names(without: Collection[str]) -> None:
    names = [d.name for d in DECISIONS]
    if unknown := sorted({*without} - {*names[1:]}):
        raise UsageError(f"there is no decision {unknown[0]!r} that can be left out", where="--without", hint=f"some of {', '.join(names[1:])}")


def begin(context: Context) -> Found:
    """Decisions among all that is judged, with a winner, which may be a scout (`Context.sketching`). Raises: what they raise; Infeasible, TimeLimit
    where nothing fits."""
    for decision in context.made:
        decision.require(context)
    require_room(context)
    return _with_winner(context, choose(replace(context, sketching=True)))


def _with_winner(context: Context, found: Found) -> Found:
    if found.best is None:
        raise no_plan(found, context)
    return found


def finish(context: Context, found: Found) -> Found:
    """Decisions on the winner, written out with all its ranks and micro-batches. Where others then turn out to be faster, all is judged again,
    written out after each decision. Raises: as `begin`."""
    if context.is_scout(found.winner):
        best, wanted, judged = found.winner, context.wish(ShardingWanted), [*found.judged]

        def counts(e: Evaluated) -> bool:
            return as_wanted(e, wanted) and e.candidate.schedule == best.candidate.schedule

        chosen = context.written_out(judged, lambda e: (e.candidate.degrees != best.candidate.degrees,), counts)
        if chosen is not None and chosen.candidate == best.candidate and chosen.placement == best.placement:
            found = replace(found, best=chosen, judged=judged)
        else:
            found = _with_winner(context, choose(context))
    return refine(context, replace(found, best=context.evaluator.whole(found.winner)))


def choose(context: Context, names: Collection[str] | None = None, found: Found | None = None) -> Found:
    """Decisions among all that is judged; `names`: these only."""
    return _each(context, names, found or Found(), "choose")


def refine(context: Context, found: Found, names: Collection[str] | None = None) -> Found:
    """Decisions on the winner; `names`: these only."""
    return _each(context, names, found, "refine")


def _each(context: Context, names: Collection[str] | None, found: Found, moment: Literal["choose", "refine"]) -> Found:
    for decision in context.made:
        acts = getattr(type(decision), moment) is not getattr(Decision, moment)
        if acts and (names is None or decision.name in names):
            found = _made(decision.name, getattr(decision, moment), found, context)
    return found


def _made(name: str, make: Callable[[Found, Context], Found], found: Found, context: Context) -> Found:
    """One decision, made under the clock, verified and timed: where time is up, what stood before it stands.

    Raises: what it raises; CheckFailed, by the decision's name, for a winner that is none (a planner is wrong: please report it).
    """
    if found.best is not None and context.clock.late:
        return found.cut(name, Cut(0, 1))
    clock, begun_s, tally = Budget(1), perf_counter(), context.evaluator.tally
    evaluations = tally["evaluations"]
    try:
        with stage(f"deciding on {name}") as here, context.clock.net(), clock.net():
            here.best = found.said
            made = make(found, context)
    except TimeLimit:
        if found.best is None or clock.cut is None:
            raise
        made = found
    if made.best is not None and made is not found and (wrong := _wrong(made, context)):
        raise CheckFailed(f"after the decision {name}: {wrong}", where=f"decision {name}", data={"decision": name})
    what = Made(
        decision=name, before_s=found.step_s, after_s=made.step_s, evaluations=tally["evaluations"] - evaluations, took_s=perf_counter() - begun_s,
    )  # fmt: skip
    if context.watch is not None:
        context.watch(what)
    return replace(made, made=(*made.made, what)).cut(name, clock.cut)


def _wrong(found: Found, context: Context) -> str:
    """What contradicts itself in a winner, nothing if it is one."""
    best, layout, job = found.winner, found.winner.layout, context.job
    devices = {d.name for d in context.fabric.devices}
    if layout.ranks != len(best.placement):
        return f"{layout.data} x {layout.tensor} x {layout.pipeline} degrees on {len(best.placement)} devices"
    if len({*best.placement}) != len(best.placement) or not devices.issuperset(best.placement):
        return "ranks share a device, or are on one that the fabric has not"
    if layout.microbatch_size * layout.all_microbatches != job.global_batch * layout.context:
        return f"{layout.all_microbatches // layout.context} micro-batches of {layout.microbatch_size} are not {job.global_batch} samples"
    if best.program is None or best.timeline is None or not best.fits:
        return "the winner was not simulated, or does not fit"
    return ""


def cites_of(decisions: Mapping[str, Any]) -> list[tuple[str, Cite]]:
    """(what, Cite) of every published method that these entries of a plan rest on, by the decisions that made them."""
    return [c for d in DECISIONS for key, entry in decisions.items() for c in d.cites(key, entry)]
