"""The codecs' kernels for tensors on a GPU: `on_cpu`'s functions, with Triton where `kernels.gpu` has a kernel, else with torch on the device.

The same bytes as on a processor, but for sums over a block or column, whose order differs: scales, means and factors may differ in the last bits.
Checked in Triton's interpreter against `on_cpu`, and on an H200 by `benchmarks/gpu.py`.
Numbers that decide sizes (how many elements are selected) wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.gpu import quantise, select, signs
from ...kernels.orthonormal import MIN_SHARE_OF_LENGTH

__all__ = [
    "accumulate", "add_at", "add_levels", "add_looked_up", "add_momentum", "add_two_values", "block_maxima", "block_means", "block_norms",
    "block_sides", "gather", "kth_magnitude", "largest_magnitude", "orthonormalise", "pack_codes", "pack_signs", "put_at", "round_levels",
    "round_nearest", "scale_blocks", "select_above", "top_k", "within",
]  # fmt: skip

MAX_QUOTIENT = 3.0e38  # quotients from here on count as overflowed, as in `kernels.quantise`


def _magnitudes(x: Tensor) -> Tensor:
    return x.view(torch.int32) & 0x7FFFFFFF


def largest_magnitude(x: Tensor) -> int:
    return int(_magnitudes(x).max()) if x.numel() else 0


def accumulate(into: Tensor, x: Tensor) -> int:
    into += x
    return largest_magnitude(into)


def add_momentum(velocity: Tensor, residual: Tensor, x: Tensor, momentum: float, factor: float) -> int:
    velocity.mul_(momentum).add_(x * factor)
    residual += velocity
    return largest_magnitude(residual)


def kth_magnitude(x: Tensor, k: int) -> int:
    return int(torch.topk(_magnitudes(x), k, sorted=True).values[-1])


def select_above(x: Tensor, threshold: int, *, expected: int = 0) -> Tensor:
    return select.select_above(x, threshold)[0].to(torch.int64)


def top_k(x: Tensor, k: int) -> Tensor:
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    if k >= x.numel():
        return torch.arange(x.numel(), device=x.device)
    kth = kth_magnitude(x, k)
    above = select_above(x, kth)
    ties = torch.nonzero(_magnitudes(x) == kth).view(-1)[: k - above.numel()]
    return torch.cat([above, ties]).sort().values


def within(indices: Tensor, elements: int) -> bool:
    return bool(((indices >= 0) & (indices < elements)).all())


def gather(x: Tensor, indices: Tensor, values: Tensor, narrow: Tensor | None) -> None:
    values.copy_(x[indices])
    if narrow is not None:
        narrow.copy_(indices)


def add_at(x: Tensor, indices: Tensor, values: Tensor) -> None:
    select.add_at(x, indices, values)


def put_at(x: Tensor, indices: Tensor, value: float) -> None:
    select.put_at(x, indices, value)


def block_means(x: Tensor, block: int, out: Tensor) -> None:
    out.copy_(signs.block_means(x, block))


def block_sides(x: Tensor, block: int, out: Tensor) -> None:
    rows = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
    total, magnitude = rows.sum(1, dtype=torch.float64), rows.abs().sum(1, dtype=torch.float64)
    negative = rows.signbit().sum(1)
    held = (x.numel() - block * torch.arange(len(rows), device=x.device)).clamp(max=block)
    out[0::2] = (magnitude + total) / 2 / (held - negative).clamp(min=1)
    out[1::2] = (total - magnitude) / 2 / negative.clamp(min=1)


def block_norms(x: Tensor, block: int, out: Tensor) -> None:
    out.copy_(quantise.block_norms(x, block))


def block_maxima(x: Tensor, block: int, out: Tensor) -> None:
    out.copy_(quantise.block_maxima(x, block))


def scale_blocks(x: Tensor, block: int, scales: Tensor, out: Tensor) -> None:
    inverse = 1 / scales
    factor = torch.where(inverse < MAX_QUOTIENT, inverse, 0.0)  # a comparison with NaN is false
    torch.mul(x, _spread(factor, block, x.numel()), out=out)


def add_looked_up(codes: Tensor, values: Tensor, block: int, scales: Tensor, out: Tensor, keep: bool) -> None:
    found = values.to(codes.device)[codes.to(torch.int64)] * _spread(scales, block, codes.numel())
    torch.add(out, found, out=out) if keep else out.copy_(found)


def _spread(of_blocks: Tensor, block: int, elements: int) -> Tensor:
    """Each block's number for each of its elements."""
    return of_blocks.repeat_interleave(block)[:elements]


def round_levels(x: Tensor, block: int, scales: Tensor, levels: int, key: tuple[int, int], codes: Tensor) -> None:
    codes.copy_(quantise.round_levels(x, block, scales, levels, (int(key[0]), int(key[1]))))


def round_nearest(x: Tensor, block: int, scales: Tensor, levels: int, codes: Tensor) -> None:
    codes.copy_(quantise.round_nearest(x, block, scales, levels))


def pack_codes(codes: Tensor, width: int, out: Tensor) -> None:
    out.copy_(quantise.pack_codes(codes, width))


def add_levels(packed: Tensor, width: int, levels: int, block: int, scales: Tensor, out: Tensor, keep: bool) -> None:
    quantise.add_levels(packed, width, levels, block, scales, out, keep)


def pack_signs(x: Tensor, out: Tensor) -> None:
    out.copy_(signs.pack_signs(x))


def add_two_values(packed: Tensor, block: int, values: Tensor, out: Tensor, keep: bool) -> None:
    signs.add_two_values(packed, block, values, out, keep)


def orthonormalise(x: Tensor) -> None:
    """`x`: [rows, columns]."""
    wide = x.to(torch.float64)
    for c in range(x.shape[1]):
        before = wide[:, c].square().sum()
        for _ in range(2):
            for d in range(c):
                wide[:, c] -= (wide[:, c] * wide[:, d]).sum() * wide[:, d]
        after = wide[:, c].square().sum()
        wide[:, c] *= torch.where(after <= before * MIN_SHARE_OF_LENGTH**2, 0.0, 1 / after.sqrt())
    x.copy_(wide)
