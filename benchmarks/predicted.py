"""Prediction against measurement: every strategy that makes an all-reduce, six fabrics, 64 KiB to 64 MiB, real processes in the lab.

Run: `python benchmarks/predicted.py` (root or user namespaces; about an hour), or in pieces: with `--folder DIR` what was measured is kept there and
not measured again, `--minutes 5` begins nothing after so many, and the same command goes on; `--predict` only predicts what the folder holds.
Overheads of the executor (per message, per byte) and what a link loses per flow that shares it are fitted on two fabrics and two sizes that are not
among those tested; rates of links are the lab's own calibration. Then nothing is adjusted any more. A prediction is the simulated time of the walk
that ran, at each link's measured goodput. Medians of five iterations up to 4 MiB, of three above.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from executed import islands, links, star
from lab_worker import measure

from meshwright.cost import Cost, Transport
from meshwright.fabric.fabric import Device, Fabric, Switch

KIB, MIB = 1 << 10, 1 << 20
STRATEGIES = (
    "ring", "forestcoll", "joint", "taccl", "blink", "blueconnect", "cloudcollectives", "hierarchical", "rooted-tree", "double-tree",
    "halving-doubling", "recursive-doubling", "bruck", "direct",
)  # fmt: skip
FIT_SIZES = (512 * KIB, 2 * MIB, 8 * MIB)
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
LARGE = (16 * MIB,)
LARGEST, ON = (64 * MIB,), ("five alike", "ring of cables")  # the quick fabrics: a direct exchange on the others takes a minute
BATCH = 5  # strategies that are measured in one job
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


@dataclass(frozen=True)
class Sweep:
    """What is measured on each fabric, BATCH strategies to a file of `folder`, until `deadline`."""

    folder: Path
    strategies: tuple[str, ...]
    fabrics: tuple[str, ...]
    deadline: float
    quick: bool

    def sizes(self, fabric: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of which five iterations are taken, and those of which three are."""
        if fabric in FIT:
            return (FIT_SIZES[1:], ()) if self.quick else (FIT_SIZES, ())
        if self.quick:
            return (MIB, 4 * MIB), ()
        return SIZES, (*LARGE, *(LARGEST if fabric in ON else ()))

    def batches(self) -> Iterator[tuple[str, tuple[str, ...], Path]]:
        for name in self.fabrics:
            for first in range(0, len(self.strategies), BATCH):
                some = self.strategies[first : first + BATCH]
                yield name, some, self.folder / f"{name.replace(' ', '-')}-{some[0]}-{len(some)}.json"

    def run(self) -> bool:
        """Measure what is missing; False if time is up before all is there."""
        from meshwright.io.fabric.document import fabric_document
        from meshwright.lab import Lab

        for name, strategies, path in self.batches():
            if path.exists():
                continue
            if time.monotonic() > self.deadline:
                return False
            sizes, large = self.sizes(name)
            job = {"op": "all-reduce", "sizes": list(sizes), "iterations": 5, "warmup": 1, "keep": str(self.folder)}
            jobs = [{**job, "strategies": [s]} for s in strategies]
            jobs += [{**j, "sizes": list(large), "iterations": 3} for j in jobs if large]
            with Lab.up({**FIT, **TEST}[name]) as lab:
                rows = measure(lab, jobs)
                document = fabric_document(lab.measured_fabric)
            machine.keep_part(path, [{"fabric": name, "measured_fabric": document, **r} for r in rows if r.get("program")])
            print(f"{name}, {', '.join(strategies)}: {len(rows)} rows", flush=True)
        return True

    def rows(self) -> list[dict[str, Any]]:
        return machine.join_parts(path for _, _, path in self.batches() if path.exists())[0]


class Predictor:
    """Simulated times of what ran; walks are made once."""

    def __init__(self) -> None:
        self.walks: dict[tuple[str, str, int], Any] = {}

    def time_s(self, row: dict[str, Any], transport: Transport, loss: float) -> float:
        from meshwright.io.fabric.document import fabric_from_document
        from meshwright.io.plan.plan import read_program
        from meshwright.run.group import predict
        from meshwright.simulate import simulate_program

        key = json.dumps(row["measured_fabric"]), row["program"], row["size_bytes"]
        if key not in self.walks:
            fabric = fabric_from_document(row["measured_fabric"])
            names = tuple(d.name for d in fabric.devices)
            program = read_program(row["program"])
            transport_then = predict.executor_transport(fabric, per_core(row))  # as rank 0 decided
            order = predict.quickest_walk(program, fabric, names, transport_then, shared=per_core(row) > 1).walk
            walk = predict.on_the_wire(predict.walked(program, fabric, names, order), fabric, names, row["size_bytes"])
            self.walks[key] = walk, fabric, names, predict.flows_on_links(walk, fabric, names)
        walk, fabric, names, flows = self.walks[key]
        slowed = predict.slowed_by_flows(fabric, flows, loss)
        return simulate_program(walk, slowed, names, Cost(transport=transport), record=False).makespan_s


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="keep what is measured here, and measure only what is missing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing new after so many")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--fabrics", default=",".join((*FIT, *TEST)))
    parser.add_argument("--predict", action="store_true", help="measure nothing, and write no result")
    parser.add_argument("--quick", action="store_true", help="one and four MiB only, and write no result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = args.folder or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        strategies, fabrics = tuple(args.strategies.split(",")), tuple(args.fabrics.split(","))
        sweep = Sweep(kept.resolve(), strategies, fabrics, time.monotonic() + 60 * args.minutes, args.quick)
        if not args.predict and not sweep.run():
            there = [path.exists() for *_, path in sweep.batches()]
            print(f"time is up: {sum(there)} of {len(there)} pieces are in {kept}; start again")
            return
        if {r["fabric"] for r in sweep.rows()} >= {*FIT, *TEST}:
            report(sweep.rows(), write=not args.predict and not args.quick)
        else:
            print("more fabrics are needed before anything can be fitted and predicted")


def report(measured: list[dict[str, Any]], *, write: bool) -> None:
    fitted_on, tested_on = ([r for r in measured if r["fabric"] in names] for names in (FIT, TEST))
    predictor = Predictor()
    message, byte, loss = fit(predictor, fitted_on)
    for row in measured:
        row["predicted_s"] = predictor.time_s(row, transport_of(row, message, byte), loss)
        row["error"] = row["predicted_s"] / row["time_s"] - 1
    for row in (*fitted_on, *tested_on):
        del row["measured_fabric"], row["program"], row["keep"]
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
    if write:
        machine.record("predicted", rows, fitted=found, wrong_elements=wrong, fitted_on=fitted_on, tested_on=tested_on)


if __name__ == "__main__":
    main()
