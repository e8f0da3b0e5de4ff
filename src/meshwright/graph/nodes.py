"""A graph of nodes that a network is trained on: who aggregates from whom, in compressed rows, with features and labels beside it.

Row v lists the nodes that v aggregates from. A graph whose edges have no direction holds each of them twice.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["Aggregation", "Labelled", "NodeGraph", "graph_of_edges", "graph_of_networkx"]

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Aggregation = Literal["gcn", "mean", "sum"]
MAX_NODES = (1 << 31) - 1  # local numbers are 32 bits wide in torch's sparse products


@dataclass(frozen=True, eq=False)
class NodeGraph:
    """`indptr` [nodes + 1], `indices` [edges]. Raises: UsageError for columns that are no compressed rows."""

    indptr: I64
    indices: I64
    name: str = "graph"

    def __post_init__(self) -> None:
        ptr, idx = self.indptr, self.indices
        if ptr.ndim != 1 or idx.ndim != 1 or not 2 <= len(ptr) <= MAX_NODES or ptr[0] != 0 or ptr[-1] != len(idx) or (np.diff(ptr) < 0).any():
            raise UsageError(
                "indptr must rise from 0 to the number of indices, for at least one node", where=f"{self.name}: indptr",
                hint="give compressed rows: indptr[v]:indptr[v + 1] are the places of v's neighbours",
            )  # fmt: skip
        if len(idx) and not 0 <= int(idx.min()) <= int(idx.max()) < self.nodes:
            wrong = int(np.flatnonzero((idx < 0) | (idx >= self.nodes))[0])
            raise UsageError(f"{int(idx[wrong])} is none of {self.nodes} nodes", where=f"{self.name}: indices[{wrong}]", hint="number nodes from 0")

    @property
    def nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        return len(self.indices)

    @cached_property
    def rows(self) -> I64:
        """[edges]: the node that aggregates."""
        return np.repeat(np.arange(self.nodes, dtype=np.int64), np.diff(self.indptr))

    @cached_property
    def symmetric(self) -> NodeGraph:
        """Both directions of every edge, each once, without self-loops: what is partitioned."""
        a, b = np.concatenate([self.rows, self.indices]), np.concatenate([self.indices, self.rows])
        keep = np.unique((a * self.nodes + b)[a != b])
        return _of_sorted(keep // self.nodes, keep % self.nodes, self.nodes, self.name)

    def looped(self) -> NodeGraph:
        """With a self-loop at each node that has none, as GCN adds them."""
        lacks = np.ones(self.nodes, bool)
        lacks[self.rows[self.rows == self.indices]] = False
        extra = np.flatnonzero(lacks)
        return graph_of_edges(np.concatenate([self.indices, extra]), np.concatenate([self.rows, extra]), self.nodes, name=self.name)

    def coefficients(self, how: Aggregation) -> F32:
        """[edges]: by what an edge multiplies. gcn: 1 / sqrt(in-degree of either end), as PyTorch Geometric's GCNConv; mean: 1 / in-degree; sum: 1.

        Degrees are those of the whole graph.
        """
        degree = np.maximum(np.diff(self.indptr), 1).astype(np.float64)
        if how == "gcn":
            root = 1 / np.sqrt(degree)
            return (root[self.rows] * root[self.indices]).astype(np.float32)
        return (1 / degree[self.rows] if how == "mean" else np.ones(self.edges)).astype(np.float32)


def _of_sorted(rows: I64, indices: I64, nodes: int, name: str) -> NodeGraph:
    ptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=nodes), out=ptr[1:])
    return NodeGraph(ptr, np.ascontiguousarray(indices), name)


def graph_of_edges(src: I64, dst: I64, nodes: int, *, directed: bool = True, name: str = "graph") -> NodeGraph:
    """Edges src -> dst: dst aggregates from src. Not `directed`: both ways, double edges and self-loops dropped."""
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    if not 1 <= nodes < MAX_NODES or len(src) != len(dst):
        raise UsageError(f"{nodes} nodes, {len(src)} sources and {len(dst)} targets", where=name, hint="at least one node, and two ends of each edge")
    if len(dst) and not 0 <= min(int(dst.min()), int(src.min())) <= max(int(dst.max()), int(src.max())) < nodes:
        raise UsageError(f"an edge ends at none of the {nodes} nodes", where=name, hint="number nodes from 0")
    by = np.lexsort((src, dst))
    found = _of_sorted(dst[by], src[by], nodes, name)
    return found if directed else found.symmetric


def graph_of_networkx(graph: Any, *, name: str = "graph") -> tuple[NodeGraph, list[Hashable]]:
    """A networkx graph and its nodes in the order in which they are numbered. Edges of an undirected one go both ways."""
    order = list(graph.nodes())
    number = {node: i for i, node in enumerate(order)}
    ends = np.array([(number[a], number[b]) for a, b in graph.edges()], np.int64).reshape(-1, 2)
    if not graph.is_directed():
        ends = np.concatenate([ends, ends[ends[:, 0] != ends[:, 1]][:, ::-1]])
    return graph_of_edges(ends[:, 0], ends[:, 1], len(order), name=name), order


@dataclass(frozen=True, eq=False)
class Labelled:
    """A graph with what it is trained on. `features` [nodes, F] float32, `labels` [nodes] (-1: none), `train` [nodes]: which of them count in the
    loss.

    Raises: UsageError for columns of other lengths, features that are not finite, labels below -1.
    """

    graph: NodeGraph
    features: F32
    labels: I64
    train: NDArray[np.bool_]

    def __post_init__(self) -> None:
        n, where = self.graph.nodes, self.graph.name
        if self.features.ndim != 2 or len({n, len(self.features), len(self.labels), len(self.train)}) > 1 or not self.features.shape[1]:
            lengths = f"{self.features.shape} features, {len(self.labels)} labels and {len(self.train)} marks"
            raise UsageError(f"{n} nodes have {lengths}", where=where, hint="one row of features, one label and one mark for each node")
        if not np.isfinite(self.features).all():
            row = int(np.flatnonzero(~np.isfinite(self.features).all(1))[0])
            raise UsageError(f"the features of node {row} are not finite", where=where, hint="leave the node out, or give it numbers")
        if (self.labels < -1).any() or not (self.train & (self.labels >= 0)).any():
            raise UsageError("labels must be -1 (none) or a class from 0 on, and some node that counts must have one", where=where)

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1
