"""A graph in parts: what each worker owns, what it needs of the others, and in which order both number it.

Local numbers: own nodes first, those without a neighbour elsewhere (central) before the others (marginal), then copies of others' nodes (halo), by
owner. Within each, nodes rise by global number, so sender and receiver agree without a word. (AdaQP, MLSys 2023, section 3.1 of its card.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .nodes import F32, I64, NodeGraph

__all__ = ["Halo", "halos", "message_scores", "require_parts"]


@dataclass(frozen=True, eq=False)
class Halo:
    """One worker's share. `nodes` [own + halo]: global numbers; `own`, `central`: counts. `send[j]`: local numbers of the rows that worker j needs;
    `receive[j]`: (first, end) of j's rows among all. `indptr` [own + 1], `indices`, `weights`: in-edges of own nodes, local numbers."""

    rank: int
    nodes: I64
    own: int
    central: int
    send: tuple[I64, ...]
    receive: tuple[tuple[int, int], ...]
    indptr: I64
    indices: I64
    weights: F32

    @cached_property
    def copies(self) -> int:
        return len(self.nodes) - self.own


def require_parts(parts: NDArray[np.integer], nodes: int, workers: int) -> I64:
    """[nodes], the worker of each. Raises: UsageError for another length, a worker that does not exist."""
    found = np.asarray(parts, np.int64)
    if found.shape != (nodes,) or (len(found) and not 0 <= int(found.min()) <= int(found.max()) < workers):
        hint = f"one number from 0 to {workers - 1} for each node"
        raise UsageError(f"parts of shape {found.shape} for {nodes} nodes on {workers} workers", where="parts", hint=hint)
    return found


def halos(graph: NodeGraph, parts: NDArray[np.integer], workers: int, weights: F32) -> tuple[Halo, ...]:
    """Every worker's share; `weights` by edge of the graph. A worker without nodes gets an empty share."""
    of = require_parts(parts, graph.nodes, workers)
    crosses = of[graph.rows] != of[graph.indices]
    marginal = np.zeros(graph.nodes, bool)
    marginal[graph.rows[crosses]] = True
    # (needing worker, node) of every copy, once: sorted by worker, then owner, then node.
    pairs = np.unique(of[graph.rows[crosses]] * graph.nodes + graph.indices[crosses])
    needs, copied = pairs // graph.nodes, pairs % graph.nodes
    found = []
    own = [np.flatnonzero(of == i) for i in range(workers)]
    own = [np.concatenate([x[~marginal[x]], x[marginal[x]]]) for x in own]
    local = np.empty(graph.nodes, np.int64)
    for x in own:
        local[x] = np.arange(len(x))
    for i in range(workers):
        mine = copied[needs == i]
        mine = mine[np.argsort(of[mine], kind="stable")]
        edge = np.searchsorted(of[mine], np.arange(workers + 1)) + len(own[i])
        number = local.copy()
        number[mine] = len(own[i]) + np.arange(len(mine))
        sizes = np.diff(graph.indptr)[own[i]]
        ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        at = np.arange(ptr[-1]) + np.repeat(graph.indptr[own[i]] - ptr[:-1], sizes)
        found.append(
            Halo(
                rank=i, nodes=np.concatenate([own[i], mine]), own=len(own[i]), central=int((~marginal[own[i]]).sum()),
                send=tuple(local[copied[(needs == j) & (of[copied] == i)]] for j in range(workers)),
                receive=tuple((int(edge[j]), int(edge[j + 1])) for j in range(workers)),
                indptr=ptr, indices=number[graph.indices[at]], weights=weights[at],
            )
        )  # fmt: skip
    return tuple(found)


def message_scores(shares: tuple[Halo, ...], src: int, dst: int) -> NDArray[np.float64]:
    """[rows that src sends to dst]: the sum of the coefficients by which dst's nodes take each row, squared: how noise on it counts."""
    share = shares[dst]
    first, end = share.receive[src]
    into = np.bincount(share.indices, weights=share.weights, minlength=len(share.nodes))
    found: NDArray[np.float64] = into[first:end].astype(np.float64) ** 2
    return found
