"""Cross-entropy over classes that are split over ranks, as three calls instead of one.

Node L (`aten.cross_entropy_loss`) of a captured graph becomes
- `L/max`: the largest logit of this rank's classes for every target; combined by maximum over the ranks (no gradient);
- `L/sums`: for every target the sum of exp(logit - max), the target's logit - max where this rank has that class, and with label smoothing
  the (class-weighted) sum of logit - max; combined by addition over the ranks;
- `L`: the loss, from the sums and the targets alone.
So three numbers per target travel (four with smoothing) instead of the vocabulary's logits.
Cite: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; deviation: the sums travel together, in one message instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..graph.graph import GraphValue, OpGraph, OpNode, Work
from .plan import VocabularyLoss

__all__ = ["LOSS", "MAX", "SUMS", "base_node", "expand_losses", "loss_arguments", "max_of", "sum_rows", "sums_of"]

LOSS, MAX, SUMS = "meshwright.vocabulary_loss.default", "meshwright.vocabulary_max.default", "meshwright.vocabulary_sums.default"
_DEFAULTS: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}


def max_of(loss: str) -> str:
    return f"{loss}/max"


def sums_of(loss: str) -> str:
    return f"{loss}/sums"


def base_node(name: str) -> str:
    """The captured node that an executed node stands for."""
    return name.partition("/")[0]


def loss_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """weight, reduction (0 none, 1 mean, 2 sum), ignore_index, label_smoothing of an `aten.cross_entropy_loss` call."""
    found = dict(_DEFAULTS)
    found |= dict(zip(_DEFAULTS, args[2:], strict=False))
    return found | {k: v for k, v in kwargs.items() if k in found}


def sum_rows(arguments: dict[str, Any]) -> int:
    """Numbers per target that `L/sums` holds."""
    return 3 if arguments["label_smoothing"] else 2


def expand_losses(graph: OpGraph, losses: Sequence[VocabularyLoss]) -> OpGraph:
    """`graph` with each of the losses as three nodes. Work: the arithmetic of the captured call goes to `L/sums`; the others are small."""
    wanted = {x.node: x for x in losses}
    if not wanted:
        return graph
    shapes = {n.name: n.outputs[0] for n in graph.nodes if n.outputs} | {f"input:{i}": x for i, x in enumerate(graph.inputs)}
    nodes: list[OpNode] = []
    for n in graph.nodes:
        nodes += _three(n, shapes, wanted[n.name]) if n.name in wanted else [n]
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _three(n: OpNode, shapes: dict[str, GraphValue], loss: VocabularyLoss) -> list[OpNode]:
    arguments = loss_arguments(n.args, n.kwargs)
    logits, target, *weight = n.inputs
    dtype = "float64" if shapes[logits].dtype == "float64" else "float32"
    size = {"float64": 8, "float32": 4}[dtype]
    shape = shapes[target].shape
    count = 1
    for d in shape:
        count *= d
    rows, classes = sum_rows(arguments), shapes[logits].shape[1 if len(shapes[logits].shape) > 1 else 0]
    per_target = count * size
    largest = OpNode(
        name=max_of(n.name), target=MAX, module=n.module, inputs=(logits,), args=[{"value": logits}],
        outputs=(GraphValue(shape=shape, dtype=dtype, storage=-1),),
        forward=Work(flops=count * classes, bytes_read=count * classes * size, bytes_written=per_target, calls=1),
    )  # fmt: skip
    kwargs = {**arguments, "smoothing": loss.smoothing, "classes": classes}
    sums = OpNode(
        name=sums_of(n.name), target=SUMS, module=n.module, inputs=(logits, target, largest.name, *weight),
        args=[{"value": logits}, {"value": target}, {"value": largest.name}], kwargs=kwargs,
        outputs=(GraphValue(shape=(rows, *shape), dtype=dtype, storage=-1),), forward=n.forward, backward=n.backward,
    )  # fmt: skip
    small = Work(flops=8 * count, bytes_read=(rows + 2) * per_target, bytes_written=per_target, calls=6)
    end = msgspec.structs.replace(
        n, target=LOSS, inputs=(sums.name, target, *weight), args=[{"value": sums.name}, {"value": target}], kwargs=kwargs, forward=small,
        backward=small, saved=(),
    )  # fmt: skip
    return [largest, sums, end]
