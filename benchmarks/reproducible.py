"""Equal bits: one fold under chunk sizes, schedules, placements and jitter; its time beside gloo's ring; training at 1 to 8 ranks.

Run: `python benchmarks/reproducible.py [lab|training]` (needs root; some minutes). Lab: two switches with four devices each, 50 Mbit/s a device and a
trunk that carries all four, so that a device's own link decides. Each schedule is run again and again, ranks late by up to 20 ms each time; counted
are different results over all ranks, runs, schedules and placements (1 = equal bits), and the share of elements in which gloo's ring, and a single
buffer filled the other way round, differ from it. Training: a byte-level language model, 8 micro-batches of 2 samples in each of 50 steps, on this
package's source, also with stages and with divided gradients and weights; weights, moments and averages compared bit by bit with the run of one rank,
and those of a plan without the promise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch

from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.classic.fold_tree import FoldTree
from meshwright.decide.collective.classic.halving_doubling import HalvingDoubling, RecursiveDoubling
from meshwright.drive.collective.job import plan_collective
from meshwright.drive.plans import write_plan
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.document import fabric_document
from meshwright.lab.lab import Lab
from meshwright.run.checkpoint.export import whole_tensors

DEVICE_BPS, TRUNK_BPS = 6_250_000, 25_000_000
ELEMENTS, TIMED_ELEMENTS = 1 << 16, 2 << 20  # 256 KiB for bits, 8 MiB for times
RUNS, ITERATIONS = 7, 5  # of each of five schedules at each of three placements: 105 runs
ASKED_RATIO = 1.3  # of the ring's time
PLACEMENTS = {"as wired": [0, 1, 2, 3, 4, 5, 6, 7], "switch by switch in turn": [0, 4, 1, 5, 2, 6, 3, 7], "shuffled": [6, 1, 4, 3, 0, 7, 2, 5]}
SCHEDULES: dict[str, Any] = {
    "1 chunk": FoldTree(radices=(8,), pieces=1), "4 chunks": FoldTree(radices=(8,), pieces=4), "16 chunks": FoldTree(radices=(4, 2), pieces=16),
    "halving": HalvingDoubling(), "doubling": RecursiveDoubling(),
}  # fmt: skip
TRAINING = {"model": "examples/gpt.py:tiny", "steps": 50}
LAYOUTS = [  # ranks, what is asked for besides, its name; the first is what the others are compared with
    *((n, ["--reproducible", "tree"], "the fold") for n in (1, 2, 4, 8)),
    *((n, ["--reproducible", "tree", *more], f"the fold, {' '.join(more)}") for n, more in ((4, ["--zero", "2"]), (8, ["--zero", "3"]))),
    (8, ["--reproducible", "tree", "--pp", "2", "--zero", "3"], "the fold, --pp 2 --zero 3"),
    (8, ["--dp", "8", "--zero", "0"], "no promise"),
]


def fabric() -> Fabric:
    links = [Link(src="left", dst="right", rate_Bps=TRUNK_BPS), Link(src="right", dst="left", rate_Bps=TRUNK_BPS)]
    for i in range(8):
        switch = "left" if i < 4 else "right"
        links += [Link(src=f"n{i}", dst=switch, rate_Bps=DEVICE_BPS), Link(src=switch, dst=f"n{i}", rate_Bps=DEVICE_BPS)]
    devices = tuple(Device(name=f"n{i}", kind="cpu", group=f"host{i // 4}") for i in range(8))
    return Fabric(name="two-switches", devices=devices, switches=(Switch(name="left"), Switch(name="right")), links=tuple(links))


def plan(folder: Path, name: str, strategy: Any, order: list[int], elements: int) -> str:
    problem = CollectiveProblem(
        fabric=fabric(), op="all-reduce", ranks=tuple(f"n{i}" for i in order), size_bytes=4 * elements, reproducible="tree",
    )  # fmt: skip
    path = folder / f"{name}-{'-'.join(map(str, order))}.json".replace(" ", "-")
    write_plan(path, plan_collective(problem, candidates=[strategy])[0])
    return str(path)


def in_lab() -> list[dict[str, Any]]:
    found = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "fabric.json").write_text(json.dumps(fabric_document(fabric())))
        run = [sys.executable, "-m", "meshwright", "lab"]
        subprocess.run([*run, "up", str(folder / "fabric.json"), "--name", "bench-bits", "--no-verify", "--quiet"], check=True)
        try:
            for place, order in PLACEMENTS.items():
                timed = place == "as wired"
                plans = {name: plan(folder, name, strategy, order, ELEMENTS) for name, strategy in SCHEDULES.items()}
                if timed:
                    plans["chosen"] = plan(folder, "chosen", FoldTree(), order, TIMED_ELEMENTS)
                job = {"plans": plans, "elements": ELEMENTS, "runs": RUNS, "timed": ["chosen", TIMED_ELEMENTS, ITERATIONS] if timed else None}
                lines: list[str] = []

                def sink(rank: int, line: bytes, lines: list[str] = lines) -> None:
                    if rank == 0:
                        lines.append(line.decode())

                lab = Lab.open("bench-bits")
                try:
                    worker = str(Path(__file__).with_name("reproducible_worker.py"))
                    lab.run([sys.executable, worker], order=order, env={"JOB": json.dumps(job)}, timeout_s=600, sink=sink)
                finally:
                    lab.close()
                found[place] = json.loads(next(x for x in lines if x.startswith("{")))
                print(place, json.dumps(found[place]), flush=True)
        finally:
            subprocess.run([*run, "down", "bench-bits", "--quiet"], check=True)
    return rows_of(found)


def rows_of(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    first = found["as wired"]
    placements = {x["tree digest"] for x in found.values()}
    runs = RUNS * (len(SCHEDULES) * len(PLACEMENTS) + 1)
    return [
        {
            "what": f"different results of the fold: {runs} runs under jitter, 3 chunk sizes and 2 more schedules, 3 placements", "unit": "results",
            "value": max(len(placements), *(x["tree all"] for x in found.values())), "is_the_fold": all(x["is the fold"] for x in found.values()),
            "digest": first["tree digest"],
        },
        {"what": "elements of gloo's ring that differ from the fold", "value": first["gloo differs"], "unit": "share"},
        {"what": "elements that differ where a single buffer is filled in rank order and the other way round", "unit": "share",
         "value": first["single buffer differs"], "asked_more_than": 0.3},
        {"what": "different results of exact sums: contributions dealt to ranks in 16 ways at each of 3 placements", "unit": "results",
         "value": max(x["exact all"] for x in found.values()),
         "largest_error_of_largest_contribution": max(x["exact error"] for x in found.values())},
        {"what": "all-reduce of 8 MiB by the fold in the lab, beside gloo's ring", "value": first["tree_s"], "unit": "s", "peer": first["gloo_s"],
         "asked_ratio": ASKED_RATIO},
    ]  # fmt: skip


def weights(run: Path) -> dict[str, Any]:
    _, _, reader, _ = whole_tensors(run)
    return {name: reader.read(name) for name in reader.tensors}


def training() -> list[dict[str, Any]]:
    rows, states = [], {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for number, (n, more, what) in enumerate(LAYOUTS):
            made, run = folder / f"plan-{number}.json", folder / f"run-{number}"
            words = ["train", "plan", "--model", TRAINING["model"], "--global-batch", "16", "--microbatch", "2", "--fabric", f"laptop:{n}"]
            subprocess.run([sys.executable, "-m", "meshwright", *words, *more, "-o", str(made), "--quiet"], check=True, stdout=subprocess.DEVNULL)
            words = ["train", "run", str(made), "--steps", str(TRAINING["steps"]), "--out", str(run), "--no-calibration", "--no-gate"]
            subprocess.run([sys.executable, "-m", "meshwright", *words, "--quiet"], check=True, stdout=subprocess.DEVNULL)
            states[n, what] = weights(run)
            first, here = states[1, "the fold"], states[n, what]
            assert first.keys() == here.keys()
            different = sum(int((np.asarray(first[k].view(-1)) != np.asarray(here[k].view(-1))).sum()) for k in first)
            total = sum(int(torch.as_tensor(x.numel())) for x in first.values())
            rows.append({
                "what": f"weights and moments after {TRAINING['steps']} steps at {n} ranks that differ from one rank's, {what}",
                "value": different / total, "unit": "share", "elements": total,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    parts = {"lab": in_lab, "training": training}
    wanted = sys.argv[1:] or list(parts)
    for part in wanted:
        machine.record(f"reproducible_{part}", parts[part](), command=f"python benchmarks/reproducible.py {part}")
