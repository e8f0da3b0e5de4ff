"""How fast a job is at so many cores and so much memory per GPU, beside its proportional share: the matrix W of Synergy (OSDI 2022).

`at` is linear between measured points, flat beyond the last and 0 below the first, where the job was not seen to run.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["MAX_POINTS", "Sensitivity"]

MAX_POINTS = 4096  # of one matrix; the published ones have 45


class Sensitivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, dict=True):
    """`speed[i][k]`: at `cores[i]` cores and `memory_bytes[k]` per GPU, as a multiple of the speed at the proportional share. `types`: how fast it is
    on a type of GPU, as a multiple of the type that it was measured on; types that are not listed count 1.

    Raises: UsageError for axes that do not grow, a matrix of another shape, and speeds that fall as cores or memory grow."""

    name: str
    cores: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    speed: tuple[tuple[float, ...], ...]
    types: dict[str, float] = {}

    def __post_init__(self) -> None:
        where = f"profile {self.name[:64]}"
        rows, columns = len(self.cores), len(self.memory_bytes)
        if not rows or not columns or rows * columns > MAX_POINTS or len(self.speed) != rows or any(len(row) != columns for row in self.speed):
            raise UsageError(
                f"{rows} cores and {columns} memory sizes need a matrix of that shape", where=where,
                hint="speed[i][k] is at cores[i], memory_bytes[k]",
            )  # fmt: skip
        for what, axis in (("cores", self.cores), ("memory_bytes", self.memory_bytes)):
            if not all(math.isfinite(x) and x > 0 for x in axis) or any(a >= b for a, b in pairwise(axis)):
                raise UsageError("must be above 0 and grow", where=f"{where}: {what}")
        matrix = np.array(self.speed)
        if not (np.isfinite(matrix).all() and (matrix >= 0).all()):
            raise UsageError("speeds are finite and at least 0", where=f"{where}: speed")
        for axis_number, what in ((0, "cores"), (1, "memory_bytes")):
            falls = np.argwhere(np.diff(matrix, axis=axis_number) < 0)
            if len(falls):
                i, k = falls[0].tolist()
                raise UsageError(
                    f"falls as {what} grow, after speed[{i}][{k}]", where=f"{where}: speed",
                    hint="measured noise: smooth it (`cluster profile` writes what is monotone)",
                )  # fmt: skip
        for kind, factor in self.types.items():
            if not (math.isfinite(factor) and factor > 0):
                raise UsageError(f"a factor of {factor}", where=f"{where}: types.{kind[:64]}", hint="a number above 0")

    @cached_property
    def _axes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        return np.array(self.cores), np.array(self.memory_bytes, np.float64), np.array(self.speed)

    def at(self, cores: Any, memory_bytes: Any) -> Any:
        """Speed at cores and bytes per GPU, on the type that it was measured on; arrays are taken element by element."""
        x, y, table = self._axes
        c, m = np.broadcast_arrays(np.asarray(cores, np.float64), np.asarray(memory_bytes, np.float64))
        slack_c, slack_m = 1e-9 * x[0], 1e-9 * y[0]  # a share of a share of a server is a rounded number
        i, k = np.clip(np.searchsorted(x, c, "right") - 1, 0, max(len(x) - 2, 0)), np.clip(np.searchsorted(y, m, "right") - 1, 0, max(len(y) - 2, 0))
        i2, k2 = np.minimum(i + 1, len(x) - 1), np.minimum(k + 1, len(y) - 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            a = np.where(i2 > i, np.clip((c - x[i]) / (x[i2] - x[i]), 0, 1), 0.0)
            b = np.where(k2 > k, np.clip((m - y[k]) / (y[k2] - y[k]), 0, 1), 0.0)
        low, high = table[i, k] * (1 - b) + table[i, k2] * b, table[i2, k] * (1 - b) + table[i2, k2] * b
        found = np.where((c >= x[0] - slack_c) & (m >= y[0] - slack_m), low * (1 - a) + high * a, 0.0)
        return found if found.ndim else float(found)

    def on(self, kind: str) -> float:
        """Factor of a type of GPU."""
        return self.types.get(kind, 1.0)
