"""A service of batches under kills: workers, the service, its guard and jobs die at random moments; do the living get each item once?

`python benchmarks/data_served.py [--kills 200]`. Rounds of three jobs over two epochs of 45 items, a kill or two in each.
A guard that is killed is started again by hand, as a supervisor would. Also: seconds of an epoch of 8 MiB batches that one job takes over the socket,
beside `SharedLoader`'s mapping.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np

from meshwright.data import ServedLoader, SharedLoader
from meshwright.data.batches import Batches
from meshwright.data.copies import SHARED_MEMORY
from meshwright.data.service import guarded, removed, serve
from meshwright.data.wire import listening

FORK = multiprocessing.get_context("fork")
JOBS, ITEMS, EPOCHS = 3, 45, 2


class Items:
    """Item i is i, after some milliseconds."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        time.sleep(0.004 * random.Random(index).random())
        return index


class Blocks:
    """Arrays of 1 MiB."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return np.full(1 << 20, index % 256, np.uint8)


def up(of: Batches, at: str) -> Any:
    def main() -> None:
        listener = listening(at)
        guarded([lambda again: serve(of, listener, workers=2, staged=6, again=again)])

    found = FORK.Process(target=main)
    found.start()
    return found


def consume(at: str, name: str, out: Path) -> None:
    with out.open("w", buffering=1) as file, ServedLoader(at, job=name, patience_s=60) as loader:
        for epoch in range(EPOCHS):
            for batch in loader:
                file.write(json.dumps([epoch, batch]) + "\n")
        file.write("end\n")


def below(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def round_of(seed: int) -> dict[str, Any]:
    rng, killed = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory(prefix="mw-served-") as name:
        folder, dead = Path(name), -1
        at = str(folder / "s")
        of = Batches(dataset=Items(), batch_size=3, name=f"bench-{os.getpid()}-{seed}", jobs=JOBS, collate_fn=list, timeout_s=60)
        guard = up(of, at)
        jobs = [FORK.Process(target=consume, args=(at, f"j{i}", folder / f"{i}.txt")) for i in range(JOBS)]
        for job in jobs:
            job.start()
        for _ in range(rng.choice((1, 2))):
            wanted, path = rng.randrange(2, 27), folder / "0.txt"
            while (not path.exists() or path.read_text().count("\n") < wanted) and jobs[0].is_alive():
                time.sleep(0.002)
            victim = rng.choice(("worker", "service", "guard", "job"))
            services = below(guard.pid)
            if victim == "guard":
                guard.kill()
                guard.join()
                guard = up(of, at)
            elif victim == "job" and dead < 0:
                dead = rng.randrange(JOBS)
                jobs[dead].kill()
            else:
                pids = [w for s in services for w in below(s)] if victim == "worker" else services
                for pid in pids[:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            killed.append(victim)
        right = 0
        for i, job in enumerate(jobs):
            job.join(120)
            lines = (folder / f"{i}.txt").read_text().splitlines()
            rows = [json.loads(x) for x in lines if x.endswith("]]")]
            items = [[x for epoch, batch in rows if epoch == e for x in batch] for e in range(EPOCHS)]
            whole = [sorted(x) for x in items] == [list(range(ITEMS))] * EPOCHS and lines[-1:] == ["end"]
            right += all(len(set(x)) == len(x) for x in items) if i == dead else whole
        guard.kill()
        guard.join()
        removed(of)
        return {"seed": seed, "killed": killed, "right": right == JOBS, "left": of.folder.exists()}


def speeds(rounds: int) -> dict[str, list[float]]:
    """Seconds of an epoch, one job: over a socket's file, and mapped."""
    found: dict[str, list[float]] = {"served": [], "mapped": []}
    for n in range(rounds):
        with tempfile.TemporaryDirectory(prefix="mw-served-") as name:
            of = Batches(dataset=Blocks(), batch_size=8, name=f"bench-{os.getpid()}-s{n}", jobs=1, collate_fn=np.stack, timeout_s=60)
            guard = up(of, f"{name}/s")
            with ServedLoader(f"{name}/s") as loader:
                found["served"].append(_second_epoch(loader))
            guard.kill()
            guard.join()
            removed(of)
        with SharedLoader(Blocks(), 8, name=f"bench-{os.getpid()}-m{n}", jobs=1, workers=2, collate_fn=np.stack) as loader:
            found["mapped"].append(_second_epoch(loader))
    return found


def _second_epoch(loader: Any) -> float:
    for _ in loader:
        pass
    begin = time.perf_counter()
    total = sum(int(batch[0, 0] >= 0) for batch in loader)
    assert total == 8
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    args = parser.parse_args()
    done: list[dict[str, Any]] = []
    while sum(len(r["killed"]) for r in done) < args.kills:
        done.append(round_of(len(done)))
        if not done[-1]["right"]:
            print(done[-1], flush=True)
    kills = [k for r in done for k in r["killed"]]
    took = speeds(5)
    rows = [
        {"what": "rounds in which every living job got each item once", "value": sum(r["right"] for r in done), "unit": "rounds", "peer": len(done)},
        *({"what": f"kills of a {k}", "value": kills.count(k), "unit": "kills"} for k in ("worker", "service", "guard", "job")),
        {"what": "rounds that left something in shared memory", "value": sum(r["left"] for r in done), "unit": "rounds"},
        {"what": "epoch of 64 MiB, one job, served over mapped", "value": statistics.median(took["served"]), "unit": "s",
         "peer": statistics.median(took["mapped"])},
    ]  # fmt: skip
    for row in rows:
        print(row, flush=True)
    left = [p.name for p in SHARED_MEMORY.glob(f"meshwright-data-{os.getuid()}-bench-*")]
    machine.record("data_served", rows, command=f"python benchmarks/data_served.py --kills {args.kills}", rounds=done, seconds=took, left=left)


if __name__ == "__main__":
    main()
