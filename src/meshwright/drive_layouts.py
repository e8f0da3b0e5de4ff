"""The search over layouts: candidates in, simulated and judged candidates out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from .cost import Cost, Priced
from .decide.layout import Grid, LayoutCandidate, LayoutProblem
from .decide.layout.grid import degrees_of
from .decide.layout.problem import Degrees, Fixed
from .decide.layout.tensor_shares import LEVEL, TensorOptions
from .decide.layout.unlike import device_orders, relative_speeds
from .decide.pipeline import one_f_one_b_order
from .drive_collectives import CANDIDATES, PURPOSES, CollectivePlanner
from .drive_divide import by_speed
from .drive_evaluated import Evaluated
from .drive_folded import MAX_FOLDED_STEPS, SCOUTED, folded_step, steady_of, with_microbatches
from .drive_layout_order import BUILT_AT_ONCE, WORTH_BUILDING, by_layer_table, max_group, predicted_steps, steps_of
from .drive_layout_search import LayoutFindings
from .drive_placements import placements_of
from .drive_recompute import KEEP_ALL, Policy, StageRecompute, require_policy, with_recomputation
from .drive_stage_steps import StageSteps, StepSource, peaks_in_flight
from .errors import TimeLimit, Unsupported
from .fabric import Fabric
from .graph import OpGraph
from .job import Training
from .layout_pipeline import split_prices
from .lowering import lower_training, training_works
from .lowering_folded import why_not_folded
from .plan import TrainingLayout
from .program import Program
from .program_calls import inline

__all__ = ["MAX_PROGRAM_STEPS", "LayoutSearch", "expected_steps"]

PER_DEGREES = 2  # micro-batch sizes simulated per combination of degrees, best closed form first
MAX_SIMULATED = 40
MANY_DEVICES = 256  # with more, collectives are rings: planning those of every group costs minutes
WORTH_FOLDING = 2  # degrees whose programs are too large to write out that are built, best by the layer table first
LARGEST_FOLDED_MICROBATCH = 8
HOPELESS = 4.0  # candidates whose closed form is this many times the fastest simulated step are left out
MAX_PROGRAM_STEPS = 300_000  # of the inlined program, over all ranks; larger candidates cannot be simulated here


@dataclass
class LayoutSearch:
    job: Training
    fabric: Fabric
    cost: Cost
    graph: OpGraph
    planner: CollectivePlanner
    time_limit_s: float = 120.0
    prices: Callable[[OpGraph, TrainingLayout], dict[str, Priced]] | None = None
    graphs: dict[int, OpGraph] = field(default_factory=dict)
    tensor_options: TensorOptions = LEVEL
    borders: tuple[str, ...] = ()  # first operators of the stages after the first, where given
    findings: LayoutFindings | None = None  # of the layer table, where it was asked
    too_large: int = 0  # steps of the smallest program that is too large, 0: none is
    out_of_time: bool = False
    divide: bool = True  # work by speed where devices are unlike
    recompute: str = "auto"  # one of drive_recompute.POLICIES
    frontiers: dict[Any, Any] = field(default_factory=dict)
    steps: StepSource | None = None  # step graphs of stages, for plans of whole stages beside those of regions
    codec_prices: dict[str, Priced] = field(default_factory=dict)  # of encode and decode steps, by their keys
    compression: dict[str, Any] = field(default_factory=dict)  # what was decided on codecs, where it was asked
    unplanned: str = ""  # why a layout's stages were not planned as steps

    def graph_at(self, batch: int) -> OpGraph:
        from .graph_scale import at_batch

        if batch not in self.graphs:
            self.graphs[batch] = self.graph if batch == self.graph.batch_size else at_batch(self.graph, batch)
        return self.graphs[batch]

    @property
    def table_share(self) -> float:
        """Of a core, at which `prices` and prices of codecs hold; 0 where devices state none."""
        return float(getattr(self.prices, "share", 0.0) or self.fabric.devices[0].cpu_share)

    def problem(self, fixed: Fixed) -> LayoutProblem:
        return LayoutProblem(
            graph_at=self.graph_at, fabric=self.fabric, cost=self.cost, global_batch=self.job.global_batch, fixed=fixed,
            borders=self.borders,
        )  # fmt: skip

    def grid(self, refuse: Callable[[Degrees], str] | None = None) -> Grid:
        from .graph_liveness import segment_workspace

        return Grid(workspace=segment_workspace, tensor_options=self.tensor_options, refuse=refuse)

    def best(self, fixed: Fixed) -> tuple[Evaluated | None, list[Evaluated]]:
        """The fastest candidate that fits (None if none does), and everything that was judged."""
        require_policy(self.recompute)
        until = time.monotonic() + self.time_limit_s
        problem = self.problem(fixed)
        refuse = self.refusal(problem, until)
        if self.planner.strategy == "auto" and len(self.fabric.devices) > MANY_DEVICES:
            self.planner = replace(self.planner, strategy="ring")
        candidates = self.grid(refuse).plan(problem)
        judged: list[Evaluated] = []
        seen: dict[tuple[int, int, int, bool], int] = {}
        simulated, fastest = 0, float("inf")
        speeds = relative_speeds(self.fabric, self.cost, self.graph)
        unlike, orders = len(set(speeds.values())) > 1, device_orders(self.fabric, speeds)
        for c in candidates:
            degrees = (c.degrees.data, c.degrees.tensor, c.degrees.pipeline, c.degrees.sequence)
            if c.layout is None:
                judged.append(Evaluated(candidate=c, why=c.why))
                continue
            steps, folded = expected_steps(c.layout), self.is_folded(c.layout)
            if steps > MAX_PROGRAM_STEPS and not folded:
                judged.append(Evaluated(candidate=c, why=f"not simulated: about {steps:,} program steps, at most {MAX_PROGRAM_STEPS:,}"))
                continue
            limit = max(d.memory_bytes for d in self.fabric.devices)
            if limit and c.memory_floor_bytes > limit:
                why = f"weights, gradients and optimiser state alone need {c.memory_floor_bytes} bytes, devices have {limit}"
                judged.append(Evaluated(candidate=c, why=why, excess_bytes=c.memory_floor_bytes - limit))
                continue
            seen[degrees] = seen.get(degrees, 0) + 1
            if seen[degrees] > PER_DEGREES or simulated >= MAX_SIMULATED or (simulated and time.monotonic() > until):
                judged.append(Evaluated(candidate=c, why=f"not simulated: closed form {c.estimate_s:.4g} s is not among the best of its degrees"))
                continue
            if c.estimate_s > HOPELESS * fastest:
                why = f"not simulated: closed form {c.estimate_s:.4g} s is over {HOPELESS} times the fastest step"
                judged.append(Evaluated(candidate=c, why=why))
                continue
            done = False  # one placement of a folded program is enough: those that have its symmetry are much alike
            for name, placement in placements_of(c.layout, self.fabric, orders):
                if done or (simulated and time.monotonic() > until):
                    break
                divided = by_speed(self, problem, c, placement, speeds) if unlike and self.divide and not folded else None
                for variant in (c, *((divided,) if divided is not None else ())):
                    for found in self.evaluate_with_recomputation(variant, placement, name):
                        judged.append(found)
                        done |= folded and found.timeline is not None
                        fastest = min(fastest, found.time_s if found.excess_bytes <= 0 else float("inf"))
                        simulated += 1
        fitting = [e for e in judged if e.timeline is not None and e.excess_bytes <= 0]
        best = min(fitting, key=lambda e: (e.time_s, e.candidate.degrees, e.candidate.division, e.placement_name), default=None)
        return best, judged

    def refusal(self, problem: LayoutProblem, until: float) -> Callable[[Degrees], str]:
        """Which degrees are not built, and why: programs too large to simulate; where many are left, all but the layer table's best."""
        small, large = self.sizes(problem)
        if len(self.fabric.devices) <= MANY_DEVICES and small:
            large = {}
        many = len(small) > WORTH_BUILDING and len(small) * len(self.graph.nodes) > BUILT_AT_ONCE
        best = self.by_table([*small, *large]) if many or len(large) > WORTH_FOLDING else {}
        order = sorted(best, key=lambda d: (best[d], d))
        keep = {*[d for d in order if d in small][:WORTH_BUILDING], *[d for d in order if d in large][:WORTH_FOLDING]}

        def refuse(degrees: Degrees) -> str:
            d = replace(degrees, sequence=False)
            if d not in small and d not in large:
                known = steps_of(self.graph, self.job.global_batch)(d)
                self.too_large = min(self.too_large or known, known)
                return f"not built: about {known:,} program steps, at most {MAX_PROGRAM_STEPS:,}"
            if best and d not in keep:
                return f"not built: not among the {WORTH_BUILDING if d in small else WORTH_FOLDING} best by the layer table"
            if time.monotonic() > until:
                self.out_of_time = True
                return "not built: the time limit was reached"
            return ""

        return refuse

    def sizes(self, problem: LayoutProblem) -> tuple[dict[Degrees, int], dict[Degrees, int]]:
        """Predicted steps of degrees whose programs can be written out, and of those that can be lowered folded only."""
        whole, folded = (steps_of(self.graph, self.job.global_batch, folded=x) for x in (False, True))
        small: dict[Degrees, int] = {}
        large: dict[Degrees, int] = {}
        most = max_group(self.fabric)
        for d in degrees_of(problem):
            if (steps := whole(d)) <= MAX_PROGRAM_STEPS:
                small[d] = steps
            elif d.tensor <= most and d.microbatch_size <= LARGEST_FOLDED_MICROBATCH and self.prices is None and folded(d) <= MAX_FOLDED_STEPS:
                large[d] = folded(d)
        return small, large

    def by_table(self, degrees: list[Degrees]) -> dict[Degrees, float]:
        """Seconds by the layer table; nothing where it has no answer."""
        seconds, self.findings = by_layer_table(self.graph_at, self.fabric, self.cost, self.job.global_batch, degrees)
        return seconds

    def evaluate_with_recomputation(self, candidate: LayoutCandidate, placement: tuple[str, ...], name: str) -> list[Evaluated]:
        """The candidate as it is and as the policy makes it; more than one where the first does not fit."""
        first = self.evaluate(candidate, placement, name, self.planner)
        if self.recompute == "none" or first.timeline is None or (self.recompute in ("auto", "optimal", "steps") and first.excess_bytes <= 0):
            return [first]
        device = self.fabric.device(placement[0])

        def again(layout: TrainingLayout, policy: Policy) -> Evaluated:
            return self.evaluate(replace(candidate, layout=layout), placement, name, self.planner, policy)

        found, graph = [first], self.graph_at(first.layout.microbatch_size)
        flight = peaks_in_flight(first.layout, candidate.orders)
        if self.recompute != "steps":
            stages = StageRecompute(graph, first.layout, self.cost, device, self.frontiers, flight)
            found = with_recomputation(self.recompute, first, stages, again)
        if self.steps is not None and self.recompute in ("auto", "optimal", "steps"):
            try:
                whole = StageSteps(first.layout, self.steps, orders=candidate.orders, room_bytes=first.room_bytes())
                found += with_recomputation("steps", first, whole, again)[1:]
            except Unsupported as error:
                self.unplanned = str(error)
        return found

    def evaluate(
        self, candidate: LayoutCandidate, placement: tuple[str, ...], name: str, planner: CollectivePlanner, policy: Policy = KEEP_ALL
    ) -> Evaluated:
        from .simulate import simulate_program

        assert candidate.layout is not None
        graph = self.graph_at(candidate.layout.microbatch_size)
        if self.is_folded(candidate.layout):
            return self.evaluate_folded(candidate, graph, placement, name, planner, policy)
        if (steps := expected_steps(candidate.layout)) > MAX_PROGRAM_STEPS:
            why = why_not_folded(candidate.layout) or "too many for one rank of every stage, too"
            return Evaluated(candidate=candidate, why=f"not simulated: about {steps:,} program steps, at most {MAX_PROGRAM_STEPS:,} ({why})")
        works = training_works(graph, candidate.layout)
        cost = self.cost
        if self.prices is not None:
            source = getattr(self.prices, "source", "operators measured")
            table = split_prices(self.prices(graph, candidate.layout), candidate.layout, cost, self.fabric.device(placement[0]))
            cost = cost.with_table(table, source=f"{cost.source}; {source}", share=self.table_share)
        if any(b.codec for b in candidate.layout.buckets):
            cost = cost.with_table(self.codec_prices, source=f"{cost.source}; codecs measured", share=self.table_share)
        try:
            rings = planner.for_placement(placement)
            program, callees = lower_training(graph, candidate.layout, one_f_one_b_order, rings, orders=candidate.orders)
        except Unsupported as error:
            return Evaluated(candidate=candidate, why=error.message)
        flat = inline(program, callees).program
        timeline = simulate_program(flat, self.fabric, placement, cost, works=works, record=False)
        limits = [self.fabric.device(d).memory_bytes for d in placement]
        needs = _memory_needs(flat, limits)
        over = [need - limit if limit else 0 for need, limit in zip(needs, limits, strict=True)]
        worst = max(range(len(over)), key=over.__getitem__)
        return Evaluated(
            candidate=candidate, placement=placement, placement_name=name, program=program, callees=callees, works=works, timeline=timeline,
            excess_bytes=max(over[worst], 0), worst_rank=worst, over_bytes=tuple(over), policy=policy, fabric=self.fabric, cost=cost,
        )  # fmt: skip

    def is_folded(self, layout: TrainingLayout) -> bool:
        """Whether a layout is lowered folded: it is too large otherwise, and not too large so."""
        large = expected_steps(layout) > MAX_PROGRAM_STEPS
        return large and self.prices is None and not why_not_folded(layout) and expected_steps(layout, folded=True) <= MAX_FOLDED_STEPS

    def evaluate_folded(
        self, candidate: LayoutCandidate, graph: OpGraph, placement: tuple[str, ...], name: str, planner: CollectivePlanner, policy: Policy,
        *, whole: bool = False,
    ) -> Evaluated:  # fmt: skip
        """Judged by few micro-batches: in the steady state of 1F1B every further one takes as long as the one before. `whole`: by all."""
        assert candidate.layout is not None
        layout, whole_s = candidate.layout, 0.0
        run = partial(folded_step, graph, fabric=self.fabric, cost=self.cost, placement=placement, planner=planner)
        try:
            if whole or layout.microbatches <= (most := layout.pipeline + SCOUTED[1]):
                step = run(layout)
            else:
                step = run(with_microbatches(layout, most))
                whole_s = steady_of(step.program, step.callees, layout).time_s(self.fabric, placement, self.cost, step.works)
        except Unsupported as error:
            return Evaluated(candidate=candidate, why=f"{error.message} ({name})")
        limits = [self.fabric.device(d).memory_bytes for d in placement]
        over = [need - limit if limit else 0 for need, limit in zip(step.needs_bytes, limits, strict=True)]
        worst = max(range(len(over)), key=over.__getitem__)
        return Evaluated(
            candidate=candidate, placement=placement, placement_name=name, program=step.program, callees=step.callees, works=step.works,
            timeline=step.timeline, excess_bytes=max(over[worst], 0), worst_rank=worst, over_bytes=tuple(over), worst_order_bytes=step.needs_bytes,
            extrapolated_s=whole_s, policy=policy, fabric=self.fabric, cost=self.cost,
        )  # fmt: skip

    def whole(self, found: Evaluated) -> Evaluated:
        """With all micro-batches, where it was judged by a few. Raises: TimeLimit where it does not fit then."""
        if not found.extrapolated_s:
            return found
        at = self.graph_at(found.layout.microbatch_size)
        made = self.evaluate_folded(found.candidate, at, found.placement, found.placement_name, self.planner, found.policy, whole=True)
        if made.timeline is None or made.excess_bytes > 0:
            why = made.why or f"{made.excess_bytes} bytes too many"
            raise TimeLimit(
                f"{found.candidate.degrees} fits with few micro-batches and not with all: {why}", where="train plan",
                hint="fix other degrees (--dp, --tp, --pp, --microbatch)",
            )  # fmt: skip
        return made

    def refine_collectives(self, best: Evaluated) -> Evaluated:
        """Tries every collective strategy for every purpose in place, one purpose after the other; keeps what shortens the step."""
        if self.planner.strategy != "auto" or (best.program is not None and best.program.fold is not None):
            return best
        planner = self.planner
        called = {self.planner.by_hash[name][0] for name in best.callees}
        for purpose in (p for p in PURPOSES if p in called):
            for name in CANDIDATES:
                tried = planner.with_choice(purpose, name)
                found = self.evaluate(best.candidate, best.placement, best.placement_name, tried, best.policy)
                if found.timeline is not None and found.excess_bytes <= 0 and found.time_s < best.time_s * (1 - 1e-9):
                    best, planner = found, tried
        return best


def expected_steps(layout: TrainingLayout, *, folded: bool = False) -> int:
    sums = sum(len(s.sum_writes) + len(s.sum_grads) + len(s.gathers) for s in layout.segments)
    return predicted_steps(layout.data, layout.tensor, layout.pipeline, layout.microbatches, len(layout.segments), sums, folded=folded)


def _memory_needs(program: Program, limits: Sequence[int]) -> list[int]:
    """Bytes each rank can need in the worst order that the program allows; an upper bound of it where that fits anyway."""
    from .check.memory import worst_order_peaks

    b, ranks = program.buffers, program.ranks
    whole = np.bincount(b.actor, weights=b.chunks * b.chunk_bytes.astype(np.float64), minlength=ranks)
    temporary = int(program.ops.workspace_bytes.max(initial=0))
    largest = np.zeros(len(program.channels), np.int64)  # message of each channel: at most so much of it is staged, `depth` times
    receives = program.steps.chan_in >= 0
    np.maximum.at(largest, program.steps.chan_in[receives], program.message_bytes()[receives])
    staged = np.bincount(program.channels.dst, weights=largest * program.channels.depth, minlength=len(whole))
    bounds = [int(x) + int(y) + temporary for x, y in zip(whole, staged, strict=False)]
    if all(not limit or bound <= limit for bound, limit in zip(bounds, limits, strict=False)):
        return bounds[:ranks]
    return list(worst_order_peaks(program))
