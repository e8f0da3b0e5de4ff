"""The expert layer beside microsoft/Tutel's own CPU build: outputs, loss, capacity and demand, on 1, 2 and 4 gloo processes with the same weights.

Run: `python benchmarks/experts_tutel.py --tutel-python PYTHON` (two minutes). PYTHON: of an environment with torch 2.13 and Tutel, built from
its repository by `NO_CUDA=1 pip install --no-build-isolation .`. Cases: k = 1, 2, 3, 5; f = 0, 0.5, 1, -1; batch-prioritised routing off and on; with
fewer experts than ranks every degree r. Raw output: results/experts_tutel.json.

With batch priority Tutel reads the demand from the row of its last token, so its counts and, for f <= 0, its capacity are too small; tokens that it
means to keep are lost. In these cases ours is held against the equations (tests/nn/test_layer.py), and how far the peer is off is written down.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

H, F, T = 16, 24, 60
CAPACITIES = (0.0, 0.5, 1.0, -1.0)
ASKED = 1e-5


def cases(ranks: int) -> list[dict[str, Any]]:
    found = [
        {"experts": 8, "k": k, "f": f, "bpr": bpr, "r": 1} for k, f, bpr in product((1, 2, 3, 5), CAPACITIES, (False, True))
    ]  # fmt: skip
    shared = {2: 1, 4: 2}.get(ranks)
    if shared:
        degrees = (0, 1, 2)
        found += [{"experts": shared, "k": k, "f": f, "bpr": False, "r": r} for k, f, r in product((1, 2)[:shared], CAPACITIES, degrees)]
    return found


def weights(experts: int) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(experts)
    shapes = {"w1": (experts, F, H), "b1": (experts, F), "w2": (experts, F, H), "b2": (experts, H), "router": (experts, H)}
    return {n: (draw.standard_normal(s) / 3).astype(np.float32) for n, s in shapes.items()}


def tokens(rank: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1000 + rank).standard_normal((T, H)).astype(np.float32)


def child(which: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number, case in enumerate(cases(ranks)):
        made = (theirs if which == "theirs" else ours)(rank, ranks, case, {n: torch.from_numpy(w) for n, w in weights(case["experts"]).items()})
        np.savez(folder / f"{which}-{number}-{rank}.npz", **made)
    dist.barrier()
    dist.destroy_process_group()


def theirs(rank: int, ranks: int, case: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    import torch
    from tutel import moe
    from tutel.impls import moe_layer as inside

    seen: list[Any] = []
    plain = getattr(inside, "_plain", inside.extract_critical)
    inside._plain = plain

    def recorded(*args: Any, **more: Any) -> Any:
        seen.append(plain(*args, **more))
        return seen[-1]

    inside.extract_critical = recorded
    experts = case["experts"]
    count = experts // ranks if experts >= ranks else -(ranks // experts)
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": case["k"], "capacity_factor": case["f"], "fp32_gate": True}, model_dim=H,
        experts={"type": "ffn", "num_experts_per_device": count, "hidden_size_per_expert": F, "activation_fn": torch.nn.functional.gelu},
        parallel_type=f"adaptive:{case['r']}", batch_prioritized_routing=case["bpr"],
    )  # fmt: skip
    local, shares = max(1, experts // ranks), max(1, ranks // experts)
    first, s = rank // shares * local, rank % shares
    own = {n: full[n][first : first + local] for n in ("w1", "b1", "w2", "b2")}
    with torch.no_grad():
        for name, target in (("w1", "batched_fc1_w"), ("b1", "batched_fc1_bias"), ("w2", "batched_fc2_w")):
            getattr(layer.experts, target).copy_(own[name][:, s * F // shares : (s + 1) * F // shares])
        layer.experts.batched_fc2_bias.copy_(own["b2"][:, s * H // shares : (s + 1) * H // shares])
        layer.gates[0].wg.weight.copy_(full["router"])
        y = layer(torch.from_numpy(tokens(rank)))
    return {"y": y.numpy(), "l_aux": y.l_aux.numpy(), "capacity": seen[-1][0][4], "counts": layer.dispatch_count.numpy()}


def ours(rank: int, ranks: int, case: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    import torch

    from meshwright.nn import FeedForward, MoELayer

    layer = MoELayer(
        FeedForward(H, F), case["experts"], k=case["k"], capacity_factor=case["f"], prioritised=case["bpr"], choice=(case["r"], 1, "linear"),
    )  # fmt: skip
    layer.load_full_experts(full)
    with torch.no_grad():
        layer.router.linear.weight.copy_(full["router"])
        y = layer(torch.from_numpy(tokens(rank)))
    return {"y": y.numpy(), "l_aux": layer.l_aux.numpy(), "capacity": layer.capacity, "counts": layer.dispatch_count.numpy()}


def run(python: str, which: str, ranks: int, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([python, __file__, "--child", which, "--folder", str(folder)], env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
                         stderr=subprocess.PIPE, text=True)
        for r in range(ranks)
    ]  # fmt: skip
    for process in started:
        _, said = process.communicate()
        if process.returncode:
            raise SystemExit(f"{which}: {said[-3000:]}")


def compared(ranks: int, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for number, case in enumerate(cases(ranks)):
        row: dict[str, Any] = {"ranks": ranks, **case, "y": 0.0, "l_aux": 0.0, "capacity": True, "counts": True}
        for rank in range(ranks):
            a, b = (np.load(folder / f"{which}-{number}-{rank}.npz") for which in ("ours", "theirs"))
            row["y"] = max(row["y"], float(np.abs(a["y"] - b["y"]).max()))
            row["l_aux"] = max(row["l_aux"], float(abs(a["l_aux"] - b["l_aux"])))
            row["capacity"] &= bool(a["capacity"] == b["capacity"])
            row["counts"] &= bool((a["counts"] == b["counts"]).all())
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tutel-python", help="interpreter of an environment with Tutel")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder)
        return
    if not args.tutel_python:
        parser.error("--tutel-python is missing")
    import machine

    raw: list[dict[str, Any]] = []
    for ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as name:
            run(sys.executable, "ours", ranks, Path(name))
            run(args.tutel_python, "theirs", ranks, Path(name))
            raw += compared(ranks, Path(name))
    sound = [r for r in raw if not r["bpr"] or r["f"] > 0]
    lost = [r for r in raw if r["bpr"] and r["f"] <= 0]
    plain = [r for r in raw if not r["bpr"]]
    rows = [
        {"what": f"largest difference of outputs, {len(sound)} cases", "value": max(r["y"] for r in sound), "limit": ASKED},
        {"what": f"largest difference of the loss, {len(raw)} cases", "value": max(r["l_aux"] for r in raw), "limit": ASKED},
        {"what": "cases with another capacity", "value": sum(not r["capacity"] for r in sound), "limit": 0},
        {"what": f"cases with other demands, without batch priority ({len(plain)})", "value": sum(not r["counts"] for r in plain), "limit": 0},
        {"what": f"cases in which the peer's capacity under batch priority is too small, of {len(lost)}",
         "value": sum(not r["capacity"] for r in lost)},
    ]  # fmt: skip
    for row in rows:
        print(f"{row['what']:<90} {row['value']:.3g}" + (f" (asked {row['limit']:.3g})" if "limit" in row else ""))
    machine.record("experts_tutel", rows, command="python benchmarks/experts_tutel.py --tutel-python PYTHON", raw=raw)


if __name__ == "__main__":
    main()
