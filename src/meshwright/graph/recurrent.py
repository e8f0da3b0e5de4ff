"""What recurrent layers' own kernels need beside the values of a graph.

The joint graph of an LSTM is one call per gate and time step: torch takes it apart wherever gradients are asked for. A run calls oneDNN's kernel.
It reorders the weights of each layer and direction, keeps products of all time steps aside, and has gradients of weights whose rows it pads in its
own order, too. Found by watching the allocator at widths 96 to 256: 1 to 8 % apart.
"""

from __future__ import annotations

from typing import Any

from .graph import OpGraph, OpNode

__all__ = ["recurrent_workspaces"]

GATES = 4
FLOAT_BYTES = 4
ROW = 16  # floats that a row is rounded up to; one more row end where a row is a multiple of 256, so that rows begin at unlike cache sets


def recurrent_workspaces(graph: OpGraph) -> dict[str, tuple[int, int]]:
    """(forward, backward) bytes of every LSTM of the graph: of its largest layer and direction, in backward with the gradients of that layer."""
    nodes = [n for n in graph.nodes if n.target == "aten.lstm.input" and n.outputs[0].dtype == "float32"]
    if not nodes:
        return {}
    shapes = {p.name: p.shape for p in graph.parameters}
    return {n.name: _workspace(n, shapes) for n in nodes}


def _workspace(node: OpNode, shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    (first, last), hidden = node.outputs[0].shape[:2], node.outputs[1].shape[-1]
    positions = first * last  # time steps and samples, whichever comes first
    forward = backward = 0
    for name in _names(node.args[2]):
        shape = shapes.get(name.removeprefix("param:"), ())
        if len(shape) != 2 or shape[0] != GATES * hidden:
            continue
        inside = shape[1]
        ahead = _row(GATES * hidden) * (inside + hidden) + positions * GATES * hidden
        padded = sum(_row(x) for x in (inside, hidden) if _row(x) != x)  # gradients of these weights have an order of their own
        behind = ahead + GATES * hidden * (padded + inside + hidden + 2) + positions * (inside + hidden)
        forward, backward = max(forward, FLOAT_BYTES * ahead), max(backward, FLOAT_BYTES * behind)
    return forward, backward


def _row(floats: int) -> int:
    whole = -(-floats // ROW) * ROW
    return whole + ROW if whole % 256 == 0 else whole


def _names(argument: Any) -> list[str]:
    return [str(x["value"]) for x in argument if isinstance(x, dict) and "value" in x]
