"""Block-sparse matrices and their products with dense ones: what an expert layer without dropped tokens is, all experts at once.

Cite: T. Gale, D. Narayanan, C. Young, M. Zaharia, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (MLSys 2023, arXiv 2211.15841).
Left open by the paper: processors. Our answer: a batched product of the blocks that there are, with the same topology (blocked CSR and row numbers).
Deviations: int32 indices where int16 would overflow silently. A sum over the blocks of a row adds them in the order of the topology.
Invariant: products are those of the dense matrix with zeros where there is no block. Cost: 2 b² K per block of an SDD, 2 b² N per block of a DSD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...errors import UsageError
from ..gpu.devices import BAND, usable

__all__ = ["BlockMatrix", "Topology", "dds", "dsd", "expert_topology", "sdd", "topology_of"]

MAX_INDEX = (1 << 31) - 1  # of blocks, rows and columns: indices are int32


@dataclass(frozen=True)
class Topology:
    """Where the blocks are: `rows` and `columns` [nnz] of each, row by row; `offsets` [block rows + 1]. `shape`: of the whole matrix, in elements."""

    block: int
    shape: tuple[int, int]
    rows: torch.Tensor
    columns: torch.Tensor
    offsets: torch.Tensor

    @cached_property
    def transposed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks in the order of the transpose, offsets of its block rows): no value moves."""
        order = torch.argsort(self.columns, stable=True)
        counts = torch.bincount(self.columns.long(), minlength=self.shape[1] // self.block)
        return order, torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])

    @cached_property
    def walks(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """(blocks row by row, offsets of block rows, of each block its place along the inner side) of the matrix and of its transpose, int32."""
        order, offsets = self.transposed
        every = torch.arange(len(self.rows), dtype=torch.int32, device=self.rows.device)
        return (every, self.offsets, self.columns), (order.int(), offsets.int(), self.rows)

    @cached_property
    def walk(self) -> torch.Tensor:
        """Blocks band by band of block rows, column by column within: programs of one time share both sides of a product."""
        rows, columns, wide = self.rows.long(), self.columns.long(), self.shape[1] // self.block
        return torch.argsort((rows // BAND * wide + columns) * BAND + rows % BAND).int()


@dataclass(frozen=True)
class BlockMatrix:
    """values: [nnz, b, b] in the topology's order."""

    values: torch.Tensor
    topology: Topology

    def dense(self) -> torch.Tensor:
        t, b = self.topology, self.topology.block
        out = self.values.new_zeros(t.shape[0] // b, t.shape[1] // b, b, b)
        out[t.rows.long(), t.columns.long()] = self.values
        return out.transpose(1, 2).reshape(t.shape)


def topology_of(mask: torch.Tensor, block: int) -> Topology:
    """Of a boolean matrix [block rows, block columns]."""
    rows, columns = mask.nonzero(as_tuple=True)
    counts = mask.sum(1)
    offsets = torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])
    shape = (mask.shape[0] * block, mask.shape[1] * block)
    return Topology(block, shape, rows.int(), columns.int(), offsets.int())


def expert_topology(counts: torch.Tensor, inner: int, block: int) -> tuple[Topology, torch.Tensor]:
    """(topology, first row of every expert [E]) of rows whose numbers `counts` [E] are rounded up to blocks: expert e has its own inner / b columns.

    Raises: UsageError where b does not divide the inner dimension, or an index would not fit.
    """
    if block < 1 or inner % block:
        fit = next(b for b in (128, 64, 32, 16, 8, 4, 2, 1) if inner % b == 0)
        raise UsageError(f"blocks of {block} do not divide an inner dimension of {inner}", where="block", hint=f"block={fit}")
    experts, wide = len(counts), inner // block
    height = -(-counts // block)
    if int(height.sum()) * wide > MAX_INDEX or experts * wide > MAX_INDEX or int(height.sum()) * block > MAX_INDEX:
        raise UsageError(f"{int(counts.sum())} rows of {inner} need more than {MAX_INDEX} blocks or rows", where="block", hint="larger blocks")
    owner = torch.repeat_interleave(torch.arange(experts, device=counts.device), height)
    columns = (owner[:, None] * wide + torch.arange(wide, device=counts.device)).reshape(-1)
    rows = torch.arange(len(owner), device=counts.device).repeat_interleave(wide)
    offsets = torch.arange(len(owner) + 1, device=counts.device) * wide
    topology = Topology(block, (len(owner) * block, experts * inner), rows.int(), columns.int(), offsets.int())
    return topology, (torch.cumsum(height, 0) - height) * block


def sdd(a: torch.Tensor, b: torch.Tensor, topology: Topology) -> BlockMatrix:
    """Blocks of a [M, K] · b [K, N]; either may be a transposed view."""
    size = topology.block
    _require(a.shape[1] == b.shape[0] and (a.shape[0], b.shape[1]) == topology.shape, "sdd", a.shape, b.shape, topology)
    if (kernels := _on_gpu(a, size)) is not None:
        return BlockMatrix(kernels.sdd(a, b, topology.rows, topology.columns, size, topology.walk), topology)
    left = a.reshape(-1, size, a.shape[1])[topology.rows.long()]
    right = b.t().reshape(-1, size, b.shape[0])[topology.columns.long()]
    return BlockMatrix(torch.bmm(left, right.transpose(1, 2)), topology)


def dsd(a: BlockMatrix, b: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """a · b, or aᵀ · b where `transposed`, of a sparse a and a dense b [K, N]."""
    t, size = a.topology, a.topology.block
    rows, inner = (t.shape[1], t.shape[0]) if transposed else t.shape
    _require(b.shape[0] == inner, "dsd", t.shape, b.shape, t)
    if (kernels := _on_gpu(b, size)) is not None:
        found: torch.Tensor = kernels.dsd(a.values, *t.walks[transposed], b, transposed=transposed)
        return found
    parts = b.reshape(-1, size, b.shape[1])
    out = a.values.new_zeros(rows // size, size, b.shape[1])
    left, at, into = (a.values.transpose(1, 2), t.rows, t.columns) if transposed else (a.values, t.columns, t.rows)
    out.index_add_(0, into.long(), torch.bmm(left, parts[at.long()]))
    return out.view(rows, b.shape[1])


def dds(a: torch.Tensor, b: BlockMatrix, *, transposed: bool = False) -> torch.Tensor:
    """a · b, or a · bᵀ where `transposed`, of a dense a [M, K] and a sparse b."""
    return dsd(b, a.t(), transposed=not transposed).t()


def _on_gpu(x: torch.Tensor, block: int) -> Any:
    """The GPU's kernels, where they take this tensor and these blocks; else None, and torch's own operators do it."""
    if not usable(x):
        return None
    from ..gpu import experts

    return experts if experts.applies(x.dtype, block) else None


def _require(fits: bool, what: str, a: Sequence[int], b: Sequence[int], topology: Topology) -> None:
    if not fits:
        raise UsageError(f"{what} of {tuple(a)} and {tuple(b)} does not fit blocks of {topology.shape}", where="block_sparse")
