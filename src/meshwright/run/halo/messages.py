"""One message of rows at planned bits: to bytes and back, with random numbers that both ends could make.

On the wire: the packed numbers of rows at 2, 4 and 8 bits, then zero points and scales of these rows (bfloat16), then rows sent as they are. Zero
points are rounded down and scales up, so every number lies between two levels and the expectation is exact (the paper rounds to nearest, then
clamps).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...codec.rows import FULL, WIDTHS, levels_of, message_bytes
from ...errors import NotFinite
from ...kernels.counter_random import key_of
from ...kernels.quantise import pack_codes
from ...kernels.rows import ceil_bfloat16, floor_bfloat16, read_rows, round_rows, row_extremes

__all__ = ["RowMessage", "spreads"]

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def _from_bfloat16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def spreads(x: F32, rows: I64) -> NDArray[np.float64]:
    """[rows]: (max - zero point)^2 of each: what the variance of a row is counted by. Not finite where the row is not."""
    low, high = np.empty(len(rows), np.float32), np.empty(len(rows), np.float32)
    row_extremes(x, rows, low, high)
    return (high.astype(np.float64) - _from_bfloat16(floor_bfloat16(low))) ** 2


class RowMessage:
    """`widths` [rows], in the order in which rows are sent; `dim`: numbers in a row."""

    def __init__(self, widths: I64, dim: int) -> None:
        self.dim, self.rows = dim, len(widths)
        self.at = {b: np.flatnonzero(widths == b) for b in (*WIDTHS, FULL)}
        self.size_bytes = message_bytes({b: len(rows) for b, rows in self.at.items()}, dim)

    def encode(self, x: F32, rows: I64, key: tuple[int, ...], where: str) -> Bytes:
        """x[rows] as bytes. `key`: of its random numbers, another one for every message. Raises: NotFinite."""
        wire = np.empty(self.size_bytes, np.uint8)
        start, drawn, parameters = 0, 0, []
        random = key_of(*key)
        for b in WIDTHS:
            mine = rows[self.at[b]]
            if not len(mine):
                continue
            low, high = np.empty(len(mine), np.float32), np.empty(len(mine), np.float32)
            row_extremes(x, mine, low, high)
            zero = floor_bfloat16(low)
            with np.errstate(over="ignore", invalid="ignore"):
                scale = ceil_bfloat16((high - _from_bfloat16(zero)) / np.float32(levels_of(b)))
            origin, unit = _from_bfloat16(zero), _from_bfloat16(scale)
            if not (np.isfinite(origin) & np.isfinite(unit) & np.isfinite(low)).all():
                self._refuse(mine[~(np.isfinite(origin) & np.isfinite(unit) & np.isfinite(low))][0], where)
            count = len(mine) * self.dim
            end = start + -(-count * b // 8)
            codes = wire[start:end] if b == 8 else np.empty(count, np.uint8)
            round_rows(x, mine, origin, unit, levels_of(b), *random, drawn, codes)
            drawn += count
            if b != 8:
                pack_codes(codes, b, wire[start:end])
            start = end
            parameters.append(np.concatenate([zero, scale]))
        for numbers in parameters:
            wire[start : start + numbers.nbytes] = numbers.view(np.uint8)
            start += numbers.nbytes
        whole = x[rows[self.at[FULL]]]
        if not np.isfinite(whole).all():
            self._refuse(rows[self.at[FULL]][~np.isfinite(whole).all(1)][0], where)
        wire[start:] = np.ascontiguousarray(whole).view(np.uint8).ravel()
        return wire

    def _refuse(self, row: int, where: str) -> None:
        raise NotFinite(f"local row {int(row)} holds NaN or infinity", where=where, hint="lower the learning rate, or look for what made it")

    def decode(self, wire: Bytes, out: F32) -> None:
        """Into out [rows, dim]."""
        start = 0
        packed = {}
        for b in WIDTHS:
            size = -(-len(self.at[b]) * self.dim * b // 8)
            packed[b] = wire[start : start + size]
            start += size
        for b in WIDTHS:
            count = len(self.at[b])
            if count:
                numbers = _from_bfloat16(np.ascontiguousarray(wire[start : start + 4 * count]).view(np.uint16))
                read_rows(packed[b], b, numbers[:count], numbers[count:], self.at[b], out)
                start += 4 * count
        if len(self.at[FULL]):
            out[self.at[FULL]] = np.ascontiguousarray(wire[start:]).view(np.float32).reshape(-1, self.dim)
