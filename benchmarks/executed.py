"""Collectives on real processes and sockets in the lab, against gloo's own, our bound with the measured goodput of every link in it, and each other.

Run: `python benchmarks/executed.py` (root or user namespaces; about twelve minutes on two quiet cores), or in pieces (`--only slow-node --part FILE`,
..., then `--join FILE...`), and `python benchmarks/executed.py unshaped` for what the backend adds where it has no plan (three minutes). All figures
are medians of ITERATIONS after warm-up, of the slowest rank; results are verified element by element. "tuned": the first calls try the four programs
predicted to be fastest, and gloo.
"""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from lab_worker import measure

from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric

MIB = 1 << 20
ITERATIONS = 5
TUNED = 4


def links(a: str, b: str, mbit: int) -> tuple[Link, Link]:
    rate = mbit * 125_000
    return Link(src=a, dst=b, rate_Bps=rate), Link(src=b, dst=a, rate_Bps=rate)


def star(*mbit: int) -> Fabric:
    devices = tuple(Device(name=f"n{i}", kind="cpu") for i in range(len(mbit)))
    row = tuple(x for i, rate in enumerate(mbit) for x in links(f"n{i}", "switch", rate))
    return Fabric(name="star", devices=devices, switches=(Switch(name="switch"),), links=row)


def islands(each: int, mbit: int, trunk: int) -> Fabric:
    devices = tuple(Device(name=f"n{i}", kind="cpu") for i in range(2 * each))
    row = [x for i in range(2 * each) for x in links(f"n{i}", f"s{i // each}", mbit)]
    return Fabric(name="islands", devices=devices, switches=(Switch(name="s0"), Switch(name="s1")), links=(*row, *links("s0", "s1", trunk)))


def dgx1_part() -> Fabric:
    """GPUs 0-4 of a DGX-1 V100: NVLinks only, without its PCIe."""
    fabric = load_fabric("dgx1-v100:1", "0-4")
    keep = {d.name for d in fabric.devices}
    row = tuple(x for x in fabric.links if x.src in keep and x.dst in keep)
    return Fabric(name="dgx1-v100 GPUs 0-4", devices=fabric.devices, links=row)


def faster(what: str, peer: dict[str, Any], ours: dict[str, Any], asked: float) -> dict[str, Any]:
    gain = peer["time_s"] / ours["time_s"]
    return {
        "what": what, "value": round(gain, 3), "unit": "x", "limit": asked, "ratio": round(gain / asked, 3), "higher_is_better": True,
        "ours": ours, "peer_row": peer,
    }  # fmt: skip


def over_bound(what: str, row: dict[str, Any], asked: float) -> dict[str, Any]:
    return {"what": what, "value": round(row["time_s"] / row["bound_s"], 4), "unit": "x", "limit": asked}


def case(what: str, fabric: Fabric, size: int, asked: float, *, order: list[int] | None = None) -> list[dict[str, Any]]:
    from meshwright.lab import Lab

    jobs = [
        {"op": "all-reduce", "sizes": [size], "backend": "gloo", "iterations": ITERATIONS, "warmup": 2},
        {"op": "all-reduce", "sizes": [size], "iterations": ITERATIONS, "warmup": 2, "builtin": True},
        {"op": "all-reduce", "sizes": [size], "iterations": ITERATIONS, "warmup": 2, "tune": TUNED},
    ]
    with Lab.up(fabric) as lab:
        gloo, predicted, tuned = measure(lab, jobs, order=order)
    rows = []
    for how, row in (("predicted choice", predicted), ("tuned", tuned)):
        rows.append(faster(f"{what}: speed over gloo, {how}", gloo, row, asked))
        rows.append(over_bound(f"{what}: time over the bound, {how}", row, 1.10))
    return rows


def dgx1() -> list[dict[str, Any]]:
    """Joint packing against reduce-scatter, then all-gather, on ForestColl's optimal trees, both ours, both executed."""
    from meshwright.lab import Lab

    fabric = dgx1_part()
    scale = Fraction(min(x.rate_Bps for x in fabric.links), 25 * 125_000)
    rows = []
    with Lab.up(fabric, scale=scale) as lab:
        for size in (4 * MIB, 8 * MIB):
            jobs = [{"op": op, "sizes": [size], "strategies": ["forestcoll"], "iterations": 5} for op in ("reduce-scatter", "all-gather")]
            scatter, gather, piped, joint = measure(lab, [
                *jobs, *({"op": "all-reduce", "sizes": [size], "strategies": [s], "iterations": 5} for s in ("forestcoll", "joint"))
            ])  # fmt: skip
            halves = {"what": "reduce-scatter, then all-gather", "time_s": scatter["time_s"] + gather["time_s"], "rows": [scatter, gather]}
            name = f"DGX-1 V100 GPUs 0-4, {size // MIB} MiB"
            rows.append(faster(f"{name}: joint over reduce-scatter + all-gather", halves, joint, 1.4))
            rows.append(faster(f"{name}: joint over the same halves pipelined into each other", piped, joint, 1.0))
            rows.append(over_bound(f"{name}: joint over its bound", joint, 1.12))
    return rows


def unshaped() -> list[dict[str, Any]]:
    """Without a fabric everything goes to gloo: what the backend adds to each call, on the same sockets, in pairs (`lab_worker.paired`)."""
    import json
    import os
    import socket
    import subprocess

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "LAB_PAIRED": "1"}
    command = [sys.executable, str(Path(__file__).with_name("lab_worker.py"))]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(2)]
    said = [r.communicate(timeout=550)[0] for r in ranks]
    rows = []
    for line in said[0].splitlines():
        if line.startswith('{"row"'):
            row = json.loads(line)["row"]
            what = f"unshaped machine, {row['op']}, {row['size_bytes']} B"
            own, twin, added = row.pop("own"), row.pop("own_twin"), 1e6 * (row.pop("caller_cpu_s") - row.pop("gloo_caller_cpu_s"))
            rows.append({**row, "what": f"{what}: time over gloo", "value": round(row["value"], 3), "unit": "x", "limit": 1.1})
            rows.append({"what": f"{what}: over gloo groups with sockets of their own", "value": round(own, 3), "unit": "x", "their_spread": twin})
            if row["size_bytes"] <= 1 << 18:  # beyond, copies into cold memory drown what a call costs
                rows.append({"what": f"{what}: processor time added per call", "value": round(added, 1), "unit": "us"})
    return rows


def slow_node() -> list[dict[str, Any]]:
    return case("slow node (400/400/400/100 Mbit/s), 32 MiB", star(400, 400, 400, 100), 32 * MIB, 1.35)


def contiguous() -> list[dict[str, Any]]:
    return case("two islands of four, trunk 200 Mbit/s, 16 MiB, contiguous ranks", islands(4, 1000, 200), 16 * MIB, 1.7)


def interleaved() -> list[dict[str, Any]]:
    what = "two islands of four, trunk 200 Mbit/s, 16 MiB, interleaved ranks"
    return case(what, islands(4, 1000, 200), 16 * MIB, 6.0, order=[0, 4, 1, 5, 2, 6, 3, 7])


CASES = {"slow-node": slow_node, "contiguous": contiguous, "interleaved": interleaved, "dgx1": dgx1}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("lab", "unshaped"), default="lab")
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--part", metavar="FILE", help="write the rows of --only here instead of the results")
    parser.add_argument("--join", nargs="+", metavar="FILE", help="record what --part wrote, instead of running anything")
    args = parser.parse_args()
    if args.what == "unshaped":
        rows = unshaped()
    elif args.join:
        rows, _ = machine.join_parts(args.join)
    else:
        rows = [row for name in args.only for row in CASES[name]()]
    for row in rows:
        asked = f" (asked {row['limit']})" if "limit" in row else ""
        print(f"{row['what']:<95} {row['value']:>8} {row['unit']}{asked}")
    if args.part:
        machine.keep_part(args.part, rows)
    elif args.what == "unshaped":
        machine.record("unshaped", rows, command="python benchmarks/executed.py unshaped")
    else:
        machine.record("executed", rows)


if __name__ == "__main__":
    main()
