"""Sign bits of a vector, eight to a byte, and back, on a GPU; and block means to go with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_two_values", "block_means", "pack_signs"]

BYTES = 128  # per program


@triton.jit  # type: ignore[untyped-decorator]
def _pack(bits, out, n, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    lane = tl.arange(0, 8)
    at = byte[:, None] * 8 + lane[None, :]
    sign = (tl.load(bits + at, mask=at < n, other=0) >> 31) & 1
    tl.store(out + byte, tl.sum(sign << lane[None, :], 1).to(tl.uint8), mask=byte * 8 < n)


@triton.jit  # type: ignore[untyped-decorator]
def _add(packed, values, out, n, block, KEEP: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    lane = tl.arange(0, 8)
    at = byte[:, None] * 8 + lane[None, :]
    here = at < n
    sign = (tl.load(packed + byte, mask=byte * 8 < n, other=0).to(tl.int32)[:, None] >> lane[None, :]) & 1
    found = tl.load(values + 2 * (at // block) + sign, mask=here, other=0.0)
    if KEEP:
        found += tl.load(out + at, mask=here, other=0.0)
    tl.store(out + at, found, mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _means(x, out, n, BLOCK: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, ROOM)
    here = (at < n) & (tl.arange(0, ROOM) < BLOCK)
    total = tl.sum(tl.abs(tl.load(x + at, mask=here, other=0.0)).to(tl.float64), 0)
    count = tl.minimum(n - start, BLOCK).to(tl.float64)
    tl.store(out + tl.program_id(0), (total / count).to(tl.float32))


def pack_signs(x: torch.Tensor) -> torch.Tensor:
    """Flat float32 -> uint8 [ceil(n/8)]; missing bits are 0."""
    n = x.numel()
    out = torch.empty(triton.cdiv(n, 8), dtype=torch.uint8, device=x.device)
    if n:
        _pack[(triton.cdiv(out.numel(), BYTES),)](x.view(torch.int32), out, n, BYTES=BYTES)
    return out


def add_two_values(packed: torch.Tensor, block: int, values: torch.Tensor, out: torch.Tensor, keep: bool) -> None:
    """out[i] = values[2b] where the bit of element i of block b is clear, values[2b + 1] where it is set; added to what is there if `keep`."""
    if out.numel():
        _add[(triton.cdiv(packed.numel(), BYTES),)](packed, values, out, out.numel(), block, KEEP=keep, BYTES=BYTES)


def block_means(x: torch.Tensor, block: int) -> torch.Tensor:
    """Mean of |x| over each block of so many elements, summed in float64."""
    out = torch.empty(triton.cdiv(x.numel(), block), device=x.device)
    if out.numel():
        _means[(out.numel(),)](x, out, x.numel(), BLOCK=block, ROOM=triton.next_power_of_2(block))
    return out
