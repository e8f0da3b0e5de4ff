"""Writes a `TrainingLayout`: the stages, segments, border values and shards that given degrees mean for a captured graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from msgspec import UNSET

from ...cost import Cost
from ...errors import Infeasible
from ...fabric.fabric import Device
from ...graph.graph import OpGraph, OpNode, Work, captured_whole
from ...plan.batch_statistics import CARRYING, MOMENTS, NORMALISE, SUMMED, sums_in
from ...plan.context import HEADS, JOIN, KINDS, OUT, RING_BLOCK, RING_END, TILE_ELEMENTS, exchanges_in
from ...plan.experts import EXPERTS, GIVEN
from ...plan.plan import GradientBucket, PartialGradient, RowBias, Segment, Stage, TrainingLayout, ValueInfo, ValueSplit, VocabularyLoss
from ...plan.recompute import layer_of, saved_storages
from ...plan.vocabulary import base_node, expand_losses, sums_of
from ...plan.whole_batch import BACK
from .cut import STARTS, Unit, around_exchanges, border_values, cut_stages, dtype_bytes
from .data_sharding import PLAIN, DataSharding, bucket_size, cut_run, gradient_buckets
from .experts import expert_shards, waits_for_tokens
from .megatron import Kept, Region, kept_notes
from .problem import Degrees
from .sequence import SequenceSplit, split_sequence
from .split import Split, made_from
from .tensor_shares import LEVEL, TensorOptions
from .tensor_usable import Usable, ordered_units, usable_regions
from .unlike_devices import EVEN, Division

__all__ = ["build_layout"]

INSIDE = frozenset({*KINDS, JOIN, OUT, RING_BLOCK, HEADS, GIVEN, *SUMMED, *EXPERTS})  # no stage ends between these and what reads them
Workspace = Callable[[OpGraph, Sequence[str]], tuple[int, int]]


@dataclass
class _Build:
    graph: OpGraph  # with split losses in three parts
    captured: OpGraph
    degrees: Degrees
    units: list[Unit]
    usable: Usable
    losses: tuple[VocabularyLoss, ...]
    workspace: Workspace
    sharding: DataSharding = PLAIN
    bucket_bytes: int = 0
    sequence: SequenceSplit = field(default_factory=SequenceSplit)
    split_of: dict[str, tuple[Split, tuple[int, ...]]] = field(default_factory=dict)
    maxima: set[str] = field(default_factory=set)
    shape_of: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    storage_of: dict[str, int] = field(default_factory=dict)
    row_bias: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    node_of: dict[str, OpNode] = field(default_factory=dict)
    made_from_params: set[str] = field(default_factory=set)
    layers: dict[str, str] = field(default_factory=dict)  # of nodes, where no segment goes beyond one

    def __post_init__(self) -> None:
        self.made_from_params = made_from(self.graph, {f"param:{p.name}" for p in self.graph.parameters}, without=("detach",))
        for n in self.graph.nodes:
            self.node_of[n.name] = n
            if n.outputs:
                self.shape_of[n.name] = (n.outputs[0].shape, n.outputs[0].dtype)
                self.storage_of[n.name] = n.outputs[0].storage
            for v in n.inputs:
                self.readers.setdefault(v, []).append(n.name)
        for unit in self.units:
            if unit.region is not None:
                self.row_bias.update(unit.region.row_bias)
                self.maxima.update(unit.region.maxima)
                self.split_of |= {v: (split, self.usable.shares[unit.region]) for v, split in (*unit.region.outputs, *unit.region.inner)}
        self.split_of |= {v: (a.split, self.sequence.shares[a.extent]) for v, a in self.sequence.values.items()}

    def is_split(self, unit: Unit) -> bool:
        return unit.region is not None and self.degrees.tensor > 1

    def layer(self, unit: Unit) -> str:
        return self.layers.get(base_node(unit.nodes[0].name), "")

    def extent(self, units: Sequence[Unit]) -> int:
        """Positions of the sequence that a run of units outside regions is split along; 0: it is whole."""
        return next((extent for u in units if u.region is None for kind, extent in (self.sequence.kind(u),) if kind == "split"), 0)

    def share(self, unit: Unit) -> tuple[int, int]:
        """(largest share, all shares) of a unit."""
        if self.degrees.tensor == 1 or (unit.region is None and not (extent := self.extent([unit]))):
            return 1, 1
        shares = (self.usable.shares[unit.region] if unit.region is not None else self.sequence.shares[extent]) or (1,) * self.degrees.tensor
        return max(shares), sum(shares)

    def differentiable(self, value: str) -> bool:
        if value in self.node_of and self.node_of[value].target in SUMMED:
            return self.node_of[value].target in CARRYING and value in self.made_from_params
        carrying = self.sequence.trained if self.sequence.values else self.made_from_params
        if value not in carrying and (base_node(value) == value or "/part/" in value):
            return False  # whole tables that ranks cut to their part would get partial gradients, for nobody
        return value not in self.maxima and self.shape_of[value][1].startswith(("float", "bfloat", "complex"))


def build_layout(
    graph: OpGraph, regions: Sequence[Region], degrees: Degrees, global_batch: int, *, cost: Cost, device: Device, border_Bps: float,
    workspace: Workspace, options: TensorOptions = LEVEL, kept: Sequence[Kept] = (), cuts: Sequence[str] = (),
    sharding: DataSharding = PLAIN, division: Division = EVEN, apart: bool = False,
) -> TrainingLayout:  # fmt: skip
    """`graph` is captured at the micro-batch size; `border_Bps` is the rate between neighbouring stages.

    `kept`: what the search for regions left whole (`megatron.search_regions`), for the layout's notes. `cuts`: the first operators of the stages
    after the first, where they are given. `division`: of work among devices of unlike speed. `apart`: every repeated layer has segments of
    its own. Raises: Infeasible when the graph cannot be cut into
    that many stages, or not there.
    """
    options = division.options(options)
    usable = usable_regions(graph, regions, degrees.tensor, options)
    losses = tuple(VocabularyLoss(node=x, smoothing=options.smoothing) for x in dict.fromkeys(x for r in usable.shares for x in r.losses))
    expanded = expand_losses(graph, losses)
    units = ordered_units(expanded, usable)
    if {x for r in usable.shares for x in r.losses} != {x.node for x in losses}:  # a loss was dissolved: its node is one again
        losses = tuple(x for x in losses if any(x.node in r.losses for r in usable.shares))
        expanded = expand_losses(graph, losses)
        units = ordered_units(expanded, usable)
    sequence = SequenceSplit()
    if options.sequence and usable.shares:
        sequence = split_sequence(expanded, units, degrees.tensor, options, [s.param for s in usable.shards])
    divided_or_early = (degrees.replicas > 1 and (sharding.level or sharding.overlap)) or (sharding.copied and sharding.overlap)
    b = _Build(expanded, graph, degrees, units, usable, losses, workspace, sharding if divided_or_early else PLAIN, sequence=sequence)
    b.layers = layer_of(expanded) if apart else {}
    starts = _stage_starts(b, cost, device, border_Bps, cuts, division.stage_speeds)
    runs = [units[i:j] for i, j in pairwise([*starts, len(units)])]
    whole = bool(b.sharding.whole and b.sharding.level)  # one of each replica fits into a bucket then, or more of it would be padding than parameters
    least = degrees.replicas * max((p.size_bytes for p in graph.parameters if p.trainable and whole), default=0)
    b.bucket_bytes = bucket_size(b.sharding, [sum(_parameter_bytes(b, run)) for run in runs], least)
    produced_in = {n.name: s for s, run in enumerate(runs) for u in run for n in u.nodes}
    last_read: dict[str, int] = {}
    for s, run in enumerate(runs):
        for u in run:
            for n in u.nodes:
                for v in n.inputs:
                    last_read[v] = s
    segments: list[Segment] = []
    stages: list[Stage] = []
    for s, run in enumerate(runs):
        crossing_in = [v for v in produced_in if produced_in[v] < s <= last_read.get(v, -1)]
        crossing_out = [v for v in produced_in if produced_in[v] <= s < last_read.get(v, -1)]
        mine = _segments(b, s, run)
        params = tuple(dict.fromkeys(p for seg in mine for p in seg.params))
        stages.append(
            Stage(index=s, segments=tuple(x.key for x in mine), receives=tuple(crossing_in), sends=tuple(crossing_out), params=params)
        )
        segments += mine
    values = sorted({v for x in segments for v in (*x.reads, *x.writes)} | {v for st in stages for v in st.receives})
    buckets = _buckets(b, stages, segments) if b.sharding != PLAIN else []
    return TrainingLayout(
        data=degrees.replicas, tensor=degrees.tensor, pipeline=degrees.pipeline,
        microbatch_size=degrees.microbatch_size, zero_level=b.sharding.level, whole_parameters=whole or UNSET, overlap=b.sharding.overlap,
        microbatches=max(division.microbatches, default=global_batch // (degrees.data * degrees.microbatch_size)),
        replica_microbatches=division.microbatches,
        global_batch=global_batch,
        context=degrees.context, expert=degrees.expert,
        expert_shards=expert_shards(graph, degrees.expert) or UNSET,
        exchanges=exchanges_in(graph) or UNSET,
        batch_sums=sums_in(graph) or UNSET,
        bucket_bytes=b.bucket_bytes if b.sharding.cuts else 0,
        buckets=tuple(buckets),
        stages=tuple(stages),
        segments=tuple(segments),
        values=tuple(_value(b, v) for v in values),
        shards=tuple(usable.shards),
        partial_gradients=(*usable.partial, *sequence.partial(degrees.tensor), *_late_biases(b, segments)),
        frozen=tuple(p.name for p in graph.parameters if not p.trainable),
        losses=losses,
        sequence=bool(sequence.values),
        notes=(*kept_notes(kept), *usable.notes, *sequence.notes) if degrees.tensor > 1 else (),
    )


def _late_biases(b: _Build, segments: Sequence[Segment]) -> list[PartialGradient]:
    """Biases of partial sums that a split segment adds to what it reads: each rank has the gradient of its part.

    Raises: Infeasible where a whole segment adds the same bias too: its gradient would be complete in one place and a part in another.
    """
    known = {x.param for x in (*b.usable.partial, *b.sequence.partial(b.degrees.tensor))}
    known |= {p.name for p in b.graph.parameters if not p.trainable}
    of_part: dict[str, bool] = {}
    for s in segments:
        for x in s.row_biases:
            part = s.sequence or (s.split and x.value in s.sum_grads)
            if of_part.setdefault(x.bias, part) != part and x.bias not in known:
                message = f"the bias {x.bias!r} is added both where its gradient is a part and where it is whole"
                raise Infeasible(message, where=s.key, hint="use tensor degree 1")
    whole = (tuple(range(b.degrees.tensor)),)
    return [PartialGradient(param=bias, groups=whole) for bias, part in of_part.items() if part and bias not in known]


def _stage_starts(b: _Build, cost: Cost, device: Device, border_Bps: float, cuts: Sequence[str], speeds: Sequence[float]) -> list[int]:
    borders = border_values(b.units)
    time_of = []
    for unit in b.units:
        forward = sum((n.forward for n in unit.nodes), Work())
        backward = sum((n.backward for n in unit.nodes), Work())
        time_of.append(sum(cost.roofline(w.share(*b.share(unit)), device).time_s for w in (forward, backward)))
    border_s, allowed = [], []
    for values in borders:
        total = sum(_border_bytes(b, v) * (2 if b.differentiable(v) else 1) for v in values if v in b.shape_of)
        messages = sum(2 if b.differentiable(v) else 1 for v in values if v in b.shape_of)
        border_s.append(total / border_Bps + 2 * messages * cost.transport.per_message_s)  # both ends handle every message
        allowed.append(all(len(b.node_of[v].outputs) == 1 and _may_cross(b, v) for v in values))
    speeds, why = (speeds if len(speeds) == b.degrees.pipeline else ()), "; ".join(captured_whole(b.graph))
    return _given_starts(b, cuts, allowed) if cuts else cut_stages(b.units, b.degrees.pipeline, time_of, border_s, allowed, speeds, why)


def _border_bytes(b: _Build, value: str) -> int:
    size = _value(b, value).size_bytes
    return -(-size // b.degrees.tensor) if value in b.sequence.values else size


def _may_cross(b: _Build, value: str) -> bool:
    """A value that stages may hand over: whole, or split along the sequence; not one whose gradient is partial within its segment."""
    if value in b.node_of and b.node_of[value].target in INSIDE:
        return False
    return (value not in b.split_of or value in b.sequence.values) and b.sequence.kinds.get(value) != "beside"


def _given_starts(b: _Build, cuts: Sequence[str], allowed: Sequence[bool]) -> list[int]:
    position = {base_node(n.name): i for i, unit in reversed(list(enumerate(b.units))) for n in unit.nodes}
    starts = [0, *(position.get(x, 0) for x in cuts)]
    for name, before, at in zip(cuts, starts, starts[1:], strict=False):
        if at <= before or not allowed[at]:
            raise Infeasible(f"a stage cannot begin with {name!r} at tensor degree {b.degrees.tensor}", hint="leave the borders to the planner")
    if len(starts) != b.degrees.pipeline:
        raise Infeasible(f"{len(cuts)} borders for {b.degrees.pipeline} stages", hint="one less than there are stages")
    return starts


def _segments(b: _Build, stage: int, run: Sequence[Unit]) -> list[Segment]:
    """Regions and the runs between them; without tensor parallelism the whole stage is one segment.

    With sequence parallelism, runs that are split along one sequence and runs that are whole are segments of their own.
    """
    groups: list[tuple[bool, list[Unit]]] = []
    kinds: list[tuple[str, int]] = []  # of the groups
    for unit in run:
        if unit.nodes[0].target in KINDS:  # messages, no step
            continue
        split = b.is_split(unit)
        if split and unit.region is not None and unit.region.inner:
            groups += [(True, [part]) for part in around_exchanges(unit)]
            kinds += [("region", 0)] * (len(groups) - len(kinds))
            continue
        kind = ("region", 0) if split else b.sequence.kind(unit)
        if kind[0] == "beside":  # runs with the next split unit
            kind = ("split", 0)
        apart = split or unit.nodes[0].target in (*STARTS, MOMENTS, NORMALISE, BACK) or waits_for_tokens(unit.nodes[0], b.node_of)
        apart |= bool(groups) and b.layer(unit) != b.layer(groups[-1][1][-1])
        fits = groups and not apart and not groups[-1][0] and (kind == kinds[-1] or "any" in (kind[0], kinds[-1][0]) or _joins(kind, kinds[-1]))
        if fits:
            groups[-1][1].append(unit)
            kinds[-1] = kind if kinds[-1][0] == "any" or (kind[1] and not kinds[-1][1]) else kinds[-1]
        else:
            groups.append((split, [unit]))
            kinds.append(kind)
    if b.sharding.cuts:
        groups = [part for split, units in groups for part in ([(split, units)] if split else _cut(b, units))]
    counted: set[int] = set()
    return [_segment(b, f"s{stage}.{i}", stage, units, split, counted) for i, (split, units) in enumerate(groups)]


def _joins(kind: tuple[str, int], other: tuple[str, int]) -> bool:
    """Both split along a sequence, one of them not yet known to be along another than the other."""
    return kind[0] == other[0] == "split" and 0 in (kind[1], other[1])


def _parameter_bytes(b: _Build, run: Sequence[Unit]) -> list[int]:
    """Bytes of trainable parameters that one rank holds for each unit, counted where they are first used."""
    size = {f"param:{p.name}": p.size_bytes for p in b.graph.parameters if p.trainable}
    found, seen = [], set[str]()
    for unit in run:
        own = dict.fromkeys(v for n in unit.nodes for v in n.inputs if v in size and v not in seen)
        seen |= own.keys()
        found.append(sum(size[v] for v in own) // (b.degrees.tensor if b.is_split(unit) else 1))
    return found


def _cut(b: _Build, run: list[Unit]) -> list[tuple[bool, list[Unit]]]:
    """A run of whole operators in parts that fill a bucket each."""
    inside = {n.name for u in run for n in u.nodes}
    later = [{v for n in u.nodes for v in n.inputs} for u in run]
    crossing, allowed = [0] * len(run), [True] * len(run)
    last = {v: i for i, reads in enumerate(later) for v in reads}
    for i, unit in enumerate(run):
        for n in unit.nodes:
            leaves = any(r not in inside for r in b.readers.get(n.name, ()))
            later_reads = range(i + 1, last.get(n.name, i) + 1)
            size = _value(b, n.name).size_bytes if later_reads and n.name in b.shape_of and not leaves else 0
            for at in later_reads:
                crossing[at] += size
                allowed[at] &= len(n.outputs) == 1
    ends = [0, *cut_run(_parameter_bytes(b, run), crossing, allowed, b.bucket_bytes), len(run)]
    return [(False, run[i:j]) for i, j in pairwise(ends)]


def _buckets(b: _Build, stages: Sequence[Stage], segments: Sequence[Segment]) -> list[GradientBucket]:
    users = Counter(p for st in stages for p in st.params)
    split = {s.param for s in b.usable.shards} if b.degrees.tensor > 1 else set()
    sizes = {p.name: p.size_bytes // (b.degrees.tensor if p.name in split else 1) for p in b.graph.parameters if p.trainable}
    shared = frozenset(p for p, count in users.items() if count > 1)
    return [
        x for st in stages
        for x in gradient_buckets(st.index, [s for s in segments if s.stage == st.index], sizes, shared, b.bucket_bytes)
    ]  # fmt: skip


def _segment(b: _Build, key: str, stage: int, units: Sequence[Unit], split: bool, counted: set[int]) -> Segment:
    nodes = [n for u in units for n in u.nodes]
    names = {n.name for n in nodes}
    reads = tuple(dict.fromkeys(v for n in nodes for v in n.inputs if v in b.shape_of and v not in names))
    writes = tuple(n.name for n in nodes if n.name in b.graph.outputs or any(r not in names for r in b.readers.get(n.name, ())))
    region = units[0].region if split else None
    late_bias = {f"param:{bias}" for _, bias in region.row_bias} if region else set()
    params = dict.fromkeys(v.removeprefix("param:") for n in nodes for v in n.inputs if v.startswith("param:") and v not in late_bias)
    # Row biases of partial sums that this segment reads: added here, once, after the sum. With tensor degree 1 there are none.
    biases = tuple(RowBias(value=v, bias=b.row_bias[v]) for v in reads if b.degrees.tensor > 1 and v in b.row_bias)
    params |= dict.fromkeys(x.bias for x in biases)
    extent = 0 if split else b.extent(units)
    largest, total = max((b.share(u) for u in units), key=lambda x: x[1]) if split or extent else (1, 1)
    border = {b.storage_of[v] for v in (*reads, *writes)}
    apart = names if split else names & {*b.sequence.values}
    saved = sum(saved_storages(b.graph, nodes, border, counted, largest, total, apart).values())
    in_parts = {x.node for x in b.losses}
    saved += sum(_saved_of_sums(b, x) * largest // total for x in in_parts if sums_of(x) in names)
    own = [n.name for n in nodes if "/" not in n.name and n.name not in in_parts]
    own += [base_node(n.name) for n in nodes if n.name in {sums_of(x) for x in in_parts}]
    forward_temp, backward_temp = b.workspace(b.captured, own)
    gathers = () if extent else tuple(v for v in reads if v in b.sequence.values)
    sums = tuple(w for w in writes if (region and w in region.rows) or b.node_of[w].target in SUMMED)
    copied = max((_value(b, v).size_bytes for v in (*gathers, *sums) if v in b.sequence.values), default=0)  # into and out of all parts' form
    return Segment(
        key=key,
        stage=stage,
        nodes=tuple(n.name for n in nodes),
        reads=reads,
        writes=writes,
        params=tuple(params),
        split=split or extent > 0,
        sum_writes=sums,
        sum_grads=_partial_grads(b, region, reads, extent),
        gathers=gathers,
        sequence=extent > 0,
        row_biases=biases,
        shares=b.usable.shares[region] if region else b.sequence.shares.get(extent, ()),
        forward=sum((n.forward.share(*b.share(u)) for u in units for n in u.nodes), Work()),
        backward=sum((n.backward.share(*b.share(u)) for u in units for n in u.nodes), Work()),
        saved_bytes=saved,
        forward_workspace_bytes=max(forward_temp * largest // total, copied, tiles := _tiles(b, nodes)),
        backward_workspace_bytes=max(backward_temp * largest // total, copied, 2 * tiles),
    )


def _tiles(b: _Build, nodes: Sequence[OpNode]) -> int:
    """Bytes of the scores that a round of ring attention has at once."""
    found = 0
    for n in nodes:
        if n.target in (RING_BLOCK, RING_END):
            batch, heads, positions, _ = b.shape_of[n.inputs[0]][0]
            found = max(found, min(batch * heads * positions**2, TILE_ELEMENTS) * max(4, dtype_bytes(b.shape_of[n.inputs[0]][1])))
    return found


def _partial_grads(b: _Build, region: Region | None, reads: Sequence[str], extent: int) -> tuple[str, ...]:
    """Read values whose gradient is a partial sum: a region's entries; what is whole where each rank computes a part of the sequence."""
    if extent:
        return tuple(v for v in reads if v not in b.sequence.values and b.differentiable(v))
    entries = region.entries if region else ()
    return tuple(v for v in reads if (v in entries or b.node_of[v].target in CARRYING) and b.differentiable(v))


def _saved_of_sums(b: _Build, loss: str) -> int:
    """Bytes that the sums over all classes keep for backward: an exponential per logit, in the precision of the sums."""
    logits = b.node_of[sums_of(loss)].inputs[0]
    return prod(b.shape_of[logits][0]) * dtype_bytes(b.shape_of[sums_of(loss)][1])


def _value(b: _Build, name: str) -> ValueInfo:
    shape, dtype = b.shape_of[name]
    split = None
    if name in b.split_of:
        how, shares = b.split_of[name]
        split = ValueSplit(dim=how.dim, blocks=how.blocks, shares=shares, groups=how.groups, mixed=how.mixed)
    return ValueInfo(
        name=name, shape=shape, dtype=dtype, size_bytes=prod(shape) * dtype_bytes(dtype), differentiable=b.differentiable(name), split=split,
        reduce="max" if name in b.maxima else "sum",
    )  # fmt: skip


