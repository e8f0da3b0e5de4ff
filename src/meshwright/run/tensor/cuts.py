"""Whole operands of pointwise calls on positions of the sequence: a rank takes its part of them first (a table of positions, a mask, a residual that
every rank has). The gradient of what is cut so is a partial sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch

from ..steps.forward_graph import ForwardNode, TensorInfo, resolve
from .state import Call, Member, Shape, Shard, member_of

__all__ = ["OWN_PART", "cuts_before", "own_part_rule", "with_operand"]

OWN_PART = "meshwright.own_part.default"


def cuts_before(node: ForwardNode, states: Mapping[str, Any], shapes: Mapping[str, Shape], parts: int | Member) -> list[ForwardNode]:
    """The calls that take this rank's part of the whole operands of `node`."""
    split = next((v for v in node.inputs if isinstance(states.get(v), Shard)), None)
    if split is None or len(node.outputs) != 1 or node.outputs[0] is None or not _pointwise(node.target):
        return []
    rank = len(node.outputs[0].shape)
    state = states[split]
    moved = replace(state, dim=state.dim + rank - len(shapes[split]))
    found = []
    for v in dict.fromkeys(node.inputs):
        at = moved.dim - (rank - len(shapes[v]))
        if states.get(v) is None and at >= 0 and shapes[v][at] != 1:
            ranges = [list(r) for r in member_of(parts).ranges(shapes[v][at], moved)]
            args: list[Any] = [{"value": v}, at, ranges]
            # the dtype is that of the operand, which nothing reads here: shapes are what the rules go by
            name = f"{node.name}/part/{v.replace(':', '.')}"  # a colon would make it a parameter's
            found.append(ForwardNode(name, OWN_PART, args, {"blocks": moved.blocks}, (TensorInfo(shapes[v], ""),)))
    return found


def _pointwise(target: str) -> bool:
    return target.count(".") == 2 and target.startswith("aten.") and torch.Tag.pointwise in getattr(resolve(target), "tags", ())


def own_part_rule(call: Call) -> Shard:
    return Shard(int(call.args[1]), int(call.kwargs.pop("blocks", 1)))


def with_operand(node: ForwardNode, old: str, new: str) -> ForwardNode:
    """`node` with the value `new` where it takes `old`."""

    def swapped(x: Any) -> Any:
        if isinstance(x, dict):
            return {"value": new} if x == {"value": old} else {k: swapped(v) for k, v in x.items()}
        return [swapped(v) for v in x] if isinstance(x, list) else x

    return msgspec.structs.replace(node, args=swapped(node.args), kwargs=swapped(node.kwargs))

