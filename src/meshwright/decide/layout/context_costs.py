"""What dividing a model's positions costs, for layer tables: its layers on a rank's positions, and the exchanges of its attention.

Cite: `plan.context.RING`, `plan.context.ULYSSES`. Left open there: what an exchange costs on a fabric of servers. Our answer: ranks of a context
group fill servers in order, beside their tensor ranks. Of a ring one hop in a server leaves it, for each of its tensor ranks, which share its NICs; a
block is on its way while the one before it is attended to, and costs what is left of it. An all-to-all waits for the slower of its parts inside
and outside of a server. The gradients go back the same ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from ...cost import Cost
from ...errors import Unsupported
from ...fabric.servers import ServerKind
from ...graph.graph import OpGraph, OpNode
from ...plan.context import ALL_TO_ALL, SHIFT
from .cut import Unit

__all__ = ["LEAST_POSITIONS", "again_s", "context_degrees", "exchange_s", "same_starts"]

LEAST_POSITIONS = 8192  # of a rank, for a degree to be tried unasked


def context_degrees(graph: OpGraph, asked: Sequence[int], most: int) -> list[int]:
    """Degrees above 1: those asked for; with none asked for, powers of two that leave every rank LEAST_POSITIONS of the longest input."""
    if asked:
        return sorted({c for c in asked if c > 1})
    longest = max((x.shape[1] for x in graph.inputs if len(x.shape) > 1 and x.shape[0] == graph.batch_size), default=0)
    return [c for c in (1 << i for i in range(1, 16)) if c <= most and longest // c >= LEAST_POSITIONS]


def same_starts(heads: Sequence[str], units: Sequence[Unit], where: str) -> list[int]:
    """Where layers begin among the units of a rank's positions; `heads`: the first operator of every layer's first unit in the whole model.

    Raises: Unsupported where an operator that begins a layer is not there, or in another order.
    """
    at = {n.name: i for i, u in enumerate(units) for n in u.nodes}
    starts = []
    for k, head in enumerate(heads):
        i = at.get(head, -1) if k else 0
        while i > 0 and all(n.name.startswith(f"{head}/part/") for n in units[i - 1].nodes):
            i -= 1  # what it takes of a value that every rank has whole
        starts.append(i)
    if any(a >= b for a, b in pairwise(starts)):
        raise Unsupported("on a part of the positions the layers are not those of the whole model", where=where, hint="--contexts 1")
    return starts


def exchange_s(
    nodes: Sequence[OpNode], context: int, tensor: int, kind: ServerKind, cost: Cost, size_bytes: Callable[[OpNode], float],
    attend_s: Callable[[OpNode, bool], float],
) -> tuple[float, float]:  # fmt: skip
    """(forward, backward) seconds of the exchanges among `nodes` that computation does not hide. `size_bytes`: of an exchanged value on one rank;
    `attend_s`: of a round of attention, in backward or not."""
    forward = backward = 0.0
    by_name = {n.name: n for n in nodes}
    for n in nodes:
        if n.target == SHIFT:
            round_, each = by_name[f"{n.name.rpartition('/')[0]}/r0"], _shift_s(size_bytes(n), context, tensor, kind, cost)
            forward, backward = forward + max(0.0, each - attend_s(round_, False)), backward + max(0.0, each - attend_s(round_, True))
        elif n.target == ALL_TO_ALL:
            each = _all_to_all_s(size_bytes(n), context, tensor, kind, cost)
            forward, backward = forward + each, backward + each
    return forward, backward


def again_s(n: OpNode, attend_s: float, context: int, tensor: int, kind: ServerKind, cost: Cost, size_bytes: float) -> float:
    """Seconds more of backward where a block comes again, the way its gradients go. `attend_s`: of a round of attention in backward."""
    each = _shift_s(size_bytes, context, tensor, kind, cost) if n.target == SHIFT else 0.0
    return max(0.0, 2 * each - attend_s) - max(0.0, each - attend_s)


def _shift_s(size_bytes: float, context: int, tensor: int, kind: ServerKind, cost: Cost) -> float:
    inside = kind.inside_Bps[kind.gpus] if kind.gpus > 1 else float("inf")
    if context * tensor <= kind.gpus:
        return size_bytes / inside + kind.inside_latency_s + cost.transport.per_message_s
    outside = kind.nic_Bps * kind.nics / tensor
    rate = min(inside, outside) if kind.nics else inside
    return size_bytes / rate + kind.outside_latency_s + cost.transport.per_message_s


def _all_to_all_s(size_bytes: float, context: int, tensor: int, kind: ServerKind, cost: Cost) -> float:
    near = min(context, max(1, kind.gpus // tensor))  # ranks of the group in one server
    inside_s = size_bytes * (near - 1) / context / kind.inside_Bps[kind.gpus] if kind.gpus > 1 else 0.0
    outside_s = size_bytes * (context - near) / context / kind.device_nic_Bps if kind.nics else 0.0
    hops = (near - 1) * kind.inside_latency_s + (context - near) * kind.outside_latency_s + (context - 1) * cost.transport.per_message_s
    return max(inside_s, outside_s) + hops
