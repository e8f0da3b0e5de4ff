"""Writes a `TrainingLayout`: the stages, segments, border values and shards that given degrees mean for a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ...cost import Cost
from ...fabric import Device
from ...graph import OpGraph, OpNode, Work
from ...graph_vocabulary import base_node, expand_losses, sums_of
from ...plan import RowBias, Segment, Stage, TrainingLayout, ValueInfo, ValueSplit, VocabularyLoss
from .cut import Unit, border_values, cut_stages, dtype_bytes
from .megatron import Kept, Region, kept_notes
from .problem import Degrees
from .sharding import Split
from .tensor_shares import LEVEL, TensorOptions
from .tensor_usable import Usable, ordered_units, usable_regions

__all__ = ["build_layout", "divided"]

Workspace = Callable[[OpGraph, Sequence[str]], tuple[int, int]]


def divided(work: Work, parts: int) -> Work:
    """The share of one of `parts` ranks in a split operator; kernels are launched by each."""
    return Work(flops=work.flops // parts, bytes_read=work.bytes_read // parts, bytes_written=work.bytes_written // parts, calls=work.calls)


def _portion(work: Work, largest: int, total: int) -> Work:
    """The share `largest` of `total` in a split operator."""
    return Work(
        flops=work.flops * largest // total, bytes_read=work.bytes_read * largest // total, bytes_written=work.bytes_written * largest // total,
        calls=work.calls,
    )  # fmt: skip


@dataclass
class _Build:
    graph: OpGraph  # with split losses in three parts
    captured: OpGraph
    degrees: Degrees
    units: list[Unit]
    usable: Usable
    losses: tuple[VocabularyLoss, ...]
    workspace: Workspace
    split_of: dict[str, tuple[Split, tuple[int, ...]]] = field(default_factory=dict)
    maxima: set[str] = field(default_factory=set)
    shape_of: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    storage_of: dict[str, int] = field(default_factory=dict)
    row_bias: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    node_of: dict[str, OpNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
                self.split_of |= {v: (split, self.usable.shares[unit.region]) for v, split in unit.region.outputs}

    def is_split(self, unit: Unit) -> bool:
        return unit.region is not None and self.degrees.tensor > 1

    def share(self, unit: Unit) -> tuple[int, int]:
        """(largest share, all shares) of a unit."""
        if unit.region is None or self.degrees.tensor == 1:
            return 1, 1
        shares = self.usable.shares[unit.region] or (1,) * self.degrees.tensor
        return max(shares), sum(shares)

    def differentiable(self, value: str) -> bool:
        return value not in self.maxima and self.shape_of[value][1].startswith(("float", "bfloat", "complex"))


def build_layout(
    graph: OpGraph, regions: Sequence[Region], degrees: Degrees, global_batch: int, *, cost: Cost, device: Device, border_Bps: float,
    workspace: Workspace, options: TensorOptions = LEVEL, kept: Sequence[Kept] = (),
) -> TrainingLayout:  # fmt: skip
    """`graph` is captured at the micro-batch size; `border_Bps` is the rate between neighbouring stages.

    `kept`: what the search for regions left whole (`megatron.search_regions`), for the layout's notes.
    Raises: Infeasible when the graph cannot be cut into that many stages.
    """
    usable = usable_regions(graph, regions, degrees.tensor, options)
    losses = tuple(VocabularyLoss(node=x, smoothing=options.smoothing) for x in dict.fromkeys(x for r in usable.shares for x in r.losses))
    expanded = expand_losses(graph, losses)
    units = ordered_units(expanded, usable)
    if {x for r in usable.shares for x in r.losses} != {x.node for x in losses}:  # a loss was dissolved: its node is one again
        losses = tuple(x for x in losses if any(x.node in r.losses for r in usable.shares))
        expanded = expand_losses(graph, losses)
        units = ordered_units(expanded, usable)
    b = _Build(expanded, graph, degrees, units, usable, losses, workspace)
    starts = _stage_starts(b, cost, device, border_Bps)
    runs = [units[i:j] for i, j in pairwise([*starts, len(units)])]
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
    return TrainingLayout(
        data=degrees.data,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        microbatch_size=degrees.microbatch_size,
        microbatches=global_batch // (degrees.data * degrees.microbatch_size),
        global_batch=global_batch,
        stages=tuple(stages),
        segments=tuple(segments),
        values=tuple(_value(b, v) for v in values),
        shards=tuple(usable.shards),
        partial_gradients=tuple(usable.partial),
        losses=losses,
        notes=(*kept_notes(kept), *usable.notes) if degrees.tensor > 1 else (),
    )


def _stage_starts(b: _Build, cost: Cost, device: Device, border_Bps: float) -> list[int]:
    borders = border_values(b.units)
    time_of = []
    for unit in b.units:
        forward = sum((n.forward for n in unit.nodes), Work())
        backward = sum((n.backward for n in unit.nodes), Work())
        time_of.append(sum(cost.roofline(_portion(w, *b.share(unit)), device).time_s for w in (forward, backward)))
    border_s, allowed = [], []
    for values in borders:
        total = sum(_value(b, v).size_bytes * (2 if b.differentiable(v) else 1) for v in values if v in b.shape_of)
        messages = sum(2 if b.differentiable(v) else 1 for v in values if v in b.shape_of)
        border_s.append(total / border_Bps + 2 * messages * cost.transport.per_message_s)  # both ends handle every message
        allowed.append(all(len(b.node_of[v].outputs) == 1 and v not in b.split_of for v in values))
    return cut_stages(b.units, b.degrees.pipeline, time_of, border_s, allowed)


def _segments(b: _Build, stage: int, run: Sequence[Unit]) -> list[Segment]:
    """Regions and the runs between them; without tensor parallelism the whole stage is one segment."""
    groups: list[tuple[bool, list[Unit]]] = []
    for unit in run:
        split = b.is_split(unit)
        if groups and not split and not groups[-1][0]:
            groups[-1][1].append(unit)
        else:
            groups.append((split, [unit]))
    counted: set[int] = set()
    segments = []
    for i, (split, units) in enumerate(groups):
        segments.append(_segment(b, f"s{stage}.{i}", stage, units, split, counted))
    return segments


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
    largest, total = b.share(units[0]) if split else (1, 1)
    border = {b.storage_of[v] for v in (*reads, *writes)}
    saved = 0
    for n in nodes:
        for s in n.saved:
            if s not in counted and s not in border:
                counted.add(s)
                owner = b.graph.storages[s].owner
                size = b.graph.storages[s].size_bytes
                saved += size * largest // total if owner in names else size
    in_parts = {x.node for x in b.losses}
    saved += sum(_saved_of_sums(b, x) * largest // total for x in in_parts if sums_of(x) in names)
    own = [n.name for n in nodes if "/" not in n.name and n.name not in in_parts]
    own += [base_node(n.name) for n in nodes if n.name in {sums_of(x) for x in in_parts}]
    forward_temp, backward_temp = b.workspace(b.captured, own)
    return Segment(
        key=key,
        stage=stage,
        nodes=tuple(n.name for n in nodes),
        reads=reads,
        writes=writes,
        params=tuple(params),
        split=split,
        sum_writes=tuple(w for w in writes if region and w in region.rows),
        sum_grads=tuple(v for v in reads if region and v in region.entries and b.differentiable(v)),
        row_biases=biases,
        shares=b.usable.shares[region] if region else (),
        forward=_portion(sum((n.forward for n in nodes), Work()), largest, total),
        backward=_portion(sum((n.backward for n in nodes), Work()), largest, total),
        saved_bytes=saved,
        forward_workspace_bytes=forward_temp * largest // total,
        backward_workspace_bytes=backward_temp * largest // total,
    )


def _saved_of_sums(b: _Build, loss: str) -> int:
    """Bytes that the sums over all classes keep for backward: an exponential per logit, in the precision of the sums."""
    logits = b.node_of[sums_of(loss)].inputs[0]
    count = 1
    for d in b.shape_of[logits][0]:
        count *= d
    return count * dtype_bytes(b.shape_of[sums_of(loss)][1])


def _value(b: _Build, name: str) -> ValueInfo:
    shape, dtype = b.shape_of[name]
    count = 1
    for dim in shape:
        count *= dim
    split = None
    if name in b.split_of:
        how, shares = b.split_of[name]
        split = ValueSplit(dim=how.dim, blocks=how.blocks, shares=shares, groups=how.groups, mixed=how.mixed)
    return ValueInfo(
        name=name, shape=shape, dtype=dtype, size_bytes=count * dtype_bytes(dtype), differentiable=b.differentiable(name), split=split,
        reduce="max" if name in b.maxima else "sum",
    )  # fmt: skip


