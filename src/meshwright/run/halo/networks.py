"""GCN and GraphSAGE on a worker's share: own nodes without neighbours elsewhere are aggregated while the halo travels."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from ...graph.halo import Halo
from ...job import GraphTraining
from .exchange import HaloExchange

__all__ = ["GraphConv", "GraphNet", "SparseRows"]


class SparseRows:
    """Rows of a sparse matrix and of its transpose, both compressed: `rows @ x` has a gradient in x."""

    def __init__(self, indptr: np.ndarray[Any, Any], indices: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], columns: int) -> None:
        rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        by = np.lexsort((rows, indices))
        turned = np.concatenate([[0], np.cumsum(np.bincount(indices, minlength=columns))])
        size = len(indptr) - 1, columns
        self.plain = _compressed(indptr, indices, weights, size)
        self.turned = _compressed(turned, rows[by], weights[by], size[::-1])

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


def _compressed(indptr: Any, indices: Any, weights: Any, size: tuple[int, int]) -> torch.Tensor:
    places = (torch.from_numpy(np.array(column, np.int64)) for column in (indptr, indices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls compressed rows a beta feature, once a process
        return torch.sparse_csr_tensor(*places, torch.from_numpy(np.array(weights, np.float32)), size=size, check_invariants=False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrix: SparseRows) -> torch.Tensor:
        ctx.matrix = matrix
        return _times(matrix.plain, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _times(ctx.matrix.turned, grads[0]), None


def _times(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return matrix @ x if matrix.values().numel() and x.numel() else x.new_zeros(matrix.shape[0], x.shape[1])


class GraphConv(nn.Module):
    """gcn: W (sum of weighted neighbours) + b; sage: W (mean of neighbours) + b + V (own row). As GCNConv and SAGEConv of PyTorch Geometric.

    The share's coefficients say which (`NodeGraph.coefficients`; for gcn of the graph with self-loops).
    """

    def __init__(self, model: str, dim_in: int, dim_out: int, share: Halo) -> None:
        super().__init__()
        self.lin = nn.Linear(dim_in, dim_out)
        self.own = nn.Linear(dim_in, dim_out, bias=False) if model == "sage" else None
        cut = int(share.indptr[share.central])
        self.central = SparseRows(share.indptr[: share.central + 1], share.indices[:cut], share.weights[:cut], share.own)
        self.marginal = SparseRows(share.indptr[share.central :] - cut, share.indices[cut:], share.weights[cut:], len(share.nodes))

    def forward(self, h: torch.Tensor, halo: HaloExchange, layer: int) -> torch.Tensor:
        """h [own, dim_in] -> [own, dim_out]."""
        ticket = halo.start(h, layer)
        central = self.central @ h
        rows = torch.cat([h, halo.finish(ticket, layer)])
        taken = torch.cat([central, self.marginal @ rows])
        out: torch.Tensor = self.lin(taken)
        return out if self.own is None else out + self.own(h)


class GraphNet(nn.Module):
    """`job.layers` convolutions with ReLU between. Equal seeds give equal weights on every worker."""

    def __init__(self, job: GraphTraining, share: Halo) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.layers = nn.ModuleList(GraphConv(job.model, a, b, share) for a, b in zip(job.dims[:-1], job.dims[1:], strict=True))

    def forward(self, x: torch.Tensor, halo: HaloExchange) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x, halo, k)
            x = torch.relu(x) if k + 1 < len(self.layers) else x
        return x
