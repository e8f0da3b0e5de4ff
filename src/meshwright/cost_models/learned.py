"""The interpolating model of a large table of matrix products: a roofline with tiles, and trees for what it leaves over.

    log time = log roofline(m, n, k) + trees(features of m, n, k), averaged over the members

- The roofline is that of `products` with two more freedoms: tiles need not be square, and a row of tiles that is only partly filled costs more than
  its share by (1 - filled) * ragged / rows of tiles (measured times fall while m grows inside one tile).
- The trees (`boosting`) see sizes, products and ratios of sizes, the roofline, and what libraries choose kernels by: waves of tiles over the
  multiprocessors and how full the last one is, for twelve tilings and for the one with the fewest waves. They are fitted to all shapes of a table
  together, so a row learns from every shape whose kernel meets the same number of waves.
- Members: the rooflines of the two best tilings, each with and without features of how full the last row of tiles is.
Fewer rows than MIN_ROWS do not determine trees; `tiles` reads such tables. Sizes beyond the table get the roofline times the outermost trees' values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from .boosting import BoostedTrees, fit_trees
from .products import ERROR_SCALE, START, GpuPeaks, fitted_rows, roofline_s
from .robust_fit import fit_positive

__all__ = ["MIN_ROWS", "LearnedProducts", "fit_learned"]

F64 = NDArray[np.float64]
MIN_ROWS = 1000  # rows of a table that determine trees; `tiles` reads smaller ones
SIDES = (64, 128, 256)  # heights of tiles that are tried, and widths of the first search
WIDTHS = (64, 128, 192, 256)  # of the second search
START_RAGGED = 0.2  # where the search for `ragged` starts
MEMBER_TILINGS = 2  # the best ones, each with two members
TREES_PER_MEMBER = 300  # boosted trees that correct one member's closed form
WAVE_WIDTHS = (*range(16, 129, 8), 144, 160)  # widths of tiles among which the fewest waves are sought
CHUNK_ROWS = 200_000  # rows predicted at once, so that memory stays bounded


@dataclass(frozen=True)
class _Roofline:
    """`numbers`: the seven of `products` and `ragged`."""

    peaks: GpuPeaks
    numbers: tuple[float, ...]
    height: int
    width: int

    def log_s(self, m: F64, n: F64, k: F64) -> F64:
        e = np.asarray(self.numbers)
        return np.asarray(np.log(roofline_s(e[:7], self.height, self.width, self.peaks, m, n, k, ragged=float(e[7]))))


@dataclass(frozen=True)
class _Member:
    roofline: _Roofline
    filling: bool
    trees: BoostedTrees

    def log_s(self, m: F64, n: F64, k: F64) -> F64:
        base = self.roofline.log_s(m, n, k)
        return base + self.trees.at(_features(m, n, k, base, self.roofline.peaks.processors, self.filling))


@dataclass(frozen=True)
class LearnedProducts:
    """Times of one data type and kernel, for any shape."""

    members: tuple[_Member, ...]

    @property
    def form(self) -> str:
        """Tilings of its rooflines, for reports."""
        tilings = ", ".join(dict.fromkeys(f"{x.roofline.height} x {x.roofline.width}" for x in self.members))
        return f"{tilings}; {len(self.members)} x {TREES_PER_MEMBER} trees"

    def time_s(self, m: F64 | float, n: F64 | float, k: F64 | float) -> F64:
        """Seconds of (m x k)(k x n); arrays broadcast. Raises: FormatError for sizes below one."""
        x = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (m, n, k)))
        flat = [v.ravel() for v in x]
        if any(not np.all(np.isfinite(v) & (v >= 1)) for v in flat):
            raise FormatError("a matrix product has sizes of one or more")
        parts = [flat[0][:0]]
        for i in range(0, len(flat[0]), CHUNK_ROWS):
            part = [v[i : i + CHUNK_ROWS] for v in flat]
            parts.append(np.mean([member.log_s(*part) for member in self.members], axis=0))
        return np.asarray(np.exp(np.concatenate(parts)).reshape(x[0].shape))


def fit_learned(m: F64, n: F64, k: F64, times_s: F64, peaks: GpuPeaks) -> LearnedProducts:
    """From measured rows of all shapes. Raises: FormatError for fewer than MIN_ROWS rows, or times that are not positive."""
    if len(times_s) < MIN_ROWS or not np.all(np.isfinite(times_s) & (times_s > 0)):
        raise FormatError(f"trees need {MIN_ROWS} rows with positive finite times", where=f"{len(times_s)} rows", hint="use cost_models.tiles")
    m, n, k = (np.asarray(v, np.float64) for v in (m, n, k))
    members = []
    for number, roofline in enumerate(_rooflines(m, n, k, times_s, peaks)[:MEMBER_TILINGS]):
        base = roofline.log_s(m, n, k)
        for filling in (False, True):
            x = _features(m, n, k, base, peaks.processors, filling)
            # Trees learn the logarithm of what the roofline misses by, so their average multiplies.
            members.append(_Member(roofline, filling, fit_trees(x, np.log(times_s) - base, trees=TREES_PER_MEMBER, seed=number)))
    return LearnedProducts(tuple(members))


def _rooflines(m: F64, n: F64, k: F64, times_s: F64, peaks: GpuPeaks) -> list[_Roofline]:
    """One for each tiling, the best first."""
    rows = fitted_rows(len(times_s))
    x, y = [v[rows] for v in (m, n, k)], times_s[rows]
    found: list[tuple[float, _Roofline]] = []
    for height in SIDES:
        for width in SIDES:

            def model(e: F64, height: int = height, width: int = width) -> F64:
                return roofline_s(e[:7], height, width, peaks, *x, ragged=float(e[7]))

            e = fit_positive(model, y, [(*START, START_RAGGED)], scale=ERROR_SCALE)
            loss = float(np.log1p((np.log(model(e) / y) / ERROR_SCALE) ** 2).sum())
            found.append((loss, _Roofline(peaks, tuple(e.tolist()), height, width)))
    return [r for _, r in sorted(found, key=lambda pair: pair[0])]


def _features(m: F64, n: F64, k: F64, base: F64, processors: int, filling: bool) -> F64:
    """One row of features for each product."""
    columns = [np.log(x) for x in (m, n, k)]
    columns += [base] + [np.log(x) for x in (m * n, n * k, m * k, n / m, k / n)]
    for height in SIDES:
        rows = np.ceil(m / height)
        for width in WIDTHS:
            waves = rows * np.ceil(n / width) / processors
            # Number of waves, and how full the last one is: time is a staircase in the one and almost flat in the other.
            columns += [np.log(np.ceil(waves)), np.log(waves / np.ceil(waves))]
        columns.append(rows)
        if filling:
            columns.append(np.where(m > height, m / height - rows + 1, 1.0))
    return np.stack(columns + _fewest_waves(m, n, processors), 1)


def _fewest_waves(m: F64, n: F64, processors: int) -> list[F64]:
    """The tiling with the fewest waves, of those the one with the fullest last wave (the first rule of DeepGEMM's choice): its features."""
    waves, full, tall, wide = np.full(len(m), np.inf), np.zeros(len(m)), np.zeros(len(m)), np.zeros(len(m))
    for heights, widths in ((np.where(m <= 64, 64.0, 128.0), WAVE_WIDTHS), (np.full(len(m), 256.0), [w for w in WAVE_WIDTHS if w <= 128])):
        for width in widths:
            tiles = np.ceil(m / heights) * np.ceil(n / width)
            now = np.ceil(tiles / processors)
            last = tiles - (now - 1) * processors
            # Fewest waves first, then the fullest last wave.
            better = (now < waves) | ((now == waves) & (last > full))
            waves, full = np.where(better, now, waves), np.where(better, last, full)
            tall, wide = np.where(better, heights, tall), np.where(better, float(width), wide)
    work = waves * tall * wide
    return [np.log(waves), full / processors, tall, wide, np.log(work), np.log(work * processors / (m * n))]
