"""The compact model of a matrix product's time: eight numbers for one (GPU, data type, kernel).

    time = launch + (compute^3 + memory^3)^(1/3)                                     a smooth roofline
    compute = waves * (2 * tile * rows * k / (peak per processor * efficiency) + start)   waves of tiles over the streaming multiprocessors
    memory = min(bytes, cache) / cache rate + max(0, bytes - cache) / (bandwidth * efficiency)

`waves` lies between tiles / processors (work is spread evenly) and its ceiling (the last wave leaves processors idle): a share
q = quantisation / (1 + quantisation) of the way up. Tiles are square, 64 rows where m <= 64. The eight: launch, efficiency, start of a tile,
quantisation, memory efficiency, cache rate, cache, and the tile (64, 128 or 256, whichever fits).
Source: the roofline of Williams et al. (CACM 2009) with the tile and wave quantisation that NVIDIA's "Matrix Multiplication Background" user's
guide describes. A plain alpha-beta line in bytes or FLOPs knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .robust_fit import fit_positive

__all__ = ["GpuPeaks", "ProductModel", "fit_products", "fitted_rows", "roofline_s"]

F64 = NDArray[np.float64]
TILES = (64, 128, 256)
NARROW_ROWS = 64  # up to so many rows m, tiles have as many rows and no more
CORNER_EXPONENT = 3.0  # of the corner between compute and memory: higher is sharper
ERROR_SCALE = 0.03  # log errors beyond this (3 %) lose weight
MAX_FITTED_ROWS = 6000  # rows of a large table that models are fitted to, evenly spread over it: the numbers are few, more rows cost time only
START = (4.0, 0.7, 0.5, 1.0, 0.8, 6.0, 40.0)  # us, share, us, -, share, TB/s, MB
QUANTISATION = (0.6, 1.5, 3.0)


@dataclass(frozen=True, kw_only=True)
class GpuPeaks:
    """What the data sheet says. `flops` for the multiply type; bytes of one value of the (n x k), the (m x k) and the result matrix."""

    flops: float
    memory_Bps: float
    processors: int
    weight_bytes: float
    input_bytes: float
    output_bytes: float = 2.0

    def __post_init__(self) -> None:
        values = (self.flops, self.memory_Bps, self.processors, self.weight_bytes, self.input_bytes, self.output_bytes)
        if not all(np.isfinite(v) and v > 0 for v in values):
            raise UsageError("peaks must be positive", where="GpuPeaks", hint="see the GPU's data sheet")


@dataclass(frozen=True, kw_only=True)
class ProductModel:
    """`numbers`: seven parameters in the order of the module's text (us, share, us, 1, share, TB/s, MB); `tile` is the eighth."""

    peaks: GpuPeaks
    numbers: tuple[float, ...]
    tile: int

    def time_s(self, m: F64 | float, n: F64 | float, k: F64 | float) -> F64:
        """Seconds of (m x k)(k x n); arrays broadcast."""
        return roofline_s(np.asarray(self.numbers), self.tile, self.tile, self.peaks, *(np.asarray(x, np.float64) for x in (m, n, k)))


def roofline_s(e: F64, height: int, width: int, peaks: GpuPeaks, m: F64, n: F64, k: F64, *, ragged: float = 0.0) -> F64:
    """Seconds by the seven numbers `e` with tiles of height x width. `ragged`: how much of a row of tiles an empty one costs beyond its share."""
    tall = np.where(m <= NARROW_ROWS, NARROW_ROWS, height)
    rows = np.ceil(m / tall)
    waves = rows * np.ceil(n / width) / peaks.processors
    share = e[3] / (1 + e[3])
    # Between whole waves (the last one leaves processors idle) and work spread evenly.
    waves = share * np.ceil(waves) + (1 - share) * waves
    if ragged:
        waves = waves * (1 + ragged * np.where(rows > 1, (1 - (m / tall - rows + 1)) / rows, 0.0))
    # A tile is computed whole, however little of it is needed, on one processor.
    compute = waves * (2 * tall * width * k / (peaks.flops / peaks.processors * e[1]) + e[2] * 1e-6)
    moved = n * k * peaks.weight_bytes + m * k * peaks.input_bytes + m * n * peaks.output_bytes
    cache = e[6] * 1e6
    # What fits into the cache comes at the cache's rate, only the rest at the memory's.
    memory = np.minimum(moved, cache) / (e[5] * 1e12) + np.maximum(moved - cache, 0) / (peaks.memory_Bps * e[4])
    return np.asarray(e[0] * 1e-6 + (compute**CORNER_EXPONENT + memory**CORNER_EXPONENT) ** (1 / CORNER_EXPONENT))


def fitted_rows(count: int) -> NDArray[np.int64]:
    """Numbers of the rows of a table that models are fitted to: all of a small one, MAX_FITTED_ROWS evenly spread over a large one."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_FITTED_ROWS)).astype(np.int64)) if count else np.empty(0, np.int64)


def fit_products(m: F64, n: F64, k: F64, times_s: F64, peaks: GpuPeaks) -> ProductModel:
    """Fit to measured rows. Raises: FormatError when there are none or a time is not positive."""
    rows = fitted_rows(len(times_s))
    x = [np.asarray(v, np.float64)[rows] for v in (m, n, k)]
    y = np.asarray(times_s, np.float64)[rows]
    starts = [START[:3] + (q,) + START[4:] for q in QUANTISATION]
    fitted = [ProductModel(peaks=peaks, numbers=_numbers(x, y, tile, peaks, starts), tile=tile) for tile in TILES]
    return min(fitted, key=lambda f: float(np.log1p((np.log(f.time_s(*x) / y) / ERROR_SCALE) ** 2).sum()))


def _numbers(x: list[F64], y: F64, tile: int, peaks: GpuPeaks, starts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(fit_positive(lambda e: roofline_s(e, tile, tile, peaks, *x), y, starts, scale=ERROR_SCALE).tolist())
