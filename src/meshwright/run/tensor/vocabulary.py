"""Embedding, output head and cross-entropy over a vocabulary that is split over ranks, as functions of one rank's part.

Cite: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3. The parts of the loss and what travels between ranks: `plan.vocabulary`.
Deviations: label smoothing is `torch.nn.functional.cross_entropy`'s (target 1-a+a/V, every class a/V, V the whole vocabulary) unless the layout asks
for Megatron's (target 1-a, every other class a/(V-1)), and neither depends on the number of ranks; class weights work; sums are taken in
float32 for narrower logits.
Left open by the paper: indices that no rank has. Our answer: an error, as without splitting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ...plan.batch_statistics import shared_norms
from ...plan.plan import TrainingLayout, VocabularyLoss
from ...plan.vocabulary import LOSS, MAX, SUMS, loss_arguments, max_of, sum_rows, sums_of
from ..executor.sequence_parts import own_part
from ..steps.forward_graph import ForwardGraph, ForwardNode, TensorInfo, resolve
from .batch_statistics import FUNCTIONS as STATISTICS
from .batch_statistics import expand_norms
from .cuts import OWN_PART
from .whole_batch import FUNCTIONS as WHOLE_BATCH
from .whole_batch import expand_batch

__all__ = ["EMBEDDING", "expand_forward", "function_of", "vocabulary_embedding", "vocabulary_loss", "vocabulary_max", "vocabulary_sums"]

EMBEDDING = "meshwright.vocabulary_embedding.default"


def vocabulary_embedding(weight: torch.Tensor, ids: torch.Tensor, start: int, stop: int, rows: int, padding: int) -> torch.Tensor:
    """Rows `ids` of a table of `rows` rows of which this rank has [start, stop); zero where another rank has the row."""
    torch._assert_async(((ids >= 0) & (ids < rows)).all(), f"an embedding index is not in [0, {rows})")
    mine = (ids >= start) & (ids < stop)
    local = torch.where(mine, ids - start, 0)
    found = torch.nn.functional.embedding(local, weight, padding_idx=padding - start if start <= padding < stop else None)
    return torch.where(mine.unsqueeze(-1), found, 0)


def _class_dim(logits: torch.Tensor) -> int:
    return 1 if logits.dim() > 1 else 0


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def vocabulary_max(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of this rank's classes, per target."""
    return logits.detach().amax(_class_dim(logits)).to(_wide(logits))


class _Sums(torch.autograd.Function):  # type: ignore[misc]
    """Keeps one exponential per logit, and the local class of every target (-1: another rank's)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, largest: torch.Tensor, weight: torch.Tensor | None, start: int, rows: int
    ) -> torch.Tensor:
        dim = _class_dim(logits)
        shifted = logits.to(largest.dtype) - largest.unsqueeze(dim)
        own = (target >= start) & (target < start + logits.shape[dim])
        local = torch.where(own, target - start, -1)
        at_target = torch.where(own, shifted.gather(dim, local.clamp(min=0).unsqueeze(dim)).squeeze(dim), 0)
        sums = [at_target]
        if rows == 3:
            sums.append((shifted if weight is None else shifted * _along(weight, shifted, dim)).sum(dim))
        exponentials = shifted.exp_()
        ctx.save_for_backward(exponentials, local, weight)
        ctx.dtype, ctx.dim = logits.dtype, dim
        return torch.stack([exponentials.sum(dim), *sums])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        exponentials, local, weight = ctx.saved_tensors
        dim = ctx.dim
        result = exponentials * gradient[0].unsqueeze(dim)
        mine = torch.where(local >= 0, gradient[1], 0)
        result.scatter_add_(dim, local.clamp(min=0).unsqueeze(dim), mine.unsqueeze(dim))
        if len(gradient) == 3:
            smooth = gradient[2].unsqueeze(dim)
            result += smooth if weight is None else smooth * _along(weight, result, dim)
        return result.to(ctx.dtype), None, None, None, None, None


def _along(weight: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    return weight.to(like.dtype).view([-1 if d == dim else 1 for d in range(like.dim())])


def vocabulary_sums(
    logits: torch.Tensor, target: torch.Tensor, largest: torch.Tensor, *, weight: torch.Tensor | None, label_smoothing: float, ignore_index: int,
    start: int = 0, stop: int | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """This rank's part of the sums over classes [start, stop), stacked: sum of exp(logit - largest), the target's logit - largest, and with
    smoothing the (weighted) sum of logit - largest."""
    stop = start + logits.shape[_class_dim(logits)] if stop is None else stop
    own = None if weight is None else weight[start:stop]
    result: torch.Tensor = _Sums.apply(logits, target.masked_fill(target == ignore_index, -1), largest, own, start, 3 if label_smoothing else 2)
    return result


def vocabulary_loss(
    sums: torch.Tensor, target: torch.Tensor, *, weight: torch.Tensor | None, reduction: int, ignore_index: int, label_smoothing: float,
    smoothing: str, classes: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`torch.nn.functional.cross_entropy` from the completed sums. `reduction`: 0 none, 1 mean over the targets that are not ignored, 2 sum."""
    valid = target != ignore_index
    torch._assert_async((~valid | ((target >= 0) & (target < classes))).all(), f"a target is not in [0, {classes}) and not {ignore_index}")
    log_sum = sums[0].log()
    of_target = torch.ones_like(log_sum) if weight is None else weight.to(log_sum.dtype)[torch.where(valid, target, 0)]
    of_target = torch.where(valid, of_target, 0)
    loss = of_target * (log_sum - sums[1])
    if label_smoothing:
        total = classes if weight is None else weight.to(log_sum.dtype).sum()
        spread = label_smoothing * classes / (classes - 1) if smoothing == "megatron" else label_smoothing
        loss = (1 - spread) * loss + (spread / classes) * torch.where(valid, total * log_sum - sums[2], 0)
    if reduction == 1:
        loss = loss.sum() / of_target.sum()
    elif reduction == 2:
        loss = loss.sum()
    return loss.to(dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    EMBEDDING: vocabulary_embedding, MAX: vocabulary_max, SUMS: vocabulary_sums, LOSS: vocabulary_loss, OWN_PART: own_part,
    **STATISTICS, **WHOLE_BATCH,
}  # fmt: skip


def function_of(target: str) -> Callable[..., Any]:
    """The callable of a call's target: one of the above, or `forward_graph.resolve`."""
    return FUNCTIONS.get(target) or resolve(target)


def expand_forward(graph: ForwardGraph, layout: TrainingLayout, rank: int = 0) -> ForwardGraph:
    """`graph` with each split cross-entropy as three calls, as `plan.vocabulary.expand_losses` does with an `OpGraph`, and what a rank's replica
    shares with others: statistics of normalisations, calls of the whole batch."""
    wanted = {x.node: x for x in layout.losses}
    graph = expand_batch(graph, layout.coordinates(rank)[1], layout.data)
    graph = expand_norms(graph, shared_norms(layout), layout.data)
    nodes = [y for n in graph.nodes for y in (_three(n, graph, wanted[n.name]) if n.name in wanted else [n])]
    return msgspec.structs.replace(graph, nodes=tuple(nodes)) if wanted else graph


def _three(n: ForwardNode, graph: ForwardGraph, loss: VocabularyLoss) -> list[ForwardNode]:
    logits, target = n.args[0], n.args[1]
    infos = {x.name: x.outputs[0] for x in graph.nodes} | {f"input:{i}": x for i, x in enumerate(graph.inputs)}
    of_logits, of_target, out = infos[logits["value"]], infos[target["value"]], n.outputs[0]
    assert of_logits is not None and of_target is not None and out is not None
    arguments = loss_arguments(n.args, n.kwargs)
    classes = of_logits.shape[1 if len(of_logits.shape) > 1 else 0]
    wide = "float64" if of_logits.dtype == "float64" else "float32"
    kwargs = {k: arguments[k] for k in ("weight", "label_smoothing", "ignore_index")}
    largest = ForwardNode(max_of(n.name), MAX, [logits], {}, (TensorInfo(of_target.shape, wide),))
    sums_info = TensorInfo((sum_rows(arguments), *of_target.shape), wide)
    sums = ForwardNode(sums_of(n.name), SUMS, [logits, target, {"value": largest.name}], kwargs, (sums_info,))
    more = {"reduction": arguments["reduction"], "smoothing": loss.smoothing, "classes": classes, "dtype": {"dtype": out.dtype}}
    end = ForwardNode(n.name, LOSS, [{"value": sums.name}, target], {**kwargs, **more}, n.outputs)
    return [largest, sums, end]
