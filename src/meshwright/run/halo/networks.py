"""GCN and GraphSAGE on a worker's share: own nodes without neighbours elsewhere are aggregated while the halo travels, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ...graph.halo import Halo
from ...job import GraphTraining
from ...kernels.rows import weighted_rows
from .exchange import HaloExchange

__all__ = ["GraphConv", "GraphNet", "Rows"]

Array = np.ndarray[Any, Any]


class Rows:
    """Weighted sums over a share's in-edges: of central rows, of marginal ones, and back to own rows and to copies."""

    def __init__(self, share: Halo) -> None:
        cut = int(share.indptr[share.central])
        self.own, self.copies, self.cut = share.own, share.copies, share.central
        self.central = share.indptr[: share.central + 1], share.indices[:cut], share.weights[:cut]
        self.marginal = share.indptr[share.central :] - cut, share.indices[cut:], share.weights[cut:]
        rows = np.repeat(np.arange(share.own), np.diff(share.indptr))
        by = np.lexsort((rows, share.indices))
        turned = np.concatenate([[0], np.cumsum(np.bincount(share.indices, minlength=len(share.nodes)))])
        self.to_own = turned[: share.own + 1], rows[by], share.weights[by]
        self.to_copies = turned[share.own :], rows[by], share.weights[by]


class _Aggregate(torch.autograd.Function):  # type: ignore[misc]
    """Forward: others' rows travel while central ones are computed. Backward: gradients of copies first, which travel while those of own rows are."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, rows: Rows, halo: HaloExchange, layer: int) -> torch.Tensor:
        ctx.rows, ctx.halo, ctx.layer = rows, halo, layer
        x = halo.checked(h, layer)
        halo.post_rows(x, layer)
        out = np.empty((rows.own, x.shape[1]), np.float32)
        weighted_rows(*rows.central, x, x[:0], out[: rows.cut])
        weighted_rows(*rows.marginal, x, halo.take_rows(layer), out[rows.cut :])
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows, g = ctx.rows, grads[0].contiguous().numpy()
        of_copies, total = np.empty((rows.copies, g.shape[1]), np.float32), np.empty((rows.own, g.shape[1]), np.float32)
        weighted_rows(*rows.to_copies, g, g[:0], of_copies)
        ctx.halo.post_gradients(of_copies, ctx.layer)
        weighted_rows(*rows.to_own, g, g[:0], total)
        ctx.halo.add_gradients(total, ctx.layer)
        return torch.from_numpy(total), None, None, None


class GraphConv(nn.Module):  # type: ignore[misc]
    """gcn: W (sum of weighted neighbours) + b; sage: W (mean of neighbours) + b + V (own row). As GCNConv and SAGEConv of PyTorch Geometric.

    The share's coefficients say which (`NodeGraph.coefficients`; for gcn of the graph with self-loops).
    """

    def __init__(self, model: str, dim_in: int, dim_out: int, rows: Rows) -> None:
        super().__init__()
        self.rows, self.lin = rows, nn.Linear(dim_in, dim_out)
        self.own = nn.Linear(dim_in, dim_out, bias=False) if model == "sage" else None

    def forward(self, h: torch.Tensor, halo: HaloExchange, layer: int) -> torch.Tensor:
        """h [own, dim_in] -> [own, dim_out]."""
        out: torch.Tensor = self.lin(_Aggregate.apply(h, self.rows, halo, layer))
        return out if self.own is None else out + self.own(h)


class GraphNet(nn.Module):  # type: ignore[misc]
    """`job.layers` convolutions with ReLU between. Equal seeds give equal weights on every worker."""

    def __init__(self, job: GraphTraining, share: Halo) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        rows = Rows(share)
        self.layers = nn.ModuleList(GraphConv(job.model, a, b, rows) for a, b in zip(job.dims[:-1], job.dims[1:], strict=True))

    def forward(self, x: torch.Tensor, halo: HaloExchange) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x, halo, k)
            x = torch.relu(x) if k + 1 < len(self.layers) else x
        return x
