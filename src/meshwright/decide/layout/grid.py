"""Every factorisation of the devices into data x tensor x pipeline degrees, with every micro-batch size that divides the batch.

Cite: see CITE (the rules by which a grid is pruned and ordered).
Left open by the paper: which degrees are possible for a module that is not a Megatron transformer. Our answer: the ones for which the graph
has a split region (tensor) and enough cut positions (pipeline); each refusal carries its reason.
Invariant: every returned layout computes each sample once; degrees multiply to the number of devices.
Cost: O(divisors² · micro-batch sizes) layouts; the graph is scaled, not captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from ...cite import Cite
from ...cost import Cost
from ...errors import Infeasible, Unsupported, UsageError
from ...fabric.fabric import Device, Fabric
from ...graph.graph import OpGraph, captured_whole
from ...graph.liveness import segment_workspace
from ...lower.training import shard_bytes
from ...plan.context import EXCHANGES, exchange_of, layout_exchanges
from ...plan.experts import GSHARD
from ...plan.plan import StepEnd, TrainingLayout
from ...plan.precision import Precision
from ...plan.shards import expert_shards
from ...plan.sizes import parameter_bytes
from .build import build_layout
from .context import context_graph
from .data_sharding import CITE as SHARDING_CITE
from .data_sharding import PLAIN, DataSharding
from .experts import expert_degree_limit, experts_graph, require_degree, tensor_part
from .megatron import CITE as MEGATRON_CITE
from .megatron import Kept, Region, search_regions
from .problem import Degrees, DegreesStrategy, LayoutCandidate, LayoutProblem
from .sequence import CITE as SEQUENCE_CITE
from .tensor_shares import LEVEL, TensorOptions
from .tensor_usable import usable_regions
from .unlike_devices import EVEN, Division

__all__ = ["CITE", "Grid", "degrees_of", "with_experts"]

CITE = Cite(
    key="narayanan2021efficient",
    title="Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    year=2021,
    venue="SC '21, arXiv:2104.04473",
)
DEVIATIONS = ("candidates are judged by simulation, the closed form only orders them",)

# Micro-batches of a step in the grid: programs and their simulation grow with them, and a pipeline is long full by then.
MAX_MICROBATCHES = 512


@dataclass(frozen=True, kw_only=True)
class Grid(DegreesStrategy):
    """`workspace(graph, nodes)` gives the peak temporaries (forward, backward) of a set of forward nodes, in bytes.

    `refuse(degrees)` says why degrees are not worth building, or nothing; it is asked before anything of them is built.
    """

    name: ClassVar[str] = "grid"
    cite: ClassVar[Cite] = CITE

    workspace: Callable[[OpGraph, Sequence[str]], tuple[int, int]] = segment_workspace
    refuse: Callable[[Degrees], str] | None = None
    tensor_options: TensorOptions = LEVEL
    end: StepEnd | None = None  # of every layout; None: plain
    precision: Precision | None = None  # of every layout, whose problem gives graphs in it; None: as captured
    whole: bool = False  # parameters stay whole where replicas divide training state
    apart: bool = False  # every repeated layer has segments of its own
    sharding: DataSharding = PLAIN  # of candidates of `plan` that have replicas

    @classmethod
    def cited(cls, layout: TrainingLayout | None) -> list[tuple[str, Cite]]:
        """(part, Cite) of what a layout is made of."""
        parts = [("layout", cls.cite), ("layout", MEGATRON_CITE)]
        if layout is not None and layout.sequence:
            parts.append(("sequence", SEQUENCE_CITE))
        if layout is not None and layout.context > 1:
            parts.append(("context", EXCHANGES[exchange_of(layout)]))
        if layout is not None and layout.expert > 1:
            parts.append(("experts", GSHARD))
        return parts + ([("sharding", SHARDING_CITE)] if layout is not None and layout.zero_level else [])

    def plan(self, problem: LayoutProblem) -> list[LayoutCandidate]:
        fits: list[LayoutCandidate] = []
        refused: list[LayoutCandidate] = []
        regions: dict[tuple[int, int, str, int, bool], tuple[tuple[Region, ...], tuple[Kept, ...]]] = {}
        for degrees in with_experts(_with_exchange(_with_sequence(degrees_of(problem), self.tensor_options.sequence)), problem):
            if self.refuse is not None and (why := self.refuse(degrees)):
                refused.append(LayoutCandidate(degrees=degrees, why=why))
                continue
            key = (degrees.microbatch_size, degrees.context, degrees.exchange, degrees.expert, degrees.copied)
            try:
                graph = _of_a_rank(problem, degrees)
            except Unsupported as error:
                refused.append(LayoutCandidate(degrees=degrees, why=f"{error.message}; {error.hint}"))
                continue
            if key not in regions:
                regions[key] = search_regions(graph)
            found = regions[key]
            candidate = self._candidate(problem, graph, *found, degrees, self.sharding if degrees.replicas > 1 else PLAIN)
            (fits if candidate.layout is not None else refused).append(candidate)
        fits.sort(key=lambda c: (c.estimate_s, c.degrees))
        return fits + refused

    def sharded(self, problem: LayoutProblem, degrees: Degrees, sharding: DataSharding, division: Division = EVEN) -> LayoutCandidate:
        """The layout of these degrees with its replicas' training state divided and its gradients summed as `sharding` says."""
        graph = _of_a_rank(problem, degrees)
        return self._candidate(problem, graph, *search_regions(graph), degrees, sharding, division)

    def _candidate(
        self, problem: LayoutProblem, graph: OpGraph, regions: tuple[Region, ...], kept: tuple[Kept, ...], degrees: Degrees,
        sharding: DataSharding = PLAIN, division: Division = EVEN,
    ) -> LayoutCandidate:  # fmt: skip
        t = degrees.tensor
        options = division.options(replace(self.tensor_options, sequence=degrees.sequence))
        if t > 1 and not usable_regions(graph, regions, t, options).shares:
            units = sorted({r.units for r in regions})
            why = f"no part of the model can be split {t} ways" + (f" (splittable units: {units})" if units else "")
            why += "".join(f": {said}" for said in captured_whole(graph)[:1])
            return LayoutCandidate(degrees=degrees, why=why, sharding=sharding, division=division)
        if self.tensor_options.sequence and not degrees.sequence:
            return LayoutCandidate(degrees=degrees, why="sequence parallelism needs a tensor degree of at least 2", sharding=sharding)
        device = problem.reference
        rate = float(min(link.rate_Bps for link in problem.fabric.links)) if problem.fabric.links else 1e12
        try:
            layout = build_layout(
                graph, regions, degrees, problem.global_batch, cost=problem.cost, device=device, border_Bps=rate, workspace=self.workspace,
                kept=kept, options=options, cuts=_borders(problem.borders, degrees.pipeline), division=division,
                sharding=replace(sharding, whole=sharding.whole or self.whole), apart=self.apart,
            )  # fmt: skip
        except Infeasible as error:
            return LayoutCandidate(degrees=degrees, why=error.message, sharding=sharding, division=division)
        if self.end is not None:
            layout = msgspec.structs.replace(layout, end=self.end)
        if self.precision is not None:
            layout = msgspec.structs.replace(layout, precision=self.precision)
        if problem.expert not in (None, degrees.expert) and tensor_part(graph, layout) == 1:
            why = f"expert degree {problem.expert}: {t} tensor ranks cannot divide the experts that a replica has"
            return LayoutCandidate(degrees=degrees, why=why, sharding=sharding, division=division)
        if degrees.sequence and not layout.sequence:
            return LayoutCandidate(degrees=degrees, why=layout.notes[-1], sharding=sharding, division=division)
        estimate, memory = _closed_form(layout, graph, problem.cost, device, rate)
        return LayoutCandidate(
            degrees=degrees, layout=layout, estimate_s=estimate, least_s=_least_s(layout, problem.cost, problem.fabric, device),
            memory_floor_bytes=memory, sharding=sharding, division=division,
        )  # fmt: skip


def _of_a_rank(problem: LayoutProblem, degrees: Degrees) -> OpGraph:
    """The graph as a rank computes it, tensor parallelism aside. Raises: Unsupported."""
    graph = context_graph(problem.graph_at(degrees.microbatch_size), degrees.context, degrees.exchange)
    if problem.expert is not None:
        require_degree(graph, problem.expert)
    if not degrees.copied or problem.copies is None:
        return experts_graph(graph, degrees.expert, problem.routing, degrees.tensor)
    if not (copies := problem.copies(graph, degrees.expert)):
        raise Unsupported("no copy of an expert saves more than its weights' way costs", where="--spare", hint="without copies")
    return experts_graph(graph, degrees.expert, problem.routing, degrees.tensor, copies)


def with_experts(found: Iterator[Degrees], problem: LayoutProblem) -> Iterator[Degrees]:
    """With the expert degree that is asked for, or every one that the replicas and the experts divide by. One that replicas do not divide by is
    folded: tensor ranks divide what a replica has."""
    for degrees in found:
        if problem.expert is not None:
            alike, folded = problem.expert, problem.expert // degrees.tensor if problem.expert % degrees.tensor == 0 else 0
            options = [e for e in (alike, folded) if e and degrees.replicas % e == 0][:1]
        elif degrees.replicas == 1:
            options = [1]
        else:
            most = expert_degree_limit(problem.graph_at(degrees.microbatch_size))
            options = [e for e in _divisors(degrees.replicas) if most % e == 0]
        for expert in options:
            yield replace(degrees, expert=expert)
            if expert > 1 and problem.copies is not None:
                yield replace(degrees, expert=expert, copied=True)


def _borders(given: Sequence[str], stages: int) -> Sequence[str]:
    """Of borders of a schedule's pieces, which are a multiple of the stages, those of as many stages; others as they are."""
    pieces = len(given) + 1
    return given[pieces // stages - 1 :: pieces // stages] if given and pieces % stages == 0 else given


def degrees_of(problem: LayoutProblem) -> Iterator[Degrees]:
    """All degrees to consider. Raises: UsageError for fixed ones that do not divide."""
    n, batch = len(problem.fabric.devices), problem.global_batch
    fixed_d, fixed_t, fixed_p, fixed_m = problem.fixed
    if batch < 1:
        raise UsageError(f"must be >= 1, got {batch}", where="global batch")
    given = [x for x in (fixed_d, fixed_t, fixed_p) if x is not None]
    if problem.context is not None and (problem.context < 1 or n % problem.context):
        near = max(c for c in _divisors(n) if c <= max(problem.context, 1))
        raise UsageError(f"context degree {problem.context} does not divide {n} devices", hint=f"e.g. --context {near}, or other --devices")
    # what experts may divide over: replicas, or replicas and all tensor ranks
    known = fixed_d is not None and fixed_t is not None and problem.context is not None
    among = fixed_d * problem.context if known and fixed_d is not None and problem.context is not None else n
    folded = fixed_t if known and fixed_t is not None else 1
    allowed = sorted({*_divisors(among), *(folded * e for e in _divisors(among))})
    if problem.expert is not None and problem.expert not in allowed:
        of = f"{n} devices" if among == n else f"data x context degree {among}" + (f", nor that times {folded} tensor ranks" if folded > 1 else "")
        near = max(e for e in allowed if e <= max(problem.expert, 1))
        raise UsageError(f"expert degree {problem.expert} does not divide the {of}", where="--ep", hint=f"e.g. --ep {near}")
    devices = n
    n //= problem.context or 1
    product = 1
    for x in given:
        product *= x
    if any(x < 1 for x in given) or n % product or (len(given) == 3 and product != n):
        named = {"data": fixed_d, "tensor": fixed_t, "pipeline": fixed_p, "context": problem.context if n < devices else None}
        fixed = [f"{name} {x}" for name, x in named.items() if x is not None]
        what = "do not multiply to" if len(given) == 3 else "do not divide" if len(fixed) > 1 else "does not divide"
        raise UsageError(
            f"{' x '.join(fixed)} {what} the fabric's {devices} devices",
            hint=f"degrees are divisors: {', '.join(map(str, _divisors(n)))}; or take a part of the fabric with --devices",
        )
    if fixed_d is not None and batch % fixed_d:
        near = batch // fixed_d * fixed_d or fixed_d
        raise UsageError(f"global batch {batch} is not a multiple of data degree {fixed_d}", hint=f"e.g. --global-batch {near}")
    if fixed_m is not None and (fixed_m < 1 or batch % (fixed_m * (fixed_d or 1))):
        message = f"global batch {batch} is not a multiple of what {fixed_d or 1} replicas take with micro-batches of {fixed_m}"
        raise UsageError(message, hint=f"a multiple of {fixed_m * (fixed_d or 1)}, or a micro-batch that divides {batch} / {fixed_d or 1}")
    for c, d, t, p in _factors(n, problem.context):
            if any(want is not None and want != have for want, have in zip(problem.fixed[:3], (d, t, p), strict=True)) or batch % d:
                continue
            for m in _divisors(batch // d):
                if fixed_m is None and (m > problem.max_microbatch or batch // d // m > MAX_MICROBATCHES):
                    continue
                if fixed_m is None or fixed_m == m:
                    yield Degrees(d, t, p, m, context=c)


def _factors(n: int, context: int | None) -> Iterator[tuple[int, int, int, int]]:
    """(context, data, tensor, pipeline); `n`: devices of one position group where the context degree is given, else all."""
    for c in _divisors(n) if context is None else [1]:
        for d in _divisors(n // c):
            for t in _divisors(n // c // d):
                yield context or c, d, t, n // c // d // t


def _with_sequence(found: Iterator[Degrees], wanted: bool | None) -> Iterator[Degrees]:
    """With a tensor degree, both with and without sequence parallelism (`wanted` None), or as wanted."""
    for degrees in found:
        if degrees.tensor == 1 or wanted is not True:
            yield degrees
        if degrees.tensor > 1 and wanted is not False:
            yield replace(degrees, sequence=True)


def _with_exchange(found: Iterator[Degrees]) -> Iterator[Degrees]:
    for degrees in found:
        for exchange in EXCHANGES if degrees.context > 1 else ("",):
            yield replace(degrees, exchange=exchange)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _least_s(layout: TrainingLayout, cost: Cost, fabric: Fabric, device: Device) -> float:
    """Seconds that the fullest stage computes, and waits for what its tensor-parallel ranks send each other and its experts' rows, at the rate of all
    links of a device together; with unequal parts (devices of unlike speed) nothing is known."""
    if layout.replica_microbatches or any(s.shares for s in layout.segments):
        return 0.0
    size, by_key = {v.name: v.size_bytes for v in layout.values}, {s.key: s for s in layout.segments}
    egress_Bps = max(sum(fabric.links[x].rate_Bps for x in fabric.out_links[i]) for i in range(len(fabric.devices))) or 1
    rows = {x.source: min(x.expected_bytes) for x in layout_exchanges(layout) if x.expected_bytes is not msgspec.UNSET}
    slowest_s = 0.0
    for stage in layout.stages:
        stage_s = sent = 0.0
        for key in stage.segments:
            s = by_key[key]
            stage_s += cost.roofline(s.forward, device).time_s + cost.roofline(s.backward, device).time_s
            moved = 2 * sum(size[v] for v in (*s.sum_writes, *s.sum_grads)) + sum(size[v] for v in s.gathers)
            sent += (layout.tensor - 1) / layout.tensor * moved
            sent += 2 * sum(rows.get(v, 0) for v in s.writes) * (layout.expert - 1) / layout.tensor
        slowest_s = max(slowest_s, stage_s + sent / egress_Bps)
    return layout.microbatches * slowest_s


def _closed_form(layout: TrainingLayout, graph: OpGraph, cost: Cost, device: Device, rate_Bps: float) -> tuple[float, int]:
    """1F1B closed form with ring all-reduces on the slowest link; bytes of weights, gradients and optimiser state of the fullest stage."""
    by_key = {s.key: s for s in layout.segments}
    size = {v.name: v.size_bytes for v in layout.values}
    shards = [shard_bytes(graph, layout, t) for t in range(layout.tensor)]
    held = max(shards, key=lambda sizes: sum(sizes[p] for st in layout.stages for p in st.params))
    experts = {s.param for s in expert_shards(layout)}
    slowest = total = gradient = 0.0
    memory = 0
    for stage in layout.stages:
        t = 0.0
        for key in stage.segments:
            s = by_key[key]
            t += cost.roofline(s.forward, device).time_s + cost.roofline(s.backward, device).time_s
            # twice around a ring for a sum, or its reduce-scatter here and all-gather there; what is gathered is gathered for backward again
            moved = 2 * sum(size[v] for v in (*s.sum_writes, *s.sum_grads)) + sum(size[v] for v in s.gathers)
            t += (layout.tensor - 1) / layout.tensor * moved / rate_Bps
            t += 2 * sum(size[x.target] for x in layout_exchanges(layout) if x.source in s.writes) / rate_Bps
        t += 2 * sum(size[v] for v in stage.sends) / rate_Bps
        own, theirs = (sum(held[p] for p in stage.params if (p in experts) is x) for x in (False, True))
        gradient = max(gradient, 2 * (layout.data - 1) / layout.data * (own + theirs) / rate_Bps)
        slowest, total = max(slowest, t), total + t
        memory = max(memory, parameter_bytes(layout, own, layout.zero_level) + parameter_bytes(layout, theirs, layout.zero_level, experts=True))
    return total + (layout.microbatches - 1) * slowest + gradient, memory


