"""A captured graph as one of several ranks computes it that divide its experts, or its placed tables: exchanges around these, and this rank's part.

Cite: `plan.experts.GSHARD`. Left open by the paper: layers that nobody annotated. Our answer: the operators of `kernels.experts.padded`, which
converted layers are captured as, say what they are.
Deviations: none. Invariant: shapes of values are those of the whole graph; only experts' parameters and their gradients get smaller. The parts of a
pack of tables (`plan.packing`) are divided as experts are.
Cost: O(nodes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import gcd
from typing import Any

import msgspec

from ...errors import Unsupported
from ...graph.graph import GraphValue, OpGraph, OpNode, Storage, Work
from ...plan.context import ALL_TO_ALL, KINDS
from ...plan.copies import ExpertCopies, own_first
from ...plan.experts import BACK, INCOMING, MLP, ROWS, TOKENS
from ...plan.packing import IDS, TABLE_ROWS, packing_of
from ...plan.plan import ParamShard, TrainingLayout
from ...plan.routing import UNIFORM, Routing
from .copied import with_copies
from .cut import dtype_bytes
from .sequence_rules import Along
from .split import Refused, Split

__all__ = ["expert_degree_limit", "expert_shards", "experts_graph", "of_positions", "require_degree", "tensor_part", "waits_for_tokens"]

_DIVIDED = (MLP, TABLE_ROWS)
_Key = tuple[int, int, tuple[tuple[str, ExpertCopies], ...]]
_RECENT: deque[tuple[OpGraph, _Key, Routing, OpGraph]] = deque(maxlen=16)  # by identity: graphs are immutable, and too large to hash


def expert_degree_limit(graph: OpGraph) -> int:
    """The largest number of ranks that can divide the experts of every layer, and the parts of a pack; 1 without such layers."""
    counts = [n.outputs[0].shape[0] for n in graph.nodes if n.target in _DIVIDED]
    return gcd(*counts) if counts else 1


def _parameters(graph: OpGraph) -> tuple[str, ...]:
    """Names of the parameters that hold experts, one after the other along their first dimension."""
    return tuple(dict.fromkeys(v.removeprefix("param:") for n in graph.nodes if n.target in _DIVIDED for v in n.inputs if v.startswith("param:")))


def tensor_part(graph: OpGraph, layout: TrainingLayout) -> int:
    """How many tensor ranks divide the experts that a replica has: all, or 1 where they hold these alike."""
    if layout.tensor == 1 or not layout.shards:
        return 1
    mine = {v.removeprefix("param:") for n in graph.nodes if n.target == MLP for v in n.inputs if v.startswith("param:")}
    return layout.tensor if mine and mine <= {s.param for s in layout.shards} else 1


def require_degree(graph: OpGraph, parts: int) -> None:
    """Raises: Unsupported where so many ranks cannot divide the experts of every layer, naming the nearest degree."""
    most = expert_degree_limit(graph)
    if most % parts:
        near = max(d for d in range(1, min(parts, most) + 1) if most % d == 0)
        nothing = "the model has no expert layers that could be divided, and no placed tables"
        why = f"{most} experts, or parts of tables, do not divide by it" if most > 1 else nothing
        hint = f"--ep {near}" if most > 1 else "--ep 1, or replace its expert layers by meshwright.nn.convert_experts(model)"
        raise Unsupported(f"expert degree {parts}: {why}", where=graph.model, hint=hint, data={"nearest": near})


def experts_graph(
    graph: OpGraph, parts: int, routing: Routing = UNIFORM, tensor: int = 1, copies: Mapping[str, ExpertCopies] | None = None
) -> OpGraph:
    """`graph` for one of `parts` ranks, whose tokens choose experts as `routing` says; the last few are remembered.

    tensor: ranks that divide a part again, if they can: the work of the experts is then so many times that of the rank with most rows.
    copies: of hot experts, by layer. Raises: Unsupported, naming the nearest degree that divides, or the layer that can have no copies.
    """
    if parts == 1 and (tensor == 1 or routing == UNIFORM):
        return graph
    most = expert_degree_limit(graph)
    tensor = tensor if most % (parts * tensor) == 0 and routing != UNIFORM else 1
    if parts * tensor == 1:
        return graph
    key = (parts, tensor, tuple(sorted((copies or {}).items())))
    if (known := next((x for g, n, r, x in list(_RECENT) if g is graph and n == key and r == routing), None)) is not None:
        return known
    require_degree(graph, parts)
    made = _divided(with_copies(graph, copies or {}), parts, routing, tensor, copies or {})
    _RECENT.append((graph, key, routing, made))
    return made


def _divided(graph: OpGraph, parts: int, routing: Routing, tensor: int, copies: Mapping[str, ExpertCopies]) -> OpGraph:
    storages, nodes = list(graph.storages), list[OpNode]()
    renamed: dict[str, str] = {}
    value = {n.name: n.outputs[0] for n in graph.nodes if n.outputs}

    def exchange(of: OpNode, source: str, suffix: str, **filled: Any) -> str:
        name, like = f"{of.name}/{suffix}", value[source]
        storages.append(Storage(size_bytes=graph.storages[like.storage].size_bytes, owner=name))
        made = GraphValue(shape=like.shape, dtype=like.dtype, storage=len(storages) - 1)
        args = [{"value": source}]
        nodes.append(OpNode(name=name, target=ALL_TO_ALL, module=of.module, inputs=(source,), args=args, kwargs=filled, outputs=(made,)))
        return name

    for n in graph.nodes:
        if n.target == MLP:
            rows, counts = n.inputs[:2]
            if (own := copies.get(n.name)) is not None:
                load, each = _load_of_copies(n, own, routing)
            else:
                load, each = _load(n, value[rows], parts, routing), _load(n, value[rows], parts * tensor, routing)
            filled = {"expected_bytes": tuple(x * _row_bytes(value[rows]) for x in load)}
            most = max(each) * len(each) / max(1, sum(each))  # the others wait for the rank with the most rows
            if parts == 1:
                nodes.append(msgspec.structs.replace(n, forward=_longer(n.forward, most), backward=_longer(n.backward, most)))
                continue
            came = {counts: exchange(n, counts, INCOMING[0])}
            came[rows] = exchange(n, rows, INCOMING[1], counts=counts, **filled)
            nodes.append(_reading(msgspec.structs.replace(n, forward=_longer(n.forward, most), backward=_longer(n.backward, most)), came))
            renamed[n.name] = exchange(n, n.name, BACK, counts=came[counts], **filled)
        elif n.target == TABLE_ROWS and parts > 1:
            nodes.append(_reading(_of_holder(n, graph, parts), {n.inputs[0]: exchange(n, n.inputs[0], IDS)}))
            renamed[n.name] = exchange(n, n.name, BACK)
        else:
            nodes.append(_reading(n, renamed) if any(v in renamed for v in n.inputs) else n)
    mine = {*_parameters(graph)}
    gradients = {graph.gradients[p] for p in mine if p in graph.gradients}
    smaller = {o.storage for j in graph.joint if j.name in gradients for o in j.outputs}
    return msgspec.structs.replace(
        graph, nodes=tuple(nodes), storages=tuple(storages), scaling=None,
        parameters=tuple(
            msgspec.structs.replace(p, shape=(p.shape[0] // parts, *p.shape[1:]), size_bytes=p.size_bytes // parts) if p.name in mine else p
            for p in graph.parameters
        ),
        joint_storages=tuple(
            msgspec.structs.replace(s, size_bytes=s.size_bytes // parts) if i in smaller else s for i, s in enumerate(graph.joint_storages)
        ),
    )  # fmt: skip


def _row_bytes(buffers: GraphValue) -> int:
    return buffers.shape[2] * dtype_bytes(buffers.dtype)


def of_positions(n: OpNode, states: Mapping[str, Along | None], shapes: Mapping[str, tuple[int, ...]], parts: int) -> tuple[OpNode, Along | None]:
    """An operator of an expert layer on one of `parts` ranks that divide positions, and what its result is: rows are divided along a buffer's length.

    Each rank's tokens lie in buffers of its own, with room for all of them. Raises: Refused where buffers have room for some tokens only: which of
    them are dropped is a question to all tokens of a sample.
    """
    along = states.get(n.inputs[1] if n.target == TOKENS else n.inputs[0])
    if along is None:
        raise Refused(f"{n.name}: an expert layer of other values than tokens of positions")
    if n.target == MLP:
        return msgspec.structs.replace(n, args=[*n.args[:-1], int(n.args[-1]) // parts]), along
    if n.target == TOKENS:
        return n, along
    tokens, capacity = shapes[n.inputs[0]][0], int(n.args[-1])
    if along.split.dim or capacity != tokens:
        raise Refused(f"{n.name}: buffers of {capacity} rows for {tokens} tokens drop some (capacity_factor=0 drops none)")
    made = msgspec.structs.replace(n, args=[*n.args[:-1], capacity // parts])
    return made, Along(Split(1), along.extent) if n.target == ROWS else None


def _load(n: OpNode, buffers: GraphValue, parts: int, routing: Routing) -> list[int]:
    """Filled rows that a rank is expected to send each of `parts` members of its group: each expert's, at most its buffer."""
    experts, capacity, _ = buffers.shape
    rows, own = int(n.args[-1]), experts // parts
    each = [min(capacity, rows * share) for share in routing.shares(experts, n.module)]
    return [round(sum(each[i * own : (i + 1) * own])) for i in range(parts)]


def _load_of_copies(n: OpNode, own: ExpertCopies, routing: Routing) -> tuple[list[int], list[int]]:
    """(rows that a rank is expected to send each other member, rows of one rank that each member gets in the mean), where hot experts have copies."""
    share, there = {e: dict(of) for e, of in own.rows}, [0.0] * own.members
    kept = [0.0] * own.members  # of a member's own rows
    for e, x in enumerate(routing.shares(own.experts, n.module)):
        rows, of = int(n.args[-1]) * x, share.get(e) or {e // own.local: 1}
        for m, some in of.items():
            there[m] += rows * some / sum(of.values())
            kept[m] += rows * dict(own_first(of, own.members, m)).get(m, 0) / (own.members * sum(of.values()))
    sent = [(own.members * a - own.members * k) / max(1, own.members - 1) for a, k in zip(there, kept, strict=True)]
    return [round(x) for x in sent], [round(x) for x in there]


def _of_holder(n: OpNode, graph: OpGraph, parts: int) -> OpNode:
    """Lookups of the rank with most of them, which the others wait for; its gradient is of its part of the pack."""
    packing = packing_of(n.args[2])
    own, elements = packing.parts // parts, [packing.elements_of(i) for i in range(packing.parts)]
    most = max(sum(elements[i * own : (i + 1) * own]) for i in range(parts)) * parts / max(1, sum(elements))
    size = next(p.size_bytes for p in graph.parameters if f"param:{p.name}" in n.inputs)
    backward = n.backward
    if backward.bytes_written >= size:
        backward = msgspec.structs.replace(backward, bytes_written=backward.bytes_written - size + size // parts)
    return msgspec.structs.replace(n, forward=_longer(n.forward, most), backward=_longer(backward, most))


def _longer(work: Work, times: float) -> Work:
    return work if times == 1 else work.share(round(times * 4096), 4096)


def _reading(n: OpNode, instead: dict[str, str]) -> OpNode:
    """The node with other operands."""

    def of(x: object) -> object:
        if isinstance(x, dict):
            return {k: instead.get(v, v) if k == "value" and isinstance(v, str) else of(v) for k, v in x.items()}
        return [of(y) for y in x] if isinstance(x, list) else x

    args, kwargs = of(n.args), of(n.kwargs)
    return msgspec.structs.replace(n, inputs=tuple(instead.get(v, v) for v in n.inputs), args=args, kwargs=kwargs)


def expert_shards(graph: OpGraph, parts: int) -> tuple[ParamShard, ...]:
    """How the experts' parameters of a layout lie on its ranks."""
    return tuple(ParamShard(param=p, axis=0) for p in _parameters(graph)) if parts > 1 else ()


def waits_for_tokens(n: OpNode, node_of: Mapping[str, OpNode]) -> bool:
    """Experts that others send tokens to, and what reads those that come back: where segments begin."""
    exchanged = [v for v in n.inputs if v in node_of and node_of[v].target in KINDS]
    return any(n.target in _DIVIDED or node_of[node_of[v].inputs[0]].target in _DIVIDED for v in exchanged)
