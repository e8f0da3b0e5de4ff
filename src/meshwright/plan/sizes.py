"""Sizes that follow from a training layout and its graph: parameters per rank, gradient buffers, work per step.

Beside `lowering`, because planners ask for sizes without lowering anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from ..graph.graph import OpGraph, Work
from .experts import EXPERT_GRADIENTS
from .forward_again import run_again
from .plan import Segment, Stage, StepEnd, TrainingLayout
from .precision import MASTER_BYTES
from .shards import expert_shards, least_part, local_size, sharing
from .vocabulary import base_node

__all__ = [
    "backward_works", "gradient_buffers", "gradient_names", "inputs_read", "master_ratio", "message_ratio", "padded_size", "parameter_bytes",
    "shard_bytes", "state_bytes", "summed_over", "training_works",
]  # fmt: skip

# Copies of a parameter's size that training keeps: weight, gradient and two Adam moments.
STATE_COPIES = 4


def summed_over(buffer: str) -> tuple[str, ...]:
    """Tensor indices over whose ranks a gradient buffer is summed, by its name: `gradients+0.1` -> 0, 1."""
    listed = buffer.partition(":")[0].partition("+")[2]
    return tuple(listed.split(".")) if listed else ()


def shard_bytes(graph: OpGraph, layout: TrainingLayout, tensor_index: int = 0) -> dict[str, int]:
    """Bytes of every parameter on one rank that holds it, by its tensor index."""
    split = {s.param: s for s in layout.shards} if layout.tensor > 1 else {}
    return {
        p.name: local_size(p.shape, p.size_bytes, s.axis, s, tensor_index, layout.tensor) if (s := split.get(p.name)) else p.size_bytes
        for p in graph.parameters
    }


def inputs_read(graph: OpGraph, layout: TrainingLayout) -> dict[str, dict[int, int]]:
    """By segment, the storages of the example inputs that it reads, and their bytes in one micro-batch (`graph` is captured at its size)."""
    storage = {f"input:{i}": x.storage for i, x in enumerate(graph.inputs)}
    read = {n.name: [s for v in n.inputs if (s := storage.get(v, -1)) >= 0] for n in graph.nodes}
    return {x.key: {s: graph.storages[s].size_bytes for n in x.nodes for s in read.get(n, read.get(base_node(n), ()))} for x in layout.segments}


def gradient_buffers(graph: OpGraph, layout: TrainingLayout, stage: Stage, tensor_index: int = 0) -> dict[str, tuple[str, ...]]:
    """`gradient_names` of the graph's trainable parameters."""
    return gradient_names(layout, stage, {p.name for p in graph.parameters if p.trainable}, tensor_index)


def gradient_names(layout: TrainingLayout, stage: Stage, trainable: Container[str], tensor_index: int) -> dict[str, tuple[str, ...]]:
    """Gradient buffers of a rank that holds `stage` (`TrainingLayout.held`): `gradients` with the parameters that no rank with other stages uses,
    `gradients:<p>` for each that some do.

    Parameters whose gradients are partial sums over a group of tensor indices lie apart, in `gradients+<indices>` (`gradients+<indices>:<p>`).
    Those of experts that neighbouring data replicas divide lie in `gradients%`.
    With buckets, `gradients` is divided into `gradients@<number>` (and `gradients@<number>+<indices>`, `gradients@<number>%`), in the order of the
    buckets.
    """
    users = Counter(p for family in layout.families() for p in layout.held(family[0]).params)
    partial = {x.param: "+" + ".".join(map(str, g)) for x in layout.partial_gradients if len(g := x.group_of(tensor_index)) > 1}
    partial |= {s.param: EXPERT_GRADIENTS for s in expert_shards(layout)}
    buckets = layout.buckets_of(stage.index)
    number = {p: f"@{i}" for i, b in enumerate(buckets) for p in b.params}
    place = {p: i for i, b in enumerate(buckets) for p in b.params}
    found: dict[str, tuple[str, ...]] = {}
    for p in sorted(stage.params, key=lambda p: place.get(p, len(buckets))):
        if p in trainable and users[p] == 1:
            name = f"gradients{number.get(p, '')}{partial.get(p, '')}"
            found[name] = (*found.get(name, ()), p)
    return found | {f"gradients{partial.get(p, '')}:{p}": (p,) for p in stage.params if p in trainable and users[p] > 1}


def padded_size(layout: TrainingLayout, group: str, sizes: Sequence[int]) -> int:
    """Bytes of a group whose replicas divide parameters of these sizes into equal parts, at least; `group`: its name or its buffer's."""
    parts = sharing(layout, 0, group)[1]
    return parts * (least_part(sizes, parts) if layout.whole_parameters else -(-sum(sizes) // parts))


def message_ratio(layout: TrainingLayout) -> int:
    """Bytes of a gradient, as it is added up and sent, per byte of its weight."""
    return layout.precision.message_ratio if layout.precision else 1


def master_ratio(layout: TrainingLayout) -> int:
    """Bytes of what the optimizer updates, per byte of its weight."""
    return layout.precision.master_ratio if layout.precision else 1


def state_bytes(layout: TrainingLayout, weights: int, held: int) -> int:
    """Of what a rank keeps beside weights and gradients, by bytes of weights: those whose state is its own, and those whose gradients it adds up.

    Where gradients are added up in a wider type than they are sent in, what is wider counts here.
    """
    copies = layout.step_end.state_copies
    if not layout.precision:
        return copies * weights
    state, more = layout.precision.state, MASTER_BYTES * (copies - StepEnd().state_copies)
    return round(((state.optimizer + more) * weights + (state.gradient - state.message) * held) / state.weight)


def parameter_bytes(layout: TrainingLayout, weights: int, level: int, *, experts: bool = False) -> int:
    """Bytes of weights, gradients and state of so many bytes of weights, of which data replicas (`experts`: those with the same) divide what sharding
    level `level` says. Without a precision, Adam's."""
    replicas = layout.data // layout.expert if experts else layout.data
    if layout.precision:
        return round(weights / layout.precision.state.weight * layout.precision.state.at(level, replicas))
    divided = min(level + 1, 3) + (level == 3) if level else 0  # of the four copies
    return weights * (STATE_COPIES - divided) + weights * divided // replicas


def training_works(graph: OpGraph, layout: TrainingLayout) -> dict[str, Work]:
    """Work of every kind of compute step, by the key under which `Cost` prices it.

    Where ranks have unequal shares, `<key>@<part>` is the work of one part; `<key>` that of the largest.
    """
    works, again = dict[str, Work](), run_again(layout)
    for s in layout.segments:
        second = (("R", s.forward),) if s.key in again else ()
        for name, work in (("F", s.forward), *second, *backward_works(s, split=layout.split_backward)):
            works[f"{s.key}|{name}"] = work
            for part, share in enumerate(s.shares):
                works[f"{s.key}|{name}@{part}"] = work.share(share, max(s.shares))
    sizes = [shard_bytes(graph, layout, t) for t in range(layout.tensor)]
    for stage in map(layout.held, range(layout.pipeline)):
        total = 0
        for t in range(layout.tensor):
            held = {b: [sizes[t][p] for p in names] for b, names in gradient_buffers(graph, layout, stage, t).items()}
            total = max(total, sum(padded_size(layout, b, x) // sharing(layout, 0, b)[1] if layout.zero_level else sum(x) for b, x in held.items()))
        # reads weight, gradient and state (both moments), writes weight and state; about ten operations per parameter
        count, norm, elements = len(stage.params), layout.step_end.norm, total * master_ratio(layout) // 4
        gradient, state = total * message_ratio(layout), state_bytes(layout, total, total)
        works[f"opt{stage.index}|optimizer"] = Work(
            flops=elements * (10 + norm), bytes_read=total + state + (1 + norm) * gradient, bytes_written=total + state + norm * gradient,
            calls=(8 + norm) * count,
        )  # fmt: skip
        if norm:  # every gradient is squared, then scaled; between them numbers of a few ranks are added up
            works[f"opt{stage.index}|norm"] = Work(flops=elements * 2, bytes_read=gradient, bytes_written=8, calls=count)
            few = Work(flops=layout.ranks, bytes_read=8 * layout.ranks, bytes_written=8, calls=1)
            works |= {f"opt{stage.index}:{axis}|norm": few for axis in ("tensor", "pipeline")}
    return works


def backward_works(s: Segment, *, split: bool) -> tuple[tuple[str, Work], ...]:
    """The compute steps of a segment's backward: `B`, or `I` and `W`."""
    if not split:
        return (("B", s.backward + s.again),)
    w, b = s.weight_backward, s.backward
    rest = Work(
        flops=max(0, b.flops - w.flops), bytes_read=max(0, b.bytes_read - w.bytes_read), bytes_written=max(0, b.bytes_written - w.bytes_written),
        calls=max(0, b.calls - w.calls),
    )  # fmt: skip
    return ("I", rest + s.again), ("W", w)
