"""Kernels of expert layers on a GPU: encode and decode, and block-sparse products; twins of `kernels.experts.dispatch` and `block_sparse`.

Cite: Tutel (arXiv 2206.03382), section 3.4, for encode and decode; MegaBlocks (arXiv 2211.15841), section 5.1, for SDD and DSD and their walk of a
transpose without moving values. One program writes one tile: no atomics, so results are the same every time.
Deviations: a row of the buffers asks for its token, so that zeros are written once and no row twice; programs that run at the same time share rows
and columns (they walk a band of block rows, column by column); sums are float32. On an H200, bf16: SDD 0.9 to 1.03 of
grouped_mm's rate, DSD 0.79 to 0.81, of a transpose 0.68 to 0.72 (`benchmarks/gpu_experts.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .devices import BAND

__all__ = ["MIN_BLOCK", "Tile", "applies", "dsd", "put", "sdd", "take"]

MIN_BLOCK = 16  # the least side of a tile that tl.dot takes
MAX_ROOM = 4096  # elements of a row per turn of a program's loop


class Tile(NamedTuple):
    """Shape of one program's work. across: columns of a DSD's result; inner: of the inner dimension per turn; stages: turns that it loads ahead."""

    across: int
    inner: int
    warps: int
    stages: int


LEAST_SHARED_BYTES = 1 << 16  # that a program may use on a device that does not say: AMD's local memory
SDD_TILE = Tile(across=128, inner=64, warps=4, stages=4)  # the fastest of six on an H200, with layers of Mixtral's size
DSD_TILE = Tile(across=128, inner=64, warps=4, stages=4)  # the fastest of five there
SMALL_TILE = Tile(across=64, inner=32, warps=4, stages=3)  # of float32, and of blocks below 128


@triton.jit  # type: ignore[untyped-decorator]
def _put(x, sources, gates, out, width, k, GATED: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per row of the buffers: the row of the token whose choice lies there, or zeros."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(sources + row).to(tl.int64)
    gate = tl.load(gates + tl.maximum(choice, 0)).to(tl.float32) if GATED else 1.0
    for start in range(0, width, ROOM):
        at = start + tl.arange(0, ROOM)
        found = tl.load(x + (choice // k) * width + at, mask=(at < width) & (choice >= 0), other=0.0)
        tl.store(out + row * width + at, (found * gate).to(out.dtype.element_ty), mask=at < width)


@triton.jit  # type: ignore[untyped-decorator]
def _take(buffer, slots, gates, out, width, GATED: tl.constexpr, CHOICES: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per token: the sum of its choices' rows, first choice first."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, ROOM):
        at = start + tl.arange(0, ROOM)
        total = tl.zeros([ROOM], tl.float32)
        for j in tl.static_range(CHOICES):
            slot = tl.load(slots + token * CHOICES + j).to(tl.int64)
            gate = tl.load(gates + token * CHOICES + j).to(tl.float32) if GATED else 1.0
            row = tl.load(buffer + slot * width + at, mask=(at < width) & (slot >= 0), other=0.0)
            total += tl.where(slot >= 0, row.to(tl.float32) * gate, 0.0)
        tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


@triton.jit  # type: ignore[untyped-decorator]
def _sdd(  # type: ignore[no-untyped-def]
    a, b, walk, rows, columns, values, inner, am, ak, bk, bn, B: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr
):
    """A program per block that there is."""
    block = tl.load(walk + tl.program_id(0)).to(tl.int64)
    here, within = tl.arange(0, B), tl.arange(0, K)
    m = tl.load(rows + block).to(tl.int64) * B + here
    n = tl.load(columns + block).to(tl.int64) * B + here
    left_at = a + m[:, None] * am + within[None, :] * ak
    right_at = b + within[:, None] * bk + n[None, :] * bn
    total = tl.zeros([B, B], tl.float32)
    for start in range(0, inner, K):
        if EVEN:
            left, right = tl.load(left_at), tl.load(right_at)
        else:
            left = tl.load(left_at, mask=start + within[None, :] < inner, other=0.0)
            right = tl.load(right_at, mask=start + within[:, None] < inner, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        left_at += K * ak
        right_at += K * bk
    tl.store(values + block * B * B + here[:, None] * B + here[None, :], total.to(values.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _dsd(  # type: ignore[no-untyped-def]
    values, order, offsets, other, b, out, tall, width, bk, bn,
    TRANSPOSED: tl.constexpr, B: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BAND: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """A program per block row of the result and tile of its columns: the blocks of that row one after the other, K of their inner sides a turn."""
    TURNS: tl.constexpr = B // K
    tiles = tl.cdiv(width, N)
    band = tl.program_id(0) // (BAND * tiles) * BAND
    within = tl.program_id(0) % (BAND * tiles)
    high = tl.minimum(tall - band, BAND)
    row = (band + within % high).to(tl.int64)
    n = (within // high).to(tl.int64) * N + tl.arange(0, N)
    here = tl.arange(0, B)
    total = tl.zeros([B, N], tl.float32)
    for turn in range(tl.load(offsets + row) * TURNS, tl.load(offsets + row + 1) * TURNS):
        block = tl.load(order + turn // TURNS).to(tl.int64)
        inside = turn % TURNS * K + tl.arange(0, K)
        at = values + block * B * B
        if TRANSPOSED:
            left = tl.load(at + inside[None, :] * B + here[:, None])
        else:
            left = tl.load(at + here[:, None] * B + inside[None, :])
        k = tl.load(other + block).to(tl.int64) * B + inside
        if EVEN:
            right = tl.load(b + k[:, None] * bk + n[None, :] * bn)
        else:
            right = tl.load(b + k[:, None] * bk + n[None, :] * bn, mask=n[None, :] < width, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    m = row * B + here
    if EVEN:
        tl.store(out + m[:, None] * width + n[None, :], total.to(out.dtype.element_ty))
    else:
        tl.store(out + m[:, None] * width + n[None, :], total.to(out.dtype.element_ty), mask=n[None, :] < width)


def applies(dtype: torch.dtype, block: int) -> bool:
    """Do the products take this? Sums are float32, so float64 is left to torch; a block is a tile of 16, 32, 64 or 128."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and MIN_BLOCK <= block <= 128 and block & (block - 1) == 0


def put(rows: int, x: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
    """`dispatch._put`: tokens [T, H] into buffers [rows, H]."""
    out = x.new_empty(rows, x.shape[1])
    if out.numel():
        # The choice that lies in each row; those without a place (-1) write the last element, which belongs to no row.
        sources = torch.full((rows + 1,), -1, dtype=torch.int64, device=x.device)
        sources[slots.reshape(-1)] = torch.arange(slots.numel(), device=x.device)
        given = gates.contiguous() if gates is not None and gates.numel() else x
        gated = gates is not None and gates.numel() > 0
        _put[(rows,)](x.contiguous(), sources, given, out, x.shape[1], max(1, slots.shape[1]), GATED=gated, ROOM=_room(x.shape[1]))
    return out


def take(buffer: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
    """`dispatch._take`: the sum of the choices' rows, [T, H]."""
    out = buffer.new_empty(slots.shape[0], buffer.shape[1])
    if out.numel():
        given = gates.contiguous() if gates is not None else buffer
        _take[(slots.shape[0],)](
            buffer.contiguous(), slots.contiguous(), given, out, buffer.shape[1],
            GATED=gates is not None, CHOICES=slots.shape[1], ROOM=_room(buffer.shape[1]),
        )  # fmt: skip
    return out


def _room(width: int) -> int:
    return min(MAX_ROOM, int(triton.next_power_of_2(width)))


def sdd(
    a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, block: int, walk: torch.Tensor, tile: Tile | None = None
) -> torch.Tensor:
    """Values [nnz, b, b] of a [M, K] · b [K, N] in the blocks (rows, columns); transposed views are read as they lie. block: 16 to 128.

    walk: the order in which programs take the blocks (`Topology.walk`). tile: for measurements of others.
    """
    values = a.new_empty(len(rows), block, block)
    if len(rows):
        tile = tile or (SDD_TILE if _wide(a, block) else SMALL_TILE)
        _sdd[(len(rows),)](
            a, b, walk, rows, columns, values, a.shape[1], *a.stride(), *b.stride(), B=block, K=tile.inner, EVEN=a.shape[1] % tile.inner == 0,
            num_warps=tile.warps, num_stages=_stages(a, 2 * block, tile),
        )  # fmt: skip
    return values


def dsd(
    values: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, other: torch.Tensor, b: torch.Tensor, *,
    transposed: bool = False, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Sparse (transposed where said) times dense b [K, N]. order: blocks by the result's block rows; `offsets`: where each of those begins; other:
    of every block its place along the inner dimension (columns; rows of a transpose)."""
    block, width, tall = values.shape[1], b.shape[1], len(offsets) - 1
    out = b.new_empty(tall * block, width)
    if out.numel():
        tile = tile or (DSD_TILE if _wide(values, block) and width >= DSD_TILE.across else SMALL_TILE)
        inner = min(tile.inner, block)
        _dsd[(tall * triton.cdiv(width, tile.across),)](
            values, order, offsets, other, b, out, tall, width, *b.stride(), TRANSPOSED=transposed, B=block, N=tile.across, K=inner, BAND=BAND,
            EVEN=width % tile.across == 0, num_warps=tile.warps, num_stages=_stages(values, block + tile.across, tile),
        )  # fmt: skip
    return out


def _stages(x: torch.Tensor, sides: int, tile: Tile) -> int:
    """As many turns ahead as the tile says and the device's shared memory holds: both sides of a turn lie there."""
    if not x.is_cuda:
        return tile.stages
    room = getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", LEAST_SHARED_BYTES)
    return max(1, min(tile.stages, int(room // (sides * tile.inner * x.dtype.itemsize))))


def _wide(x: torch.Tensor, block: int) -> bool:
    """Are full tiles worth it: 16-bit numbers in blocks of 128?"""
    return x.dtype.itemsize == 2 and block == 128
