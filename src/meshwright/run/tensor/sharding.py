"""Tensor parallelism by rewriting: follow the sharded dimension through a segment's calls and divide what it touches.

Cite: Shoeybi et al., Megatron-LM, arXiv 1909.08053 (column- and row-parallel linear layers); the column/row rule is applied to traced ATen calls
here instead of to module classes.
State of a value: None = the whole tensor on every rank; `Shard(dim, blocks)`: dimension `dim` consists of `blocks` equal blocks and this rank holds
its t-th of each; PARTIAL = the ranks' tensors add up to it.
Left open by the paper: which calls may lie between a column- and a row-parallel layer. Our answer: those with a rule below; any other call on a
sharded value raises `Unsupported` naming the node, so nothing is silently wrong. Gradients are followed backwards too: a replicated parameter
whose gradient would be a partial sum is refused.
Invariant (tested): every rewritten call has the shape of the original with the sharded dimension divided by t.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from ...errors import Unsupported
from ...plan.shards import Cut, part_ranges
from ..steps.forward_graph import ForwardNode
from .cuts import cuts_before, with_operand
from .rules import apply_rule
from .state import PARTIAL, Call, Member, Partial, Shape, Shard, State, States, local_shape

__all__ = [
    "PARTIAL", "Member", "Shard", "ShardedCalls", "State", "check_gradients", "local_shape", "propagate", "put_part", "take_part",
]  # fmt: skip


class ShardedCalls(NamedTuple):
    """Rewritten calls of a segment, and what each value of it is on a rank."""

    nodes: tuple[ForwardNode, ...]
    states: States


def take_part(tensor: torch.Tensor, axis: int, cut: Cut, part: int, parts: int) -> torch.Tensor:
    """What part `part` of `parts` holds of dimension `axis` (`plan.shards.part_ranges`); a contiguous copy."""
    ranges = part_ranges(tensor.shape[axis], cut, part, parts)
    if len(ranges) == 1:
        (low, high) = ranges[0]
        return tensor.narrow(axis, low, high - low).clone(memory_format=torch.contiguous_format)
    return torch.cat([tensor.narrow(axis, low, high - low) for low, high in ranges], dim=axis)


def put_part(whole: torch.Tensor, piece: torch.Tensor, axis: int, cut: Cut, part: int, parts: int) -> None:
    """Inverse of `take_part`: write the part into its place of the whole tensor."""
    at = 0
    for low, high in part_ranges(whole.shape[axis], cut, part, parts):
        whole.narrow(axis, low, high - low).copy_(piece.narrow(axis, at, high - low))
        at += high - low


def propagate(
    nodes: Iterable[ForwardNode], states: Mapping[str, Any], shapes: Mapping[str, Shape], parts: int | Member
) -> ShardedCalls:
    """Rewrite the calls of a split segment for one rank: a `Member`, or the first of `parts` with equal shares.

    Where an operand of a call is whole and has to be split as another is, a call is put before it that takes this rank's part.
    `states`: of parameters, buffers and values from before (missing = whole); `shapes`: whole shapes of everything the calls take.
    Raises: Unsupported, naming the node, where a sharded value meets a call that has no rule or whose rule does not hold.
    """
    known: States = dict(states)
    known_shapes = dict(shapes)
    out = []
    for node in nodes:
        for part in cuts_before(node, known, known_shapes, parts):
            taken = Call(part, known, known_shapes, parts)
            known[part.name] = apply_rule(taken)
            out.append(msgspec.structs.replace(part, args=taken.args, kwargs=taken.kwargs))
            known_shapes[part.name] = known_shapes[part.inputs[0]]
            node = with_operand(node, part.inputs[0], part.name)
        call = Call(node, known, known_shapes, parts)
        known[node.name] = apply_rule(call)
        if not node.many and node.outputs[0] is not None:
            known_shapes[node.name] = node.outputs[0].shape
        elif node.many:
            for i, info in enumerate(node.outputs):
                known_shapes[f"{node.name}#{i}"] = info.shape if info else ()
        out.append(msgspec.structs.replace(call.node, args=call.args, kwargs=call.kwargs))
    return ShardedCalls(tuple(out), known)


def check_gradients(
    nodes: Sequence[ForwardNode],
    states: Mapping[str, Any],
    reads: Iterable[str],
    params: Iterable[str],
    writes: Iterable[str],
    partial: Iterable[str],
) -> None:
    """Raise Unsupported unless exactly the gradients of the reads in `partial` are partial sums over the tensor-parallel ranks."""
    partial_grad: dict[str, bool] = dict.fromkeys(writes, False)
    for node in reversed(nodes):
        state = states.get(node.name)
        sharded = any(isinstance(s, (Shard, Partial)) for s in (state if isinstance(state, tuple) else (state,)))
        if not sharded and node.name not in partial_grad:
            continue
        contribution = sharded or partial_grad[node.name]
        for name in node.inputs:
            if isinstance(states.get(name), (Shard, Partial, tuple)):
                continue
            if partial_grad.setdefault(name, contribution) != contribution:
                raise Unsupported(f"the gradient of {name!r} is a partial sum along one path and whole along another", where=f"node {node.name}")
    wanted = set(partial)
    for name in (*reads, *params):
        is_partial = partial_grad.get(name, False)
        if is_partial and name not in wanted:
            raise Unsupported(
                f"the gradient of {name!r} would be a partial sum over the tensor-parallel ranks that nothing completes",
                hint="end the split segment before it, or list it in sum_grads",
            )
        if name in wanted and name in partial_grad and not is_partial:
            raise Unsupported(
                f"the gradient of {name!r} is whole on every rank; summing it would multiply it",
                hint="take it out of sum_grads; plan with --sequence-parallel off or --tp 1",
            )
