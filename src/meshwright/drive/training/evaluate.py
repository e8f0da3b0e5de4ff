"""How a layout is judged: lowered to a program, simulated on the fabric, and what it needs in the worst order that the program allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ...cost import Cost, Priced
from ...decide.layout import LayoutCandidate
from ...decide.layout.context import context_graph
from ...decide.layout.experts import experts_graph, tensor_part
from ...decide.pipeline import one_f_one_b_order
from ...errors import TimeLimit, Unsupported
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ...kernels.effort import count_work, look
from ...lower.folded import why_not_folded
from ...lower.training import lower_training, training_works
from ...plan.batch_statistics import with_shared_statistics
from ...plan.context import copies_in, exchange_of
from ...plan.narrowed import in_precision
from ...plan.on_schedule import split_prices
from ...plan.plan import TrainingLayout
from ...plan.precision import Precision
from ...plan.routing import UNIFORM, Routing
from ...program.calls import called_sizes, inline
from ...program.program import Program
from .collectives import CollectivePlanner
from .evaluated import KEEP_ALL, Evaluated, Policy
from .folded import MAX_FOLDED_STEPS, SCOUTED_MICROBATCHES, folded_step, steady, steady_of, step_of_lone_sums, with_microbatches
from .pairs import ExchangeTimes, woven_orders
from .placements import with_server_replicas
from .program_sizes import MAX_PROGRAM_STEPS, MAX_SMALL_OPERATORS, MAX_SMALL_STEPS, expected_steps
from .schedules import Prices

__all__ = ["Evaluator"]

# Counted work of judging the smallest candidate: its seconds on a quiet core.
EVALUATION_WORK_S = 0.02
# Steps and edges of a program that are written out to judge it; beyond them its collectives have as few as there are, or it is not judged.
MAX_WRITTEN_OUT = 2 * MAX_PROGRAM_STEPS
# Counted work per executed step of its program, which is lowered and simulated and its memory bounded.
STEP_WORK_S = 2e-5


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Judges candidates of one model on one fabric. Its copies share what it remembers: graphs by batch, recomputation, how many it judged."""

    fabric: Fabric
    cost: Cost
    graph: OpGraph
    planner: CollectivePlanner
    prices: Prices | None = None
    scouting: bool = False  # large programs are judged by one rank of every stage and few micro-batches, where that can be
    routing: Routing = UNIFORM  # how tokens choose experts
    precision: Precision | None = None  # of every layout; None: the graph's
    statistics_of: int = 0  # samples of the batch whose statistics replicas share; 0: none does
    graphs: dict[int, OpGraph] = field(default_factory=dict)
    shared: dict[int, OpGraph] = field(default_factory=dict)  # the same with statistics in three calls
    frontiers: dict[Any, Any] = field(default_factory=dict)
    exchanges: ExchangeTimes = field(default_factory=dict)  # of pairs of a schedule
    tally: Counter[str] = field(default_factory=Counter)  # of evaluations

    def graph_at(self, batch: int) -> OpGraph:
        if batch >= self.statistics_of:
            return self._plain(batch)
        if batch not in self.shared:
            self.shared[batch] = with_shared_statistics(self._plain(batch), self._plain(self.statistics_of))
        return self.shared[batch]

    def _plain(self, batch: int) -> OpGraph:
        from ...graph.scale import at_batch

        if batch not in self.graphs:
            self.graphs[batch] = in_precision(self.graph if batch == self.graph.batch_size else at_batch(self.graph, batch), self.precision)
        return self.graphs[batch]

    def graph_for(self, layout: TrainingLayout) -> OpGraph:
        """The graph as a rank of the layout computes it, tensor parallelism aside: at its micro-batch size, of its positions."""
        graph = self.positions_for(layout)
        return experts_graph(graph, layout.expert, self.routing, tensor_part(graph, layout), copies_in(layout))

    def positions_for(self, layout: TrainingLayout) -> OpGraph:
        """The same with all experts."""
        return context_graph(self.graph_at(layout.microbatch_size), layout.context, exchange_of(layout))

    @property
    def table_share(self) -> float:
        """Of a core, at which `prices` and prices of codecs hold; 0 where devices state none."""
        return float(getattr(self.prices, "share", 0.0) or self.fabric.devices[0].cpu_share)

    def evaluate(
        self, candidate: LayoutCandidate, placement: tuple[str, ...], name: str, policy: Policy = KEEP_ALL,
        codec_prices: Mapping[str, Priced] | None = None, *, scouted: bool = False,
    ) -> Evaluated:  # fmt: skip
        """`codec_prices`: of encode and decode steps, by their keys; `scouted`: judged by one rank of every stage, it fits. What cannot be simulated
        comes back without a timeline and with a reason."""
        from ...check.program.memory import worst_order_peaks
        from ...simulate import simulate_program

        assert candidate.layout is not None
        graph, codecs = self.graph_for(candidate.layout), codec_prices or {}
        self.tally["evaluations"] += 1
        if self.is_folded(candidate.layout):
            return self._evaluate_folded(candidate, graph, placement, name, policy)
        if (steps := expected_steps(candidate.layout)) > MAX_PROGRAM_STEPS:
            why = why_not_folded(candidate.layout) or "too many for one rank of every stage, too"
            return Evaluated(candidate=candidate, why=f"not simulated: about {steps:,} program steps, at most {MAX_PROGRAM_STEPS:,} ({why})")
        if self.scouting and steps > MAX_SMALL_STEPS and self.prices is None and _scouted_by_one(candidate):
            scout = self._scouted(candidate, graph, placement, name, policy)
            if scout.timeline is not None:
                return scout
        if not scouted and (unfit := self._surely_unfit(candidate, graph, placement, name, policy)) is not None:
            return unfit
        works = training_works(graph, candidate.layout)
        cost = self._cost(graph, candidate.layout, placement, codecs)
        try:
            program, callees, size = self._lowered(candidate, graph, placement, cost)
        except Unsupported as error:
            return Evaluated(candidate=candidate, why=error.message)
        if size > MAX_WRITTEN_OUT:
            why = f"not simulated: its collectives stand for {size:,.0f} steps and edges, at most {MAX_WRITTEN_OUT:,}"
            return Evaluated(candidate=candidate, why=why)
        look()
        flat = inline(program, callees).program
        count_work(EVALUATION_WORK_S + STEP_WORK_S * flat.executed_steps)
        look()
        timeline = simulate_program(flat, self.fabric, placement, cost, works=works, record=False)
        look()
        bounds = _memory_bounds(flat)
        limits = self._limits(placement)
        surely = all(not limit or bound <= limit for bound, limit in zip(bounds, limits, strict=True))
        worst = () if surely else tuple(worst_order_peaks(flat))
        return Evaluated(
            candidate=candidate, placement=placement, placement_name=name, program=program, callees=callees, works=works, timeline=timeline,
            policy=policy, fabric=self.fabric, cost=cost, codec_prices=codecs, worst_order_bytes=worst, **self._over(worst or bounds, placement),
        )  # fmt: skip

    def _surely_unfit(
        self, candidate: LayoutCandidate, graph: OpGraph, placement: tuple[str, ...], name: str, policy: Policy
    ) -> Evaluated | None:
        """Of a large model, one rank of every stage where already its simulated peak is more than there is: whoever makes it fit asks for no more.
        None where it may fit, or its ranks are not alike."""
        limits = self._limits(placement)
        small = len(graph.nodes) <= MAX_SMALL_OPERATORS or self.prices is not None
        if candidate.layout is None or small or not all(limits) or not _scouted_by_one(candidate):
            return None
        scout = self._scouted(candidate, graph, placement, name, policy)
        return scout if scout.timeline is not None and scout.peak_bytes > max(limits) else None

    def _lowered(
        self, candidate: LayoutCandidate, graph: OpGraph, placement: tuple[str, ...], cost: Cost
    ) -> tuple[Program, dict[str, Program], float]:
        """The program, what it calls, and steps and edges of all that is written out. Where those are too many, the purpose that brings most gets
        collectives with few steps, and so on; of a large program with alike ranks one rank of every stage tells which. Raises: Unsupported."""
        layout, short = candidate.layout, set[str]()
        assert layout is not None
        alike = expected_steps(layout) > MAX_SMALL_STEPS and _scouted_by_one(candidate)
        orders = woven_orders(candidate, graph, self.fabric, cost, placement, self.exchanges)
        for folded in (True, False) if alike else (False,):
            while True:
                rings = self.planner.for_placement(placement, short)
                program, callees = lower_training(graph, layout, one_f_one_b_order, rings, folded=folded, orders=orders)
                size, of = called_sizes(program, callees)
                left: dict[str, float] = {}
                for name, brought in of.items():
                    if (purpose := self.planner.by_hash[name][0]) not in short:
                        left[purpose] = left.get(purpose, 0.0) + brought
                members = program.fold.members if program.fold is not None else 1
                if size * members <= MAX_WRITTEN_OUT or not left or self.planner.strategy != "auto":
                    break
                short.add(max(sorted(left), key=left.__getitem__))
        return program, callees, size

    def again(self, found: Evaluated, layout: TrainingLayout | None = None, policy: Policy | None = None) -> Evaluated:
        """What was judged, in its place, with another layout (and what that recomputes), or as this evaluator's planner would have it."""
        candidate = found.candidate if layout is None else replace(found.candidate, layout=layout)
        scouted = found.folded and found.fits and layout is None and policy is None
        return self.evaluate(candidate, found.placement, found.placement_name, policy or found.policy, found.codec_prices, scouted=scouted)

    def is_folded(self, layout: TrainingLayout) -> bool:
        """Whether a layout is lowered folded: it is too large otherwise, and not too large so."""
        large = expected_steps(layout) > MAX_PROGRAM_STEPS
        return large and self.prices is None and not why_not_folded(layout) and expected_steps(layout, folded=True) <= MAX_FOLDED_STEPS

    def whole(self, found: Evaluated) -> Evaluated:
        """With all micro-batches, where it was judged by a few. Raises: TimeLimit where it does not fit then."""
        if not found.extrapolated_s:
            return found
        made = self._evaluate_folded(found.candidate, self.graph_for(found.layout), found.placement, found.placement_name, found.policy, whole=True)
        if not made.fits:
            why = made.why or f"{made.excess_bytes} bytes too many"
            raise TimeLimit(
                f"{found.candidate.degrees} fits with few micro-batches and not with all: {why}", where="train plan",
                hint="fix other degrees (--dp, --tp, --pp, --microbatch)",
            )  # fmt: skip
        return made

    def _scouted(self, candidate: LayoutCandidate, graph: OpGraph, placement: tuple[str, ...], name: str, policy: Policy) -> Evaluated:
        """One rank of every stage; where the placement has not the symmetry of its rings, with each sum as long as it takes alone."""
        made = self._evaluate_folded(candidate, graph, placement, name, policy)
        return made if made.timeline is not None else self._evaluate_folded(candidate, graph, placement, name, policy, lone_sums=True)

    def _evaluate_folded(
        self, candidate: LayoutCandidate, graph: OpGraph, placement: tuple[str, ...], name: str, policy: Policy, *, whole: bool = False,
        lone_sums: bool = False,
    ) -> Evaluated:  # fmt: skip
        """Judged by few micro-batches: in the steady state of 1F1B every further one takes as long as the one before. `whole`, and other orders: by
        all."""
        layout, whole_s = candidate.layout, 0.0
        assert layout is not None
        if self.is_folded(layout):  # what is written out has collectives that know the servers
            layout = with_server_replicas(layout, placement, self.fabric)
            candidate = replace(candidate, layout=layout)
        made = step_of_lone_sums if lone_sums else folded_step
        orders = woven_orders(candidate, graph, self.fabric, self.cost, placement, self.exchanges)
        run = partial(made, graph, fabric=self.fabric, cost=self.cost, placement=placement, planner=self.planner, orders=orders)
        few, most = (layout.pipeline + extra for extra in SCOUTED_MICROBATCHES)
        try:
            look()
            # Where two programs would be simulated, all micro-batches take hardly longer if they are few, and the winner is not judged a second time.
            enough = 2 * most if self.is_folded(layout) and not steady(layout) else most
            all_of_them = whole or candidate.orders or layout.microbatches <= enough
            step = run(layout if all_of_them else with_microbatches(layout, most))
            if step.microbatches < layout.microbatches and (lone_sums or not steady(layout)):
                more_s = step.timeline.makespan_s - run(with_microbatches(layout, few)).timeline.makespan_s
                whole_s = step.timeline.makespan_s + (layout.microbatches - most) * more_s / (most - few)
            elif step.microbatches < layout.microbatches:
                whole_s = steady_of(step.program, step.callees, layout).time_s(self.fabric, placement, self.cost, step.works)
        except Unsupported as error:
            return Evaluated(candidate=candidate, why=f"{error.message} ({name})")
        # Of what stays folded, the representatives' steps; a scout stands for the program that may be written out.
        steps = called_sizes(step.program, step.callees)[0] if self.is_folded(layout) else step.program.executed_steps
        count_work(EVALUATION_WORK_S + STEP_WORK_S * steps)
        return Evaluated(
            candidate=candidate, placement=placement, placement_name=name, program=step.program, callees=step.callees, works=step.works,
            timeline=step.timeline, worst_order_bytes=step.needs_bytes, extrapolated_s=whole_s, lone_sums=lone_sums, policy=policy,
            fabric=self.fabric, cost=self.cost, **self._over(step.needs_bytes, placement),
        )  # fmt: skip

    def _cost(self, graph: OpGraph, layout: TrainingLayout, placement: tuple[str, ...], codecs: Mapping[str, Priced]) -> Cost:
        cost = self.cost
        if self.prices is not None:
            source = getattr(self.prices, "source", "operators measured")
            table = split_prices(self.prices(graph, layout), layout, cost, self.fabric.device(placement[0]))
            cost = cost.with_table(table, source=f"{cost.source}; {source}", share=self.table_share)
        if any(b.codec for b in layout.buckets):
            cost = cost.with_table(codecs, source=f"{cost.source}; codecs measured", share=self.table_share)
        return cost

    def _limits(self, placement: tuple[str, ...]) -> list[int]:
        return [self.fabric.device(d).memory_bytes for d in placement]

    def _over(self, needs: Sequence[int], placement: tuple[str, ...]) -> dict[str, Any]:
        """What ranks need beyond what their devices have, as fields of `Evaluated`."""
        over = [need - limit if limit else 0 for need, limit in zip(needs, self._limits(placement), strict=True)]
        worst = max(range(len(over)), key=over.__getitem__)
        return {"excess_bytes": max(over[worst], 0), "worst_rank": worst, "over_bytes": tuple(over)}


def _scouted_by_one(candidate: LayoutCandidate) -> bool:
    """Whether one rank of every stage, and under 1F1B few micro-batches, tell of a layout that may be written out."""
    layout = candidate.layout
    return layout is not None and not layout.zero_level and not why_not_folded(layout)


def _memory_bounds(program: Program) -> list[int]:
    """Bytes that each rank can need in the worst order that the program allows, at most."""
    b, ranks = program.buffers, program.ranks
    whole = np.bincount(b.actor, weights=b.chunks * b.chunk_bytes.astype(np.float64), minlength=ranks)
    temporary = int(program.ops.workspace_bytes.max(initial=0))
    largest = np.zeros(len(program.channels), np.int64)  # message of each channel: at most so much of it is staged, `depth` times
    receives = program.steps.chan_in >= 0
    np.maximum.at(largest, program.steps.chan_in[receives], program.message_bytes()[receives])
    staged = np.bincount(program.channels.dst, weights=largest * program.channels.depth, minlength=len(whole))
    return [int(x) + int(y) + temporary for x, y in zip(whole, staged, strict=False)][:ranks]
