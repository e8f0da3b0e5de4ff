"""A plan: what was decided, the programs that carry it out, the bound, the prediction, and where each came from.

`meshwright.io.plan.plan` reads and writes it: equal inputs and seed give equal bytes. It has a cycle `[(program, when)]`; calls go by content hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..bound import Bound
from ..graph.graph import Work
from ..graph.step_graph import StepGraph, StepPlan
from ..notebook_repr import repr_html
from ..program.program import Program
from .copies import ExpertCopies
from .entries import Alternative, CycleEntry, Prediction
from .precision import Precision

__all__ = [
    "Alternative", "ContextExchange", "CycleEntry", "GradientBucket", "ParamShard", "PartialGradient", "Plan", "Prediction", "Recompute", "RowBias",
    "Segment", "SegmentStep", "ShapePlan", "Stage", "StepEnd", "TrainingLayout", "ValueInfo", "ValueSplit", "VocabularyLoss",
]  # fmt: skip

SCHEMA = "meshwright.plan"
VERSION = 1


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ParamShard(_Record, frozen=True, kw_only=True):
    """How one parameter is split over the tensor-parallel ranks.

    Dimension `axis` consists of `blocks` equal blocks (3 for packed q, k, v), or of the unequal blocks of `mixed`: (size, groups) each.
    A block is cut at the running sums of `shares` (empty: equal shares), part i keeping the i-th piece, blocks in order. Where `groups`
    is not 0, a block consists of that many groups (key-value heads) that are never cut: a part keeps every group its piece touches,
    so parts may hold the same group; such a parameter is named in TrainingLayout.partial_gradients. Arithmetic: `plan.shards`."""

    param: str
    axis: int
    blocks: int = 1
    shares: tuple[int, ...] = ()
    groups: int = 0
    mixed: tuple[tuple[int, int], ...] = ()


class ValueSplit(_Record, frozen=True, kw_only=True):
    """How a value that crosses a segment border is split over the tensor-parallel ranks; as ParamShard."""

    dim: int
    blocks: int = 1
    shares: tuple[int, ...] = ()
    groups: int = 0
    mixed: tuple[tuple[int, int], ...] = ()


class PartialGradient(_Record, frozen=True, kw_only=True):
    """The gradient of `param` is a partial sum on each rank of a group of tensor indices; an all-reduce over the group completes it."""

    param: str
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, tensor_index: int) -> tuple[int, ...]:
        return next((g for g in self.groups if tensor_index in g), (tensor_index,))


class VocabularyLoss(_Record, frozen=True, kw_only=True):
    """A cross-entropy whose classes are split over the tensor-parallel ranks, computed without gathering the logits.

    Node `node` of the captured graph is executed as three: `<node>/max`, `<node>/sums` and `<node>` itself (see `plan.vocabulary`).
    `smoothing`: "torch" (target 1-a+a/V) or "megatron" (target 1-a, every other class a/(V-1)); V is the whole vocabulary in both."""

    node: str
    smoothing: str = "torch"


class RowBias(_Record, frozen=True, kw_only=True):
    """`bias` (a parameter name) is added to `value` once, after the sum over the tensor-parallel ranks."""

    value: str
    bias: str


class Recompute(_Record, frozen=True, kw_only=True):
    """Calls of a segment that run once more before its backward uses what they made, instead of that being kept; for each region alike.

    A region (a repeated layer) begins at position `starts[i]` of Segment.nodes; other positions count from there. `again`: calls that run
    again, in order, together, when backward first asks for one of their results. `needed`: calls of the region whose results backward asks for.
    `kept`: calls whose results are kept, because backward asks for them or `again` reads them; before the region where negative. `reads`: values
    that cross the segment's border and that `again` reads. Regions share nothing that is made again; no collective runs again.
    """

    starts: tuple[int, ...]
    again: tuple[int, ...]
    needed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()


class SegmentStep(_Record, frozen=True, kw_only=True):
    """A segment run as a planned step: its own forward-and-backward graph for one micro-batch, and the straight line of actions through it.

    `reads`, `writes`: the nodes of the values that cross its border, in the segment's order; `gradients`: of each read the node of its gradient, -1
    where it has none. Node `handed` ends the forward pass: it gives the writes away. Gradients of parameters are added to their buffers by nodes of
    the graph. `kept`: border values that backward actions read, or in whose storage something lies that is held for them. `weights`: the action at
    which `W` begins where backward is split (before it the gradients of reads are made, from it on those of parameters), -1 where it is whole.
    """

    graph: StepGraph
    plan: StepPlan
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    gradients: tuple[int, ...]
    handed: int
    kept: tuple[str, ...] = ()
    weights: int = -1

    def again_s(self) -> float:
        """Seconds of running nodes again, by the graph's times."""
        return max(0.0, self.plan.time_s - sum(self.graph.nodes[x].time_s for x in {a.node for a in self.plan.actions}))

    def forward_s(self) -> float:
        """Seconds of the forward pass, everything once."""
        return sum(self.graph.nodes[x].time_s for x in {a.node for a in self.plan.actions[: self.plan.boundary]})


class Segment(_Record, frozen=True, kw_only=True):
    """A run of consecutive forward nodes executed as one compute step, forward (`F`) and backward (`B`).

    `key` is `op.graph` of its steps. `reads` and `writes` name the values that cross its border (activations; parameters are in `params`). If
    `split`, its parameters named in TrainingLayout.shards are sharded, its `sum_writes` are partial sums that an all-reduce over the tensor-parallel
    ranks completes in forward, and the gradients of `sum_grads` (some of its reads) in backward; of those named in TrainingLayout.batch_sums one
    over the data replicas. `row_biases`: added to read values when the segment starts (see RowBias).

    With sequence parallelism a border value may be split along the sequence (`ValueInfo.split`). A sum_write that is, is completed by a
    reduce-scatter: each rank gets its part of the sum. `gathers` are reads that the segment needs whole and that are split: all-gathered
    before F, and again before B where autograd keeps them; of their gradients each rank gets its part, by reduce-scatter where they are
    sum_grads, by taking it where every rank has the whole gradient. `sequence`: the segment computes one part of the sequence per rank; then
    the gradients of its parameters are partial sums (`TrainingLayout.partial_gradients`).
    """

    key: str
    stage: int
    nodes: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    params: tuple[str, ...] = ()
    split: bool = False
    sum_writes: tuple[str, ...] = ()
    sum_grads: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()
    sequence: bool = False
    row_biases: tuple[RowBias, ...] = ()
    shares: tuple[int, ...] = ()  # of a split segment, per tensor-parallel rank; empty: equal
    forward: Work = Work()  # of one rank for one micro-batch; with unequal shares, of the rank with the largest
    backward: Work = Work()
    saved_bytes: int = 0  # kept from F to B by one rank for one micro-batch, beyond what earlier segments of the stage keep
    forward_workspace_bytes: int = 0  # peak of temporaries during F beyond saved and written values
    backward_workspace_bytes: int = 0
    recompute: tuple[Recompute, ...] = ()
    step: SegmentStep | None = None  # run so, and not by autograd; then `recompute` is empty
    again: Work = Work()  # of the calls that run again, part of every `B` (or `I`) beside `backward`
    weight_backward: Work = Work()  # where backward is split: the part of `backward` that is left for `W`
    left_bytes: int = 0  # gradients, and results made again, kept from `I` to `W` for one micro-batch, beside saved_bytes

    def computed_again(self) -> tuple[tuple[str, ...], ...]:
        """Per region the names of the calls that run again."""
        return tuple(tuple(self.nodes[start + k] for k in r.again) for r in self.recompute for start in r.starts)


class Stage(_Record, frozen=True, kw_only=True):
    """One pipeline stage: its segments in order, the values it receives and sends in forward (gradients flow the other way). What a rank has
    already, from another stage that it holds, it neither receives again nor is sent."""

    index: int
    segments: tuple[str, ...]
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    params: tuple[str, ...] = ()


class GradientBucket(_Record, frozen=True, kw_only=True):
    """Parameters of stage `stage` whose gradients are summed over the data replicas together (and, when sharded, divided together).

    A stage's buckets are numbered from 0 in the order in which its backward completes them. A parameter that several stages use is in none: it
    is a group of its own. With a `codec` (`codec.parse_codec`) replicas gather each other's payloads instead of summing gradients."""

    stage: int
    params: tuple[str, ...]
    codec: str = ""


class ValueInfo(_Record, frozen=True, kw_only=True):
    """A value that crosses a segment border: shape for one micro-batch, dtype, whether it carries a gradient.

    `split`: None where every tensor-parallel rank holds the whole value; else shape and size are the whole value's, and a rank holds its
    part (`plan.shards.local_value`). `reduce`: how the parts of a summed value are combined, "sum" or "max".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    differentiable: bool = True
    split: ValueSplit | None = None
    reduce: str = "sum"


class ContextExchange(_Record, frozen=True, kw_only=True):
    """Value `target` on a rank is what others of its context group have as `source`. "shift": the neighbour's before, whole. "all-to-all": of equal
    blocks, block i of rank r is block r of rank i. "copies": `plan.copies`. Gradients go the other way. `again`: it comes again for backward.
    Of experts' rows [E, C, H], `counts`: the value with the number of filled ones [E], `expected_bytes`: of them, per member with experts."""

    kind: str
    source: str
    target: str
    again: bool | msgspec.UnsetType = msgspec.UNSET  # left out of documents where nothing comes again
    counts: str | msgspec.UnsetType = msgspec.UNSET
    expected_bytes: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    copies: ExpertCopies | msgspec.UnsetType = msgspec.UNSET


class StepEnd(_Record, frozen=True, kw_only=True):
    """What the end of a step does beyond Adam's update. `state_copies`: kept beside each parameter, in units of it. `norm`: gradients are scaled by
    that of all, summed by the ranks first. `folded`: they are a fold over micro-batches (docs/reproducibility.md)."""

    state_copies: int = 2
    norm: bool = False
    folded: bool | msgspec.UnsetType = msgspec.UNSET  # left out of documents where they are not


class TrainingLayout(_Record, frozen=True, kw_only=True):
    """How a training job is split: rank = (pipeline · data + data_index) · tensor + tensor_index.

    `placement[copy][stage]`: the pipeline index that holds the stage; empty: stage i is on pipeline index i. With several copies of the stages,
    micro-batch m runs through copy `copy_of[m]` (empty: 0), and pipeline indices that share a stage share all theirs (`mates`). `split_backward`:
    backward runs as `I` (gradients of what a segment reads) and later `W` (gradients of its parameters). `held` is what one index holds.
    `replica_microbatches`: micro-batches of every data replica where they differ (devices of unlike speed), the most of them being `microbatches`;
    replica d takes the samples after those of the replicas before it (`in_turn`: micro-batch by micro-batch).
    `context`: of neighbouring data replicas that share samples and divide positions, as `exchanges` say. `server_replicas`: that share a server.
    `batch_sums`: values that data replicas add up, not tensor-parallel ranks (`plan.batch_statistics`). `zero_level`: what replicas divide: 0
    nothing, 1 optimizer state, 2 gradients too, 3 weights. `overlap`: sums of gradients and gathers of weights run beside backward and forward."""

    data: int
    tensor: int
    pipeline: int
    microbatch_size: int
    microbatches: int  # per data-parallel replica and step
    global_batch: int
    replica_microbatches: tuple[int, ...] = ()
    schedule: str = "1f1b"
    placement: tuple[tuple[int, ...], ...] = ()
    copy_of: tuple[int, ...] = ()
    split_backward: bool = False
    context: int = 1  # neighbours among the data replicas that share samples, each with its positions (`plan.context`)
    expert: int = 1  # neighbours among the data replicas that divide experts and exchange their tokens (`plan.experts`)
    server_replicas: int | msgspec.UnsetType = msgspec.UNSET  # `plan.shards.sharing`; left out where parts are in rank order
    copies_in_servers: bool | msgspec.UnsetType = msgspec.UNSET  # replicas with the same experts share one: `plan.shards.sharing`; left out else
    zero_level: int = 0
    overlap: bool = False
    bucket_bytes: int = 0  # what a bucket was filled up to; 0 where there are none
    buckets: tuple[GradientBucket, ...] = ()
    stages: tuple[Stage, ...] = ()
    segments: tuple[Segment, ...] = ()
    values: tuple[ValueInfo, ...] = ()
    shards: tuple[ParamShard, ...] = ()
    partial_gradients: tuple[PartialGradient, ...] = ()
    frozen: tuple[str, ...] = ()  # parameters that are not trained: nothing adds up or reads gradients of theirs
    forward_again: tuple[tuple[str, ...], ...] | msgspec.UnsetType = msgspec.UNSET  # `plan.forward_again`; left out where nothing is
    losses: tuple[VocabularyLoss, ...] = ()
    sequence: bool = False  # sequence parallelism between the tensor-parallel regions
    notes: tuple[str, ...] = ()  # what was kept whole, and why
    end: StepEnd | msgspec.UnsetType = msgspec.UNSET  # left out of documents where it is plain
    exchanges: tuple[ContextExchange, ...] | msgspec.UnsetType = msgspec.UNSET  # left out without context parallelism
    batch_sums: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # left out where replicas share no statistics
    expert_shards: tuple[ParamShard, ...] | msgspec.UnsetType = msgspec.UNSET  # experts' parameters over `expert` ranks; left out where that is 1
    precision: Precision | msgspec.UnsetType = msgspec.UNSET  # left out of documents where it is the captured graph's
    whole_parameters: bool | msgspec.UnsetType = msgspec.UNSET  # none in the parts of two replicas (`plan.shards.places`); left out where any may be

    @property
    def step_end(self) -> StepEnd:
        return self.end or StepEnd()

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def expert_ranks(self) -> int:
        """How many ranks hold different experts: neighbours, times the tensor indices that divide a neighbour's part."""
        divided = {s.param for s in self.expert_shards or ()}
        return self.expert * (self.tensor if any(s.param in divided for s in self.shards) else 1)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pipeline index, data index, tensor index) of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return pipeline, data, tensor

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        return (pipeline * self.data + data) * self.tensor + tensor

    def microbatches_of(self, data: int) -> int:
        """Micro-batches of a data replica."""
        return self.replica_microbatches[data] if self.replica_microbatches else self.microbatches

    @property
    def all_microbatches(self) -> int:
        """Of all data replicas; those of a context group count each for its positions."""
        return sum(self.replica_microbatches) or self.data * self.microbatches

    @property
    def microbatch_counts(self) -> str:
        """Micro-batches of the replicas in words: "2 x 8", or "6 + 2" where they differ."""
        return " + ".join(map(str, self.replica_microbatches)) or f"{self.data // self.context} x {self.microbatches}"

    @property
    def in_turn(self) -> bool:
        """Do replicas take micro-batches in turn, not each a block? A sum over replicas of one is then a node of the tree that they fold by."""
        return bool(self.step_end.folded) and self.zero_level > 1

    def first_sample(self, data: int, microbatch: int) -> int:
        """The number, within the global batch, of a micro-batch's first sample."""
        before = sum(self.replica_microbatches[:data]) if self.replica_microbatches else data // self.context * self.microbatches
        return (microbatch * self.data + data if self.in_turn else before + microbatch) * self.microbatch_size

    def hosted(self, pipeline: int) -> tuple[tuple[int, int], ...]:
        """(stage, copy) of everything a pipeline index holds, by stage."""
        if not self.placement:
            return ((pipeline, 0),)
        return tuple(sorted((s, c) for c, where in enumerate(self.placement) for s, p in enumerate(where) if p == pipeline))

    def held(self, pipeline: int) -> Stage:
        """The stages of a pipeline index as one: segments in the order of forward."""
        if not self.placement:
            return self.stages[pipeline]
        mine, lists = [self.stages[s] for s, _ in self.hosted(pipeline)], ("segments", "receives", "sends", "params")
        return Stage(index=pipeline, **{x: tuple(dict.fromkeys(one for stage in mine for one in getattr(stage, x))) for x in lists})

    def mates(self, pipeline: int) -> tuple[int, ...]:
        """Pipeline indices that hold copies of the same stages, this one among them, in order."""
        if len(self.placement) < 2:
            return (pipeline,)
        mine = {s for s, _ in self.hosted(pipeline)}
        return tuple(p for p in range(self.pipeline) if {s for s, _ in self.hosted(p)} == mine)

    def families(self) -> tuple[tuple[int, ...], ...]:
        """Every set of mates once."""
        return tuple(dict.fromkeys(self.mates(p) for p in range(self.pipeline)))

    def buckets_of(self, pipeline: int) -> tuple[GradientBucket, ...]:
        """Buckets of a pipeline index, in the order of their numbers: backward goes through the last stage first."""
        return tuple(b for s, _ in reversed(self.hosted(pipeline)) for b in self.buckets if b.stage == s)

    def copy(self, microbatch: int) -> int:
        """The copy of the stages that a micro-batch runs through."""
        return self.copy_of[microbatch] if self.copy_of else 0


class ShapePlan(_Record, frozen=True, kw_only=True):
    """The step for batches of one more shape (`plan.shapes`). `program`: by content hash; `inputs`: shape and dtype of each tensor of a global
    batch, as in the job's `batch`; `job`: what of the plan's job is this shape's own."""

    program: str
    inputs: list[tuple[list[int], str]]
    layout: TrainingLayout
    job: dict[str, Any]
    decisions: dict[str, Any]
    bound: Bound | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`decisions` maps a decision ("layout", "collective:gradient", ...) to {strategy, options, why, cite}. `shapes`: steps for smaller batches."""

    kind: str  # "training" | "collective" | "pipeline" | "experts" | "placement" | "tables" | "halo" | "imported"
    job: Mapping[str, Any]
    target_fabric: Mapping[str, Any]  # the fabric's JSON document
    placement: tuple[str, ...]  # rank -> device name; then switch actor -> switch name
    programs: Mapping[str, Program]  # content hash -> program
    cycle: tuple[CycleEntry, ...]
    decisions: Mapping[str, Any]
    layout: TrainingLayout | None = None
    bound: Bound | None = None
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    shapes: tuple[ShapePlan, ...] = ()
    _repr_html_ = repr_html

    @property
    def main(self) -> Program:
        return self.programs[self.cycle[0].program]
