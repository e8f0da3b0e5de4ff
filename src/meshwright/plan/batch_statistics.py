"""Statistics of a batch that data replicas share, as three calls instead of one. Names and arithmetic, without torch.

A normalisation N (`aten.batch_norm` in training) of a captured graph becomes, where each of several replicas has its samples of the batch,
- `N/sum`: per channel the sum over this replica's samples; added up over the replicas (no gradient);
- `N/moments`: per channel this replica's share of that sum, and the sum of squared distances from the mean; added up over the replicas, and so is
  its gradient in backward;
- `N`: the normalised samples, from the moments; running statistics move alike on all replicas.
Cite: Ioffe and Szegedy, Batch Normalization, arXiv 1502.03167, equations of section 3 over the whole batch; synchronised as in Peng et al., MegDet,
arXiv 1711.07240, section 3.3.
Deviations: distances are from the mean of the whole batch, so nothing cancels where the mean is large; that takes two small sums forward instead of
one gather, and one backward.
Left open: several micro-batches of one replica. All of them would have to reach a normalisation before any may go on, which keeps the activations of
all; so layouts have one micro-batch per replica (`require_one_each`), and the statistics are those of the whole batch.
Invariant: the moments of N are those of the batch; the mean over replicas of their losses has the gradient of the whole batch's.
Cost: two all-reduces forward (C and 2C numbers) and one backward (2C) for C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..graph.graph import GraphValue, OpGraph, OpNode, Work
from .plan import TrainingLayout
from .vocabulary import base_node
from .whole_batch import PLACE, SHARE, with_shared_batch

__all__ = [
    "BATCH_NORM", "CARRYING", "MOMENTS", "NORMALISE", "SUM", "SUMMED", "batch_sums", "moments_of", "normalises", "shared_norms", "shares_batch",
    "sum_of", "sums_in", "with_shared_statistics",
]  # fmt: skip

BATCH_NORM = "aten.batch_norm.default"
# Named after what they are, so that what is never computed again (`plan.recompute`) and what changes buffers is known of them too.
SUM, MOMENTS, NORMALISE = "meshwright.batch_norm_sum.default", "meshwright.batch_norm_moments.default", "meshwright.batch_norm.default"
SUMMED = (SUM, MOMENTS, PLACE, SHARE)
CARRYING = (MOMENTS, PLACE, SHARE)  # those with a gradient, which is summed too
TRAINING = 5  # position of `training` among the arguments of `aten.batch_norm`


def sum_of(norm: str) -> str:
    return f"{norm}/sum"


def moments_of(norm: str) -> str:
    return f"{norm}/moments"


def normalises(target: str, args: Sequence[Any]) -> bool:
    """Whether a call normalises by the batch that it sees."""
    return target == BATCH_NORM and len(args) > TRAINING and bool(args[TRAINING])


def batch_sums(layout: TrainingLayout) -> tuple[str, ...]:
    """Values that the data replicas add up within the step."""
    return () if layout.batch_sums is msgspec.UNSET else layout.batch_sums


def sums_in(graph: OpGraph) -> tuple[str, ...]:
    """Those of a graph of one replica's samples, in order."""
    return tuple(n.name for n in graph.nodes if n.target in SUMMED)


def shared_norms(layout: TrainingLayout) -> frozenset[str]:
    """The captured normalisations that run as three."""
    return frozenset(base_node(v) for v in batch_sums(layout) if v == sum_of(base_node(v)))


def shares_batch(layout: TrainingLayout) -> bool:
    """Whether calls are of the whole batch (`plan.whole_batch`)."""
    return any(base_node(v) not in shared_norms(layout) for v in batch_sums(layout))


def with_shared_statistics(graph: OpGraph, whole: OpGraph) -> OpGraph:
    """`graph` with every normalisation by the batch as three nodes, and other calls that look at other samples as in `plan.whole_batch`; `whole`: the
    graph at the whole batch. Work: the captured call's goes to the last; the others read the samples once. Raises: Unsupported."""
    graph = with_shared_batch(graph, whole)
    shapes = {n.name: n.outputs[0] for n in graph.nodes if n.outputs} | {f"input:{i}": x for i, x in enumerate(graph.inputs)}
    nodes = [y for n in graph.nodes for y in (_three(n, shapes[n.inputs[0]]) if normalises(n.target, n.args) else [n])]
    return graph if len(nodes) == len(graph.nodes) else msgspec.structs.replace(graph, nodes=tuple(nodes))


def _three(n: OpNode, samples: GraphValue) -> list[OpNode]:
    dtype, size = ("float64", 8) if samples.dtype == "float64" else ("float32", 4)
    x, channels, count = n.inputs[0], samples.shape[1], 1
    for d in samples.shape:
        count *= d
    each = count * (2 if samples.dtype in ("float16", "bfloat16") else size)

    def node(name: str, target: str, inputs: tuple[str, ...], rows: tuple[int, ...], flops: int, backward: Work) -> OpNode:
        forward = Work(flops=flops * count, bytes_read=each, bytes_written=channels * size, calls=2)
        outputs = (GraphValue(shape=(*rows, channels), dtype=dtype, storage=-1),)
        args = [{"value": v} for v in inputs]
        return OpNode(name=name, target=target, module=n.module, inputs=inputs, args=args, outputs=outputs, forward=forward, backward=backward)

    first = node(sum_of(n.name), SUM, (x,), (), 1, Work())
    backward = Work(flops=3 * count, bytes_read=each, bytes_written=each, calls=3)
    second = node(moments_of(n.name), MOMENTS, (x, first.name), (2,), 3, backward)
    args = [{"value": x}, {"value": second.name}, *n.args[1:]]
    return [first, second, msgspec.structs.replace(n, target=NORMALISE, inputs=(x, second.name, *n.inputs[1:]), args=args)]
