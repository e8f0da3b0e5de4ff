"""Which border values of a layout's segments autograd keeps for their backward passes."""

from __future__ import annotations

from ..graph.graph import OpGraph
from ..graph.liveness import kept_storages
from ..plan.batch_statistics import batch_sums, moments_of, shared_norms, sum_of
from ..plan.plan import TrainingLayout
from ..plan.vocabulary import base_node, expand_losses, sums_of

__all__ = ["kept_values"]


def kept_values(graph: OpGraph, layout: TrainingLayout) -> dict[str, set[str]]:
    """Per segment, the border values that autograd keeps for its backward, or that calls read that run again in it.

    Of a split loss these are the completed sums; of a normalisation by shared statistics the samples and what travelled.
    """
    kept = kept_storages(graph)
    storage_of = {n.name: n.outputs[0].storage for n in expand_losses(graph, layout.losses).nodes if n.outputs}
    found = {
        s.key: {v for v in (*s.reads, *s.writes) if storage_of.get(v, -1) >= 0 and any(storage_of[v] in kept.get(n, ()) for n in s.nodes)}
        for s in layout.segments
    }
    samples = {n.name: n.inputs[0] for n in graph.nodes if n.name in shared_norms(layout)}
    of_batch = {v for v in batch_sums(layout) if base_node(v) not in shared_norms(layout)}  # calls of the whole batch keep what they are given
    for s in layout.segments:
        for norm, x in samples.items():
            asked = ({x, sum_of(norm)} if moments_of(norm) in s.nodes else set()) | ({x, moments_of(norm)} if norm in s.nodes else set())
            found[s.key] |= asked & {*s.reads, *s.writes}
        found[s.key] |= {v for v in s.reads if v in of_batch}
        found[s.key] |= {sums_of(x.node) for x in layout.losses if x.node in s.nodes}
        found[s.key] |= {v for x in s.recompute for v in x.reads}
        if s.step is not None:
            found[s.key] = {*s.step.kept}
    return found
