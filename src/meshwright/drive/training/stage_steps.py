"""Stages of a layout planned as whole steps: the joint forward-and-backward graph of one micro-batch, with the others that are in flight beside it.

A stage that is over its devices' memory gets the fastest plan of its step graph that saves what is missing (`decide.memory`); the segment then runs
that plan, and its bytes and seconds in the training program are the plan's. Where nothing saves enough, it gets the plan of least memory.
A stage that tensor parallelism cuts into several segments has a graph for each of them; which of its plans each one runs is the mix of least time
(`decide.memory.mix`): all keep what their plans keep, and one of them runs at a time.
Where backward is split, the plan's backward actions are told apart: what gradients of reads need runs first, all else in `W`, where what both need is
held in between (`in_two`); the bytes held from `F` to `I` are counted until `W`.
Where ranks divide positions, the rounds of attention between their messages are no planned steps: each rank computes other parts of a mask in them.
They run as they are, and the segments beside them are planned.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import msgspec
import numpy as np

from ...decide.memory.fusionaware import FusionAware
from ...decide.memory.mix import Members, whole_mix
from ...decide.memory.problem import LayerPolicy
from ...decide.memory.regions import Chosen
from ...decide.memory.stage_floor import Holding, SegmentFloor, floor_of, least_again_s
from ...decide.memory.step import finished, keep_everything
from ...decide.memory.workspaces import plan_with_workspaces, relaxed
from ...decide.pipeline import peak_in_flight
from ...errors import Infeasible, Unsupported
from ...graph.graph import Work
from ...graph.step_graph import StepGraph, StepPlan, replacement
from ...plan.batch_statistics import batch_sums
from ...plan.context import layout_exchanges
from ...plan.plan import Segment, SegmentStep, TrainingLayout
from ...plan.shards import local_value
from ...simulate.step_memory import simulate_step

__all__ = ["SegmentGraph", "StageSteps", "StepSource", "holdings_of", "peaks_in_flight", "with_step"]

# Runs of nodes of the search over a segment's schedules, per node of its graph.
EFFORT_PER_NODE = 40_000
# Budgets that the segments of a stage are planned for, from keeping everything to the least.
BUDGETS_PER_STAGE = 9
Orders = Sequence[Sequence[tuple[str, int, int]]]
replace = msgspec.structs.replace


@dataclass(frozen=True, kw_only=True)
class SegmentGraph:
    """A segment's step graph with costs; the other fields as in `plan.SegmentStep`. Its operators may have other implementations, which read the same
    and write over nothing; `plain`: as PyTorch runs it, where that is not `graph`."""

    graph: StepGraph
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    gradients: tuple[int, ...]
    handed: int
    plain: StepGraph | None = None

    def keep_peak_bytes(self) -> int:
        """Of keeping everything, unplanned."""
        return keep_everything(replace(self.plain or self.graph, in_flight=self.graph.in_flight)).peak_bytes


def holdings_of(layout: TrainingLayout, orders: Orders = ()) -> list[list[Holding]]:
    """By pipeline index, of how many micro-batches it holds at once what their backward needs, whenever that is most or a backward is next."""
    if not orders:
        stages = [layout.placement[0].index(p) if layout.placement else p for p in range(layout.pipeline)]
        return [[Holding(counts={s: peak_in_flight(layout.pipeline, layout.microbatches, p)}, back=s)] for p, s in enumerate(stages)]
    last, found = "W" if layout.split_backward else "B", []
    for order in orders:
        alive: Counter[int] = Counter()
        seen: dict[tuple[object, ...], Holding] = {}
        for phase, stage, _ in order:
            if phase != "F":
                held = Holding(counts=dict(+alive), back=stage if phase == "B" else -1)
                seen[tuple(sorted(held.counts.items())), held.back] = held
            alive[stage] += (phase == "F") - (phase == last)
        found.append(list(seen.values()))
    return found


def peaks_in_flight(layout: TrainingLayout, orders: Orders = ()) -> tuple[int, ...]:
    """By stage, the most micro-batches of which a rank holds what their backward needs."""
    counts = [h.counts for mine in holdings_of(layout, orders) for h in mine]
    return tuple(max((c.get(s.index, 0) for c in counts), default=0) for s in layout.stages)


class StepSource(Protocol):
    def __call__(self, layout: TrainingLayout, key: str) -> SegmentGraph:
        """Of a segment. Raises: Unsupported for one that cannot be run as a planned step."""
        ...


@dataclass
class StageSteps:
    """As `drive.training.recompute.StageRecompute`, with a plan for every segment of a stage as its choice."""

    layout: TrainingLayout
    source: StepSource
    effort: int | None = None  # of the search over a segment's schedules
    name: str = "steps"
    orders: Orders = ()  # as of `LayoutCandidate`; empty: 1F1B's
    room_bytes: Sequence[int] = ()  # by pipeline index, what ranks have beside what they always hold; empty: not known
    steps: dict[str, SegmentStep] = field(default_factory=dict)  # what `saving` chose last, by segment
    _bounds: dict[int, float] | None = None
    _menus: dict[object, tuple[StepPlan | None, ...]] = field(default_factory=dict)  # of graphs that are alike

    def __post_init__(self) -> None:
        if self.layout.split_backward and self.layout.sequence:
            raise Unsupported(
                "with sequence parallelism, planned steps (--recompute steps) run a whole backward, and this schedule splits it", where="--recompute",
                hint="another --recompute, --sequence-parallel off, or a schedule with whole backward",
            )  # fmt: skip
        if batch_sums(self.layout):
            raise Unsupported(
                "planned steps share no statistics of the batch with other replicas", where="--recompute",
                hint="another --recompute, no --memory plan, or leave out --batch-statistics global",
            )  # fmt: skip
        self.in_flight = peaks_in_flight(self.layout, self.orders)
        self.segment = {s.key: s for s in self.layout.segments}
        self.size_bytes = {v.name: local_value(v, 0, self.layout.tensor).size_bytes for v in self.layout.values}
        exchanged = {v for x in layout_exchanges(self.layout) for v in (x.source, x.target)}
        planned = [s for s in self.layout.segments if not exchanged & {*s.reads}]
        self.graphs = {s.key: self._in_flight(s.stage, self.source(self.layout, s.key)) for s in planned}

    def _in_flight(self, stage: int, found: SegmentGraph) -> SegmentGraph:
        flight = self.in_flight[stage]
        return SegmentGraph(**{**vars(found), "graph": replace(found.graph, in_flight=flight)})

    def saving(self, need_bytes: Mapping[int, int]) -> dict[int, Chosen]:
        """Per stage the fastest plans that need so many bytes less than keeping everything; the leanest where none do."""
        self.steps = {}
        chosen = {}
        if self._bounds is None:
            self._bounds = self._bounded()
        for stage, need in need_bytes.items():
            if need > 0:
                keys = self.layout.stages[stage].segments
                plans = [self._alone(keys[0], need)] if len(keys) == 1 and keys[0] in self.graphs else self._mixed(keys, need)
                mine = {k: self._step(k, plan) for k, plan in zip(keys, plans, strict=True) if plan is not None}
                self.steps |= mine
                chosen[stage] = self._chosen(mine, self._bounds.get(stage, 0.0))
        return {i: c for i, c in chosen.items() if c.again}

    def _alone(self, key: str, need: int) -> StepPlan:
        return self.fastest(self.graphs[key].graph, self.graphs[key].keep_peak_bytes() - need)

    def fastest(self, graph: StepGraph, budget_bytes: int | None) -> StepPlan:
        strategy, rng = FusionAware(effort=self.effort or EFFORT_PER_NODE * len(graph.nodes)), np.random.default_rng(0)
        try:
            return plan_with_workspaces(graph, budget_bytes, strategy, rng=rng)
        except Infeasible:
            return plan_with_workspaces(graph, None, strategy, rng=rng)

    def _mixed(self, keys: Sequence[str], need: int) -> list[StepPlan | None]:
        """A plan for each of the segments, None: it runs as it is. The least time that saves `need`, else the least that all together hold."""
        alike: dict[object, list[str]] = {}
        for k in keys:
            alike.setdefault(self._kind(k), []).append(k)
        flight = self.in_flight[self.segment[keys[0]].stage]
        menus = [self._worthwhile(mine[0]) for mine in alike.values()]
        classes = [
            Members(count=len(mine), policies=tuple(policy for _, policy in menu), copies=flight)
            for mine, menu in zip(alike.values(), menus, strict=True)
        ]
        whole = sum(flight * m.count * m.policies[0].kept_bytes for m in classes) + max(m.policies[0].workspace_bytes for m in classes)
        try:
            counts = whole_mix(classes, whole - need)
        except Infeasible:
            least = [min(m.policies, key=lambda p: flight * p.kept_bytes + p.workspace_bytes) for m in classes]
            counts = [[m.count if p is lean else 0 for p in m.policies] for m, lean in zip(classes, least, strict=True)]
        found: dict[str, StepPlan | None] = {}
        for mine, menu, count in zip(alike.values(), menus, counts, strict=True):
            order = [plan for (plan, _), times in zip(reversed(menu), reversed(count), strict=True) for _ in range(times)]  # the first hold longest
            found |= dict(zip(mine, order, strict=True))
        return [found[k] for k in keys]

    def _kind(self, key: str) -> object:
        """Equal for segments that are planned alike; of those that are not planned, for ones of equal bytes."""
        s = self.segment[key]
        return _alike(self.graphs[key].graph, s) if key in self.graphs else (s.saved_bytes, s.left_bytes, s.backward_workspace_bytes)

    def _worthwhile(self, key: str) -> list[tuple[StepPlan | None, LayerPolicy]]:
        """The segment as it is, and plans that hold fewer bytes between its passes or while one runs."""
        plain, *others = [(plan, self._policy(key, plan)) for plan in self._menu(key)]
        held, working = plain[1].kept_bytes, plain[1].workspace_bytes
        return [plain, *((plan, p) for plan, p in others if p.kept_bytes < held or p.workspace_bytes < working)]

    def _menu(self, key: str) -> tuple[StepPlan | None, ...]:
        """From the segment as it is to the plan of least memory; a partial sum that others complete in place is held by none of them."""
        if key not in self.graphs:
            return (None,)
        graph, which = self.graphs[key].graph, self._kind(key)
        if graph.boundary == len(graph.nodes):  # no backward: nothing is kept for it
            return (None,)
        if which not in self._menus:
            stage = self.layout.stages[self.segment[key].stage]
            beside = replace(graph, in_flight=graph.in_flight * len(stage.segments))  # what others of the stage hold adds up as micro-batches do
            top, low = keep_everything(beside).peak_bytes, self.fastest(beside, None).peak_bytes
            plans = [self.fastest(beside, top - i * (top - low) // (BUDGETS_PER_STAGE - 1)) for i in range(1, BUDGETS_PER_STAGE)]
            summed = {*self.segment[key].sum_writes}
            distinct = [_on(graph, p) for p in {(p.peak_bytes, p.time_s): p for p in plans}.values()]
            held = [p for p in distinct if not summed & {*_kept(self.graphs[key], p, self.segment[key])}]
            self._menus[which] = (None, *held)
        return self._menus[which]

    def _policy(self, key: str, plan: StepPlan | None) -> LayerPolicy:
        """What a segment holds and takes by a plan, as far as mixing them asks."""
        segment = self.segment[key]
        if key not in self.graphs:
            held = segment.saved_bytes + segment.left_bytes
            return LayerPolicy(recompute=(), keep=(), kept_bytes=held, workspace_bytes=segment.backward_workspace_bytes, time_s=0.0)
        found = self.graphs[key]
        used, step = (keep_everything(found.graph), None) if plan is None else (plan, self._step(key, plan))
        made = segment if step is None else with_step(segment, step)
        border = sum(self.size_bytes[v] for v in _kept(found, used, segment))
        return LayerPolicy(
            recompute=(), keep=(), kept_bytes=made.saved_bytes + made.left_bytes + border, workspace_bytes=made.backward_workspace_bytes,
            time_s=0.0 if step is None else step.again_s(),
        )  # fmt: skip

    def _step(self, key: str, plan: StepPlan) -> SegmentStep:
        found, weights = self.graphs[key], -1
        if self.layout.split_backward:
            plan, weights = in_two(found, plan)
        return SegmentStep(
            graph=found.graph, plan=plan, reads=found.reads, writes=found.writes, gradients=found.gradients, handed=found.handed,
            kept=_kept(found, plan, self.segment[key]), weights=weights,
        )  # fmt: skip

    def _bounded(self) -> dict[int, float]:
        """Seconds per micro-batch that the stages run again at least, by any plans of their segments with which their ranks' memory suffices.

        Stages of one rank are bounded together, each has its share. Of the values on borders, those that backward nodes read are kept in any case.
        """
        found: dict[int, float] = {}
        for room_bytes, holdings in zip(self.room_bytes, holdings_of(self.layout, self.orders), strict=False):
            mine = {s: self._floors(self.layout.stages[s].segments) for h in holdings for s in h.counts}
            for s, seconds in least_again_s(mine, holdings, room_bytes).items():
                found[s] = min(found.get(s, seconds), seconds)
        return found

    def _floors(self, keys: Sequence[str]) -> list[SegmentFloor]:
        """Of a stage's segments; of alike ones, the moments of the last only."""
        found, known, surely = list[SegmentFloor](), dict[object, SegmentFloor](), set[str]()
        border = {v for k in keys if k in self.graphs for v in _read_by_backward(self.graphs[k], self.segment[k])}
        last = {self._kind(k): k for k in keys}
        for k in keys:
            s, alike = self.segment[k], self._kind(k)
            if k not in self.graphs:
                found.append(SegmentFloor(held=((float(s.saved_bytes + s.left_bytes), 0.0),)))
                continue
            g = self.graphs[k]
            surely |= _read_by_backward(g, s)
            elsewhere = tuple(n for v, n in zip(s.writes, g.writes, strict=True) if v in border)
            which = alike, elsewhere
            if which not in known:
                known[which] = floor_of(
                    relaxed(g.graph), plain_bytes=s.saved_bytes + s.left_bytes, plain_workspace_bytes=s.backward_workspace_bytes, elsewhere=elsewhere,
                    whole=not self.layout.split_backward,
                )  # fmt: skip
            moments = known[which].moments if last[alike] == k else ()
            found.append(dataclasses.replace(known[which], moments=moments, border_bytes=sum(self.size_bytes[v] for v in surely)))
        return found

    def _chosen(self, steps: Mapping[str, SegmentStep], bound_s: float) -> Chosen:
        again, saved, workspace, time_s = {}, 0, 0, 0.0
        for key, step in steps.items():
            made, ran, nodes = with_step(self.segment[key], step), [a.node for a in step.plan.actions], step.graph.nodes
            names = tuple(nodes[x].name for x in sorted({*ran}) if ran.count(x) > 1 and nodes[x].makes)
            if names or any(a.alternative >= 0 or replacement(nodes[a.node].target) for a in step.plan.actions):
                again[key, "step"] = names
            saved += self.segment[key].saved_bytes - made.saved_bytes
            workspace = max(workspace, made.backward_workspace_bytes)
            time_s += step.again_s()
        return Chosen(again=again, saved_bytes=saved, workspace_bytes=workspace, time_s=time_s, bound_s=bound_s)

    def apply(self, chosen: Mapping[int, Chosen]) -> TrainingLayout:
        made = {k: self.steps[k] for i in chosen for k in self.layout.stages[i].segments if k in self.steps}
        return replace(self.layout, segments=tuple(with_step(s, made[s.key]) if s.key in made else s for s in self.layout.segments))


def _read_by_backward(found: SegmentGraph, segment: Segment) -> set[str]:
    """Reads of the segment in whose storage lies what a backward node reads: every plan keeps them."""
    graph = found.graph
    backward = [graph.nodes[a.node] for a in keep_everything(graph).actions if a.node >= graph.boundary]
    asked = {s for n in backward for x in n.inputs for s in graph.nodes[x].storages}
    return {v for v, n in zip(segment.reads, found.reads, strict=True) if asked & {*graph.nodes[n].storages}}


def _alike(graph: StepGraph, segment: Segment) -> object:
    """Equal for segments whose graphs differ in names only, and that autograd would run alike."""
    nodes = tuple(replace(n, name="", module="") for n in graph.nodes)
    own = segment.saved_bytes, segment.backward_workspace_bytes, tuple(v in segment.sum_writes for v in segment.writes)
    return nodes, tuple((s.size_bytes, s.kind) for s in graph.storages), graph.results, graph.in_flight, own


def _on(graph: StepGraph, plan: StepPlan) -> StepPlan:
    """The plan of a graph that differs in micro-batches in flight only."""
    runs = [(a.node, a.alternative) for a in plan.actions]
    return finished(graph, runs, plan.boundary, strategy=plan.strategy, options=plan.options)


def in_two(found: SegmentGraph, plan: StepPlan) -> tuple[StepPlan, int]:
    """(the plan with what the gradients of reads need before all other backward actions, the first of these)."""
    graph, latest, needs = found.graph, dict[int, int](), list[tuple[int, ...]]()
    for i, a in enumerate(plan.actions):
        way = graph.nodes[a.node] if a.alternative < 0 else graph.nodes[a.node].alternatives[a.alternative]
        needs.append(tuple(latest[x] for x in way.inputs if x in latest))
        latest[a.node] = i
    stack, first = [latest[n] for n in found.gradients if n in latest], set[int]()
    while stack:
        i = stack.pop()
        if i not in first:
            first.add(i)
            stack += needs[i]
    backward = range(plan.boundary, len(plan.actions))
    order = [*range(plan.boundary), *(i for i in backward if i in first), *(i for i in backward if i not in first)]
    runs = [(plan.actions[i].node, plan.actions[i].alternative) for i in order]
    made = finished(graph, runs, plan.boundary, strategy=plan.strategy, options=plan.options, notes=("backward in two parts",))
    return made, plan.boundary + sum(i >= plan.boundary for i in first)


def with_step(segment: Segment, step: SegmentStep) -> Segment:
    """The segment run by a plan: what it keeps, its workspaces, and the work of running calls again (that share of forward by seconds)."""
    graph, plan = replace(step.graph, in_flight=1), step.plan
    run = simulate_step(graph, plan.actions, boundary=plan.boundary)
    alive = [b - graph.fixed_bytes() for b in run.bytes_at]
    held = _made(graph, plan.saved)
    given = {v: _made(graph, (n,)) for v, n in zip(segment.writes, step.writes, strict=True)}
    border: set[int] = set().union(*given.values())
    kept: set[int] = set().union(*(s for v, s in given.items() if v in step.kept))
    back = _made(graph, [n for n in step.gradients if n >= 0])
    saved = _bytes(graph, held - border)
    crossing = _read_late(step)
    arrived = _bytes(graph, {s for s in crossing if graph.storages[s].kind == "tangent"})
    left = max(0, arrived + _bytes(graph, {s for s in crossing if graph.storages[s].kind == "made"} - kept) - saved) if step.weights >= 0 else 0
    forward_s = step.forward_s()
    share = Fraction(step.again_s() / forward_s) if forward_s > 0 else Fraction(0)
    return replace(
        segment, step=step, recompute=(), saved_bytes=saved, left_bytes=left,
        forward_workspace_bytes=max(0, max(alive[: plan.boundary], default=0) - saved - _bytes(graph, border)),
        backward_workspace_bytes=max(0, max(alive[plan.boundary :], default=0) + arrived - saved - left - _bytes(graph, kept | back)),
        again=Work(**{x: max(0, round(getattr(segment.forward, x) * share)) for x in ("flops", "bytes_read", "bytes_written", "calls")}),
    )  # fmt: skip


def _read_late(step: SegmentStep) -> set[int]:
    """Storages in which something lies that the second part of a split backward reads and does not make."""
    fresh, read = set[int](), set[int]()
    for a in step.plan.actions[step.weights :] if step.weights >= 0 else ():
        read |= {s for x in step.graph.nodes[a.node].inputs if x not in fresh for s in step.graph.nodes[x].storages}
        fresh.add(a.node)
    return read


def _made(graph: StepGraph, nodes: tuple[int, ...] | list[int]) -> set[int]:
    """Storages of the step's own in which results of these nodes lie."""
    return {s for x in nodes for s in graph.nodes[x].storages if graph.storages[s].kind == "made"}


def _bytes(graph: StepGraph, storages: set[int]) -> int:
    return sum(graph.storages[s].size_bytes for s in storages)


def _kept(found: SegmentGraph, plan: StepPlan, segment: Segment) -> tuple[str, ...]:
    """Border values that backward needs: reads that lie where backward actions read or held results lie, writes of which something held is a part."""
    graph = found.graph
    asked = {*plan.saved, *(x for a in plan.actions[plan.boundary :] for x in graph.nodes[a.node].inputs)}
    there = {s for x in asked for s in graph.nodes[x].storages}
    reads = [v for v, n in zip(segment.reads, found.reads, strict=True) if there & {*graph.nodes[n].storages}]
    held = {s for x in plan.saved for s in graph.nodes[x].storages}
    writes = [v for v, n in zip(segment.writes, found.writes, strict=True) if held & _made(graph, (n,))]
    return tuple(dict.fromkeys([*reads, *writes]))
