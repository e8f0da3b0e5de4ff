"""Models of measured GPU tables, and how far off they are on rows that they have not seen.

Protocol: the sizes of a curve are sorted and every second one is held back (m for each (n, k) of a data type and kernel; the message size for each
operation, data type and GPU count). Models, and every choice inside them, see the other rows only. Each table version is judged on its own. Three
models, beside one alpha-beta line per curve (in bytes for collectives, in m for products) that sees the same rows:
- interpolating: for products `cost_models.learned`, or `cost_models.tiles` where a table has too few rows for it; linear between neighbouring sizes
  for collectives;
- compact, eight numbers: `cost_models.products` per data type and kernel, `cost_models.collectives` for a whole table;
- beyond: the largest quarter of a collective's sizes held back.
Errors are |predicted / measured - 1|.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cost_models.collectives import CollectiveCurve, fit_collectives
from ...cost_models.learned import MIN_ROWS, LearnedProducts, fit_learned
from ...cost_models.products import GpuPeaks, fit_products
from ...cost_models.tiles import TiledTable, fit_tiles
from ...errors import FormatError, UnknownName
from ...io.costs.perf_tables import GemmCurve, NcclCurve, System
from ...run.calibrate.fit import fit_line

__all__ = ["GemmErrors", "NcclTable", "TableErrors", "gemm_table_errors", "gpu_peaks", "nccl_table_errors"]

F64 = NDArray[np.float64]
# Streaming multiprocessors that the data sheets of the measured boards state.
PROCESSORS = {
    "a30": 56, "a100_pcie": 108, "a100_sxm": 108, "h100_pcie": 114, "h100_sxm": 132, "h200_sxm": 132, "b200_sxm": 148, "gb200": 148, "l4": 58,
    "l40s": 142,
}  # fmt: skip
WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int8_wo": 1.0, "int4_wo": 0.5, "sq": 1.0}
INPUT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int8_wo": 2.0, "int4_wo": 2.0, "sq": 1.0}


@dataclass(frozen=True)
class TableErrors:
    """Relative errors of a model and of the alpha-beta lines on the same rows."""

    model: F64
    line: F64

    @staticmethod
    def joined(parts: Sequence[TableErrors]) -> TableErrors:
        """Raises: FormatError when there are none."""
        if not parts:
            raise FormatError("no rows to judge a model by", hint="a curve needs three sizes")
        return TableErrors(np.concatenate([p.model for p in parts]), np.concatenate([p.line for p in parts]))

    def summary(self) -> dict[str, float]:
        return {
            "median": float(np.median(self.model)), "p90": float(np.percentile(self.model, 90)), "line_median": float(np.median(self.line)),
            "line_p90": float(np.percentile(self.line, 90)), "points": float(len(self.model)),
        }  # fmt: skip


def _every_second(count: int) -> NDArray[np.bool_]:
    """True where held back: the second, fourth, ... of the sorted sizes."""
    return np.asarray(np.arange(count) % 2 == 1)


def _off(predicted: F64, measured: F64) -> F64:
    return np.asarray(np.abs(predicted / measured - 1))


# ---- collectives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NcclTable:
    """Times of collectives on one server: the measured curve where there is one, the compact model of the table elsewhere."""

    curves: dict[tuple[str, int], CollectiveCurve]
    link_Bps: float

    @staticmethod
    def of(curves: Sequence[NcclCurve], link_Bps: float, *, dtype: str = "half") -> NcclTable:
        """Raises: FormatError when nothing was measured in `dtype`."""
        chosen = {(c.op, c.gpus): _curve(c, link_Bps) for c in reversed(curves) if c.dtype == dtype and len(c.sizes) > 1}
        if not chosen:
            raise FormatError(f"no curve of {dtype!r}", where="nccl_perf", hint="half and int8 are measured")
        return NcclTable(chosen, link_Bps)

    def time_s(self, operation: str, size_bytes: float, gpus: int) -> float:
        """Seconds. Raises: UnknownName for an operation that does not exist."""
        curve = self.curves.get((operation, gpus))
        if curve is not None:
            return float(curve.at(size_bytes))
        return float(fit_collectives(list(self.curves.values())).time_s(operation, size_bytes, gpus))


def _curve(c: NcclCurve, link_Bps: float, keep: NDArray[np.bool_] | None = None) -> CollectiveCurve:
    sizes, times_s = (c.sizes, c.times_s) if keep is None else (c.sizes[keep], c.times_s[keep])
    return CollectiveCurve(operation=c.op, gpus=c.gpus, link_Bps=link_Bps, sizes=sizes, times_s=times_s)


def nccl_table_errors(curves: Sequence[NcclCurve], link_Bps: float) -> dict[str, TableErrors]:
    """`interpolating`, `compact` (one model for the whole table) and `largest quarter`. Raises: FormatError for a table without long curves."""
    curves = [c for c in curves if len(c.sizes) >= 4]
    kept = [_curve(c, link_Bps, ~_every_second(len(c.sizes))) for c in curves]
    if not kept:
        raise FormatError("no curve of four sizes or more", where="nccl_perf")
    compact = fit_collectives(kept)
    found: dict[str, list[TableErrors]] = defaultdict(list)
    for c, seen in zip(curves, kept, strict=True):
        back = _every_second(len(c.sizes))
        x, y = c.sizes[back], c.times_s[back]
        line = _off(fit_line(seen.sizes, seen.times_s).at(x), y)
        found["interpolating"].append(TableErrors(_off(seen.at(x), y), line))
        found["compact"].append(TableErrors(_off(compact.time_s(c.op, x, c.gpus), y), line))
        few = len(c.sizes) - -(-len(c.sizes) // 4)
        small = _curve(c, link_Bps, np.arange(len(c.sizes)) < few)
        x, y = c.sizes[few:], c.times_s[few:]
        found["largest quarter"].append(TableErrors(_off(small.at(x), y), _off(fit_line(small.sizes, small.times_s).at(x), y)))
    return {name: TableErrors.joined(parts) for name, parts in found.items()}


# ---- matrix products ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmErrors:
    """Of one data type and kernel: both models, and what was chosen and fitted."""

    interpolating: TableErrors
    compact: TableErrors
    table: TiledTable | LearnedProducts
    numbers: tuple[float, ...]
    tile: int


def gpu_peaks(system: System, dtype: str) -> GpuPeaks:
    """Data-sheet peaks for a table's data type. Raises: UnknownName."""
    flops, processors = system.flops.get(dtype), PROCESSORS.get(system.name)
    if flops is None or processors is None or dtype not in WEIGHT_BYTES:
        what = "multiprocessors of this GPU" if processors is None else f"peak for {dtype!r}"
        raise UnknownName(f"the {what} is not known: {system.name!r}", hint=f"known: {', '.join(PROCESSORS)}; {', '.join(WEIGHT_BYTES)}")
    return GpuPeaks(
        flops=flops, memory_Bps=system.memory_bandwidth_Bps, processors=processors, weight_bytes=WEIGHT_BYTES[dtype], input_bytes=INPUT_BYTES[dtype]
    )


def gemm_table_errors(curves: Sequence[GemmCurve], system: System) -> dict[tuple[str, str], GemmErrors]:
    """By (data type, kernel source). Raises: UnknownName, FormatError."""
    groups: dict[tuple[str, str], list[GemmCurve]] = defaultdict(list)
    for c in curves:
        groups[c.dtype, c.source].append(c)
    return {key: _gemm_errors(mine, gpu_peaks(system, key[0])) for key, mine in sorted(groups.items())}


def _gemm_errors(curves: Sequence[GemmCurve], peaks: GpuPeaks) -> GemmErrors:
    back = [_every_second(len(c.m)) for c in curves]

    def stacked(pick: Callable[[NDArray[np.bool_]], NDArray[np.bool_]]) -> list[F64]:
        parts = []
        for c, b in zip(curves, back, strict=True):
            m = c.m[pick(b)]
            parts.append((m, np.full(len(m), float(c.n)), np.full(len(m), float(c.k)), c.times_s[pick(b)]))
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    m, n, k, times_s = stacked(lambda b: ~b)
    model = fit_products(m, n, k, times_s, peaks)
    table: TiledTable | LearnedProducts
    if len(times_s) >= MIN_ROWS:
        table = fit_learned(m, n, k, times_s, peaks)
    else:
        table = fit_tiles([(c.n, c.k, c.m[~b], c.times_s[~b]) for c, b in zip(curves, back, strict=True)], model)
    interpolated, compact = [], []
    for c, b in zip(curves, back, strict=True):
        if not b.any():
            continue
        x, y = c.m[b], c.times_s[b]
        line = _off(fit_line(c.m[~b], c.times_s[~b]).at(x), y)
        read = table.at(c.n, c.k, x) if isinstance(table, TiledTable) else table.time_s(x, c.n, c.k)
        interpolated.append(TableErrors(_off(read, y), line))
        compact.append(TableErrors(_off(model.time_s(x, c.n, c.k), y), line))
    return GemmErrors(TableErrors.joined(interpolated), TableErrors.joined(compact), table, model.numbers, model.tile)
