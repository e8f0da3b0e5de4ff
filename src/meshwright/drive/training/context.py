"""What the decisions on a training step share: what is asked and known (`Context`), what was found (`Found`), and their form (`Decision`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import msgspec

from ...cite import Cite
from ...cost import Cost
from ...decide.layout import Grid, LayoutCandidate, LayoutProblem
from ...decide.layout.problem import Degrees
from ...decide.layout.unlike_devices import device_orders, relative_speeds
from ...errors import TimeLimit
from ...fabric.fabric import Device, Fabric
from ...graph.graph import OpGraph
from ...io.quantity import show_time
from ...job import Training
from ...kernels.effort import Budget, Cut, Deadline
from ...plan.copies import ExpertCopies
from ...plan.optimizers import may_be_cut
from ...plan.plan import TrainingLayout
from .collectives import CollectivePlanner
from .copies import copies_of_hot_experts
from .evaluate import Evaluator
from .evaluated import Evaluated, fastest
from .placements import placements_of
from .program_sizes import MAX_SMALL_OPERATORS, MAX_SMALL_STEPS, expected_steps
from .step_end import refusing_cuts, statistics_of, step_end
from .wishes import LayoutWanted, PrecisionWanted, Wishes

__all__ = ["MAX_WORK_S", "TIME_LIMIT_S", "Context", "Decision", "Found", "Looks", "Made", "SearchBudget"]

W = TypeVar("W")
# Counted work of the layout search, in seconds of a quiet core: README's job counts 4; programs of 300,000 steps are judged in 4 layouts.
MAX_WORK_S = 20.0
# Scouts that are judged by all their ranks and micro-batches, fastest first, until one of these is still the fastest.
MAX_WRITTEN_OUT = 4
# The net by the clock under it: thirty times as long, so that a busy machine still finishes what is counted.
TIME_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SearchBudget:
    """`work_s`: counted work (`kernels.effort`) of the layout search; sharding and schedules have half as much each. `time_limit_s`: the net by the
    clock under all of it; where it cuts, the best so far stands and the plan says so."""

    work_s: float = MAX_WORK_S
    time_limit_s: float = TIME_LIMIT_S


class Looks:
    """A decision's evaluations: at most so many, within so much counted work; the clock is a net under them."""

    def __init__(self, evaluations: int, work_s: float) -> None:
        self.budget, self.deadline = Budget(evaluations), Deadline.after(work_s=work_s)

    @property
    def spent(self) -> bool:
        """The work is done; never before the first look."""
        return self.budget.looked > 0 and self.deadline.work_left_s <= 0

    def at(self, judge: Callable[[], object]) -> bool:
        """Whether something was looked at: not where the budget is spent, not where the clock ended it."""
        if self.spent or not self.budget.spend():
            return False
        try:
            with self.budget.net():
                judge()
        except TimeLimit:
            if self.budget.cut is None:
                raise
        return self.budget.cut is None


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a decision gained and took: the step before and after it (None: nothing fitted), candidates judged, seconds by the clock."""

    decision: str
    before_s: float | None
    after_s: float | None
    evaluations: int
    took_s: float

    def to_json(self) -> dict[str, Any]:
        """Without the seconds that it took: equal plans give equal bytes."""
        return {"decision": self.decision, "before_s": self.before_s, "after_s": self.after_s, "evaluations": self.evaluations}


@dataclass(frozen=True)
class Found:
    """The best so far, None while nothing fits; everything judged; by names of decisions what they keep for their entries and errors, and which of
    them the clock cut; and what each gained and took, in order."""

    best: Evaluated | None = None
    judged: list[Evaluated] = field(default_factory=list)
    notes: Mapping[str, Any] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    made: tuple[Made, ...] = ()

    @property
    def winner(self) -> Evaluated:
        assert self.best is not None, "decisions on the winner come after something was found that fits"
        return self.best

    def noted(self, name: str, note: Any) -> Found:
        return replace(self, notes={**self.notes, name: note})

    def cut(self, name: str, cut: Cut | None) -> Found:
        """With the first cut of a decision, if there is one."""
        return self if cut is None or name in self.cuts else replace(self, cuts={**self.cuts, name: cut})

    @property
    def said(self) -> str:
        """The best so far for whoever waits, nothing before there is one."""
        return f"{self.best.candidate.what}, {show_time(self.best.time_s)} a step" if self.best is not None else ""

    @property
    def step_s(self) -> float | None:
        return self.best.time_s if self.best is not None else None


class Decision:
    """One decision on a training step. It acts at one or more of four moments, and by default at none of them.

    `variants`: what else is worth judging of a candidate on a placement. `fitted`: what it makes of a candidate that was judged. `choose`: among all
    that was judged, trying more. `refine`: the winner. Then it says in the plan what was decided and why (`entries`), and whom that rests on.
    """

    name: ClassVar[str]

    def require(self, context: Context) -> None:
        """Raises: UsageError, before anything is searched, where what is asked cannot be done."""

    def variants(self, candidate: LayoutCandidate, placement: tuple[str, ...], context: Context) -> Iterable[LayoutCandidate]:
        return ()

    def fitted(self, found: list[Evaluated], context: Context, limit_s: float) -> list[Evaluated]:
        """`found`: the candidate as it is first, and what decisions before this one made of it; returns all that count. Nobody needs a longer step
        than `limit_s`."""
        return found

    def asks_first(self, context: Context) -> bool:
        """Whether `fitted` must know what a candidate does as it is; else it may get one that was not judged, and does not return it."""
        return True

    def choose(self, found: Found, context: Context) -> Found:
        return found

    def refine(self, found: Found, context: Context) -> Found:
        return found

    def entries(self, found: Found, context: Context) -> dict[str, Any]:
        """Of the plan's `decisions`, by key: strategy, options, why, cite."""
        return {}

    def cites(self, key: str, entry: Mapping[str, Any]) -> list[tuple[str, Cite]]:
        """(what, Cite) of a plan's entry; nothing for entries of others."""
        return []


@dataclass(frozen=True, kw_only=True)
class Context:
    """A job on a fabric, and how its candidates are judged. `decisions`: in the order in which they are made; `without`: names of those left out;
    `clock`: the net under all of them, which began with the context."""

    job: Training
    fabric: Fabric
    cost: Cost
    graph: OpGraph
    evaluator: Evaluator
    wishes: Wishes
    budget: SearchBudget
    clock: Budget
    decisions: tuple[Decision, ...]
    without: frozenset[str] = frozenset()
    watch: Callable[[Made], None] | None = None
    sketching: bool = False  # decisions may end with a scout whose placement has its layout's symmetry: whoever goes on writes the last out

    def wish(self, kind: type[W]) -> W:
        return self.wishes.of(kind)

    def wishing(self, *changed: object) -> Context:
        """The same job with other wishes."""
        return replace(self, wishes=self.wishes.but(*changed))

    def on(self, fabric: Fabric, global_batch: int | None = None, work_s: float | None = None) -> Context:
        """The same wishes on another fabric, for another batch, or with less work; under the same clock."""
        old = self.evaluator.planner
        planner = CollectivePlanner(fabric=fabric, transport=old.transport, strategy=old.strategy, seed=old.seed, reproducible=old.reproducible)
        job = self.job if global_batch is None else msgspec.structs.replace(self.job, global_batch=global_batch)
        evaluator = replace(self.evaluator, fabric=fabric, planner=planner, statistics_of=statistics_of(job))
        budget = self.budget if work_s is None else replace(self.budget, work_s=work_s)
        return replace(self, job=job, fabric=fabric, evaluator=evaluator, budget=budget)

    @property
    def made(self) -> Iterator[Decision]:
        return (d for d in self.decisions if d.name not in self.without)

    @cached_property
    def problem(self) -> LayoutProblem:
        wish = self.wish(LayoutWanted)
        return LayoutProblem(
            graph_at=self.evaluator.graph_at, fabric=self.fabric, cost=self.cost, global_batch=self.job.global_batch, fixed=wish.fixed,
            context=wish.context, expert=wish.expert, routing=wish.routing, borders=wish.borders, copies=self.copies if wish.spare else None,
        )  # fmt: skip

    def copies(self, graph: OpGraph, members: int) -> Mapping[str, ExpertCopies]:
        wish = self.wish(LayoutWanted)
        return copies_of_hot_experts(graph, members, wish.routing, wish.spare, self.fabric, self.cost)

    def grid(self, refuse: Callable[[Degrees], str] | None = None) -> Grid:
        from ...graph.liveness import segment_workspace

        options = self.wish(LayoutWanted).tensor_options
        precision = self.wish(PrecisionWanted).precision
        end, whole = step_end(self.job, self.graph, precision), not may_be_cut(self.job.optimizer)
        refuse = refusing_cuts(self.job, refuse)
        return Grid(workspace=segment_workspace, tensor_options=options, refuse=refuse, end=end, precision=precision, whole=whole)

    @cached_property
    def speeds(self) -> dict[str, float]:
        """Of every device, by the whole model on it."""
        return relative_speeds(self.fabric, self.cost, self.graph)

    @cached_property
    def orders(self) -> list[tuple[str, tuple[Device, ...]]]:
        return device_orders(self.fabric, self.speeds)

    def is_large(self, candidate: LayoutCandidate) -> bool:
        """Whether judging it takes so much that the search looks at the most promising only."""
        many = len(self.graph.nodes) > MAX_SMALL_OPERATORS
        return candidate.layout is not None and (many or expected_steps(candidate.layout) > MAX_SMALL_STEPS)

    def hoped_s(self, candidate: LayoutCandidate) -> float:
        """What a step may take: of a large candidate at least, since each that is judged costs seconds; of others the closed form, near the truth."""
        return candidate.least_s if self.is_large(candidate) else candidate.estimate_s

    def placements(self, layout: TrainingLayout) -> Iterator[tuple[str, tuple[str, ...]]]:
        fixed = self.wish(LayoutWanted).placement
        if fixed:
            return iter([("as given", fixed)])
        return placements_of(layout, self.fabric, self.orders, alike=self.evaluator.is_folded(layout))

    def judge(self, candidate: LayoutCandidate, placement: tuple[str, ...], name: str, limit_s: float = float("inf")) -> list[Evaluated]:
        """The candidate as it is and as decisions make it, so that it fits; of a large one only while it takes less than `limit_s`, and as it is only
        where a decision asks for that."""
        large = self.is_large(candidate)
        limit_s = limit_s if large else float("inf")
        if large and not all(d.asks_first(self) for d in self.made):
            found = [Evaluated(candidate=candidate, placement=placement, placement_name=name)]
        else:
            found = [self.evaluator.evaluate(candidate, placement, name)]
            if found[0].time_s >= limit_s:  # what makes a layout fit makes no step shorter
                return found
        for decision in self.made:
            found = decision.fitted(found, self, limit_s)
        return found

    def scouting(self) -> Context:
        """The same, with large programs judged by one rank of every stage where that tells: `written_out` judges the fastest by all of them."""
        return replace(self, evaluator=replace(self.evaluator, scouting=True))

    def is_scout(self, e: Evaluated) -> bool:
        """Judged by one rank of every stage, and its program may be written out."""
        return e.folded and not self.evaluator.is_folded(e.layout)

    def written_out(
        self, judged: list[Evaluated], then: Callable[[Evaluated], tuple[Any, ...]], counts: Callable[[Evaluated], bool] = lambda _: True
    ) -> Evaluated | None:
        """The fastest that fits and counts, by all its ranks and micro-batches where these can be written out: in `judged` it takes the place of its
        scout. Of equally fast ones the least by `then`. While this is a sketch, only scouts that time each sum alone are replaced."""

        def scouts(e: Evaluated) -> bool:
            return self.is_scout(e) and (e.lone_sums or not self.sketching)

        for _ in range(MAX_WRITTEN_OUT):
            first = fastest(filter(counts, judged), then)
            if first is None or not scouts(first):
                break
            judged[next(i for i, e in enumerate(judged) if e is first)] = self.evaluator.again(first)
        return fastest((e for e in judged if counts(e) and not scouts(e)), then)
