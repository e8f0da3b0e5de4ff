"""The traced calls as one rank of a context group runs them: on its positions of every sequence, attention in steps between which blocks travel.

What is divided is what the layout says (`decide.layout.context` finds it): values of which it lists a rank's part, attention whose steps it lists.
How is found again here, by the rules of `run.tensor` with the rank's positions for a share, so that planner and run agree or the run is refused.
Invariant: every rewritten call has the shape of the original with the divided dimension's positions those of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...errors import PlanMismatch
from ...plan.context import HEADS, JOIN, OUT, PART, RING_BLOCK, RING_END, UNITE, exchange_of, part_of, position_ranges
from ...plan.plan import TrainingLayout
from ..steps.forward_graph import ForwardGraph, ForwardNode, TensorInfo, argument_of, operator_of
from ..tensor.cuts import with_operand
from ..tensor.rules import apply_rule
from ..tensor.state import Call, Member, Shape, Shard, local_shape
from .attention import RingSpec, context_heads, context_join, context_out, context_part, context_unite, ring_block, ring_end
from .experts import OPERATORS, experts_rule, with_copies

__all__ = ["CONTEXT", "Positions", "local_graph"]

ATTENTION = "aten.scaled_dot_product_attention.default"
LOSSES = ("cross_entropy_loss", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div")


def _ring_block(q: Any, kv: Any, before: Any, mask: Any, *facts: Any) -> Any:
    return ring_block(q, kv, before, RingSpec(*facts), mask)


def _ring_end(q: Any, kv: Any, before: Any, mask: Any, *facts: Any) -> Any:
    return ring_end(q, kv, before, RingSpec(*facts), mask)


CONTEXT: dict[str, Callable[..., Any]] = {
    JOIN: context_join, RING_BLOCK: _ring_block, RING_END: _ring_end, OUT: context_out, HEADS: context_heads, UNITE: context_unite,
    PART: context_part,
}  # fmt: skip


class _Positions(Member):
    """A rank's positions as a share: whole chunks, of which each rank has two."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__(part, (1,) * (2 * parts))

    def extent(self, size: int, shard: Shard) -> int:
        return size // len(self.shares) * 2

    def ranges(self, size: int, shard: Shard) -> tuple[tuple[int, int], ...]:
        return position_ranges(size, shard.blocks, self.index, len(self.shares) // 2)


@dataclass(frozen=True)
class Positions:
    """`graph`: of the rank, `traced`: of all. `whole`, `split`: shape and divided dimension of every value of the traced graph."""

    graph: ForwardGraph
    traced: ForwardGraph
    member: Member
    whole: Mapping[str, Shape]
    split: Mapping[str, Any]

    def ranges(self, value: str) -> list[tuple[tuple[int, int], ...]] | None:
        """The [start, stop) ranges of each dimension of a value that the rank has; None where it has all of it."""
        shard = self.split.get(value)
        if not isinstance(shard, Shard):
            return None
        return [self.member.ranges(d, shard) if i == shard.dim else ((0, d),) for i, d in enumerate(self.whole[value])]


def local_graph(graph: ForwardGraph, layout: TrainingLayout, rank: int, shapes: Mapping[str, Shape], *, evaluated: bool = False) -> Positions:
    """`shapes`: of parameters, buffers and constants. `evaluated`: the graph has other calls than the planned one, by the same names where they are
    the same. Raises: PlanMismatch where the traced calls are not those that were planned."""
    found = _Local(graph, layout, layout.coordinates(rank)[1] % layout.context, shapes).run()
    infos = {n.name: n.outputs[0] for n in with_copies(found.graph, layout, rank).nodes}
    for s in layout.segments:
        for name in s.nodes:
            if not evaluated and "/" not in name and name not in infos:
                raise PlanMismatch(f"the plan runs {name!r}, which the model does not call", hint="make the plan again from this model")
    for v in layout.values:
        info = infos.get(v.name)
        if info is not None and info.shape != v.shape:
            raise PlanMismatch(f"{v.name!r} has shape {info.shape} on this rank, {v.shape} in the plan", hint="make the plan again from this model")
    return found


class _Local:
    def __init__(self, graph: ForwardGraph, layout: TrainingLayout, part: int, shapes: Mapping[str, Shape]) -> None:
        self.graph, self.layout, self.part, self.parts = graph, layout, part, layout.context
        self.member, self.ring = _Positions(part, layout.context), exchange_of(layout) != "ulysses"
        self.planned = {n for s in layout.segments for n in s.nodes}
        self.value = {v.name: v for v in layout.values}
        self.states: dict[str, Any] = {}
        self.shapes: dict[str, Shape] = {f"input:{i}": x.shape for i, x in enumerate(graph.inputs)} | dict(shapes)
        self.dtypes: dict[str, str] = {f"input:{i}": x.dtype for i, x in enumerate(graph.inputs)}
        self.nodes: list[ForwardNode] = []

    def run(self) -> Positions:
        for node in self.graph.nodes:
            if not node.many and node.outputs[0] is not None:
                self.shapes[node.name], self.dtypes[node.name] = node.outputs[0].shape, node.outputs[0].dtype
            for i, info in enumerate(node.outputs if node.many else ()):
                self.shapes[f"{node.name}#{i}"] = info.shape if info else ()
            self.take(node)
        return Positions(msgspec.structs.replace(self.graph, nodes=tuple(self.nodes)), self.graph, self.member, self.shapes, self.states)

    def take(self, node: ForwardNode) -> None:
        name = node.target.split(".")[1] if node.target.count(".") == 2 else node.target
        for v in dict.fromkeys(node.inputs):
            if part_of(node.name, v) in self.planned:
                node = self.cut(node, name, v, Shard(2) if node.target == ATTENTION else None)
        if node.target == ATTENTION and all(isinstance(self.states.get(v), Shard) for v in node.inputs[:3]):
            self.states[node.name] = Shard(2)
            (self.ring_steps if self.ring else self.ulysses_steps)(node)
            return
        states = [self.states.get(v) for v in node.inputs]
        if all(s is None for s in states):
            self.nodes.append(node)
            return
        out = node.outputs[0]
        scalar = not node.many and out is not None and out.shape == ()
        if scalar or name == "embedding":
            self.states[node.name] = None if scalar else states[1]
            self.add(node)
            return
        if name in LOSSES:  # one number per position
            shard = next(s for s in states if isinstance(s, Shard))
            self.states[node.name] = replace(shard, dim=0)
            self.add(node)
            return
        call = Call(node, self.states, self.shapes, self.member)
        self.states[node.name] = experts_rule(call, self.parts) if node.target in OPERATORS else apply_rule(call)
        self.add(msgspec.structs.replace(call.node, args=call.args, kwargs=call.kwargs))

    def add(self, node: ForwardNode) -> None:
        state = self.states.get(node.name)
        each = state if isinstance(state, tuple) else (state,) * len(node.outputs)
        pairs = zip(node.outputs, each, strict=True)
        outputs = tuple(None if o is None else TensorInfo(local_shape(o.shape, s, self.member), o.dtype) for o, s in pairs)
        self.nodes.append(msgspec.structs.replace(node, outputs=outputs))

    def cut(self, node: ForwardNode, name: str, value: str, known: Shard | None = None) -> ForwardNode:
        shape = self.shapes[value]
        first = next((v for v in node.inputs if isinstance(self.states.get(v), Shard)), None)
        shard = known or Shard(1)
        if first is not None and known is None:
            like, rank = self.states[first], len(self.shapes[first])
            dim = like.dim
            if name in LOSSES:
                dim -= len(shape) == rank - 1 and dim > (1 if rank > 1 else 0)
            elif name not in ("cat", "stack"):
                dim += len(shape) - rank
            shard = replace(like, dim=dim)
        made = part_of(node.name, value)
        local = local_shape(shape, shard, self.member)
        ranges = [list(r) for r in self.member.ranges(shape[shard.dim], shard)]
        dtype = self.dtypes.get(value, "")
        self.nodes.append(ForwardNode(made, PART, [{"value": value}, shard.dim, ranges], {}, (TensorInfo(local, dtype),)))
        self.states[made], self.shapes[made], self.dtypes[made] = shard, shape, dtype
        return with_operand(node, value, made)

    # ---- attention ---------------------------------------------------------------------------------------------
    def step(self, node: ForwardNode, suffix: str, target: str, args: list[Any]) -> None:
        name = f"{node.name}/{suffix}" if suffix else node.name
        if name in self.value:
            info = TensorInfo(self.value[name].shape, self.value[name].dtype)
        else:
            out = node.outputs[0]
            assert out is not None
            info = TensorInfo(local_shape(out.shape, Shard(2), self.member), out.dtype)
        self.nodes.append(ForwardNode(name, target, args, {}, (info,)))

    def unrepeated(self, value: str) -> str:
        """Key-value heads before they are repeated, as the plan has them travel."""
        made = {n.name: n for n in self.nodes}
        while value not in self.planned and value in made and made[value].inputs:
            value = made[value].inputs[0]
        return value

    def argument(self, node: ForwardNode, name: str) -> Any:
        return argument_of(operator_of(node), node.args, node.kwargs, name)

    def ring_steps(self, node: ForwardNode) -> None:
        q, k, v = node.inputs[:3]
        k, v = self.unrepeated(k), self.unrepeated(v)
        keys = self.shapes[k][3]
        causal, scale = self.argument(node, "is_causal"), self.argument(node, "scale")
        facts = [keys, bool(causal), float(keys**-0.5 if scale is None else scale)]
        self.step(node, "kv0", JOIN, [{"value": k}, {"value": v}])
        mask = self.argument(node, "attn_mask")
        before: Any = None
        for j in range(self.parts):
            args = [{"value": q}, {"value": f"{node.name}/kv{j}"}, before, mask, self.part, self.parts, (self.part - j) % self.parts, *facts]
            last = j == self.parts - 1
            self.step(node, "" if last else f"r{j}", RING_END if last else RING_BLOCK, args)
            before = {"value": f"{node.name}/r{j}"}

    def ulysses_steps(self, node: ForwardNode) -> None:
        q, k, v = node.inputs[:3]
        b, heads, whole, keys = self.shapes[q]
        k, v = self.unrepeated(k), self.unrepeated(v)
        width, s = self.shapes[v][3], whole // self.parts
        sizes = [heads // self.parts, max(1, self.shapes[k][1] // self.parts), keys, width]
        causal, scale = self.argument(node, "is_causal"), self.argument(node, "scale")
        self.step(node, "out", OUT, [{"value": x} for x in (q, k, v)] + [self.parts])
        self.step(node, "heads", HEADS, [{"value": f"{node.name}/in"}, self.argument(node, "attn_mask"), b, s, sizes, bool(causal), scale])
        self.step(node, "", UNITE, [{"value": f"{node.name}/back"}, b, s, heads])
