"""Lowering only one rank of each pipeline stage: tensor-parallel ranks are alike, and data-parallel replicas are.

The program is `lower_training`'s for the ranks whose tensor and data index are 0, with a `Fold` that says what the others are: rank (stage, d, t)
runs the lanes of (stage, 0, 0), t further along "tensor" and d further along "data". Of a buffer with a slot for every tensor rank's part, slot
0 of the representative is slot t of the image, which is the fold's shift.

Shares that are not equal (50,257 tokens among 8 ranks) are padded to the largest: every rank then has the buffers, messages and work of the rank with
the largest share, which is what the step waits for anyway. So are rows of experts: each rank gets as many as the one with the most. What is refused:
see `why_not_folded`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import UNSET

from ..errors import Unsupported
from ..graph.graph import OpGraph, Work
from ..plan.batch_statistics import batch_sums
from ..plan.context import layout_exchanges, neighbours
from ..plan.experts import EXPERT_GRADIENTS
from ..plan.plan import TrainingLayout, ValueInfo
from ..plan.shards import local_values, sequence_values
from ..plan.sizes import shard_bytes, training_works
from ..program.program import Fold, FoldAxis, Program
from ..program.validate import validate

__all__ = ["fold_axes", "folded_works", "largest_shards", "largest_values", "require_foldable", "representatives", "with_fold", "why_not_folded"]

WHOLE_GROUPS = ("weights", "gradients", "gradfull", "gathered")  # kinds of buffers of a whole group that data replicas divide
# Kinds of buffers of values with a slot for every tensor rank's part.
SLOTTED = ("actall", "actagain", "actsum", "remadeall", "remadesum", "gradall", "gradpart")


def why_not_folded(layout: TrainingLayout) -> str:
    """Why ranks of this layout are not alike, or are not lowered alike; empty where they are."""
    if len(layout.placement) > 1:
        return f"copies of the stages (schedule {layout.schedule}) add up gradients of unlike ranks"
    if layout.zero_level and layout.step_end.folded:
        return f"folds of micro-batches at sharding level {layout.zero_level} are lowered rank by rank"
    if layout.expert > 1 and layout.context > 1:
        return "replicas divide experts and positions"
    if any(x.copies is not UNSET for x in layout_exchanges(layout)):
        return "ranks hold unlike numbers of copies of experts"
    if batch_sums(layout):
        return "statistics that replicas share are lowered rank by rank"
    if layout.replica_microbatches:
        return "data replicas have unequal numbers of micro-batches"
    everyone = tuple(range(layout.tensor))
    for x in layout.partial_gradients:
        if x.group_of(0) != everyone:
            return f"gradients of {x.param} are partial sums on some of the tensor-parallel ranks only"
    return ""


def require_foldable(layout: TrainingLayout) -> None:
    """Raises: Unsupported, see `why_not_folded`."""
    if why := why_not_folded(layout):
        raise Unsupported(f"the layout cannot be lowered folded: {why}", hint="lower it unfolded, on fewer devices")


def fold_axes(layout: TrainingLayout) -> tuple[FoldAxis, ...]:
    """Tensor ranks, ranks that divide positions or experts, and data replicas folded, stages not; axes of one rank are plain."""
    name, near = neighbours(layout)
    sizes = {"tensor": layout.tensor} | ({name: near} if near > 1 else {}) | {"data": layout.data // near}
    found, stride = [], 1
    for name, size in sizes.items():
        found.append(FoldAxis(name, size, stride, "shift" if size > 1 else "plain"))
        stride *= size
    return (*found, FoldAxis("pipeline", layout.pipeline, stride, "plain"))


def representatives(layout: TrainingLayout) -> list[int]:
    """The ranks that are stored: of each stage the first."""
    return [layout.rank(p, 0, 0) for p in range(layout.pipeline)]


def largest_shards(graph: OpGraph, layout: TrainingLayout) -> dict[str, int]:
    """Bytes of every parameter on the rank that holds most of it."""
    every = [shard_bytes(graph, layout, t) for t in range(layout.tensor)]
    return {name: max(sizes[name] for sizes in every) for name in every[0]}


def largest_values(layout: TrainingLayout) -> dict[str, ValueInfo]:
    """Every border value as the rank that holds most of it does."""
    every = [local_values(layout, layout.rank(0, 0, t)) for t in range(layout.tensor)]
    return {name: max((values[name] for values in every), key=lambda v: v.size_bytes) for name in every[0]}


def folded_works(graph: OpGraph, layout: TrainingLayout) -> dict[str, Work]:
    """`training_works` without those of single parts: all ranks do the largest."""
    return {key: work for key, work in training_works(graph, layout).items() if "@" not in key.rpartition("|")[2]}


def with_fold(program: Program, layout: TrainingLayout) -> Program:
    """The representatives' program as the folded program that it stands for."""
    axes = fold_axes(layout)
    folded = [axis.name for axis in axes if axis.kind != "plain"]
    shift = np.zeros((len(folded), len(program.buffers)), np.int32)
    slots = _Slots(layout)
    for b, name in enumerate(program.buffers.name):
        for axis, parts in slots.of(name).items():
            if axis in folded:
                shift[folded.index(axis), b] = int(program.buffers.chunks[b]) // parts
    made = replace(program, fold=Fold(axes, shift))
    validate(made)
    return made


class _Slots:
    """Which buffers have parts that move from member to member."""

    def __init__(self, layout: TrainingLayout) -> None:
        self.layout, self.apart = layout, sequence_values(layout)
        self.in_blocks = {v for x in layout_exchanges(layout) if x.kind == "all-to-all" for v in (x.source, x.target)}
        self.near, n = neighbours(layout)
        # Replica r * n + c of n neighbours has the r-th part of block c: into so many cuts a whole group, of which a step along an axis moves one.
        self.of_group = {self.near: n, "data": layout.data}
        self.of_block = {"data": layout.data // n}
        if layout.copies_in_servers:  # parts are in rank order
            self.of_group, self.of_block = {self.near: layout.data, "data": layout.data // n}, {self.near: n}
        self.of_experts = {"data": layout.data // n}  # the neighbours have other experts
        self.blocks = {self.near: n}

    def of(self, name: str) -> dict[str, int]:
        """By axis: into how many parts a buffer is cut, of which the next member has the next."""
        lay = self.layout
        kind, _, rest = name.partition(":")
        if kind == "norm":
            return {"data": self.of_group, "experts": self.blocks, "tensor": {"tensor": lay.tensor}}.get(rest, {})
        if kind == "block":
            return self.of_block
        if lay.zero_level and kind.partition("@")[0] in WHOLE_GROUPS and name != "weights":
            return self.of_experts if name.endswith(EXPERT_GRADIENTS) else self.of_group
        value = rest.rpartition(":")[0]
        if kind in SLOTTED:
            value = value.rpartition(":")[0] if kind in ("actall", "actagain", "remadeall", "gradpart") else value
            if value in self.apart:
                return {"tensor": lay.tensor}
        return self.blocks if value in self.in_blocks and value not in self.apart and kind in ("act", "remade", "grad") else {}
