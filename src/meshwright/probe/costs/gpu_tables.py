"""Costs of real GPUs from measured tables (`meshwright.io.costs.perf_tables`), and how far interpolating in them is off.

- Collectives and matrix products: log-log interpolation beside one alpha-beta line, every second size held back (`nccl_errors`,
  `gemm_errors`; protocol in `meshwright.run.calibrate.fit`).
- `tables_cost`: a `Cost` for a kind of GPU: efficiency on matrix products and time per call fitted to the product table, message
  overhead fitted to two-GPU all-gathers, evidence "interpolated".
- `table_prices`: prices of a layout's segments, matrix products from the table, everything else by that cost's roofline. A price is called
  interpolated if more than half of its time is. `TablePrices` gives them to a planner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from ...cost import Cost, Priced, Transport
from ...cost_models.learned import MIN_ROWS, LearnedProducts, fit_learned
from ...cost_models.products import GpuPeaks, ProductModel, fit_products
from ...cost_models.tiles import TiledTable, fit_tiles
from ...errors import FormatError, UnknownName, UsageError
from ...fabric.fabric import Device, Fabric
from ...graph.graph import OpGraph, OpNode, Work
from ...io.costs.perf_tables import GemmCurve, NcclCurve, System, package_version, read_gemm, read_nccl, read_system
from ...plan.plan import Segment, TrainingLayout
from ...plan.shards import local_extent
from ...plan.vocabulary import expand_losses
from ...run.calibrate.fit import FitErrors, errors_of, fit_line, held_back
from .gpu_tables_models import gpu_peaks

__all__ = ["GemmTable", "TablePrices", "gemm_errors", "nccl_errors", "table_prices", "tables_cost"]

F64 = NDArray[np.float64]
TABLE_DTYPE = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8"}
FRAMEWORKS = ("vllm", "sglang", "trtllm")
MIN_LARGE_FLOPS = 1e10  # products from here on show the efficiency, not the launch
MEMORY_RATE_SHARE = 0.8  # the package's own correction for plain memory traffic; assumed


def nccl_errors(curves: Iterable[NcclCurve]) -> dict[str, FitErrors]:
    """Errors on held back sizes by operation, all dtypes, GPU counts and sources together."""
    found: dict[str, list[tuple[F64, F64]]] = defaultdict(list)
    for c in curves:
        found[c.op].append(held_back(c.sizes, c.times_s))
    return {op: _joined(parts) for op, parts in sorted(found.items())}


def gemm_errors(curves: Iterable[GemmCurve]) -> dict[str, FitErrors]:
    """Errors on held back m by `dtype / kernel source`, over all (n, k)."""
    found: dict[str, list[tuple[F64, F64]]] = defaultdict(list)
    for c in curves:
        found[f"{c.dtype} / {c.source}"].append(held_back(c.m, c.times_s))
    return {name: _joined(parts) for name, parts in sorted(found.items())}


def _joined(parts: Sequence[tuple[F64, F64]]) -> FitErrors:
    return errors_of(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))


@dataclass(frozen=True)
class GemmTable:
    """Times of (m x k)(k x n) of one dtype and kernel source, for any shape.

    With `peaks`, a large table is read by `cost_models.learned`, never faster than the peak; shapes beyond a small one follow the compact model.
    """

    curves: tuple[GemmCurve, ...]
    peaks: GpuPeaks | None = None

    @cached_property
    def _learned(self) -> LearnedProducts | None:
        if self.peaks is None or sum(len(c.m) for c in self.curves) < MIN_ROWS:
            return None
        return fit_learned(*self._rows, self.peaks)

    @cached_property
    def _asked(self) -> dict[tuple[float, float, float], float]:
        """Answers of the learned model: layers repeat, and one answer takes milliseconds."""
        return {}

    @cached_property
    def _rows(self) -> tuple[F64, F64, F64, F64]:
        columns = [(c.m, np.full(len(c.m), float(c.n)), np.full(len(c.m), float(c.k)), c.times_s) for c in self.curves]
        m, n, k, times_s = (np.concatenate(x) for x in zip(*columns, strict=True))
        return m, n, k, times_s

    @cached_property
    def _by_shape(self) -> TiledTable:
        return fit_tiles([(c.n, c.k, c.m, c.times_s) for c in self.curves], self._model)

    @cached_property
    def _model(self) -> ProductModel | None:
        if self.peaks is None:
            return None
        return fit_products(*self._rows, self.peaks)

    @cached_property
    def _axes(self) -> tuple[F64, F64]:
        if not self.curves:
            raise FormatError("a table of matrix products without rows")
        return (np.unique([float(c.n) for c in self.curves]), np.unique([float(c.k) for c in self.curves]))

    def time_s(self, m: float, n: float, k: float) -> float:
        """As the table's model says it. Of a small table: along m as `cost_models.tiles` reads it on the four surrounding (n, k),
        then linear in log n and log k.

        A corner that was not measured, and sizes beyond the table, are taken from the nearest measured (n, k), scaled by the compact model where
        the peaks are known, else by n * k.
        """
        axis_n, axis_k = self._axes
        if self._learned is not None and self.peaks is not None:
            sides = max(1.0, m), max(1.0, n), max(1.0, k)
            if sides not in self._asked:
                self._asked[sides] = max(float(self._learned.time_s(*sides)), 2 * m * n * k / self.peaks.flops)
            return self._asked[sides]
        total, weight = 0.0, 0.0
        for cn, wn in _bracket(axis_n, n):
            for ck, wk in _bracket(axis_k, k):
                if wn * wk > 0:
                    total += wn * wk * np.log(self._corner(m, cn, ck))
                    weight += wn * wk
        inside = float(np.clip(n, axis_n[0], axis_n[-1])), float(np.clip(k, axis_k[0], axis_k[-1]))
        return float(np.exp(total / weight)) * self._scale(m, (n, k), inside)

    def _scale(self, m: float, shape: tuple[float, float], known: tuple[float, float]) -> float:
        """How much longer `shape` takes than `known`."""
        if shape == known:
            return 1.0
        if self._model is None:
            return shape[0] * shape[1] / (known[0] * known[1])
        return float(self._model.time_s(m, *shape) / self._model.time_s(m, *known))

    def _corner(self, m: float, n: float, k: float) -> float:
        table = self._by_shape
        shape = int(n), int(k)
        near = shape if shape in table.shapes else min(table.shapes, key=lambda s: (abs(np.log(s[0] / n)) + abs(np.log(s[1] / k)), s))
        return float(table.at(*near, m)) * self._scale(m, (n, k), near)


def _bracket(axis: F64, value: float) -> list[tuple[float, float]]:
    value = float(np.clip(value, axis[0], axis[-1]))
    i = int(np.clip(np.searchsorted(axis, value) - 1, 0, max(len(axis) - 2, 0)))
    if len(axis) == 1:
        return [(float(axis[0]), 1.0)]
    part = float((np.log(value) - np.log(axis[i])) / (np.log(axis[i + 1]) - np.log(axis[i])))
    return [(float(axis[i]), 1.0 - part), (float(axis[i + 1]), part)]


# ---- a cost ------------------------------------------------------------------------------------------------------------


def gemm_table(system: str, dtype: str = "bf16") -> tuple[GemmTable, str]:
    """(products of the framework with the most rows for this dtype, what they are from). Raises: UnknownName."""
    name = TABLE_DTYPE.get(dtype)
    read_system(system)  # an unknown one is said with the known ones
    best: tuple[int, GemmTable, str] | None = None
    for framework in FRAMEWORKS:
        try:
            curves, _, version = read_gemm(system, framework)
        except UnknownName:
            continue
        sources: dict[str, list[GemmCurve]] = defaultdict(list)
        for c in curves:
            if c.dtype == name:
                sources[c.source].append(c)
        for source, mine in sources.items():
            rows = sum(len(c.m) for c in mine)
            if best is None or rows > best[0]:
                best = (rows, GemmTable(tuple(mine), _peaks(system, str(name))), f"{version} ({source})")
    if best is None:
        raise UnknownName(f"no measured matrix products of {system!r} in {dtype!r}", hint=f"data types: {', '.join(sorted(TABLE_DTYPE))}")
    return best[1], best[2]


def _peaks(system: str, dtype: str) -> GpuPeaks | None:
    """None where the data sheet's numbers are not known: then the table is read without a model of the GPU."""
    try:
        return gpu_peaks(read_system(system), dtype)
    except UnknownName:
        return None


def tables_cost(system: str, *, dtype: str = "bf16") -> Cost:
    """A cost for this kind of GPU with evidence "interpolated". Raises: UnknownName, MissingExtra, FormatError."""
    table, source = gemm_table(system, dtype)
    peaks = read_system(system)
    peak = peaks.flops.get(TABLE_DTYPE[dtype])
    if peak is None:
        raise UnknownName(f"the description of {system!r} has no peak for {dtype!r}", hint="use bf16")
    curves, _, nccl = read_nccl(system)
    efficiency, per_call = _efficiency(table.curves, peak)
    return Cost(
        name=f"tables:{system}", dtype=dtype, flops_efficiency=efficiency, memory_efficiency=MEMORY_RATE_SHARE, per_call_s=per_call,
        default_flops=peak, default_memory_Bps=peaks.memory_bandwidth_Bps, transport=_transport(curves, peaks), evidence="interpolated",
        source=f"aiconfigurator-core {package_version()}: {system} gemm {source}, nccl {nccl}",
    )  # fmt: skip


def _efficiency(curves: Sequence[GemmCurve], peak: float) -> tuple[float, float]:
    """(median share of the peak over large products, median time of the smallest): the two ends of a product's cost."""
    large: list[F64] = []
    small = []
    for c in curves:
        flops = 2.0 * c.m * c.n * c.k
        large.append((flops / peak / c.times_s)[flops >= MIN_LARGE_FLOPS])
        small.append(float(c.times_s[0]))
    shares = np.concatenate(large)
    if len(shares) == 0:
        raise FormatError("no large matrix product was measured", where="gemm_perf", hint="this table cannot give an efficiency")
    return min(1.0, float(np.median(shares))), float(np.percentile(small, 5))


def _transport(curves: Sequence[NcclCurve], system: System) -> Transport:
    """An all-gather on two GPUs is one message each way: half of its start-up at either end, and what its bytes take beyond the link."""
    mine = [c for c in curves if c.op == "all-gather" and c.gpus == 2 and c.dtype == "half"]
    if not mine:
        raise FormatError("no two-GPU all-gather was measured", where="nccl_perf", hint="this table cannot give a message cost")
    line = fit_line(mine[0].sizes / 2, mine[0].times_s)
    extra = max(0.0, line.beta_s_per_byte - 1 / system.link_Bps)
    return Transport(per_message_s=line.alpha_s / 2, per_byte_s=extra / 2, evidence="interpolated")


# ---- prices of a layout ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TablePrices:
    """Prices layouts of any graph for a planner (`drive.plan_training`)."""

    table: GemmTable
    cost: Cost
    device: Device
    source: str

    def __call__(self, graph: OpGraph, layout: TrainingLayout) -> dict[str, Priced]:
        return table_prices(self.table, graph, layout, self.cost, self.device)

    @staticmethod
    def of(system: str, cost: Cost, fabric: Fabric) -> TablePrices | None:
        """None on a fabric of several kinds of devices: a segment's one price cannot hold for all of them. Raises: as `tables_cost`."""
        kinds = {(tuple(sorted(d.flops.items())), d.memory_bandwidth_Bps) for d in fabric.devices}
        if len(kinds) != 1:
            return None
        table, source = gemm_table(system, cost.dtype)
        return TablePrices(table, cost, fabric.devices[0], f"matrix products of {source}")


def table_prices(table: GemmTable, graph: OpGraph, layout: TrainingLayout, cost: Cost, device: Device) -> dict[str, Priced]:
    """Prices of every segment's `F` and `B`, by the keys of `Cost.table`. Raises: UsageError when graph and layout do not belong together."""
    graph = expand_losses(graph, layout.losses)
    nodes = {n.name: n for n in graph.nodes}
    shapes = _shapes(graph)
    found = {}
    for s in layout.segments:
        missing = [n for n in s.nodes if n not in nodes]
        if missing:
            raise UsageError(f"segment {s.key!r} has a node {missing[0]!r} that the graph lacks", hint="capture the same model again")
        products = [p for name in s.nodes if (p := _product(nodes[name], shapes, graph, layout, s)) is not None]
        forward = [(m, n, k) for m, n, k in products]
        backward = [q for m, n, k in products for q in ((m, k, n), (n, k, m))]
        found[f"{s.key}|F"] = _price(table, forward, s.forward, cost, device)
        again = [p for names in s.computed_again() for name in names if (p := _product(nodes[name], shapes, graph, layout, s)) is not None]
        found[f"{s.key}|B"] = _price(table, backward + again, s.backward + s.again, cost, device)
    return found


def _shapes(graph: OpGraph) -> Mapping[str, tuple[int, ...]]:
    shapes = {f"param:{p.name}": p.shape for p in graph.parameters} | {f"buffer:{b.name}": b.shape for b in graph.buffers}
    shapes |= {f"input:{i}": v.shape for i, v in enumerate(graph.inputs)}
    return shapes | {n.name: n.outputs[0].shape for n in graph.nodes if n.outputs}


def _product(
    node: OpNode, shapes: Mapping[str, tuple[int, ...]], graph: OpGraph, layout: TrainingLayout, segment: Segment
) -> tuple[float, float, float] | None:
    """(m, n, k) of a linear layer on one rank for one micro-batch; None for other calls."""
    if node.target not in ("aten.linear.default", "aten.addmm.default", "aten.mm.default"):
        return None
    x, w = (node.inputs[-2], node.inputs[-1]) if node.target != "aten.linear.default" else node.inputs[:2]
    n, k = (float(d) for d in (shapes[w] if node.target == "aten.linear.default" else reversed(shapes[w])))
    m = prod(shapes[x]) / k * layout.microbatch_size / graph.batch_size
    if segment.sequence:
        m *= max(segment.shares) / sum(segment.shares) if segment.shares else 1 / layout.tensor
    elif segment.split:
        for shard in layout.shards:
            if f"param:{shard.param}" == w:
                held = max(local_extent(shapes[w][shard.axis], shard, i, layout.tensor) for i in range(layout.tensor))  # of the fullest rank
                n, k = (float(held), k) if shard.axis == 0 else (n, float(held))
    return m, n, k


def _price(table: GemmTable, products: Sequence[tuple[float, float, float]], work: Work, cost: Cost, device: Device) -> Priced:
    interpolated = sum(table.time_s(m, n, k) for m, n, k in products)
    flops = round(sum(2 * m * n * k for m, n, k in products))
    moved = round(sum(m * k + n * k + m * n for m, n, k in products)) * 2
    rest = Work(
        flops=max(0, work.flops - flops), bytes_read=max(0, work.bytes_read + work.bytes_written - moved), calls=max(0, work.calls - len(products))
    )
    assumed = cost.roofline(rest, device).time_s
    return Priced(interpolated + assumed, "interpolated" if interpolated > assumed else "assumed")
