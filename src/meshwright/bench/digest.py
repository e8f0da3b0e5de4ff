"""One number for the bits of a collective's result, to compare machines, fabrics, placements and runs by.

Inputs are a fixed function of (seed, contribution, element), made of integers alone, so that every machine makes the same: floats of random sign,
mantissa and size, of which another order of addition gives other sums in most elements.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from .data import DTYPES, element_hashes

__all__ = ["digest_of", "uneven"]

# Per float type: as which integers it is seen, bits of its mantissa, the exponent field of 1.0, and how many exponents below it are drawn from.
_FORMS = {
    torch.float16: (torch.int16, 10, 15, 8), torch.bfloat16: (torch.int16, 7, 127, 16), torch.float32: (torch.int32, 23, 127, 24),
    torch.float64: (torch.int64, 52, 1023, 24),
}  # fmt: skip


def uneven(seed: int, contribution: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements 0 .. count of a contribution; integers are drawn evenly."""
    first, second = element_hashes(seed, 2 * contribution, 0, count), element_hashes(seed, 2 * contribution + 1, 0, count)
    if dtype not in _FORMS:
        return (first % 101).to(dtype)
    kind, mantissa, one, spread = _FORMS[dtype]
    bits = (first << 31 | second) & (1 << mantissa) - 1
    field = one - second % spread
    made = (bits | field << mantissa).to(torch.int64)
    made = torch.where((first >> 30 & 1) > 0, made | -1 << 8 * dtype.itemsize - 1, made)  # its sign
    return made.to(kind).view(dtype)


def digest_of(op: str, size_bytes: int, kind: str, reduction: str, root: int, seed: int, group: Any, control: Any) -> str:
    """sha256 over the result's bits, in rank order where each has a part, equal at all ranks; of operations that reduce. Sizes as in `operations`.

    An all-reduce whose ranks end with unlike bits says so: `differs`.
    """
    from .operations import reduce_operator

    dtype, n, rank = DTYPES[kind], dist.get_world_size(group), dist.get_rank(group)
    total = size_bytes // dtype.itemsize // n * n if op == "reduce-scatter" else size_bytes // dtype.itemsize
    given, operator = uneven(seed, rank, total, dtype), reduce_operator(reduction)
    out = given
    if op == "reduce-scatter":
        out = torch.empty(total // n, dtype=dtype)
        dist.reduce_scatter_tensor(out, given, operator, group=group)
    elif op == "reduce":
        dist.reduce(given, op=operator, group=group, group_dst=root)
    else:
        dist.all_reduce(given, operator, group=group)
    own = hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).digest()
    rows = [torch.empty(32, dtype=torch.uint8) for _ in range(n)]
    dist.all_gather(rows, torch.frombuffer(bytearray(own), dtype=torch.uint8), group=control)
    found = [bytes(row.tolist()) for row in rows]
    if op == "reduce":
        return found[root].hex()
    if op == "all-reduce":
        return found[0].hex() if len(set(found)) == 1 else "differs"
    return hashlib.sha256(b"".join(found)).hexdigest()
