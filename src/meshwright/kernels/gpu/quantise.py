"""Rounding to few levels, packing and unpacking, on a GPU: one program per block of elements, its scale in a register.

Random numbers are those of `kernels.counter_random`, at the same positions: a GPU rank rounds as a CPU rank would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_levels", "block_maxima", "block_norms", "pack_codes", "round_levels", "round_nearest"]

ROOM = 512  # bytes per program when packing


@triton.jit
def _mixed(h):  # type: ignore[no-untyped-def]
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _bits_at(position, key0, key1):  # type: ignore[no-untyped-def]
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    first = _mixed(low + key0.to(tl.uint32))
    return _mixed(first ^ (key1.to(tl.uint32) + high * 0x9E3779B9))


@triton.jit
def _inverse(scale, numerator):  # type: ignore[no-untyped-def]
    quotient = tl.div_rn(numerator, scale)
    return tl.where(quotient < 3.0e38, quotient, 0.0)  # a comparison with NaN is false: level 0


@triton.jit  # type: ignore[untyped-decorator]
def _measure(x, out, n, NORM: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, ROOM)
    here = (at < n) & (tl.arange(0, ROOM) < BLOCK)
    found = tl.load(x + at, mask=here, other=0)
    if NORM:
        wide = found.to(tl.float64)
        tl.store(out + tl.program_id(0), tl.sqrt(tl.sum(wide * wide, 0)).to(tl.float32))
    else:
        tl.store(out + tl.program_id(0), tl.max(found & 0x7FFFFFFF, 0))


# Triton makes a constant of an integer that is 1, and a constant has no `.to`: levels of 2 bits, a key, a first position may be 1.
@triton.jit(do_not_specialize=["levels", "key0", "key1", "first"])  # type: ignore[untyped-decorator]
def _round(  # type: ignore[no-untyped-def]
    x, scales, codes, n, levels, key0, key1, first, RANDOM: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, ROOM)
    here = (at < n) & (tl.arange(0, ROOM) < BLOCK)
    value = tl.load(x + at, mask=here, other=0.0)
    factor = _inverse(tl.load(scales + tl.program_id(0)), levels.to(tl.float32))
    y = tl.abs(value) * factor
    y = tl.where(y == y, y, 0.0)
    whole = tl.floor(y)
    part = y - whole
    level = whole.to(tl.int32)
    if RANDOM:
        u = (_bits_at(first + at, key0, key1) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        level += (u < part).to(tl.int32)
    else:
        level += ((part > 0.5) | ((part == 0.5) & (level % 2 == 1))).to(tl.int32)
    level = tl.minimum(level, levels)
    tl.store(codes + at, (levels + tl.where(value < 0, -level, level)).to(tl.uint8), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _pack(codes, out, n, WIDTH: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    per: tl.constexpr = 8 // WIDTH
    byte = tl.program_id(0).to(tl.int64) * ROOM + tl.arange(0, ROOM)
    lane = tl.arange(0, per)
    at = byte[:, None] * per + lane[None, :]
    found = tl.load(codes + at, mask=at < n, other=0).to(tl.int32)
    tl.store(out + byte, tl.sum(found << (lane[None, :] * WIDTH), 1).to(tl.uint8), mask=byte * per < n)


@triton.jit(do_not_specialize=["levels"])  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    packed, scales, out, n, levels, WIDTH: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr
):
    per: tl.constexpr = 8 // WIDTH
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, ROOM)
    here = (at < n) & (tl.arange(0, ROOM) < BLOCK)
    byte = tl.load(packed + at // per, mask=here, other=0).to(tl.int32)
    code = (byte >> ((at % per) * WIDTH).to(tl.int32)) & ((1 << WIDTH) - 1)
    unit = tl.div_rn(tl.load(scales + tl.program_id(0)), levels.to(tl.float32))
    found = (code - levels).to(tl.float32) * unit
    if KEEP:
        found += tl.load(out + at, mask=here, other=0.0)
    tl.store(out + at, found, mask=here)


def _measured(x: torch.Tensor, block: int, norm: bool) -> torch.Tensor:
    out = torch.empty(triton.cdiv(x.numel(), block), device=x.device)
    if out.numel():
        source, into = (x, out) if norm else (x.view(torch.int32), out.view(torch.int32))
        _measure[(out.numel(),)](source, into, x.numel(), NORM=norm, BLOCK=block, ROOM=triton.next_power_of_2(block))
    return out


def block_maxima(x: torch.Tensor, block: int) -> torch.Tensor:
    """Largest |x| of each block; NaN where there is one."""
    return _measured(x, block, False)


def block_norms(x: torch.Tensor, block: int) -> torch.Tensor:
    """2-norm of each block, summed in float64."""
    return _measured(x, block, True)


def round_levels(x: torch.Tensor, block: int, scales: torch.Tensor, levels: int, key: tuple[int, int], first: int = 0) -> torch.Tensor:
    """Codes (uint8) of `kernels.quantise.round_levels`."""
    return _rounded(x, block, scales, levels, key, first, True)


def round_nearest(x: torch.Tensor, block: int, scales: torch.Tensor, levels: int) -> torch.Tensor:
    """Codes (uint8) of `kernels.quantise.round_nearest`."""
    return _rounded(x, block, scales, levels, (0, 0), 0, False)


def _rounded(x: torch.Tensor, block: int, scales: torch.Tensor, levels: int, key: tuple[int, int], first: int, at_random: bool) -> torch.Tensor:
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    if x.numel():
        _round[(scales.numel(),)](
            x, scales, codes, x.numel(), levels, *key, first, RANDOM=at_random, BLOCK=block, ROOM=triton.next_power_of_2(block),
            enable_fp_fusion=False
        )
    return codes


def pack_codes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes of 2 or 4 bits, four or two to a byte; missing ones are 0."""
    out = torch.empty(triton.cdiv(codes.numel() * width, 8), dtype=torch.uint8, device=codes.device)
    if out.numel():
        _pack[(triton.cdiv(out.numel(), ROOM),)](codes, out, codes.numel(), WIDTH=width, ROOM=ROOM)
    return out


def add_levels(packed: torch.Tensor, width: int, levels: int, block: int, scales: torch.Tensor, out: torch.Tensor, keep: bool) -> None:
    """out[i] = (code - levels) * scale / levels, added to what is there if `keep`."""
    if out.numel():
        _add[(scales.numel(),)](
            packed, scales, out, out.numel(), levels, WIDTH=width, KEEP=keep, BLOCK=block, ROOM=triton.next_power_of_2(block), enable_fp_fusion=False
        )
