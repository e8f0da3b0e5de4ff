"""Runs with a whole recipe that are killed at random moments and resumed: the weights must be the bits of a run that nobody disturbed.

Run: `python benchmarks/killed_runs.py [KILLS]` (a quarter of a minute of processor time per kill; default 20). The tiny example GPT on two ranks that
divide weights and optimizer state: shuffled DataLoader, groups, schedule, moving average, clipping by norm, checkpoints every second step. A run is
killed and resumed until a start of it reaches the end; then its files are compared.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

STEPS = 12
LOADER = '''
import torch
from torch.utils.data import DataLoader, Dataset

class Windows(Dataset):
    def __init__(self):
        self.text = torch.randint(0, 256, (8192,), generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return 50
    def __getitem__(self, i):
        window = self.text[i * 100 : i * 100 + LENGTH + 1]
        return window[:-1], window[1:]

def loader():
    return DataLoader(Windows(), batch_size=8, shuffle=True)
'''
PLAN = [
    "train", "plan", "--model", "examples/gpt.py:tiny", "--fabric", "laptop:2", "--global-batch", "8", "--dp", "2", "--tp", "1", "--pp", "1",
    "--zero", "3", "--microbatch", "4", "--recompute", "none", "--collective", "ring", "--without", "division",
    "--optimizer", "adamw:weight_decay=0.1", "--no-decay", "bias,1d", "--schedule", "cosine:steps=12,warmup=3", "--ema", "0.9", "--clip-norm", "0.5",
]  # fmt: skip


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "meshwright", *words]


def files_of(run: Path) -> dict[str, str]:
    (index,) = run.glob("checkpoint/step-*/index.json")
    document = json.loads(index.read_text())
    assert document["step"] == STEPS
    return dict(document["files"])


def killed(words: list[str], run: Path, after_s: float) -> bool:
    """Start a run and kill all of it some seconds after its first step of this start; whether it still ran."""
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    log = run.parent / f"{run.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_mtime_ns > before):
        time.sleep(0.02)
    time.sleep(after_s)
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == 0 or running, f"a start that nobody killed failed: {log.read_text()[-2000:]}"
    return running


def _followed(run: dict[str, Any]) -> list[str]:
    """What each kill's next start was resumed from."""
    return [*(x["resumed_from"] for x in run["kills"][1:]), *([run["last_resumed_from"]] if run["kills"] else [])]


def record(raw: list[dict[str, Any]]) -> None:
    """After every run, so that what an interrupted benchmark has seen is kept."""
    done, equal = sum(len(x["kills"]) for x in raw), sum(len(x["kills"]) for x in raw if x["equal"])
    rows = [
        {
            "what": "kills after which a run ended with the undisturbed run's files, byte for byte", "value": equal, "unit": "", "limit": done,
            "raw": raw,
        },
        {"what": "of these, resumed from a checkpoint", "value": sum(bool(x) for r in raw for x in _followed(r)), "unit": ""},
    ]  # fmt: skip
    machine.record("killed_runs", rows)


def main() -> None:
    from meshwright.capture.resolve import build_model

    kills, rng = int(sys.argv[1]) if len(sys.argv) > 1 else 20, random.Random(0)
    length = build_model("examples/gpt.py:tiny", device="cpu").inputs[0].shape[1]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data.py").write_text(LOADER.replace("LENGTH", str(length)))
        subprocess.run(command(*PLAN, "-o", str(root / "plan.json")), check=True, stdout=subprocess.DEVNULL)
        run = command("train", "run", str(root / "plan.json"), "--data", f"{root}/data.py:loader", "--steps", str(STEPS), "--no-calibration")
        run += ["--checkpoint-every", "2", "--no-module-spans", "--no-gate"]
        start = time.perf_counter()
        subprocess.run([*run, "--out", str(root / "whole")], check=True, stdout=subprocess.DEVNULL)
        metrics = [json.loads(x) for x in (root / "whole" / "metrics.jsonl").read_text().splitlines()]
        training_s = sum(x["step_s"] for x in metrics)
        print(f"undisturbed: {time.perf_counter() - start:.1f} s, of which {training_s:.2f} s in {STEPS} steps", flush=True)
        whole, raw = files_of(root / "whole"), []
        while sum(len(x["kills"]) for x in raw) < kills:
            out, cuts = root / f"cut-{len(raw)}", []
            while True:
                had = sorted(p.parent.name for p in out.glob("checkpoint/step-*/index.json"))
                if had and int(had[-1].removeprefix("step-")) == STEPS:
                    break  # killed after its last checkpoint: there is nothing left to resume
                after_s = rng.uniform(0, 1.2 * training_s)
                if not killed([*run, "--out", str(out), *(["--resume"] if had else [])], out, after_s):
                    break
                cuts.append({"resumed_from": had[-1] if had else "", "killed_after_s": round(after_s, 3)})
            raw.append({"kills": cuts, "last_resumed_from": had[-1] if had else "", "equal": files_of(out) == whole})
            print(raw[-1], flush=True)
            record(raw)
    assert all(x["equal"] for x in raw)


if __name__ == "__main__":
    main()
