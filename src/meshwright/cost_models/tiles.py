"""The interpolating model of measured matrix products: along m in whole tiles, steadied by the neighbouring shapes.

A kernel computes whole tiles, so time is a staircase in m: m = 256 costs what m = 225 does, not almost what m = 257 does. So
- rows are placed at m rounded up to whole tiles; rows of one tile are one level (their median: the noise of one row hardly counts);
- between levels time is linear in that position, or log-log, or the ratio to the compact model (`products`) is log-log;
- a level may be replaced by the median of itself and what its four neighbours in (n, k) say: their level, moved by the running median of the
  difference. One disturbed row then does not bend the curve.
Which of these a table wants (tile heights up to and above `MAX_SMALL_M`, the interpolation, the smoothing) is chosen by leaving out every m in
turn, for all shapes at once, and predicting it from the rest; rows that are held back by a caller are never seen. Beyond the last level the last
slope goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, UnknownName
from .products import ProductModel

__all__ = ["TileChoice", "TiledTable", "fit_tiles"]

F64 = NDArray[np.float64]
MAX_SMALL_M = 256  # up to this m kernels have lower tiles
SMALL_TILES = (1, 16, 32, 64, 128)
LARGE_TILES = (1, 64, 128, 256)
MAX_LEFT_OUT = 40  # values of m that are left out in turn, spread evenly over the table's
TAIL_WEIGHT = 0.2  # weight of the 90th percentile beside the median when choices are compared
WINDOW_LEVELS = 2  # levels to either side in the running median of a neighbour's difference


class TileChoice(NamedTuple):
    """How a table is read: tile heights up to and above MAX_SMALL_M, interpolation, neighbours or not."""

    small: int
    large: int
    along: Literal["linear", "log", "model"]
    smooth: bool


@dataclass(frozen=True)
class _Rows:
    """log seconds by (shape, m), NaN where nothing was measured; the model's where there is one; numbers of the four neighbours, -1 for none."""

    shapes: tuple[tuple[int, int], ...]
    m: F64
    log_s: F64
    model: F64 | None
    neighbours: NDArray[np.int64]


@dataclass(frozen=True)
class TiledTable:
    """Times of one data type and kernel for the shapes (n, k) of its table."""

    choice: TileChoice
    shapes: Mapping[tuple[int, int], int]
    positions: F64
    levels: F64  # log seconds, or log ratio to the model; shape x position
    model: ProductModel | None

    @property
    def form(self) -> str:
        """What was chosen, for reports."""
        small, large, along, smooth = self.choice
        return f"tiles {small} / {large}, {along}{', neighbours vote' if smooth else ''}"

    def at(self, n: int, k: int, m: F64 | float) -> F64:
        """Seconds for each m. Raises: UnknownName for a shape that is not in the table."""
        row = self.shapes.get((n, k))
        if row is None:
            raise UnknownName(f"the table has no products of n {n}, k {k}", hint="use the compact model, or a measured shape nearby")
        x = np.atleast_1d(np.asarray(m, np.float64))
        base = np.log(self.model.time_s(x, n, k)) if self.choice.along == "model" and self.model is not None else np.zeros(len(x))
        value = np.array([_read(self.levels[row : row + 1], self.positions, p, self.choice.along)[0] for p in _positions(x, self.choice)])
        return np.asarray(np.exp(value + base).reshape(np.shape(m)))


def fit_tiles(curves: Sequence[tuple[int, int, F64, F64]], model: ProductModel | None = None) -> TiledTable:
    """From (n, k, rising m, seconds) of every shape. Raises: FormatError without rows, with equal shapes or times that are not positive."""
    rows = _rows(curves, model)
    choice = _choose(rows)
    positions, levels = _levels(rows, choice)
    return TiledTable(choice, {s: i for i, s in enumerate(rows.shapes)}, positions, levels, model)


def _rows(curves: Sequence[tuple[int, int, F64, F64]], model: ProductModel | None) -> _Rows:
    shapes = tuple((int(n), int(k)) for n, k, _, _ in curves)
    if not curves or len(set(shapes)) != len(shapes):
        raise FormatError("a table needs rows, every shape once", hint="keep kernels and data types apart")
    m = np.unique(np.concatenate([np.asarray(x, np.float64) for _, _, x, _ in curves]))
    log_s = np.full((len(shapes), len(m)), np.nan)
    for i, (_, _, x, y) in enumerate(curves):
        if len(x) == 0 or len(x) != len(y) or not np.all(np.isfinite(y) & (y > 0)) or x[0] <= 0 or np.any(np.diff(x) <= 0):
            raise FormatError("a shape needs rising positive m with positive finite times", where=f"n {shapes[i][0]}, k {shapes[i][1]}")
        log_s[i, np.searchsorted(m, x)] = np.log(y)
    predicted = None
    if model is not None:
        n, k = (np.array([s[j] for s in shapes], np.float64)[:, None] for j in (0, 1))
        predicted = np.log(model.time_s(m[None, :], n, k))
    return _Rows(shapes, m, log_s, predicted, _neighbours(shapes))


def _neighbours(shapes: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    number = {s: i for i, s in enumerate(shapes)}
    axes = tuple(sorted({s[j] for s in shapes}) for j in (0, 1))
    place = tuple({v: i for i, v in enumerate(axis)} for axis in axes)
    out = np.full((4, len(shapes)), -1, np.int64)
    for (n, k), i in number.items():
        for way, (dn, dk) in enumerate(((0, 1), (0, -1), (1, 0), (-1, 0))):
            a, b = place[0][n] + dn, place[1][k] + dk
            if 0 <= a < len(axes[0]) and 0 <= b < len(axes[1]):
                out[way, i] = number.get((axes[0][a], axes[1][b]), -1)
    return out


def _positions(m: F64, choice: TileChoice) -> F64:
    tile = np.where(m <= MAX_SMALL_M, choice.small, choice.large)
    return np.asarray(np.where(tile == 1, m, np.ceil(m / tile) * tile), np.float64)


def _levels(rows: _Rows, choice: TileChoice, without: int = -1) -> tuple[F64, F64]:
    """(positions, levels by shape and position), as if column `without` of m had not been measured."""
    # What is interpolated is the logarithm of time, or of its ratio to the model's.
    values = rows.log_s - rows.model if choice.along == "model" and rows.model is not None else rows.log_s
    keep = np.arange(len(rows.m)) != without
    at = _positions(rows.m[keep], choice)
    values = values[:, keep]
    positions, starts = np.unique(at, return_index=True)
    ends = np.append(starts[1:], len(at))
    levels = np.stack([values[:, a] if b == a + 1 else _median(values[:, a:b]) for a, b in zip(starts, ends, strict=True)], 1)
    return positions, _smoothed(levels, rows.neighbours) if choice.smooth else levels


def _median(values: F64) -> F64:
    """Along the last axis, NaN left out; NaN where nothing is left."""
    count = np.isfinite(values).sum(-1)
    ordered = np.sort(values, -1)  # NaN last
    low, high = np.maximum((count - 1) // 2, 0), np.maximum(count // 2, 0)
    pick = [np.take_along_axis(ordered, np.minimum(i, values.shape[-1] - 1)[..., None], -1)[..., 0] for i in (low, high)]
    return np.asarray(np.where(count > 0, (pick[0] + pick[1]) / 2, np.nan))


def _smoothed(levels: F64, neighbours: NDArray[np.int64]) -> F64:
    said = [levels]
    width = levels.shape[1]
    for way in neighbours:
        other = np.where((way >= 0)[:, None], levels[way], np.nan)
        padded = np.pad(levels - other, ((0, 0), (WINDOW_LEVELS, WINDOW_LEVELS)), constant_values=np.nan)
        windows = np.stack([padded[:, i : i + width] for i in range(2 * WINDOW_LEVELS + 1)], -1)
        # The neighbour's level, moved by what the two usually differ by around here.
        said.append(other + _median(windows))
    stacked = np.stack(said, -1)
    enough = np.isfinite(stacked).sum(-1) > 2  # of itself and one other the median is their mean: no vote
    return np.where(np.isfinite(levels) & enough, _median(stacked), levels)


def _read(levels: F64, positions: F64, position: float, along: str) -> F64:
    """Log value of every shape at one position, from the nearest level on either side (of those it has)."""
    there = np.isfinite(levels)
    number = np.arange(len(positions))
    below = np.where(there & (positions <= position)[None, :], number, -1).max(1)
    above = np.where(there & (positions > position)[None, :], number, len(positions)).min(1)
    first, last = there.argmax(1), len(positions) - 1 - there[:, ::-1].argmax(1)
    second = np.where(there & (number[None, :] > first[:, None]), number, len(positions)).min(1)
    before = np.where(there & (number[None, :] < last[:, None]), number, -1).max(1)
    # Below the first level and beyond the last, the nearest two levels give the line that goes on.
    a = np.where(below < 0, first, np.where(above >= len(positions), before, below))
    b = np.where(below < 0, second, np.where(above >= len(positions), last, above))
    # A shape with one level only is constant.
    single = (a < 0) | (b >= len(positions))
    a, b = np.where(single, first, a), np.where(single, first, b)
    each = np.arange(len(levels))
    ya, yb = levels[each, a], levels[each, b]
    span = np.where(single, 1.0, positions[b] - positions[a])
    if along == "linear":
        part = np.where(single, 0.0, (position - positions[a]) / span)
        value = np.exp(ya) + part * (np.exp(yb) - np.exp(ya))
        return np.asarray(np.log(np.maximum(value, 0.3 * np.exp(np.minimum(ya, yb)))))  # a falling last slope must not reach zero
    part = np.where(single, 0.0, np.log(position / positions[a]) / np.where(single, 1.0, np.log(positions[b] / positions[a])))
    if along == "model":
        part = np.clip(part, 0, 1)  # beyond the table the model's own slope goes on
    return np.asarray(ya + part * (yb - ya))


def _choose(rows: _Rows) -> TileChoice:
    out = np.unique(np.linspace(1, len(rows.m) - 2, MAX_LEFT_OUT).astype(int)) if len(rows.m) >= 4 else np.empty(0, int)
    if len(out) == 0:
        return TileChoice(1, 1, "log", False)
    ways: list[Literal["linear", "log", "model"]] = ["linear", "log"]
    if rows.model is not None:
        ways.append("model")
    candidates = [TileChoice(s, g, along, smooth) for s in SMALL_TILES for g in LARGE_TILES for along in ways for smooth in (False, True)]
    return min(candidates, key=lambda c: _left_out_error(rows, c, out))


def _left_out_error(rows: _Rows, choice: TileChoice, columns: NDArray[np.int64]) -> float:
    errors = []
    for j in columns.tolist():
        positions, levels = _levels(rows, choice, without=j)
        has = np.isfinite(rows.log_s[:, j]) & np.isfinite(levels).any(1)
        if not has.any():
            continue
        value = _read(levels[has], positions, float(_positions(rows.m[j : j + 1], choice)[0]), choice.along)
        if choice.along == "model" and rows.model is not None:
            value = value + rows.model[has, j]
        # |e^d - 1|: the relative error of time.
        errors.append(np.abs(np.expm1(value - rows.log_s[has, j])))
    joined = np.concatenate(errors)
    return float(np.median(joined) + TAIL_WEIGHT * np.percentile(joined, 90))
