"""Regions over the vocabulary: embeddings by rows of their table, output heads with their cross-entropy by classes.

Cite: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3 (see `megatron.CITE`).
Left open by the paper: which of a user's modules these are. Our answer: an embedding is split if its indices depend on the job's inputs (a table
of positions is read whole by every sample and stays); a linear whose result reaches a cross-entropy over its features through operators that
run on shards is a head. A table and the heads that are tied to it are split together or not at all. Vocabularies that do not divide
get uneven shares; nothing is padded.
"""

from __future__ import annotations

from ...graph.graph import OpNode
from ...plan.plan import ParamShard
from ...plan.vocabulary import loss_arguments, max_of, sums_of
from .graph_index import GraphIndex
from .sharding import short_name
from .tensor_regions import Region, try_region

__all__ = ["POSITIONS", "embedding_region", "loss_region", "splittable_embedding", "splittable_loss"]


POSITIONS = "its indices are the same in every sample, as positions are"


def _argument(n: OpNode, position: int, name: str, default: object) -> object:
    return n.args[position] if len(n.args) > position else n.kwargs.get(name, default)


def splittable_embedding(g: GraphIndex, n: OpNode) -> str:
    """Why an embedding cannot be split by rows; empty if it can."""
    if n.inputs[1] not in g.from_input and not n.inputs[1].startswith("input:"):
        return POSITIONS
    if _argument(n, 3, "scale_grad_by_freq", False):
        return "gradients scaled by frequency need the whole table"
    if _argument(n, 4, "sparse", False):
        return "sparse gradients are not split"
    return ""


def embedding_region(g: GraphIndex, n: OpNode) -> Region:
    """Each rank looks up the rows it has; the results add up."""
    param = n.inputs[0].removeprefix("param:")
    return Region((n.name,), (), (n.name,), (ParamShard(param=param, axis=0),), (), g.shapes[n.inputs[0]][0], bundle=param)


def splittable_loss(g: GraphIndex, n: OpNode) -> str:
    """Why a cross-entropy cannot be computed on split classes; empty if it can."""
    logits, target = n.inputs[:2]
    if len(g.shapes[target]) >= len(g.shapes[logits]):
        return "its targets are probabilities of every class"
    if n.inputs[2:] and n.inputs[2].startswith("param:"):
        return "its class weights are a parameter"
    if loss_arguments(n.args, n.kwargs)["reduction"] not in (0, 1, 2):
        return "unknown reduction"
    return ""


def loss_region(g: GraphIndex, loss: OpNode, why: dict[str, str]) -> list[Region] | None:
    """The head with the largest logits, and the sums over its classes: two regions of one bundle."""
    head = _head(g, loss)
    if head is None:
        return None
    reasons: list[str] = []
    found = try_region(g, [head], set(), whys=reasons, loss=True)
    if found is None or found.losses != (loss.name,):
        if reasons:
            why[head] = reasons[0]
        return None
    first, second = max_of(loss.name), sums_of(loss.name)
    start = Region(
        (*found.nodes, first), found.entries, (first,), found.shards, (), found.units, bundle=found.bundle, outputs=found.outputs,
        maxima=(first,), losses=(loss.name,),
    )  # fmt: skip
    return [start, Region((second,), (), (second,), (), (), found.units, bundle=found.bundle)]


def _head(g: GraphIndex, loss: OpNode) -> str | None:
    """The linear behind the logits, through operators with one activation operand."""
    value = loss.inputs[0]
    for _ in range(24):
        if g.is_linear(value, tied=True):
            return value
        n = g.node.get(value)
        if n is None or short_name(n.target) in ("linear", "embedding"):
            return None
        activations = [v for v in n.inputs if v in g.node]
        if len(activations) != 1:
            return None
        value = activations[0]
    return None


