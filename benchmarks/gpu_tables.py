"""How far interpolating in measured GPU tables is off: collectives and matrix products of real GPUs, every second size held back.

Log-log interpolation beside one alpha-beta line. Needs the extra `tables` (only its Parquet files are read). The first and last size of a
curve are never held back, so nothing is extrapolated; see `meshwright.probe.fit` for the protocol.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

SYSTEMS = ("h100_sxm", "h200_sxm", "a100_sxm", "b200_sxm", "gb200")
FRAMEWORKS = ("vllm", "sglang", "trtllm")


def row(what: str, errors: Any) -> list[dict[str, Any]]:
    """Two rows: interpolation against the line, median and 95th percentile."""
    return [
        {"what": f"{what}, {name}", "value": round(getattr(errors, f"curve_{key}"), 4), "unit": "relative error",
         "peer": round(getattr(errors, f"line_{key}"), 4), "points": errors.points}
        for key, name in (("median", "median"), ("p95", "95th percentile"))
    ]  # fmt: skip


def main() -> None:
    from meshwright.errors import UnknownName
    from meshwright.io.perf_tables import package_version, read_gemm, read_nccl
    from meshwright.probe.gpu_tables import gemm_errors, nccl_errors, tables_cost

    rows: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    costs: dict[str, Any] = {}
    begin = time.process_time()
    for system in SYSTEMS:
        curves, rejected, version = read_nccl(system)
        tables.append({"table": f"{system} nccl {version}", "curves": len(curves), **rejected.to_json()})
        for op, errors in nccl_errors(curves).items():
            rows += row(f"{system} nccl {version} {op}", errors)
        for framework in FRAMEWORKS:
            try:
                products, rejected, version = read_gemm(system, framework)
            except UnknownName as error:
                tables.append({"table": f"{system} gemm {framework}", "absent": str(error)})
                continue
            tables.append({"table": f"{system} gemm {version}", "curves": len(products), **rejected.to_json()})
            for kind, errors in gemm_errors(products).items():
                rows += row(f"{system} gemm {version} {kind}", errors)
        cost = tables_cost(system)
        costs[system] = {
            "flops_efficiency": round(cost.flops_efficiency, 4), "per_call_s": cost.per_call_s, "per_message_s": cost.transport.per_message_s,
            "per_byte_s": cost.transport.per_byte_s, "source": cost.source,
        }  # fmt: skip
    seconds = round(time.process_time() - begin, 1)
    machine.record(
        "gpu_tables", rows, package=f"aiconfigurator-core {package_version()}", tables=tables, costs=costs, cpu_seconds=seconds,
        protocol="every second size held back, first and last kept; value: log-log interpolation, peer: one alpha-beta line",
    )  # fmt: skip
    for r in rows:
        print(f"{r['what']:95s} {r['value']:8.2%}  line {r['peer']:8.2%}  ratio {r.get('ratio', 0):.2f}  ({r['points']} points)")
    print(f"{seconds} s of CPU time")


if __name__ == "__main__":
    main()
