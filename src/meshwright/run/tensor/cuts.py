"""Whole operands of calls on shards: a rank takes its part of them first (a table of positions, a mask, a bias per head, the one key-value head of
multi-query attention, a residual that every rank has). The gradient of what is cut so is a partial sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from ..steps.forward_graph import ForwardNode, TensorInfo, resolve
from .state import Call, Member, Shape, Shard, member_of

__all__ = ["OWN_PART", "cuts_before", "einsum_terms", "own_part_rule", "with_operand"]

OWN_PART = "meshwright.own_part.default"


def cuts_before(node: ForwardNode, states: Mapping[str, Any], shapes: Mapping[str, Shape], parts: int | Member) -> list[ForwardNode]:
    """The calls that take this rank's part of the whole operands of `node`."""
    split = next((v for v in node.inputs if isinstance(states.get(v), Shard)), None)
    if split is None or len(node.outputs) != 1 or node.outputs[0] is None:
        return []
    found = []
    for v, wanted in _wanted(node, split, states, shapes).items():
        size = shapes[v][wanted.dim]
        if states.get(v) is None and size != 1 and not wanted.repeated:
            ranges = [list(r) for r in member_of(parts).ranges(size, wanted)]
            args: list[Any] = [{"value": v}, wanted.dim, ranges]
            # the dtype is that of the operand, which nothing reads here: shapes are what the rules go by
            name = f"{node.name}/part/{v.replace(':', '.')}"  # a colon would make it a parameter's
            found.append(ForwardNode(name, OWN_PART, args, {"shard": wanted}, (TensorInfo(shapes[v], ""),)))
    return found


def _wanted(node: ForwardNode, split: str, states: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Shard]:
    """How the operands of `node` have to be split where `split` is."""
    state, operands = states[split], list(dict.fromkeys(node.inputs))
    base = node.target.rsplit(".", 1)[0]
    if base == "aten.einsum":
        terms = einsum_terms(node)
        letter = terms[split][state.dim]
        return {v: replace(state, dim=t.index(letter)) for v, t in terms.items() if letter in t}
    if base in ("aten.cat", "aten.stack", "aten.slice_scatter"):
        at = 2 if base == "aten.slice_scatter" else 1
        joined = base != "aten.stack" and int(node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)) % len(shapes[split]) == state.dim
        return {} if joined else dict.fromkeys(operands, state)
    if base == "aten.scaled_dot_product_attention":
        heads = shapes[operands[0]][state.dim]
        keys = {v for v in operands[1:3] if shapes[v][state.dim] != heads}  # fewer than queries
        mine = {v: Shard(state.dim, groups=shapes[v][state.dim] if v in keys else 0) for v in operands[:3]}
        return mine | _aligned(operands[3:], Shard(state.dim), len(shapes[operands[0]]), shapes)
    batched = base in ("aten.matmul", "aten.bmm", "aten.baddbmm") and state.dim < len(shapes[split]) - 2
    if not batched and not _pointwise(node.target) and base not in ("aten.max", "aten.min"):  # of two values
        return {}
    rank = max(len(shapes[v]) for v in operands)
    return _aligned(operands, replace(state, dim=state.dim + rank - len(shapes[split])), rank, shapes)


def _aligned(operands: Sequence[str], state: Shard, rank: int, shapes: Mapping[str, Shape]) -> dict[str, Shard]:
    """Of operands that are broadcast to `rank` dimensions; those without the split one are left out."""
    at = {v: state.dim - (rank - len(shapes[v])) for v in operands}
    return {v: replace(state, dim=d) for v, d in at.items() if d >= 0}


def einsum_terms(node: ForwardNode) -> dict[str, str]:
    """The letters of each operand of an einsum."""
    terms = str(node.args[0]).replace(" ", "").partition("->")[0].split(",")
    return {x["value"]: t for x, t in zip(node.args[1], terms, strict=True)}


def _pointwise(target: str) -> bool:
    return target.count(".") == 2 and target.startswith("aten.") and torch.Tag.pointwise in getattr(resolve(target), "tags", ())


def own_part_rule(call: Call) -> Shard:
    found: Shard = call.kwargs.pop("shard")
    return found


def with_operand(node: ForwardNode, old: str, new: str) -> ForwardNode:
    """`node` with the value `new` where it takes `old`."""

    def swapped(x: Any) -> Any:
        if isinstance(x, dict):
            return {"value": new} if x == {"value": old} else {k: swapped(v) for k, v in x.items()}
        return [swapped(v) for v in x] if isinstance(x, list) else x

    return msgspec.structs.replace(node, args=swapped(node.args), kwargs=swapped(node.kwargs))

