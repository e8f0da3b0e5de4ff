"""Runs with a whole recipe that are killed at random moments and resumed: the weights must be the bits of a run that nobody disturbed.

Run: `python benchmarks/killed_runs.py [KILLS]` (about half a minute per kill on a busy machine; default 20). The tiny example GPT on two ranks that
divide weights and optimizer state: shuffled DataLoader, groups, schedule, moving average, clipping by norm, checkpoints every second step.
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
    "--zero", "3",
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
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_mtime_ns > before):
        time.sleep(0.02)
    time.sleep(after_s)
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return running


def main() -> None:
    from meshwright.capture.resolve import build_model

    kills, rng = int(sys.argv[1]) if len(sys.argv) > 1 else 20, random.Random(0)
    length = build_model("examples/gpt.py:tiny", device="cpu").inputs[0].shape[1]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data.py").write_text(LOADER.replace("LENGTH", str(length)))
        subprocess.run(command(*PLAN, "-o", str(root / "plan.json")), check=True, stdout=subprocess.DEVNULL)
        run = command("train", "run", str(root / "plan.json"), "--data", f"{root}/data.py:loader", "--steps", str(STEPS), "--no-calibration")
        run += ["--checkpoint-every", "2", "--no-module-spans", "--out"]
        start = time.perf_counter()
        subprocess.run([*run, str(root / "whole")], check=True, stdout=subprocess.DEVNULL)
        metrics = [json.loads(x) for x in (root / "whole" / "metrics.jsonl").read_text().splitlines()]
        training_s = sum(x["step_s"] for x in metrics)
        print(f"undisturbed: {time.perf_counter() - start:.1f} s, of which {training_s:.2f} s in {STEPS} steps", flush=True)
        whole, equal, done, trial = files_of(root / "whole"), 0, 0, 0
        raw = []
        while done < kills:
            out, resumed = root / f"cut-{trial}", False
            trial += 1
            after_s = rng.uniform(0, 1.2 * training_s)
            if not killed([*run, str(out)], out, after_s):
                continue
            had = sorted(p.parent.name for p in out.glob("checkpoint/step-*/index.json"))
            resumed = bool(had)
            subprocess.run([*run, str(out), *(["--resume"] if resumed else [])], check=True, stdout=subprocess.DEVNULL)
            same = files_of(out) == whole
            done, equal = done + 1, equal + same
            raw.append({"killed_after_s": round(after_s, 3), "checkpoint": had[-1] if had else "", "resumed": resumed, "equal": same})
            print(raw[-1], flush=True)
    rows = [
        {"what": "killed runs whose files are the undisturbed run's, byte for byte", "value": equal, "unit": "", "limit": kills, "raw": raw},
        {"what": "of these, resumed from a checkpoint", "value": sum(x["resumed"] for x in raw), "unit": ""},
    ]  # fmt: skip
    machine.record("killed_runs", rows)
    assert equal == kills


if __name__ == "__main__":
    main()
