"""Selection above a threshold and compaction, on a GPU: count per program, prefix sum, write; two reads of the vector and no atomics.

Also: adding sparse entries, and clearing them. Indices ascend, as on a CPU. Magnitudes are compared as integers: NaN is above everything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_at", "put_at", "select_above"]

ROOM = 1024  # elements per program


@triton.jit  # type: ignore[untyped-decorator]
def _count(bits, counts, n, threshold, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * ROOM + tl.arange(0, ROOM)
    magnitude = tl.load(bits + at, mask=at < n, other=0) & 0x7FFFFFFF
    above = (magnitude > threshold) & (at < n)
    tl.store(counts + tl.program_id(0), tl.sum(above.to(tl.int32), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _write(bits, before, n, threshold, indices, values, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * ROOM + tl.arange(0, ROOM)
    found = tl.load(bits + at, mask=at < n, other=0)
    above = ((found & 0x7FFFFFFF) > threshold) & (at < n)
    place = tl.load(before + tl.program_id(0)) + tl.cumsum(above.to(tl.int32), 0) - 1
    tl.store(indices + place, at.to(indices.dtype.element_ty), mask=above)
    tl.store(values + place, found, mask=above)


@triton.jit  # type: ignore[untyped-decorator]
def _add(x, indices, values, count, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * ROOM + tl.arange(0, ROOM)
    here = at < count
    index = tl.load(indices + at, mask=here, other=0).to(tl.int64)
    old = tl.load(x + index, mask=here, other=0.0)
    tl.store(x + index, old + tl.load(values + at, mask=here, other=0.0), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _put(x, indices, value, count, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * ROOM + tl.arange(0, ROOM)
    here = at < count
    index = tl.load(indices + at, mask=here, other=0).to(tl.int64)
    tl.store(x + index, tl.zeros([ROOM], tl.float32) + value, mask=here)


def select_above(x: torch.Tensor, threshold: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices (int32; int64 from 2^31 elements on) and values of the elements of flat float32 `x` whose magnitude, as the integer of its bits, is
    greater than `threshold` (-1: all). Waits for the device once, to know how many there are."""
    n = x.numel()
    programs = triton.cdiv(n, ROOM)
    kind = torch.int32 if n <= 0x7FFFFFFF else torch.int64
    if not n:
        return torch.empty(0, dtype=kind, device=x.device), torch.empty(0, device=x.device)
    bits = x.view(torch.int32)
    counts = torch.empty(programs, dtype=torch.int32, device=x.device)
    _count[(programs,)](bits, counts, n, threshold, ROOM=ROOM)
    upto = torch.cumsum(counts, 0, dtype=torch.int64)
    total = int(upto[-1])
    indices = torch.empty(total, dtype=kind, device=x.device)
    values = torch.empty(total, device=x.device)
    _write[(programs,)](bits, upto - counts, n, threshold, indices, values.view(torch.int32), ROOM=ROOM)
    return indices, values


def add_at(x: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """x[indices] += values; no index may stand twice."""
    if indices.numel():
        _add[(triton.cdiv(indices.numel(), ROOM),)](x, indices, values, indices.numel(), ROOM=ROOM)


def put_at(x: torch.Tensor, indices: torch.Tensor, value: float) -> None:
    """x[indices] = value."""
    if indices.numel():
        _put[(triton.cdiv(indices.numel(), ROOM),)](x, indices, value, indices.numel(), ROOM=ROOM)
