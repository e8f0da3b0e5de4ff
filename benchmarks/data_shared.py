"""Four jobs on one machine that train on the same pictures: batches prepared once for all, beside a DataLoader for each; and jobs that are killed.

Run: `python benchmarks/data_shared.py [--parts speed,kills] [--rounds N] [--kills N]`. speed (needs pillow): 2,000 JPEG files of 256 x 256, decoded,
cropped to 224 and flipped at random, batches of 32 as uint8. Each job takes the batches of two epochs and does nothing else. Wall time from the first
job's start to the last one's end, processor time of all processes; ways in turn, medians. kills: three jobs of two workers each; at a random moment a
job or a worker is killed; every job that lives must get each item of both epochs once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import machine
import numpy as np

PICTURES, SIDE, CROP, BATCH, JOBS, EPOCHS = 2000, 256, 224, 32, 4, 2
SHARED_JOB = Path(__file__).parents[1] / "tests" / "data" / "shared_job.py"


class Pictures:
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        picture = np.asarray(Image.open(io.BytesIO(self.paths[index].read_bytes())).convert("RGB"))
        x, y = (random.randrange(SIDE - CROP + 1) for _ in range(2))
        cut = picture[y : y + CROP, x : x + CROP]
        return np.ascontiguousarray(cut[:, ::-1] if random.random() < 0.5 else cut)


def stacked(items: list[Any]) -> Any:
    import torch

    return torch.from_numpy(np.stack(items))


def write_pictures(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(PICTURES):
        coarse = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / f"{i:04d}.jpg", quality=90)


def job(way: str, folder: Path, name: str) -> None:
    """One job: waits for a line, then two epochs; prints wall and processor seconds."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    loader: Any
    if way == "shared":
        from meshwright.data import SharedLoader

        loader = SharedLoader(Pictures(folder), BATCH, name=name, jobs=JOBS, workers=1, collate_fn=stacked)
    else:
        loader = DataLoader(Pictures(folder), BATCH, shuffle=True, num_workers=1, collate_fn=stacked, persistent_workers=True)
        iter(loader)  # starts the worker
    print("ready", flush=True)
    sys.stdin.readline()
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin, items = time.time(), 0
    for _ in range(EPOCHS):
        for batch in loader:
            items += len(batch)
    end, after = time.time(), resource.getrusage(resource.RUSAGE_SELF)
    assert items == EPOCHS * PICTURES, items
    if way == "shared":
        loader.close()
    else:
        loader._iterator._shutdown_workers()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"begin": begin, "end": end, "cpu_s": own + children.ru_utime + children.ru_stime}), flush=True)


def four_jobs(way: str, folder: Path) -> dict[str, float]:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    words = [sys.executable, __file__, "--job", way, "--folder", str(folder), "--name", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(JOBS)]
    for p in started:
        assert p.stdout and p.stdout.readline() == "ready\n"
    for p in started:
        assert p.stdin
        p.stdin.write("go\n")
        p.stdin.flush()
    told = [json.loads(p.communicate()[0].splitlines()[-1]) for p in started]
    return {"wall_s": max(t["end"] for t in told) - min(t["begin"] for t in told), "cpu_s": sum(t["cpu_s"] for t in told)}


def speed(rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {"four loaders": [], "shared": []}
    with tempfile.TemporaryDirectory(prefix="data-shared-") as name:
        write_pictures(Path(name))
        for _ in range(rounds):
            for way, rows in found.items():
                rows.append(four_jobs(way, Path(name)))
                print(way, rows[-1], flush=True)
    middle = {way: {k: statistics.median(r[k] for r in rows) for k in ("wall_s", "cpu_s")} for way, rows in found.items()}
    asked = {"wall_s": 2.8, "cpu_s": 3.2}
    what = {"wall_s": "wall time", "cpu_s": "processor time"}
    return [
        {"what": f"{what[k]} of four loaders over shared batches (asked: {asked[k]})", "value": middle["four loaders"][k], "unit": "s",
         "peer": middle["shared"][k], "raw": {way: [r[k] for r in rows] for way, rows in found.items()}}
        for k in asked
    ]  # fmt: skip


def killed(seed: int) -> dict[str, Any]:
    """One round; says what was killed and whether all that live got everything."""
    rng, name, items, epochs = random.Random(seed), f"kill-{uuid.uuid4().hex[:8]}", 60, 2
    words = [sys.executable, str(SHARED_JOB), name, "3", str(epochs), str(items), "0.01"]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(3)]
    lines: list[list[str]] = [[] for _ in started]
    readers = [threading.Thread(target=lambda i=i, p=p: lines[i].extend(iter(p.stdout.readline, ""))) for i, p in enumerate(started)]
    for reader in readers:
        reader.start()
    when = rng.randrange(1, 38)
    # Not before all have joined: who waits for a job that was killed before it came is told so after a minute, which is no round.
    while not (all(lines) and len(lines[0]) >= when) and started[0].poll() is None:
        time.sleep(0.001)
    time.sleep(rng.random() * 0.01)
    victim, whole = rng.randrange(3), rng.random() < 0.5
    with contextlib.suppress(ProcessLookupError, IndexError):
        pid = started[victim].pid if whole else json.loads(lines[victim][0])["workers"][rng.randrange(2)]
        os.kill(pid, signal.SIGKILL)
    for p in started:
        p.wait(timeout=120)
    for reader in readers:
        reader.join()
    right = True
    for i, p in enumerate(started):
        told = [json.loads(line) for line in lines[i] if line.endswith("}\n")]
        got = [sorted(x[0] for line in told if line.get("epoch") == e for x in line["items"]) for e in range(epochs)]
        if whole and i == victim:
            right &= all(len(set(g)) == len(g) for g in got)
        else:
            right &= p.returncode == 0 and got == [list(range(items))] * epochs
    left = Path(f"/dev/shm/meshwright-data-{os.getuid()}-{name}").exists()
    return {"killed": "job" if whole else "worker", "after": when, "right": bool(right), "left": left}


def kills(count: int) -> list[dict[str, Any]]:
    found = [killed(seed) for seed in range(count)]
    wrong = [i for i, x in enumerate(found) if not x["right"]]
    return [
        {"what": f"of {count} kills, rounds in which a job that lives did not get each item once (asked: 0)", "value": len(wrong), "unit": "rounds",
         "wrong": wrong, "jobs_killed": sum(x["killed"] == "job" for x in found)},
        {"what": "rounds that left something in shared memory", "value": sum(x["left"] for x in found), "unit": "rounds"},
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="speed,kills")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=200)
    for hidden in ("--job", "--folder", "--name"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job, Path(args.folder), args.name)
        return
    for part in args.parts.split(","):
        rows = speed(args.rounds) if part == "speed" else kills(args.kills)
        options = f"--rounds {args.rounds}" if part == "speed" else f"--kills {args.kills}"
        for row in machine.record(f"data_shared_{part}", rows, command=f"python benchmarks/data_shared.py --parts {part} {options}")["rows"]:
            print({k: row[k] for k in ("what", "value", "ratio") if k in row}, flush=True)


if __name__ == "__main__":
    main()
