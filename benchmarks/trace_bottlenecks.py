"""Planted bottlenecks in real runs: does `trace breakdown` rank the planted cause first, by name? 20 cases.

Run: `python benchmarks/trace_bottlenecks.py [--quick] [--only data|copy|link]` (prints a row per case; raw output goes to
results/trace_bottlenecks.json). The cases of links need the lab (namespaces).

- `data`: the dataset of one rank sleeps; plain torch.profiler traces of a CNN with skips, a transformer, an LSTM, on 1 or 2 processes (DDP, gloo).
- `copy`: one layer makes a contiguous copy of a transposed tensor; the same models. Module trees are captured once.
- `link`: `train run` of the example GPT on 4 devices of a lab in which one direction of one cable is slow; the folder of the run is all that is read.
Each plant is sized to about the step without it. Its share of the profiled steps is clocked inside the plant (of links: from the step
with and without it), and a case below 20 % is made again.
A case counts if the first cause is of the planted kind and names the planted rank, module or link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

MODELS = ("cnn", "transformer", "lstm")
LEAST, SIZE = 0.20, 1.0
WARM, STEPS = 4, 5
EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt.py"
DEVICES = 4


# ---- one rank of a planted run by torch itself
def build(model: str, seed: int, planted: int = -1) -> tuple[Any, Any, list[str]]:
    """(module, one sample of input, paths of the layers that can be planted)."""
    import torch
    from torch import nn

    torch.manual_seed(seed)

    class Copying(nn.Module):
        """The layer, after a contiguous copy of a transposed tensor of `rows` rows that nobody needs. `spent_s` adds up."""

        rows, spent_s = 1, 0.0

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun = time.perf_counter()
            wide = x.detach().flatten()[:1024].expand(self.rows, -1).transpose(0, 1).contiguous()
            self.spent_s += time.perf_counter() - begun
            return self.inner(x + 0.0 * wide[0, 0])

    class Residual(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
            self.norm = nn.BatchNorm2d(channels)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.two(torch.relu(self.one(x))))

    class Recurrent(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.lstm = nn.LSTM(width, width, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    if model == "cnn":
        layers, sample = [Residual(24) for _ in range(5)], torch.randn(24, 20, 20)
    elif model == "transformer":
        layers = [nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, dropout=0.0) for _ in range(5)]
        sample = torch.randn(48, 96)
    else:
        layers, sample = [Recurrent(96) for _ in range(4)], torch.randn(24, 96)
    blocks = nn.ModuleList([Copying(x) if i == planted else x for i, x in enumerate(layers)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks
            self.head = nn.Linear(sample.shape[-1], 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x).flatten(1).mean(1)

    return Net(), sample, [f"blocks.{i}" for i in range(len(layers))]


def worker(case: dict[str, Any]) -> None:
    """Train, size the plant against the plain step, profile; the planted rank also writes the module tree. Prints the plant's share."""
    import torch
    import torch.distributed as dist

    from meshwright.capture.modules import capture_modules
    from meshwright.io.trace.module_tree import write_module_tree

    rank, world, folder = int(os.environ["RANK"]), case["world"], Path(case["folder"])
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    planted = case["layer"] if case["kind"] == "copy" else -1
    module, sample, _ = build(case["model"], case["seed"], planted)
    copying = module.blocks[planted] if planted >= 0 else None

    class Slow(torch.utils.data.Dataset):  # type: ignore[misc]
        sleep_s, spent_s = 0.0, 0.0

        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, i: int) -> Any:
            if self.sleep_s and rank == case["rank"]:
                begun = time.perf_counter()
                time.sleep(self.sleep_s)
                self.spent_s += time.perf_counter() - begun
            return sample, torch.tensor(0.5)

    data = Slow()
    loader = iter(torch.utils.data.DataLoader(data, batch_size=8))
    model: Any = torch.nn.parallel.DistributedDataParallel(module) if world > 1 else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        x, y = next(loader)
        loss = torch.nn.functional.mse_loss(model(x), y.expand(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def timed(count: int) -> float:
        found = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            found.append(time.perf_counter() - start)
        return of_all(statistics.median(found))

    def of_all(mine: float) -> float:
        """The largest of all ranks', so that they decide alike."""
        largest = torch.tensor(mine, dtype=torch.float64)
        if world > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    timed(WARM)
    plain = timed(STEPS)
    if case["kind"] == "data":
        data.sleep_s = SIZE * plain / 8
    else:
        while True:
            copying.spent_s = 0.0
            timed(3)
            once = of_all(copying.spent_s / 3)
            if once >= 0.8 * SIZE * plain or copying.rows >= 1 << 16:
                break
            copying.rows = min(max(copying.rows + 1, int(copying.rows * min(SIZE * plain / max(once, 1e-6), 8))), 1 << 16)
    plant = data if case["kind"] == "data" else copying
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=STEPS)
    target = str(folder / f"rank{rank}.json")
    with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda p: p.export_chrome_trace(target)) as profiler:
        for number in range(STEPS + 1):
            if number == 1:
                plant.spent_s, begun = 0.0, time.perf_counter()
            step()
            stopped = time.perf_counter()
            profiler.step()
    share = plant.spent_s / (stopped - begun)
    if rank == case["rank"]:
        write_module_tree(folder / "modules.json", capture_modules(module, (sample.unsqueeze(0).repeat(8, *[1] * sample.dim()),)))
        print(json.dumps({"share": share, "plain_s": plain}))
    if world > 1:
        dist.destroy_process_group()


def profiled_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import socket

    from meshwright.compare.breakdown import breakdown_of

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    case["folder"] = str(folder)
    command = [sys.executable, __file__, "--worker", json.dumps(case)]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(case["world"])}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **common, "RANK": str(r)})
        for r in range(case["world"])
    ]
    said = [p.communicate(timeout=600) for p in ranks]
    if any(p.returncode for p in ranks):
        raise SystemExit(said[0][1][-2000:])
    facts = json.loads(next(x for x in said[case["rank"]][0].splitlines() if x.startswith("{")))
    found, _ = breakdown_of([folder / f"rank{r}.json" for r in range(case["world"])], modules=folder / "modules.json")
    wanted = ("data stall", f"load data on rank {case['rank']}") if case["kind"] == "data" else ("copies", f"module blocks.{case['layer']}")
    return judged(facts["share"], found, *wanted)


def judged(share: float, found: Any, kind: str, where: str) -> dict[str, Any]:
    first = found.causes[0]
    right = first.kind == kind and (first.where == where or first.where.startswith(where + "."))
    top = [{"kind": c.kind, "where": c.where, "share": round(c.share, 4)} for c in found.causes[:3]]
    return {"planted": [kind, where], "plant_share": round(share, 4), "right": right, "top": top}


# ---- a slow link in the lab
def mesh(slow: tuple[int, int] | None, rate: str, slow_rate: str) -> str:
    """Direct cables between all pairs of devices."""
    lines = [f'schema = "meshwright.fabric"\nversion = 1\nname = "mesh"\n[[devices]]\nname = "d"\ncount = {DEVICES}\nkind = "cpu"']
    for a in range(DEVICES):
        for b in range(DEVICES):
            if a != b:
                lines.append(f'[[links]]\nsrc = "d{a}"\ndst = "d{b}"\nrate = "{slow_rate if (a, b) == slow else rate}"')
    return "\n".join(lines) + "\n"


def plan_for_mesh(folder: Path, seed: int) -> Path:
    (folder / "mesh.toml").write_text(mesh(None, "200Mbit/s", ""))
    command = [sys.executable, "-m", "meshwright", "train", "plan", "--model", f"{EXAMPLE}:tiny", "--fabric", str(folder / "mesh.toml")]
    more = ["--global-batch", "8", "--seed", str(seed), "--dp", str(DEVICES), "--collective", "ring", "-o", str(folder / "plan.json")]
    subprocess.run([*command, *more], check=True, capture_output=True, timeout=600)
    return folder / "plan.json"


def run_in_lab(plan_path: Path, out: Path, slow: tuple[int, int] | None) -> Any:
    """The breakdown of a run on the mesh with one slow direction, or none."""
    from meshwright.compare.breakdown import breakdown_of
    from meshwright.io.fabric.toml import parse_fabric_toml
    from meshwright.lab import Lab

    with Lab.up(parse_fabric_toml(mesh(slow, "200Mbit/s", "20Mbit/s"))) as lab:
        command = [sys.executable, "-m", "meshwright", "train", "run", str(plan_path), "--steps", "8", "--out", str(out), "--no-calibration"]
        lab.run([*command, "--data", "synthetic", "--pacing", "none"], env={"TORCHELASTIC_RUN_ID": "lab"}, timeout_s=300)
    return breakdown_of([out], plan=plan_path)[0]


def link_case(case: dict[str, Any], folder: Path, plan_path: Path, plain_s: float) -> dict[str, Any]:
    from meshwright.io.plan.plan import read_plan
    from meshwright.program.calls import inline

    plan = read_plan(plan_path)
    program = inline(plan.main, plan.programs).program
    pairs = sorted(set(zip(program.channels.src.tolist(), program.channels.dst.tolist(), strict=True)))
    pair = pairs[case["seed"] % len(pairs)]
    found = run_in_lab(plan_path, folder / "slow", pair)
    return judged(1 - plain_s / found.step_s, found, "slow link", f"link {pair[0]} -> {pair[1]}")


def cases(quick: bool) -> list[dict[str, Any]]:
    worlds = [1 + (i // 3) % 2 for i in range(7)]
    data = [{"kind": "data", "model": MODELS[i % 3], "world": w, "seed": i, "rank": i % w, "layer": -1} for i, w in enumerate(worlds)]
    copy = [{"kind": "copy", "model": MODELS[i % 3], "world": w, "seed": 10 + i, "rank": 0, "layer": (2 * i + 1) % 4} for i, w in enumerate(worlds)]
    link = [{"kind": "link", "seed": i, "model": "gpt", "world": DEVICES} for i in range(6)]
    return [data[0], copy[1], link[1]] if quick else data + copy + link


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one case of each kind, nothing written")
    parser.add_argument("--only", choices=("data", "copy", "link"), help="cases of one kind, nothing written")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    raw = []
    with tempfile.TemporaryDirectory() as name:
        chosen = [c for c in cases(args.quick) if args.only in (None, c["kind"])]
        plan, plain_s = None, 0.0
        if any(c["kind"] == "link" for c in chosen):
            plan = plan_for_mesh(Path(name), 0)
            plain_s = run_in_lab(plan, Path(name) / "plain", None).step_s
        for number, case in enumerate(chosen):
            for attempt in range(3):
                folder = Path(name) / f"{number}-{attempt}"
                folder.mkdir()
                found = link_case(case, folder, plan, plain_s) if plan and case["kind"] == "link" else profiled_case(case, folder)
                if found["plant_share"] >= LEAST:
                    break
            case.pop("folder", None)
            raw.append({**case, **found, "attempts": attempt + 1})
            print(json.dumps(raw[-1]), flush=True)
    right = sum(r["right"] for r in raw)
    least = min(r["plant_share"] for r in raw)
    first = {"what": f"planted cause ranked first, of {len(raw)}", "value": right, "unit": "cases", "limit": len(raw)}
    smallest = {"what": "smallest plant, share of the step", "value": round(least, 3), "unit": "", "limit": LEAST}
    rows = [first | {"ratio": round(len(raw) / max(right, 1), 3)}, smallest | {"ratio": round(LEAST / max(least, 1e-9), 3)}]
    for row in rows:
        print(f"{row['what']:<60} {row['value']} {row['unit']}")
    if not args.quick and not args.only:
        machine.record("trace_bottlenecks", rows, raw=raw)


if __name__ == "__main__":
    main()
