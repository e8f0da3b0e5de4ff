"""Measured GPU tables of the PyPI package `aiconfigurator-core` (Apache-2.0, NVIDIA): collectives and matrix products on real GPUs.

The Parquet files are read with pyarrow where the package lies on disk; the package itself is never imported. Optional: extra `tables`.
- `nccl_perf`: `message_size` counts ELEMENTS of `nccl_dtype`, of the whole buffer as in nccl-tests; `latency` is in ms. Here: bytes, s.
- `gemm_perf`: (m x k) times (k x n); `latency` in ms.
- the system's YAML: peak rates, one number per line.

One key may have several rows (the first is kept) and several kernel sources (kept apart). Rows faster than physics allows (bytes that must
enter a GPU over its link rate; multiply-adds over its peak) and rows without a positive time are left out. All three are counted and
reported, never averaged in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, MissingExtra, UnknownName
from ..limits import MaxBytes

__all__ = [
    "GemmCurve", "NcclCurve", "Rejected", "System", "gemm_curves", "gemm_versions", "list_systems", "nccl_curves", "nccl_versions",
    "package_version", "read_gemm", "read_nccl", "read_system",
]  # fmt: skip

F64 = NDArray[np.float64]
PACKAGE = "aiconfigurator-core"
MAX_ROWS = 4_000_000  # of one file; the largest real ones have 110,000
ELEMENT_BYTES = {"half": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "float": 4}
PEAK_OF = {
    "bfloat16": "bfloat16_tc_flops", "fp8": "fp8_tc_flops", "fp8_block": "fp8_tc_flops", "int8_wo": "bfloat16_tc_flops",
    "int4_wo": "bfloat16_tc_flops", "sq": "int8_tc_flops",
}  # fmt: skip
OPS = {"all_gather": "all-gather", "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "alltoall": "all-to-all"}
_NUMBER = re.compile(r"^(\s*)(\w+):\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)?\s*(?:#.*)?$")


@dataclass(frozen=True, kw_only=True)
class System:
    """Peaks of one kind of GPU server, from the package's own description. `flops` by the table's dtype names; rates per GPU, one direction."""

    name: str
    memory_bandwidth_Bps: float
    memory_bytes: int
    link_Bps: float
    flops: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """What was left out of a table. `spread` is the largest ratio between rows of one key."""

    rows: int
    duplicates: int
    spread: float
    below_bound: int
    without_time: int

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows, "duplicates": self.duplicates, "spread": self.spread, "below_bound": self.below_bound,
            "without_time": self.without_time,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NcclCurve:
    """Time of one collective over its size (nccl-tests' definition, bytes)."""

    op: str
    dtype: str
    gpus: int
    source: str
    sizes: F64
    times_s: F64


@dataclass(frozen=True, kw_only=True)
class GemmCurve:
    """Time of (m x k)(k x n) over m."""

    dtype: str
    source: str
    n: int
    k: int
    m: F64
    times_s: F64


# ---- where the files are -----------------------------------------------------------------------------------------------


def _root() -> Path:
    spec = find_spec("aiconfigurator_core")  # finds, does not import
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise MissingExtra(PACKAGE, extra="tables", needed_for="reading measured GPU tables")
    return Path(places[0]) / "systems"


def package_version() -> str:
    """Version of the installed tables, for provenance."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise MissingExtra(PACKAGE, extra="tables", needed_for="reading measured GPU tables") from None


def list_systems() -> list[str]:
    """Systems that have a description and data, e.g. `h100_sxm`."""
    root = _root()
    return sorted(p.stem for p in root.glob("*.yaml") if (root / "data" / p.stem).is_dir())


def _folder(system: str) -> Path:
    names = list_systems()
    if system not in names:
        raise UnknownName(f"no measured tables for {system!r}", hint=f"there are: {', '.join(names)}")
    return _root() / "data" / system


def _versions(folder: Path, file: str) -> list[Path]:
    """Files of that name one level below, newest version first."""
    found = [f for f in folder.glob(f"*/{file}") if f.is_file()]
    return sorted(found, key=lambda f: [int(x) for x in re.findall(r"\d+", f.parent.name)], reverse=True)


def _not_larger(path: Path, most: int) -> None:
    size = path.stat().st_size
    if size > most:
        raise FormatError(f"{size:,} bytes are more than the {most:,} that are read", where=str(path), hint="reinstall the package")


def _columns(path: Path, names: Sequence[str]) -> dict[str, Any]:
    _not_larger(path, MaxBytes.PERF_TABLE)
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MissingExtra("pyarrow", extra="tables", needed_for="reading measured GPU tables") from None
    try:
        rows = parquet.read_metadata(path).num_rows
        if rows > MAX_ROWS:
            raise FormatError(f"{rows:,} rows are more than the {MAX_ROWS:,} that are read", where=str(path), hint="reinstall the package")
        table = parquet.read_table(path, columns=list(names))
    except (ArrowException, OSError, ValueError) as error:
        raise FormatError(f"not a table of measurements: {str(error).splitlines()[0]}", where=str(path), hint="reinstall the package") from error
    missing = [n for n in names if n not in table.column_names]
    if missing:
        raise FormatError(f"column {missing[0]!r} is missing", where=str(path), hint=f"this reads the layout of {PACKAGE} 0.12")
    return {n: table.column(n).to_numpy(zero_copy_only=False) for n in names}


def read_system(system: str) -> System:
    """Raises: UnknownName, MissingExtra, FormatError when a peak is missing."""
    _folder(system)
    path = _root() / f"{system}.yaml"
    _not_larger(path, MaxBytes.PERF_SYSTEM)
    return parse_system(system, path.read_text(errors="replace"), where=str(path))


def parse_system(name: str, text: str, *, where: str) -> System:
    """The two-level `section: / key: number  # comment` files; anything else in them is ignored."""
    section, found = "", {}
    for line in text.splitlines():
        match = _NUMBER.match(line)
        if match and not match[1]:
            section = match[2]
        elif match and match[3]:
            found[f"{section}.{match[2]}"] = float(match[3])
    try:
        return System(
            name=name,
            memory_bandwidth_Bps=found["gpu.mem_bw"],
            memory_bytes=int(found["gpu.mem_capacity"]),
            link_Bps=found["node.intra_node_bw"],
            flops={dtype: found[f"gpu.{key}"] for dtype, key in PEAK_OF.items() if f"gpu.{key}" in found},
        )
    except KeyError as error:
        raise FormatError(f"{error.args[0]} is missing", where=where, hint=f"this reads the layout of {PACKAGE} 0.12") from None
    except OverflowError:
        raise FormatError("gpu.mem_capacity is no finite number", where=where, hint=f"this reads the layout of {PACKAGE} 0.12") from None


# ---- collectives -------------------------------------------------------------------------------------------------------


def nccl_versions(system: str) -> list[str]:
    """NCCL versions that this system was measured with, newest first. Raises: UnknownName, MissingExtra."""
    return [f.parent.name for f in _versions(_folder(system) / "comm" / "nccl", "nccl_perf.parquet")]


def gemm_versions(system: str) -> list[tuple[str, str]]:
    """(framework, version) of every table of matrix products of this system. Raises: UnknownName, MissingExtra."""
    folder = _folder(system) / "gemm"
    return [(d.name, f.parent.name) for d in sorted(folder.glob("*")) for f in _versions(d, "gemm_perf.parquet")]


def read_nccl(system: str, version: str | None = None) -> tuple[list[NcclCurve], Rejected, str]:
    """(curves, what was left out, NCCL version) of that table, or of the newest of this system that has all-reduce.

    Raises: UnknownName (no such system, or it has no such table), MissingExtra, FormatError.
    """
    names = ("op_name", "nccl_dtype", "num_gpus", "message_size", "kernel_source", "latency")
    link = read_system(system).link_Bps
    for path in _versions(_folder(system) / "comm" / "nccl", "nccl_perf.parquet"):
        if version is not None and path.parent.name != version:
            continue
        columns = _columns(path, names)
        if version is not None or "all_reduce" in columns["op_name"]:
            curves, rejected = nccl_curves(columns, link_Bps=link)
            return curves, rejected, path.parent.name
    raise UnknownName(f"no complete NCCL table for {system!r}", hint="h100_sxm, h200_sxm, a100_sxm and b200_sxm have one")


def nccl_curves(columns: Mapping[str, Any], *, link_Bps: float) -> tuple[list[NcclCurve], Rejected]:
    """Curves by (op, dtype, GPUs, source) from the table's columns (see the module's text for units)."""
    unknown = sorted({*columns["nccl_dtype"]} - {*ELEMENT_BYTES}) + sorted({*columns["op_name"]} - {*OPS})
    if unknown:
        raise FormatError(f"unknown data type or operation {unknown[0]!r}", where="nccl_perf", hint=f"this reads the layout of {PACKAGE} 0.12")
    sizes = np.asarray(columns["message_size"], np.float64) * np.array([ELEMENT_BYTES[d] for d in columns["nccl_dtype"]])
    times = np.asarray(columns["latency"], np.float64) * 1e-3
    gpus = np.asarray(columns["num_gpus"], np.float64)
    # What must enter (or leave) the busiest GPU whatever the algorithm, also with sums formed inside switches.
    must_move = np.where(np.asarray(columns["op_name"]) == "all_reduce", sizes, sizes * (gpus - 1) / gpus)
    named = [columns[c] for c in ("op_name", "nccl_dtype", "num_gpus", "kernel_source")]
    keys = [(OPS[o], str(d), int(g), str(s)) for o, d, g, s in zip(*named, strict=True)]
    groups, rejected = _group(keys, sizes, times, must_move / link_Bps)
    return [NcclCurve(op=k[0], dtype=k[1], gpus=k[2], source=k[3], sizes=x, times_s=y) for k, (x, y) in groups.items()], rejected


# ---- matrix products ---------------------------------------------------------------------------------------------------


def read_gemm(system: str, framework: str = "vllm", version: str | None = None) -> tuple[list[GemmCurve], Rejected, str]:
    """(curves over m, what was left out, version) of that table, or the newest, that `framework` (vllm, sglang, trtllm) was measured with."""
    names = ("kernel_source", "gemm_dtype", "m", "n", "k", "latency")
    folder = _folder(system) / "gemm"
    paths = [f for f in _versions(folder / framework, "gemm_perf.parquet") if version in (None, f.parent.name)]
    if not paths:
        known = sorted(p.name for p in folder.glob("*") if p.is_dir())
        raise UnknownName(f"no matrix product table for {system!r} with {framework!r}", hint=f"there are: {', '.join(known) or 'none'}")
    curves, rejected = gemm_curves(_columns(paths[0], names), flops=read_system(system).flops)
    return curves, rejected, f"{framework} {paths[0].parent.name}"


def gemm_curves(columns: Mapping[str, Any], *, flops: Mapping[str, float]) -> tuple[list[GemmCurve], Rejected]:
    """Curves by (dtype, source, n, k). The bound is multiply-adds over the peak of the dtype; where the peak is unknown there is none.

    Memory bandwidth gives no bound here: repeated measurements find their operands in the cache.
    """
    m, n, k = (np.asarray(columns[c], np.float64) for c in "mnk")
    times = np.asarray(columns["latency"], np.float64) * 1e-3
    peak = np.array([flops.get(d, np.inf) for d in columns["gemm_dtype"]])
    keys = list(zip(columns["gemm_dtype"], columns["kernel_source"], n.astype(int).tolist(), k.astype(int).tolist(), strict=True))
    groups, rejected = _group(keys, m, times, 2 * m * n * k / peak)
    return [GemmCurve(dtype=str(g[0]), source=str(g[1]), n=g[2], k=g[3], m=x, times_s=y) for g, (x, y) in groups.items()], rejected


def _group(keys: Sequence[tuple[Any, ...]], x: F64, y: F64, bound_s: F64) -> tuple[dict[tuple[Any, ...], tuple[F64, F64]], Rejected]:
    """Sorted (sizes, times) per key; the first row of equal (key, size) counts."""
    usable = np.isfinite(y) & (y > 0) & (x > 0)
    fast = usable & (y < bound_s)
    groups: dict[tuple[Any, ...], dict[float, float]] = {}
    duplicates, spread = 0, 1.0
    for i in np.flatnonzero(usable & ~fast).tolist():
        points = groups.setdefault(keys[i], {})
        size, time_s = float(x[i]), float(y[i])
        if size in points:
            duplicates += 1
            spread = max(spread, points[size] / time_s, time_s / points[size])
        else:
            points[size] = time_s
    found = {}
    for key in sorted(groups, key=str):
        sizes = sorted(groups[key])
        found[key] = (np.array(sizes), np.array([groups[key][s] for s in sizes]))
    rejected = Rejected(
        rows=len(y), duplicates=duplicates, spread=spread, below_bound=int(fast.sum()), without_time=int(len(y) - usable.sum())
    )
    return found, rejected
