"""Kernels of expert layers on a GPU: encode and decode, and block-sparse products; twins of `kernels.experts.dispatch` and `block_sparse`.

Cite: Tutel (arXiv 2206.03382), section 3.4, for encode and decode; MegaBlocks (arXiv 2211.15841), section 5.1, for SDD and DSD and their walk of a
transpose without moving values. One program writes one tile: no atomics, so results are the same every time.
Deviations: a row of tokens is copied by one program, whatever its length; sums are float32. Not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["dsd", "put", "sdd", "take"]

ROOM = 1024  # elements of a row per turn of a program's loop
K_TILE = 32  # of the inner dimension, per turn of an SDD
N_TILE = 64  # columns of a DSD's result per program


@triton.jit  # type: ignore[untyped-decorator]
def _put(x, slots, gates, out, width, k, GATED: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per choice: the token's row goes to its slot."""
    choice = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + choice).to(tl.int64)
    if slot >= 0:
        gate = tl.load(gates + choice) if GATED else 1.0
        for start in range(0, width, ROOM):
            at = start + tl.arange(0, ROOM)
            row = tl.load(x + (choice // k) * width + at, mask=at < width, other=0.0)
            tl.store(out + slot * width + at, (row * gate).to(out.dtype.element_ty), mask=at < width)


@triton.jit  # type: ignore[untyped-decorator]
def _take(buffer, slots, gates, out, width, k, GATED: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per token: the sum of its choices' rows, first choice first."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, ROOM):
        at = start + tl.arange(0, ROOM)
        total = tl.zeros([ROOM], tl.float32)
        for j in range(k):
            slot = tl.load(slots + token * k + j).to(tl.int64)
            gate = tl.load(gates + token * k + j) if GATED else 1.0
            row = tl.load(buffer + tl.maximum(slot, 0) * width + at, mask=at < width, other=0.0)
            total += tl.where(slot >= 0, row.to(tl.float32) * gate, 0.0)
        tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


@triton.jit  # type: ignore[untyped-decorator]
def _sdd(a, b, rows, columns, values, inner, am, ak, bk, bn, B: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per block that there is."""
    block = tl.program_id(0).to(tl.int64)
    m = tl.load(rows + block).to(tl.int64) * B + tl.arange(0, B)
    n = tl.load(columns + block).to(tl.int64) * B + tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    for start in range(0, inner, K):
        at = start + tl.arange(0, K)
        left = tl.load(a + m[:, None] * am + at[None, :] * ak, mask=at[None, :] < inner, other=0.0)
        right = tl.load(b + at[:, None] * bk + n[None, :] * bn, mask=at[:, None] < inner, other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    here = tl.arange(0, B)
    tl.store(values + block * B * B + here[:, None] * B + here[None, :], total.to(values.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _dsd(values, order, offsets, other, b, out, width, bk, bn, TRANSPOSED: tl.constexpr, B: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per block row of the result and tile of its columns: the blocks of that row one after the other."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    here = tl.arange(0, B)
    total = tl.zeros([B, N], tl.float32)
    for i in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        block = tl.load(order + i).to(tl.int64)
        at = values + block * B * B
        if TRANSPOSED:
            left = tl.load(at + here[None, :] * B + here[:, None])
        else:
            left = tl.load(at + here[:, None] * B + here[None, :])
        k = tl.load(other + block).to(tl.int64) * B + here
        right = tl.load(b + k[:, None] * bk + n[None, :] * bn, mask=n[None, :] < width, other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    m = row * B + here
    tl.store(out + m[:, None] * width + n[None, :], total.to(out.dtype.element_ty), mask=n[None, :] < width)


def put(rows: int, x: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
    """`dispatch._put`: tokens [T, H] into buffers [rows, H]."""
    out = x.new_zeros(rows, x.shape[1])
    if slots.numel():
        given = gates.contiguous() if gates is not None else x
        _put[(slots.numel(),)](x.contiguous(), slots.contiguous(), given, out, x.shape[1], slots.shape[1], GATED=gates is not None, ROOM=ROOM)
    return out


def take(buffer: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
    """`dispatch._take`: the sum of the choices' rows, [T, H]."""
    out = buffer.new_empty(slots.shape[0], buffer.shape[1])
    if slots.numel():
        given = gates.contiguous() if gates is not None else buffer
        _take[(slots.shape[0],)](
            buffer.contiguous(), slots.contiguous(), given, out, buffer.shape[1], slots.shape[1], GATED=gates is not None, ROOM=ROOM
        )
    return out


def sdd(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, block: int) -> torch.Tensor:
    """Values [nnz, b, b] of a [M, K] · b [K, N] in the blocks (rows, columns); transposed views are read as they lie. block: 16 to 128."""
    values = a.new_empty(len(rows), block, block)
    if len(rows):
        _sdd[(len(rows),)](a, b, rows, columns, values, a.shape[1], *a.stride(), *b.stride(), B=block, K=K_TILE)
    return values


def dsd(
    values: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, other: torch.Tensor, b: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Sparse (transposed where said) times dense b [K, N]. order: blocks by the result's block rows, `offsets` of which say where each begins; other:
    of every block its place along the inner dimension (columns; rows of a transpose)."""
    block, width = values.shape[1], b.shape[1]
    out = b.new_empty((len(offsets) - 1) * block, width)
    if out.numel():
        grid = (len(offsets) - 1, triton.cdiv(width, N_TILE))
        _dsd[grid](values, order, offsets, other, b, out, width, *b.stride(), TRANSPOSED=transposed, B=block, N=N_TILE)
    return out
