"""Calls of an expert layer on a tensor rank that has a part of its replica's experts: it places, multiplies and takes the rows of these alone."""

from __future__ import annotations

from typing import Any

from ...plan.experts import MLP, TOKENS
from .state import PARTIAL, Call, Shard

__all__ = ["experts_rule"]


def experts_rule(call: Call) -> Any:
    """`shard` among the arguments: how the layer's buffers are divided (`run.context.experts`). Raises: Unsupported."""
    target, given = call.node.target, call.kwargs.pop("shard", None)
    if target == MLP:
        rows, counts, gate_up, down = (call.state(i) for i in range(4))
        if not isinstance(rows, Shard) or rows.dim or counts != rows or gate_up != Shard(0) or down != Shard(0):
            raise call.fail(f"rows {rows}, counts {counts}, experts {gate_up}, {down}")
        call.args[-1] = -(-int(call.args[-1]) // call.member.parts)
        return rows
    others = [call.state(i) for i in range(len(call.args)) if target != TOKENS or i]
    if given is None and target != TOKENS and not any(others):
        return None
    if any(others) or given is None or (target == TOKENS and call.state(0) != given):
        raise call.fail(f"its operands are {[call.state(0), *others]}, its buffers {given}")
    experts = int(call.shape(0)[0] if target == TOKENS else call.args[-2])
    places, held = [-1] * experts, 0
    for low, high in call.member.ranges(experts, given):
        places[low:high] = range(held, held + high - low)
        held += high - low
    call.args.append(places)
    return PARTIAL if target == TOKENS else given
