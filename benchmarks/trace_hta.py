"""Device times beside HolisticTraceAnalysis's on the same files: idle, compute, the rest, overlap; and how long both take, parsing included.

`--start TRACE`: nothing but processor time (user and system) of whole processes on one trace, start and imports included, three each: HTA's temporal
breakdown and overlap, our device totals (the same question), and our `trace breakdown` (the critical path and causes as well).

Run: `python benchmarks/trace_hta.py --hta-python PYTHON [--quick] [TRACE ...]` (prints a summary; raw output goes to results/trace_hta.json).

`PYTHON` is an interpreter in whose environment `HolisticTraceAnalysis` is installed: it runs in a child process and is no dependency. Traces
are CUDA-like ones made by `tests/bottleneck/cuda_traces.py` (several ranks, streams, NCCL kernels), or the given ones, all ranks in one
folder. Both settings of `include_last_profiler_step` are compared; limit: 0.5 % of the kernel time (overlap: 0.5 points). Times are from the
files on disk to the numbers, one process each for all ranks, imports left out, the better of two runs; HTA parses ranks in several processes
as it does by default.

By default HTA rounds starts of traces with ns up and ends down to whole us, which takes a us from every kernel. It is compared both ways: as it is
by default, and with that rounding off (HTA_DISABLE_NS_ROUNDING=1), which shows that the definitions are the same; and on a trace in
whole us, as Kineto wrote them before. HTA 0.5.0 needs pandas < 3 for traces of more than 32,767 events.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "bottleneck"))
import machine
from cuda_traces import Settings, write_ranks

LIMIT, FASTER = 0.005, 5.0
CHILD = r"""
import json, sys, time, warnings, logging
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
files, last, repeat = json.loads(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3])
best = 1e9
for _ in range(repeat):
    start = time.perf_counter()
    analysis = TraceAnalysis(trace_files={int(k): v for k, v in files.items()}, trace_dir="", include_last_profiler_step=last)
    times = analysis.get_temporal_breakdown(visualize=False)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    best = min(best, time.perf_counter() - start)
rows = times.merge(overlap, on="rank").to_dict("records")
print("RESULT" + json.dumps({"wall_s": best, "rows": rows}, default=float))
"""


def theirs(python: str, files: list[Path], last: bool, repeat: int, *, exact: bool = False) -> dict[str, Any]:
    names = json.dumps({i: str(f) for i, f in enumerate(files)})
    environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1" if exact else "0"}
    command = [python, "-c", CHILD, names, str(int(last)), str(repeat)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, cwd=tempfile.gettempdir(), env=environment)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(f"HolisticTraceAnalysis failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return found


def ours(files: list[Path], last: bool, repeat: int) -> dict[str, Any]:
    from meshwright.bottleneck.device import DeviceTimes, device_times
    from meshwright.io.each_file import each_file
    from meshwright.io.trace.read import read_trace

    def times(_: int, path: Path) -> DeviceTimes | None:
        return device_times(read_trace(path), last_step=last)

    best, rows = float("inf"), []
    for _ in range(repeat):
        start = time.perf_counter()
        found = each_file(times, files)
        best = min(best, time.perf_counter() - start)
        rows = [{"rank": i, **vars(t)} for i, t in enumerate(found) if t is not None]
    return {"wall_s": best, "rows": rows}


OURS = r"""
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as the command does
from pathlib import Path
from meshwright.bottleneck.device import device_times
from meshwright.io.trace.read import read_trace
print(device_times(read_trace(Path(sys.argv[1]))))
"""


def started(command: list[str], environment: dict[str, str]) -> float:
    """Processor seconds of a process from its start to its end, its children's included; the better of three."""
    best = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True, cwd=tempfile.gettempdir(), env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def start_included(python: str, trace: Path) -> None:
    """Prints and records the whole processes on one trace. Both write and use byte code of their modules, as installed packages do."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    with tempfile.TemporaryDirectory() as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        names = json.dumps({"0": str(trace.absolute())})
        theirs_s = started([python, "-c", CHILD, names, "1", "1"], environment)
        same_s = started([sys.executable, "-c", OURS, str(trace.absolute())], environment)
        whole_s = started([sys.executable, "-m", "meshwright", "trace", "breakdown", str(trace.absolute())], environment)
    rows = [
        {"what": "device totals by a script of one BLAS thread, start included", "value": round(same_s, 3), "unit": "s", "peer": round(theirs_s, 3),
         "ratio": round(same_s / theirs_s, 3)},
        {"what": "whole breakdown, start included", "value": round(whole_s, 3), "unit": "s", "peer": round(theirs_s, 3),
         "ratio": round(whole_s / theirs_s, 3)},
    ]  # fmt: skip
    for row in rows:
        print(f"{row['what']:<65} {row['value']:>8} s, HTA {row['peer']} s: {1 / row['ratio']:.1f} times faster")
    machine.record("trace_hta_start", rows, command="python benchmarks/trace_hta.py --hta-python PYTHON --start TRACE", raw=[{"trace": trace.name}])


def whole(files: list[Path]) -> float:
    """Seconds of the whole breakdown, critical path and causes included."""
    from meshwright.compare.breakdown import breakdown_of

    start = time.perf_counter()
    breakdown_of(files)
    return time.perf_counter() - start


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """Ours and theirs, with the largest difference as a share of the kernel time."""
    out = []
    for x, y in zip(a["rows"], b["rows"], strict=True):
        kernel = y["kernel_time(us)"] / 1e6
        pairs = {"idle": "idle_time(us)", "compute": "compute_time(us)", "other": "non_compute_time(us)", "kernel": "kernel_time(us)"}
        off = {k: abs(x[f"{k}_s"] - y[name] / 1e6) / kernel for k, name in pairs.items()}
        off["overlap"] = abs(100 * x["overlap"] - y["comp_comm_overlap_pctg"]) / 100
        out.append({"rank": x["rank"], "ours": x, "theirs": y, "off": off})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hta-python", required=True, help="interpreter of an environment with HolisticTraceAnalysis")
    parser.add_argument("--quick", action="store_true", help="small traces, nothing written")
    parser.add_argument("traces", nargs="*", type=Path, help="real traces instead, one per rank")
    parser.add_argument("--start", type=Path, metavar="TRACE", help="whole processes on this trace instead, start included")
    args = parser.parse_args()
    if args.start:
        start_included(args.hta_python, args.start)
        return
    cases = [("1 rank", Settings(ranks=1, steps=40, layers=60, seed=1)), ("4 ranks", Settings(ranks=4, steps=30, layers=60, seed=2, skew_us=200.0))]
    cases.append(("2 ranks in whole us", Settings(ranks=2, steps=30, layers=60, seed=3, whole_us=True)))
    if args.quick:
        cases = [("2 ranks", Settings(ranks=2, steps=5, layers=10, seed=1))]
    rows, raw = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in [("given", None)] if args.traces else cases:
            place = Path(folder) / name.replace(" ", "-")
            place.mkdir()
            files = args.traces or write_ranks(place, settings)
            ours(files[:1], True, 1)  # compile
            for last in (True, False):
                a, b = ours(files, last, 2), theirs(args.hta_python, files, last, 2)
                compared = {"rounded": compare(a, b), "exact": compare(a, theirs(args.hta_python, files, last, 1, exact=True))}
                setting = f"include_last_profiler_step={last}"
                for how, found in compared.items():
                    worst = max(max(c["off"].values()) for c in found)
                    rows.append({"what": f"{name}, {setting}, {how}", "value": round(worst, 7), "unit": "of kernel time", "limit": LIMIT})
                speed = b["wall_s"] / a["wall_s"]
                rows.append({"what": f"{name}, {setting}: times faster", "value": round(speed, 2), "unit": "x", "ratio": round(FASTER / speed, 3)})
                raw.append({"case": name, "last_step": last, "ours_s": a["wall_s"], "theirs_s": b["wall_s"], "compared": compared})
            took = whole(files)
            rows.append({"what": f"{name}: whole breakdown", "value": round(took, 3), "unit": "s", "peer": round(raw[-1]["theirs_s"], 3)})
    for row in rows:
        print(f"{row['what']:<70} {row['value']:>10} {row['unit']}")
    if not args.quick:
        command = "python benchmarks/trace_hta.py --hta-python PYTHON" + (" TRACE ..." if args.traces else "")
        machine.record("trace_hta", rows, command=command, raw=raw)


if __name__ == "__main__":
    main()
