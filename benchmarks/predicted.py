"""Prediction against measurement: every strategy that makes an all-reduce, six fabrics, 64 KiB to 64 MiB, real processes in the lab.

Run: `python benchmarks/predicted.py` (root or user namespaces; about half an hour). Overheads of the executor (per message, per byte) and what a
link loses per flow that shares it are fitted on two fabrics and two sizes that are not among those tested; rates of links are the lab's own
calibration. Then nothing is adjusted any more. A prediction is the simulated time of the walk that ran, at each link's measured goodput.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from executed import islands, links, star
from lab_worker import measure

from meshwright.cost import Cost, Transport
from meshwright.fabric import Device, Fabric, Switch

KIB, MIB = 1 << 10, 1 << 20
STRATEGIES = (
    "ring", "forestcoll", "joint", "taccl", "blink", "blueconnect", "cloudcollectives", "hierarchical", "rooted-tree", "double-tree",
    "halving-doubling", "recursive-doubling", "bruck", "direct",
)  # fmt: skip
FIT_SIZES = (512 * KIB, 2 * MIB, 8 * MIB)
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
LARGE = (16 * MIB,)
LARGEST, ON = (64 * MIB,), ("five alike", "ring of cables")  # the quick fabrics: a direct exchange on the others takes a minute
COUNTED = MIB  # errors are asked for from here on
PER_MESSAGE_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4)
PER_BYTE_S = (0.0, 5e-10, 1e-9, 2e-9, 4e-9)
LOSS_PER_FLOW = (0.0, 0.005, 0.01, 0.02, 0.04)


def named(name: str, devices: int, switches: tuple[str, ...], rows: list[tuple[str, str, int]]) -> Fabric:
    row = tuple(x for a, b, mbit in rows for x in links(a, b, mbit))
    members = tuple(Device(name=f"n{i}", kind="cpu") for i in range(devices))
    return Fabric(name=name, devices=members, switches=tuple(Switch(name=s) for s in switches), links=row)


def one_way() -> Fabric:
    """Uplinks of 200, downlinks of 100 Mbit/s."""
    fabric = star(200, 200, 200, 200)
    return replace(fabric, name="one way", links=tuple(replace(x, rate_Bps=x.rate_Bps // 2) if x.src == "switch" else x for x in fabric.links))


def racks() -> Fabric:
    ports = [(f"n{i}", f"rack{i // 2}", 200) for i in range(6)]
    return named("three racks", 6, ("rack0", "rack1", "rack2", "core"), [*ports, *((f"rack{i}", "core", 150) for i in range(3))])


def cables() -> Fabric:
    """Four devices in a ring of direct links, one of them slow."""
    return named("ring of cables", 4, (), [("n0", "n1", 200), ("n1", "n2", 200), ("n2", "n3", 200), ("n3", "n0", 100)])


FIT = {"small islands": islands(2, 200, 80), "fast star": star(1000, 1000, 1000, 1000, 1000, 200)}
TEST = {
    "slow node": star(200, 200, 200, 50), "five alike": star(150, 150, 150, 150, 150), "islands": islands(3, 200, 100), "one way": one_way(),
    "three racks": racks(), "ring of cables": cables(),
}  # fmt: skip


def measured(
    fabrics: dict[str, Fabric], sizes: tuple[int, ...], folder: str, large: tuple[int, ...] = (), largest: tuple[int, ...] = ()
) -> list[dict[str, Any]]:  # fmt: skip
    """Medians of three up to 4 MiB; above, one iteration after one of warm-up."""
    from meshwright.io.fabric_document import fabric_document
    from meshwright.lab import Lab

    rows = []
    for name, fabric in fabrics.items():
        jobs = []
        for s in STRATEGIES:
            few = [*large, *(largest if name in ON else ())]
            jobs.append({"op": "all-reduce", "sizes": list(sizes), "strategies": [s], "iterations": 3, "warmup": 1, "keep": folder})
            if few:
                jobs.append({**jobs[-1], "sizes": few, "iterations": 1})
        with Lab.up(fabric) as lab:
            document = fabric_document(lab.measured_fabric)
            for row in measure(lab, jobs):
                rows.append({"fabric": name, "measured_fabric": document, **row})
            print(f"{name}: {len(rows)} rows so far", flush=True)
    return [r for r in rows if r.get("program")]


class Predictor:
    """Simulated times of what ran; walks are made once."""

    def __init__(self) -> None:
        self.walks: dict[tuple[str, str], Any] = {}
        self.fabrics: dict[str, Fabric] = {}

    def time_s(self, row: dict[str, Any], transport: Transport, loss: float) -> float:
        from meshwright.io.fabric_document import fabric_from_document
        from meshwright.io.plan_file import read_program
        from meshwright.run.group import predict
        from meshwright.simulate import simulate_program

        if row["fabric"] not in self.fabrics:
            self.fabrics[row["fabric"]] = fabric_from_document(row["measured_fabric"])
        fabric = self.fabrics[row["fabric"]]
        names = tuple(d.name for d in fabric.devices)
        key = row["fabric"], row["program"]
        if key not in self.walks:
            program = read_program(row["program"])
            order, _ = predict.quickest_walk(program, fabric, names, predict.executor_transport(fabric, per_core(row)))  # as rank 0 decided
            walk = predict.walk_program(predict.walked(program, fabric, names, order))
            self.walks[key] = walk, predict.flows_on_links(walk, fabric, names)
        walk, flows = self.walks[key]
        share = [1 - min(loss * max(int(f) - 1, 0), predict.MOST_LOSS) for f in flows]
        slowed = replace(fabric, links=tuple(replace(x, rate_Bps=int(x.rate_Bps * f)) for x, f in zip(fabric.links, share, strict=True)))
        return simulate_program(predict.at_size(walk, row["size_bytes"]), slowed, names, Cost(transport=transport), record=False).makespan_s


def per_core(row: dict[str, Any]) -> float:
    """Ranks of a lab share this machine's cores."""
    import os

    return len(row["measured_fabric"]["devices"]) / len(os.sched_getaffinity(0))


def transport_of(row: dict[str, Any], per_message_s: float, per_byte_s: float) -> Transport:
    times = max(1.0, per_core(row))
    return Transport(per_message_s=per_message_s * times, per_byte_s=per_byte_s * times, per_step_s=5e-6 * times)


def fit(predictor: Predictor, rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """The overheads with the least mean absolute error of the logarithm."""

    def error(found: tuple[float, float, float]) -> float:
        message, byte, loss = found
        return statistics.fmean(abs(math.log(predictor.time_s(r, transport_of(r, message, byte), loss) / r["time_s"])) for r in rows)

    return min(itertools.product(PER_MESSAGE_S, PER_BYTE_S, LOSS_PER_FLOW), key=error)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fitted_on = measured(FIT, FIT_SIZES, folder)
        tested_on = measured(TEST, SIZES, folder, LARGE, LARGEST)
        predictor = Predictor()
        message, byte, loss = fit(predictor, fitted_on)
        for row in (*fitted_on, *tested_on):
            row["predicted_s"] = predictor.time_s(row, transport_of(row, message, byte), loss)
            row["error"] = row["predicted_s"] / row["time_s"] - 1
    for row in (*fitted_on, *tested_on):
        del row["measured_fabric"], row["program"]
    rows: list[dict[str, Any]] = []

    def said(what: str, chosen: list[dict[str, Any]], limit: float | None = None) -> None:
        errors = sorted(abs(r["error"]) for r in chosen)
        if errors:
            rows.append({
                "what": what, "value": round(statistics.median(errors), 4), "unit": "median error", "cases": len(errors),
                "p90": round(errors[int(0.9 * (len(errors) - 1))], 4), "worst": round(errors[-1], 4), **({"limit": limit} if limit else {}),
            })  # fmt: skip

    said(f"all from {COUNTED // MIB} MiB on", [r for r in tested_on if r["size_bytes"] >= COUNTED], 0.10)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in tested_on:
        groups["size", f"{row['size_bytes'] // KIB} KiB"].append(row)
        if row["size_bytes"] >= COUNTED:
            groups["fabric", row["fabric"]].append(row)
            groups["strategy", row["strategies"][0]].append(row)
    for (kind, name), chosen in groups.items():
        said(f"{kind} {name}", chosen)
    for row in rows:
        print(f"{row['what']:<36} median {row['value']:7.1%}  p90 {row['p90']:7.1%}  worst {row['worst']:7.1%}  of {row['cases']}")
    wrong = sum(r["wrong"] for r in (*fitted_on, *tested_on))
    found = {"per_message_s": message, "per_byte_s": byte, "loss_per_flow": loss}
    print("fitted", json.dumps(found), "wrong elements", wrong)
    machine.record("predicted", rows, fitted=found, wrong_elements=wrong, fitted_on=fitted_on, tested_on=tested_on)


if __name__ == "__main__":
    main()
