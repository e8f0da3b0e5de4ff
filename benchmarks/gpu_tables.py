"""How far models of measured GPU tables are off on rows they have not seen: matrix products and collectives of real GPUs.

    python benchmarks/gpu_tables.py [--systems h100_sxm,a100_sxm,h200_sxm]

Needs the extra `tables` (only its Parquet files are read; no data is copied). Protocol and models: `meshwright.probe.gpu_tables_models`. Per table
version: every second size held back, interpolating model and compact model (eight numbers) beside one alpha-beta line per curve; for NCCL also the
largest quarter of the sizes held back. Rows per kernel are listed too. A row that misses its limit has ratio above 1 and is printed with `MISS`.
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
    from meshwright.io.perf_tables import nccl_versions, read_nccl, read_system
    from meshwright.probe.gpu_tables_models import nccl_table_errors

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
    from meshwright.io.perf_tables import gemm_versions, read_gemm, read_system
    from meshwright.probe.gpu_tables_models import TableErrors, gemm_table_errors

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
            about = {"choice": list(e.table.choice), "numbers": [round(x, 4) for x in e.numbers], "tile": e.tile}
            for r in rows_of(name, "interpolating", e.interpolating, (None, None)) + rows_of(name, "compact", e.compact, (None, None)):
                kernels.append(r | about)


def main() -> None:
    from meshwright.io.perf_tables import package_version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated (default: %(default)s)")
    systems = parser.parse_args().systems.split(",")
    rows: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    begin = time.process_time()
    for system in systems:
        nccl(system, rows, tables)
        gemm(system, rows, kernels, tables)
    machine.record(
        "gpu_tables", rows, kernels=kernels, package=f"aiconfigurator-core {package_version()}", tables=tables,
        cpu_seconds=round(time.process_time() - begin, 1),
        protocol="every second size held back, or the largest quarter; line: one alpha-beta line per curve on the same rows",
    )  # fmt: skip
    for r in rows + kernels:
        verdict = "" if "limit" not in r else f"limit {r['limit']:.0%}{'  MISS' if r['value'] > r['limit'] else ''}"
        print(f"{r['what']:110s} {r['value']:8.2%}  line {r['line']:8.2%}  ({r['points']} points) {verdict}")


if __name__ == "__main__":
    main()
