"""The traced calls as a rank runs them that divides experts with its neighbours: they read what came of others. See `plan.experts` for the names.

On a rank that divides positions too, buffers have room for its own tokens. On a tensor rank that divides its replica's experts, they are of those.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import msgspec

from ...errors import PlanMismatch
from ...kernels.experts import copied  # noqa: F401  registers its operators
from ...plan.context import among_experts, copies_in, layout_exchanges
from ...plan.copies import COPIED, ExpertCopies, blocks_of, given, places_of, slot_shares
from ...plan.experts import BACK, COUNTS, EXPERTS, GIVEN, MLP, ROWS, SLOTS, TOKENS
from ...plan.plan import TrainingLayout
from ..steps.forward_graph import ForwardGraph, ForwardNode, TensorInfo
from ..tensor.cuts import with_operand
from ..tensor.state import Call, Shard

__all__ = ["OPERATORS", "experts_rule", "with_copies", "with_exchanges"]

OPERATORS = (*EXPERTS, TOKENS)


def experts_rule(call: Call, parts: int) -> Shard | None:
    """What the result of an operator of an expert layer is on one of `parts` ranks that divide positions. Raises: Unsupported."""
    target = call.node.target
    state = call.state(1 if target == TOKENS else 0)
    if not isinstance(state, Shard):
        raise call.fail("its tokens are not divided by positions")
    if target in (ROWS, COUNTS):
        if call.args[-1] != call.shape(0)[0] or state.dim:
            raise call.fail("its buffers drop tokens")
        call.args[-1] //= parts
        return Shard(1) if target == ROWS else None
    if target == MLP:
        call.args[-1] //= parts
    return state


def _with_parts(graph: ForwardGraph, layout: TrainingLayout) -> ForwardGraph:
    """`graph` with what of their experts' buffers tensor ranks have, in calls of segments that these divide (`tensor.experts` reads it)."""
    if layout.tensor == 1:
        return graph
    inside = {n for s in layout.segments if s.split and not s.sequence for n in s.nodes}
    part = {"shard": Shard(0, layout.expert)}
    nodes = [
        msgspec.structs.replace(n, kwargs={**n.kwargs, **part}) if n.name in inside and n.target in (ROWS, COUNTS, TOKENS) else n for n in graph.nodes
    ]
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def with_copies(graph: ForwardGraph, layout: TrainingLayout, rank: int = 0) -> ForwardGraph:
    """`graph` with buffers that have a part for every slot, in layers with copies of experts, and with the weights that this rank gives others.

    Raises: PlanMismatch for copies of experts that the model does not have."""
    member, instead, before = layout.coordinates(rank)[1] % layout.expert, dict[str, ForwardNode](), dict[str, list[ForwardNode]]()
    for layer, x in copies_in(layout).items():
        mlp = graph.by_name.get(layer)
        made = [graph.by_name[v] for v in mlp.inputs[:2] if v in graph.by_name] if mlp is not None else []
        sums = next((n for n in graph.nodes if n.target == TOKENS and n.inputs[0] == layer), None)
        experts = made[0].outputs[0].shape[0] if made and made[0].outputs[0] is not None else 0
        if mlp is None or sums is None or [n.target for n in made] != [ROWS, COUNTS] or experts != x.experts:
            raise PlanMismatch(f"the plan copies experts of {layer!r}, which is no layer of {x.experts} experts here", hint="make the plan again")
        index = made[0].inputs[1]
        slots, slot, wide = x.members * (x.local + places_of(x)), f"{layer}/slots", {"value": f"{layer}/slots"}
        where, weights = graph.by_name[index].outputs[0], mlp.args[2:4]
        assert where is not None
        give = [e % x.local for e, _ in given(x, member)]
        before[made[0].name] = before[made[1].name] = []
        before[min(made, key=graph.nodes.index).name] = [
            ForwardNode(slot, SLOTS, [{"value": index}, *_places(x, member)], {}, (TensorInfo(where.shape, "int64"),)),
            ForwardNode(f"{layer}/given", GIVEN, [*weights, give, blocks_of(x)], {}, (None,)),
        ]
        rows, counts = (with_operand(n, index, slot) for n in made)
        instead[rows.name] = _longer(msgspec.structs.replace(rows, args=[rows.args[0], wide, None, slots, *rows.args[4:]]), slots)
        instead[counts.name] = _longer(msgspec.structs.replace(counts, args=[wide, slots, *counts.args[2:]]), slots)
        instead[layer] = _longer(msgspec.structs.replace(mlp, kwargs={**mlp.kwargs, "copies": {"value": f"{layer}/{COPIED}"}}), slots)
        instead[sums.name] = with_operand(sums, index, slot)
    nodes = [y for n in graph.nodes for y in (*before.get(n.name, ()), instead.get(n.name, n))]
    return msgspec.structs.replace(graph, nodes=tuple(nodes)) if instead else graph


def _longer(n: ForwardNode, slots: int) -> ForwardNode:
    info = n.outputs[0]
    assert info is not None
    return msgspec.structs.replace(n, outputs=(msgspec.structs.replace(info, shape=(slots, *info.shape[1:])),))


def _places(x: ExpertCopies, member: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """What `expert_slots` takes: the slot of each expert, and of those with several the expert, the slot and up to which share, slot by slot."""
    shares = slot_shares(x, member)
    several = [(e, slot, end) for e, of in enumerate(shares) if len(of) > 1 for (slot, _), end in zip(of, accumulate(n for _, n in of), strict=True)]
    return [of[0][0] for of in shares], [e for e, _, _ in several], [slot for _, slot, _ in several], [end for _, _, end in several]


def with_exchanges(graph: ForwardGraph, layout: TrainingLayout, rank: int) -> ForwardGraph:
    """`graph` with the targets of the layout's exchanges in the place of their sources, where experts read them, and readers of experts.

    Raises: PlanMismatch for copies of experts that the model does not have."""
    graph = _with_parts(graph, layout)
    if layout.expert == 1:
        return graph
    graph = with_copies(graph, layout, rank)
    before: dict[str, list[tuple[str, str]]] = {}
    after: dict[str, str] = {}
    for x in (x for x in layout_exchanges(layout) if among_experts(layout, x)):
        layer, _, suffix = x.target.rpartition("/")
        if suffix == BACK:
            after[x.source] = x.target
        elif suffix != COPIED:  # read as such
            before.setdefault(layer, []).append((x.source, x.target))
    nodes: list[ForwardNode] = []
    for node in graph.nodes:
        pairs: list[Any] = [*before.get(node.name, ()), *((v, after[v]) for v in dict.fromkeys(node.inputs) if v in after)]
        for source, target in pairs:
            node = with_operand(node, source, target)
        nodes.append(node)
    return msgspec.structs.replace(graph, nodes=tuple(nodes))
