"""Time, memory and size of what leaves as a timeline: a million steps as Chrome JSON, as Perfetto protobuf and as Chakra traces, and back in.

    python benchmarks/timelines_out.py [--quick]

Peers in the same run: `json.loads` of the Chrome file, and protobuf's own runtime parsing the Perfetto file; they also show that the files are valid.
Each case in a fresh process; processor seconds. Writes benchmarks/results/timelines_out.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import numpy as np

RANKS = 64
CASES = ("chrome", "perfetto", "chrome with links", "perfetto with links", "chakra")


def exchange(steps: int) -> tuple[Any, Any, np.ndarray]:
    """Every rank sends to the next and receives from the one before, over and over: (program, fabric, durations)."""
    from meshwright.io.fabric.name import load_fabric
    from meshwright.program.builder import ProgramBuilder

    b = ProgramBuilder(ranks=RANKS, name="exchange")
    buffers = [b.buffer(rank, chunks=2, chunk_bytes=4096) for rank in range(RANKS)]
    channels = [b.channel(rank, (rank + 1) % RANKS, depth=2) for rank in range(RANKS)]
    for rank in range(RANKS):
        out, into = b.lane(rank), b.lane(rank)
        for _ in range(steps // (2 * RANKS)):
            out.send(channels[rank], buffers[rank], 0)
            into.recv(channels[rank - 1], buffers[rank], 1)
    program = b.build()
    return program, load_fabric(f"dgx-h100:{RANKS // 8}"), np.full(len(program.steps), 1e-6)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(case: str, steps: int) -> dict[str, Any]:
    from meshwright.simulate import simulate_program

    program, fabric, durations_s = exchange(steps)
    if case == "chakra":
        return chakra(program, durations_s)
    devices = [d.name for d in fabric.devices]
    timeline = simulate_program(program, fabric, devices, durations_s=durations_s, transfers="links" in case)
    from meshwright.io.trace.write import trace_bytes

    before = peak_bytes()
    start = time.process_time()
    data = trace_bytes("x.json" if "chrome" in case else "x.pftrace", program, [timeline])
    written_s = time.process_time() - start
    row = {"steps": len(program.steps), "cpu_s": written_s, "size_bytes": len(data), "peak_bytes": peak_bytes(), "peak_before_bytes": before}
    row["transfers"] = len(timeline.transfers) if timeline.transfers is not None else 0
    start = time.process_time()
    if "chrome" in case:
        row["events"] = len(json.loads(data)["traceEvents"])
    else:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

        trace = Trace()
        trace.ParseFromString(data)
        row["events"] = len(trace.packet)
    row["peer_reads_s"] = time.process_time() - start
    return row


def chakra(program: Any, durations_s: np.ndarray) -> dict[str, Any]:
    from meshwright.interop.from_chakra import from_chakra
    from meshwright.interop.to_chakra import to_chakra
    from meshwright.io.chakra.et import chakra_bytes, parse_chakra

    start = time.process_time()
    traces = to_chakra(program, durations_s)
    made_s = time.process_time() - start
    start = time.process_time()
    files = [chakra_bytes(trace) for trace in traces.traces]
    written_s = time.process_time() - start
    start = time.process_time()
    again = [parse_chakra(data, "x.et") for data in files]
    read_s = time.process_time() - start
    assert tuple(again) == traces.traces
    start = time.process_time()
    back = from_chakra(traces, lambda *_: None)  # type: ignore[arg-type,return-value]
    return {
        "steps": len(program.steps), "nodes": sum(len(t.nodes) for t in traces.traces), "made_cpu_s": made_s, "written_cpu_s": written_s,
        "read_cpu_s": read_s, "imported_cpu_s": time.process_time() - start, "imported_steps": len(back.program.steps),
        "size_bytes": sum(map(len, files)), "peak_bytes": peak_bytes(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20,000 steps; writes nothing")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = 20_000 if args.quick else 1_024_000
    if args.case:
        print(json.dumps(measure(args.case, steps)))
        return 0
    rows: dict[str, Any] = {}
    about = machine.describe()
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, *(["--quick"] if args.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows[case] = json.loads(done.stdout)
        print(case, rows[case], flush=True)
    if not args.quick:
        document = {"schema": "meshwright.benchmark.timelines-out", "version": 1, "machine": about, "rows": rows}
        (machine.RESULTS / "timelines_out.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
