"""How much a step depends on how tokens choose experts: its time with experts chosen alike, as stated, and with all tokens on one rank's experts."""

from __future__ import annotations

from typing import Any

import msgspec

from ...decide.layout.experts import experts_graph, tensor_part
from ...graph.graph import OpGraph, Work
from ...lower.training import training_works
from ...plan.context import copies_in, exchanges_in
from ...plan.experts import FILLED, MLP
from ...plan.plan import TrainingLayout
from ...plan.routing import UNIFORM, Routing
from ...program.calls import inline
from .evaluate import Evaluator
from .evaluated import Evaluated

__all__ = ["routing_range"]


def routing_range(best: Evaluated, evaluator: Evaluator) -> dict[str, Any]:
    """`routing` and `range_s`: (least, most) seconds of the step, by simulation of the chosen program with other sizes of messages and other work.
    Prices of measured operators stay as they are. Empty without experts on several ranks, or where the program is folded."""
    layout = best.layout
    if best.program is None or best.folded or best.fabric is None or best.cost is None:
        return {}
    base = evaluator.positions_for(layout)
    tensor = tensor_part(base, layout)
    if layout.expert * tensor == 1:
        return {}
    from ...simulate import simulate_program

    among = {v.name: layout.tensor if v.split is not None else 1 for v in layout.values}  # tensor ranks that divide a member's experts
    flat = inline(best.program, best.callees).program
    now, times = evaluator.graph_for(layout), [best.time_s]
    for routing in (UNIFORM, _one_rank(base, layout.expert * tensor)):
        graph = experts_graph(base, layout.expert, routing, tensor, copies_in(layout))
        works = training_works(graph, _with_work(layout, now, graph, tensor))
        sizes = {
            f"{FILLED}{x.target}:{j}": n // among[x.source] for x in exchanges_in(graph) if x.expected_bytes is not msgspec.UNSET
            for j, n in enumerate(x.expected_bytes)
        }  # fmt: skip
        known = {name: sizes[name] for name in flat.sizes.name}
        found = simulate_program(flat, best.fabric, best.placement, best.cost, works=works, sizes=known, record=False)
        times.append(found.makespan_s)
    return {"routing": str(evaluator.routing), "range_s": [min(times), max(times)]}


def _one_rank(graph: OpGraph, parts: int) -> Routing:
    """All tokens go to the first of `parts` equal parts of every layer's experts, alike to each there."""
    counts = {n.module: n.outputs[0].shape[0] for n in graph.nodes if n.target == MLP}
    return Routing(measured=tuple((name, tuple(int(e < n // parts) for e in range(n))) for name, n in counts.items()))


def _with_work(layout: TrainingLayout, now: OpGraph, then: OpGraph, tensor: int) -> TrainingLayout:
    """The layout with the experts' work of another graph, of which each of `tensor` ranks has its part."""
    mine = {n.name: n for n in now.nodes if n.target == MLP}
    other = {n.name: n for n in then.nodes if n.target == MLP}
    segments = []
    for s in layout.segments:
        experts = [n for n in s.nodes if n in mine]
        forward, backward = s.forward, s.backward
        for n in experts:
            forward = _instead(forward, mine[n].forward.share(1, tensor), other[n].forward.share(1, tensor))
            backward = _instead(backward, mine[n].backward.share(1, tensor), other[n].backward.share(1, tensor))
        segments.append(msgspec.structs.replace(s, forward=forward, backward=backward))
    return msgspec.structs.replace(layout, segments=tuple(segments))


def _instead(of: Work, old: Work, new: Work) -> Work:
    return Work(
        flops=of.flops - old.flops + new.flops, bytes_read=of.bytes_read - old.bytes_read + new.bytes_read,
        bytes_written=of.bytes_written - old.bytes_written + new.bytes_written, calls=of.calls,
    )  # fmt: skip
