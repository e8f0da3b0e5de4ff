"""Sums in the network: all-reduce through a software switch in the lab, beside the frame bound and gloo in the same namespaces; loss; state counts.

Run: `python benchmarks/aggregate.py` (root; some three minutes on a quiet machine). Workers hang on one switch, or four each on two below a third, by
links of 50 Mbit/s; payloads of 1 KiB, 500,000 elements. Bound: elements * 4 * 8 * (1 + 58/1024) / rate, every byte of every frame once over a link.
A number is the median of the repetitions after a warm-up. Loss is injected in the switch, each way, with as many packets doubled and as many sent
again three turns of their slot later. Every result of every worker is compared with the true sum.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import machine

from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.lab import Lab
from meshwright.lab.aggregators import PORT
from meshwright.testing.aggregate_states import explore, original
from meshwright.testing.aggregate_twin import DONE, Faults, run_schedule

RATE_BPS = 50e6
ELEMENTS, SLOTS = 500_000, 64
BOUND_S = ELEMENTS * 4 * 8 * (1 + 58 / 1024) / RATE_BPS
ROUGHEST_ELEMENTS = 50_000  # at a loss of 20 %: a loss costs its slot a full timeout, so all of them take many minutes
SCHEDULES = 100_000
LOSSES = (0.001, 0.01, 0.05, 0.2)
SIZES = ((1, 1, 3), (2, 1, 3), (2, 1, 6), (3, 1, 4), (2, 2, 6))


def star(workers: int) -> Fabric:
    devices = tuple(Device(name=f"n{i}", kind="cpu") for i in range(workers))
    links = tuple(Link(src=a, dst=b, rate_Bps=int(RATE_BPS / 8)) for d in devices for a, b in ((d.name, "tor"), ("tor", d.name)))
    return Fabric(name=f"star{workers}", devices=devices, switches=(Switch(name="tor", aggregate=True, multicast=True),), links=links)


def two_levels(workers: int) -> Fabric:
    devices = tuple(Device(name=f"n{i}", kind="cpu") for i in range(workers))
    ways = [(d.name, f"leaf{i * 2 // workers}") for i, d in enumerate(devices)] + [("leaf0", "top"), ("leaf1", "top")]
    links = tuple(Link(src=a, dst=b, rate_Bps=int(RATE_BPS / 8)) for x, y in ways for a, b in ((x, y), (y, x)))
    switches = tuple(Switch(name=name, aggregate=True, multicast=True) for name in ("leaf0", "leaf1", "top"))
    return Fabric(name=f"levels{workers}", devices=devices, switches=switches, links=links)


def case(
    name: str, workers: int, lab: Lab, *, arithmetic: str = "exact", dtype: str = "int32", repeat: int = 5, port: int = PORT, **more: Any
) -> dict[str, Any]:
    """`levels`: through two levels of switches."""
    devices, levels = len(lab.fabric.devices), more.pop("levels", False)
    address = [f"{lab.wiring.address(devices + i)}:{port}" for i in range(len(lab.fabric.switches))]
    seats = []
    for rank in range(workers):
        if levels:
            half = workers // 2
            above = [{"address": address[2], "worker": rank // half, "children": 2}]
            seats.append({"switch": address[rank // half], "worker": rank % half, "children": half, "above": above})
        else:
            seats.append({"switch": address[0], "worker": rank, "children": workers, "above": []})
    return {"name": name, "elements": ELEMENTS, "dtype": dtype, "arithmetic": arithmetic, "repeat": repeat, "slots": SLOTS,
            "switch": "" if arithmetic == "gloo" else address[0], "seats": seats, **more}  # fmt: skip


def run(lab: Lab, cases: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def sink(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if text.startswith('{"case"'):
            row = json.loads(text)
            found[row["case"]] = row
            print(f"{row['case']:<40} {statistics.median(row['times_s']):.4f} s  wrong {row['wrong']}  {row.get('resent', '')}", flush=True)
        elif "hostname" not in text and "socket.cpp" not in text:
            sys.stderr.write(f"{rank}: {text}")

    lab.run([sys.executable, str(Path(__file__).with_name("aggregate_worker.py"))], env={"CASES": json.dumps(cases)}, timeout_s=590, sink=sink)
    return found


def row(what: str, got: Any, peer: float, *, asked: float | None = None, more: bool = False, name: str = "peer") -> dict[str, Any]:
    """`asked`: of the time over the peer's, at most; `more`: of the peer's over the time, at least."""
    time_s = statistics.median(got["times_s"])
    ratio = peer / time_s if more else time_s / peer
    return {"what": what, "value": time_s, "unit": "s", "peer": peer, "ratio": ratio, "asked": asked, "wrong": got["wrong"],
            "times_s": got["times_s"], "resent": got.get("resent"), "peer_is": name}  # fmt: skip


def aggregated() -> list[dict[str, Any]]:
    rows, plain = [], {}
    for workers in (2, 4, 8):
        with Lab.up(star(workers), verify=False) as lab:
            cases = [case(f"int32 {workers}", workers, lab)]
            if workers == 8:
                cases += [
                    case("gloo 8", 8, lab, arithmetic="gloo"), case("float32 exact 8", 8, lab, dtype="float32"),
                    case("float32 two-limb 8", 8, lab, dtype="float32", arithmetic="two-limb"),
                    case("float32 tree 8", 8, lab, dtype="float32", arithmetic="tree"),
                ]  # fmt: skip
                once = {"repeat": 1, "warm": 0, "in_a_row": 3}
                for i, loss in enumerate(LOSSES):
                    start_lossy(lab, PORT + 1 + i, loss)
                    fewer = {"elements": ROUGHEST_ELEMENTS} if loss > 0.1 else {}
                    cases.append(case(f"int32 8, loss {loss:g}", 8, lab, port=PORT + 1 + i, **(once if loss > 0.02 else {}), **fewer))
            found = run(lab, cases)
        plain[workers] = found[f"int32 {workers}"]
        rows.append(row(f"int32, {workers} workers, beside the frame bound", plain[workers], BOUND_S, asked=1.10, name="bound"))
    alone = statistics.median(plain[8]["times_s"])
    gloo = statistics.median(found["gloo 8"]["times_s"])
    rows.append(row("int32, 8 workers, beside gloo's all-reduce in the same namespaces", plain[8], gloo, asked=1.6, more=True, name="gloo"))
    for words in ("exact", "two-limb"):
        rows.append(row(f"float32 {words}, 8 workers, beside the bound", found[f"float32 {words} 8"], BOUND_S, name="bound"))
    rows.append(row("float32 tree, 8 workers, beside the bound", found["float32 tree 8"], BOUND_S, asked=1.2, name="bound"))
    for loss, asked in zip(LOSSES, (1.3, 2.2, None, None), strict=True):
        size = ROUGHEST_ELEMENTS if loss > 0.1 else ELEMENTS
        rows.append(row(f"int32, {size} elements, 8 workers, loss {loss:g} each way, beside no loss" + (", three in a row" if asked is None else ""),
                        found[f"int32 8, loss {loss:g}"], alone * size / ELEMENTS * (1 if asked else 3), asked=asked, name="no loss"))  # fmt: skip
    with Lab.up(two_levels(8), verify=False) as lab:
        found = run(lab, [case("int32 8, two levels", 8, lab, levels=True)])
        rows.append(row("int32, 8 workers, two levels of switches, beside the bound", found["int32 8, two levels"], BOUND_S, asked=1.3, name="bound"))
    return rows


def start_lossy(lab: Lab, port: int, loss: float) -> None:
    """Another switch process beside the lab's own, which loses, doubles and keeps packets."""
    actor, pace = len(lab.fabric.devices), f"{loss:g}"
    words = [sys.executable, "-m", "meshwright", "collective", "aggregator", "--listen", f"{lab.wiring.address(actor)}:{port}", "--slots", "1024"]
    words += ["--lost", pace, "--doubled", pace, "--late", pace, "--quiet"]
    lab.control.start(f"lossy{port}", actor, words, dict(os.environ), stdout=-3, stderr=-3)


def proofs() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        found = explore(*size)
        trace = explore(*size, take=original).wrong if size[0] > 1 else ()
        rows.append({"what": f"reachable states, {size} workers, slots, chunks", "value": found.states, "unit": "states", "wrong": len(found.wrong),
                     "cannot_end": found.stuck, "published_rule_goes_wrong": list(trace)})  # fmt: skip
        print(f"{size}: {found.states} states, wrong {len(found.wrong)}, stuck {found.stuck}; the published rule: {' / '.join(trace)}", flush=True)
    begin, right, replayed = time.process_time(), 0, 0
    for seed in range(SCHEDULES):
        rates = (0.0, 0.01, 0.05, 0.2)[seed % 4]
        tally = run_schedule(seed, workers=1 + seed % 8, slots=1 + seed % 4, chunks=seed % 17, tensors=1 + seed % 3,
                             faults=Faults(lost=rates, doubled=0.1, kept=0.1))  # fmt: skip
        right += tally.verdict == DONE
        replayed += tally.replayed
    rows.append({"what": f"drawn schedules that ended with the right sums, of {SCHEDULES}", "value": right, "unit": "schedules", "replayed": replayed,
                 "cpu_s": time.process_time() - begin})  # fmt: skip
    print(f"{right} of {SCHEDULES} schedules right, {replayed} packets replayed late", flush=True)
    return rows


if __name__ == "__main__":
    machine.record("aggregate", proofs() + aggregated(), command="python benchmarks/aggregate.py")
