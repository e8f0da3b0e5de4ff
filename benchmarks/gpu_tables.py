"""How far models of measured GPU tables are off on rows they have not seen: matrix products and collectives of real GPUs.

    python benchmarks/gpu_tables.py [--systems h100_sxm,a100_sxm,h200_sxm]

Needs the extra `tables` (only its Parquet files are read; no data is copied). Protocol and models: `meshwright.probe.costs.gpu_tables_models`. Per
table
version: every second size held back, interpolating model and compact model (eight numbers) beside one alpha-beta line per curve; for NCCL also the
largest quarter of the sizes held back. Rows per kernel are listed too, and what the noise of a table alone is where two more tables of the same
calls show it. A row that misses its limit has ratio above 1 and is printed with `MISS`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

SYSTEMS = ("h100_sxm", "a100_sxm", "h200_sxm")
MEDIAN, LOOSER_MEDIAN, P90, COMPACT, BEYOND = 0.04, 0.05, 0.18, 0.10, 0.12


def rows_of(table: str, what: str, errors: Any, limits: tuple[float | None, float | None]) -> list[dict[str, Any]]:
    found = errors.summary()
    out = []
    for name, key, limit in (("median", "median", limits[0]), ("90th percentile", "p90", limits[1])):
        row = {
            "what": f"{table}: {what}, {name}", "value": round(found[key], 4), "unit": "relative error", "line": round(found[f"line_{key}"], 4),
            "points": int(found["points"]),
        }  # fmt: skip
        out.append(row | ({"limit": limit} if limit is not None else {}))
    return out


def nccl(system: str, rows: list[dict[str, Any]], tables: list[dict[str, Any]]) -> None:
    from meshwright.io.costs.perf_tables import nccl_versions, read_nccl, read_system
    from meshwright.probe.costs.gpu_tables_models import nccl_table_errors

    for version in nccl_versions(system):
        curves, rejected, _ = read_nccl(system, version)
        table = f"{system} nccl {version}"
        tables.append({"table": table, "curves": len(curves), **rejected.to_json()})
        found = nccl_table_errors(curves, read_system(system).link_Bps)
        median = LOOSER_MEDIAN if version == "2.23" else MEDIAN
        rows += rows_of(table, "interpolating", found["interpolating"], (median, P90))
        rows += rows_of(table, "compact", found["compact"], (COMPACT, None))
        rows += rows_of(table, "largest quarter", found["largest quarter"], (BEYOND, None))


def gemm(system: str, rows: list[dict[str, Any]], kernels: list[dict[str, Any]], tables: list[dict[str, Any]]) -> None:
    from meshwright.io.costs.perf_tables import gemm_versions, read_gemm, read_system
    from meshwright.probe.costs.gpu_tables_models import TableErrors, gemm_table_errors

    for framework, version in gemm_versions(system):
        curves, rejected, _ = read_gemm(system, framework, version)
        table = f"{system} gemm {framework} {version}"
        tables.append({"table": table, "curves": len(curves), **rejected.to_json()})
        found = gemm_table_errors(curves, read_system(system))
        median = LOOSER_MEDIAN if system == "a100_sxm" else MEDIAN
        rows += rows_of(table, "interpolating", TableErrors.joined([e.interpolating for e in found.values()]), (median, P90))
        rows += rows_of(table, "compact", TableErrors.joined([e.compact for e in found.values()]), (COMPACT, None))
        for (dtype, source), e in found.items():
            name = f"{table} / {dtype} / {source}"
            about = {"form": e.table.form, "numbers": [round(x, 4) for x in e.numbers], "tile": e.tile}
            for r in rows_of(name, "interpolating", e.interpolating, (None, None)) + rows_of(name, "compact", e.compact, (None, None)):
                kernels.append(r | about)


def noise(system: str) -> list[dict[str, Any]]:
    """What no model of a table gets below: its bfloat16 rows that are held back, read off the other frameworks' tables of the same GPU and library.

    The predictor is the mean logarithm of the two other tables (of the newest versions), moved for every m by what suits the held rows themselves
    best. The products are the same calls, so what is left is noise (of all three). Only tables with two such companions have a row.
    """
    import numpy as np

    from meshwright.io.costs.perf_tables import gemm_versions, read_gemm

    newest = dict(reversed(gemm_versions(system)))
    tables = {}
    for framework, version in newest.items():
        curves = [c for c in read_gemm(system, framework, version)[0] if c.dtype == "bfloat16"]
        rows_of_it = ((c, i, x, t) for c in curves for i, (x, t) in enumerate(zip(c.m, c.times_s, strict=True)))
        tables[f"{framework} {version}"] = {(float(x), c.n, c.k): (i % 2 == 1, np.log(t)) for c, i, x, t in rows_of_it}
    rows = []
    for name, mine in tables.items():
        others = [t for other, t in tables.items() if other != name]
        held = sorted(key for key, (back, _) in mine.items() if back and all(key in t for t in others))
        if len(others) != 2 or len(held) < 1000:
            continue
        left = np.array([mine[key][1] - (others[0][key][1] + others[1][key][1]) / 2 for key in held])
        m = np.array([key[0] for key in held])
        errors = np.empty(len(held))
        for x in np.unique(m):
            here = m == x
            errors[here] = min((np.abs(np.expm1(s - left[here])) for s in np.linspace(-0.1, 0.2, 61)), key=lambda e: float(np.median(e)))
        for what, value in (("median", np.median(errors)), ("90th percentile", np.percentile(errors, 90))):
            named = f"{system} gemm {name} / bfloat16: noise, {what}"
            rows.append({"what": named, "value": round(float(value), 4), "unit": "relative error", "points": len(held)})
    return rows


def main() -> None:
    from meshwright.io.costs.perf_tables import package_version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated (default: %(default)s)")
    systems = parser.parse_args().systems.split(",")
    rows: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    floors: list[dict[str, Any]] = []
    begin = time.process_time()
    for system in systems:
        nccl(system, rows, tables)
        gemm(system, rows, kernels, tables)
        floors += noise(system)
    machine.record(
        "gpu_tables", rows, kernels=kernels, noise=floors, package=f"aiconfigurator-core {package_version()}", tables=tables,
        cpu_seconds=round(time.process_time() - begin, 1),
        protocol="every second size held back, or the largest quarter; line: one alpha-beta line per curve on the same rows",
    )  # fmt: skip
    for r in rows + kernels:
        verdict = "" if "limit" not in r else f"limit {r['limit']:.0%}{'  MISS' if r['value'] > r['limit'] else ''}"
        print(f"{r['what']:110s} {r['value']:8.2%}  line {r['line']:8.2%}  ({r['points']} points) {verdict}")
    for r in floors:
        print(f"{r['what']:110s} {r['value']:8.2%}  ({r['points']} points)")


if __name__ == "__main__":
    main()
