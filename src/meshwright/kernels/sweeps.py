"""A sweep of messages through a graph in levels, compiled, and its derivative (GiPH's net, decide/place/giph).

Nodes of a level are neighbours, `node_ptr[l]` to `node_ptr[l + 1]`; so are the edges that end at its nodes, by `edge_ptr`. Level by level, from the
first on or from the last (`back`), with s numbers of state and h of a message:

    m = ReLU(to_message y[src] + of_edge)       [h], of every edge;  `of_edge`: what the edge's own features add
    z = mean of m over the edges that end at a node, 0 without any
    y = ReLU(to_state z + bias) + y0            [s], of every node
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["sweep", "sweep_gradient"]

_kept = njit(cache=True, nogil=True)


@_kept  # type: ignore[untyped-decorator]
def sweep(
    y0: Any, of_edge: Any, src: Any, dst: Any, node_ptr: Any, edge_ptr: Any, to_message: Any, to_state: Any, bias: Any, back: bool, y: Any, z: Any,
    count: Any,
) -> None:  # fmt: skip
    """Fills `y` [nodes, s], and `z` [nodes, h] and `count` [nodes], which `sweep_gradient` reads; both must be 0 before.
    O(edges · h + nodes · s · h)."""
    states, size, levels = y0.shape[1], of_edge.shape[1], len(node_ptr) - 1
    said = np.empty((len(y0), size), y0.dtype)
    for turn in range(levels):
        level = levels - 1 - turn if back else turn
        for e in range(edge_ptr[level], edge_ptr[level + 1]):
            a, b = src[e], dst[e]
            count[b] += 1
            for c in range(size):
                z[b, c] += max(said[a, c] + of_edge[e, c], 0)
        for v in range(node_ptr[level], node_ptr[level + 1]):
            for c in range(size):
                z[v, c] /= max(count[v], 1)
            for r in range(states):
                total = bias[r]
                for c in range(size):
                    total += to_state[r, c] * z[v, c]
                y[v, r] = max(total, 0) + y0[v, r]
            for c in range(size):
                total = y[v, 0] * to_message[c, 0]
                for r in range(1, states):
                    total += y[v, r] * to_message[c, r]
                said[v, c] = total


@_kept  # type: ignore[untyped-decorator]
def sweep_gradient(
    y: Any, y0: Any, z: Any, count: Any, of_edge: Any, src: Any, dst: Any, node_ptr: Any, edge_ptr: Any, to_message: Any, to_state: Any, back: bool,
    g_y: Any, g_edge: Any, g_to_message: Any, g_to_state: Any, g_bias: Any,
) -> None:  # fmt: skip
    """`g_y`: gradient of y, changed into that of y0. Fills `g_edge`, that of `of_edge`; adds to those of the weights. Cost as `sweep`."""
    states, size, levels = y.shape[1], of_edge.shape[1], len(node_ptr) - 1
    said, g_said = np.zeros((len(y), size), y.dtype), np.zeros((len(y), size), y.dtype)
    for v in range(len(y)):
        for c in range(size):
            total = y[v, 0] * to_message[c, 0]
            for r in range(1, states):
                total += y[v, r] * to_message[c, r]
            said[v, c] = total
    g_z = np.empty(size, y.dtype)
    g_sum = np.zeros((len(y), size), y.dtype)
    for turn in range(levels):
        level = turn if back else levels - 1 - turn
        for v in range(node_ptr[level], node_ptr[level + 1]):
            for c in range(size):  # all edges that begin here end at levels that are done
                for r in range(states):
                    g_y[v, r] += to_message[c, r] * g_said[v, c]
                    g_to_message[c, r] += g_said[v, c] * y[v, r]
            g_z[:] = 0
            for r in range(states):
                if y[v, r] > y0[v, r]:
                    g_bias[r] += g_y[v, r]
                    for c in range(size):
                        g_to_state[r, c] += g_y[v, r] * z[v, c]
                        g_z[c] += to_state[r, c] * g_y[v, r]
            for c in range(size):
                g_sum[v, c] = g_z[c] / max(count[v], 1)
        for e in range(edge_ptr[level], edge_ptr[level + 1]):
            a, b = src[e], dst[e]
            for c in range(size):
                g = g_sum[b, c] if said[a, c] + of_edge[e, c] > 0 else 0
                g_edge[e, c] = g
                g_said[a, c] += g
