"""Layouts of DeepSeek-V3-, Mixtral-8x22B- and Qwen3-235B-shaped models on 256 and 2,048 H100s, beside published runs.

Run: `python benchmarks/expert_layouts.py [SHAPE ...] [--graphs FOLDER] [--plans]`. Each shape of `examples/experts.py` is captured whole, then
`layout search --ep` looks for layouts with the expert degree that was published (8 for Mixtral, which has 8 experts). Processor seconds of both
commands count; the limit is 120 of both together. `--graphs` keeps captured graphs, with the seconds that they took. Prices: analytic roofline,
bf16, every operator alone; buffers with room for experts chosen alike. So published figures, with fused kernels and float8, stand beside ours and are
no limit. `tokens_per_s_gpu` of a published share of the peak follows from the model operations counted here (half of the causal scores) and
989.4e12/s.

`--plans`: instead, training plans of the shapes with the degrees of `PLANS`, in bfloat16 with float32 masters: written, read again and checked
(`train plan`, `train check`), with the memory that their programs need. Capture and plan count, the check is told apart. A command makes all rows;
what both commands print is in them; each shape has a file of results. A plan that is refused is a row with the words of the refusal. `--graphs` keeps
plans too, with their seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import machine

SHAPES = Path(__file__).parent.parent / "examples" / "experts.py"
SEQUENCE, LIMIT_S, PEAK_FLOPS = 4096, 120, 989.4e12
# name -> (expert degree, samples of a step on 256 and on 2,048 devices, active parameters in products per token, layers, width of scores)
MODELS: dict[str, tuple[int, dict[int, int], float, int, int]] = {
    "mixtral_8x22b": (8, {256: 1024, 2048: 2048}, 38.9e9, 56, 6144), "deepseek_v3": (64, {256: 2048, 2048: 15_360}, 36.6e9, 61, 128 * 160),
    "qwen3_235b": (32, {256: 1024, 2048: 4096}, 21.5e9, 94, 8192),
}  # fmt: skip
# name -> devices -> degrees and recomputation of a plan
PLANS: dict[str, tuple[tuple[int, str], ...]] = {  # devices and flags
    "mixtral_8x22b": ((256, "--dp 256 --tp 1 --pp 1 --ep 8 --zero 3"), (2048, "--dp 2048 --tp 1 --pp 1 --ep 8 --zero 3")),
    "deepseek_v3": (
        (256, "--dp 256 --tp 1 --pp 1 --ep 64 --zero 3 --recompute layers"), (2048, "--dp 1024 --tp 2 --pp 1 --ep 64 --zero 3 --recompute layers"),
    ),
    "qwen3_235b": (
        (256, "--dp 64 --tp 4 --pp 1 --ep 32 --zero 3 --recompute full"),
        (256, "--dp 16 --tp 2 --pp 8 --ep 32 --zero 1 --recompute layers --pipeline dualpipe-v"),  # the published degrees, with pairs
        (2048, "--dp 512 --tp 4 --pp 1 --ep 32 --zero 3"),
    ),
}  # fmt: skip
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "deepseek_v3": [
        {"source": "arXiv:2412.19437, sections 1 and 3.2: 180e3 H800 hours per 1e12 tokens; 2,048 devices, PP 16, EP 64, ZeRO 1, DualPipe, float8",
         "devices": 2048, "tokens_per_s_gpu": 1e12 / (180e3 * 3600)},
        {"source": "docs.nvidia.com/nemo/megatron-bridge, MoE hardware configurations: H100, TP 2, EP 64, PP 8, VPP 4: high-teens share of the peak",
         "share_of_peak": 0.18},
    ],
    "mixtral_8x22b": [{"source": "arXiv:2504.14960, abstract: Megatron-Core on H100s, bf16: 49.3 % of the peak", "share_of_peak": 0.493}],
    "qwen3_235b": [
        {"source": "docs.nvidia.com/nemo/megatron-bridge, MoE hardware configurations: H100, TP 2, EP 32, PP 8, VPP 4: around 30 % of the peak",
         "share_of_peak": 0.30},
    ],
}  # fmt: skip


def command(*words: str, may_refuse: bool = False) -> tuple[float, str]:
    """Processor seconds of a command, and what it printed; `may_refuse`: or why it refused."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    full, single = [sys.executable, "-m", "meshwright", *words], os.environ | {"OMP_NUM_THREADS": "1"}
    made = subprocess.run(full, capture_output=True, text=True, check=not may_refuse, env=single)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = made.stderr[made.stderr.rfind("error:") :] if made.returncode else made.stdout
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, said


def captured(name: str, folder: Path) -> tuple[Path, float]:
    path, kept = folder / f"{name}.json.gz", folder / f"{name}.cpu_s"
    if not (path.exists() and kept.exists()):
        kept.write_text(str(command("train", "capture", "--model", f"{SHAPES}:{name}", "-o", str(path))[0]))
    return path, float(kept.read_text())


def model_flops(name: str) -> float:
    """Of a token, forward and backward: 6 for every parameter in products, and attention to half of the positions."""
    _, _, active, layers, width = MODELS[name]
    return 6 * active + 6 * layers * width * SEQUENCE


def published(name: str) -> list[dict[str, Any]]:
    return [{**p, "tokens_per_s_gpu": p.get("tokens_per_s_gpu") or p["share_of_peak"] * PEAK_FLOPS / model_flops(name)} for p in PUBLISHED[name]]


def planned(name: str, devices: int, graph: Path, capture_s: float) -> dict[str, Any]:
    degree, batches, *_ = MODELS[name]
    search_s, text = command(
        "layout", "search", "--graph", str(graph), "--fabric", f"dgx-h100:{devices // 8}", "--global-batch", str(batches[devices]), "--ep",
        str(degree), "--tensors", "1,2", "--microbatches", "1", "--show", "2", "--json",
    )  # fmt: skip
    found = json.loads(text)
    best, bounds = found["best"], found["bounds"]
    rate = batches[devices] * SEQUENCE / best["time_s"] / devices
    return {
        "what": f"{name} on {devices} H100s: capture and search", "value": capture_s + search_s, "unit": "CPU seconds", "limit": LIMIT_S,
        "capture_cpu_s": capture_s, "search_cpu_s": search_s, "layout": best["name"], "choices": best["choices"][:4], "expert_degree": degree,
        "global_batch": batches[devices], "step_s": best["time_s"], "tokens_per_s_gpu": rate,
        "share_of_peak": rate * model_flops(name) / PEAK_FLOPS, "gap_to_any_layout": bounds["universal_gap"], "gap_to_family": bounds["family_gap"],
        "candidates": found["counts"]["candidates"], "published": published(name),
    }  # fmt: skip


def bounds(name: str, devices: int, degrees: str, graph: Path) -> dict[str, Any]:
    """The two bounds of `layout search`: of any layout by its layer table, and of the family of the plan's degrees, in seconds."""
    from meshwright.decide.layout.mixed.bounds import layout_bounds
    from meshwright.drive.layout.search import find_layouts
    from meshwright.drive.plans import read_fabric
    from meshwright.graph.scale import at_batch
    from meshwright.io.model.graph import read_graph
    from meshwright.plan.precision import MIXED
    from meshwright.probe.costs.name import load_cost

    flags = degrees.split()
    data, tensor, pipeline, expert, level = (int(flags[flags.index(flag) + 1]) for flag in ("--dp", "--tp", "--pp", "--ep", "--zero"))
    fabric, captured_graph = read_fabric(f"dgx-h100:{devices // 8}"), read_graph(graph)
    found = find_layouts(
        lambda batch: at_batch(captured_graph, batch), fabric, load_cost("roofline", fabric), global_batch=MODELS[name][1][devices], precision=MIXED,
        microbatches=(1,), tensors={1, 2, tensor}, levels=(level,), methods=("grid",), contexts=(1,), experts=expert, simulated=1, refine=0,
    )  # fmt: skip
    mine = next(
        c for j in (*found.found.ranked, *found.found.others) for c in [j.candidate]
        if (c.layout.data, c.layout.stages[0].replicas[0].tensor, c.layout.pipeline) == (data, tensor, pipeline)
    )  # fmt: skip
    made = layout_bounds(found.problem, mine)
    return {"universal_bound_s": made.universal_s, "family_bound_s": made.family_s, "family": made.family}


def proved(name: str, devices: int, degrees: str, graph: Path, capture_s: float, folder: Path) -> dict[str, Any]:
    """A plan that is written, read and checked, and what its program needs."""
    made = f"{name}-{devices // 8}-{degrees.replace(' ', '')}"
    path, kept = folder / f"{made}.json.gz", folder / f"{made}.seconds.json"
    if not kept.exists():
        given = ("--graph", str(graph), "--fabric", f"dgx-h100:{devices // 8}", "--global-batch", str(MODELS[name][1][devices]))
        how = ("--microbatch", "1", "--precision", "mixed", *(() if "--pipeline" in degrees else ("--pipeline", "1f1b")), *degrees.split())
        plan_s, text = command("train", "plan", *given, *how, "--out", str(path), may_refuse=True)
        check_s, verdict = command("train", "check", str(path)) if path.exists() else (0.0, "")
        said = {"plan": text.partition("plan written")[0], "check": verdict.replace(f"{path}: ", "")}
        kept.write_text(json.dumps({"plan_cpu_s": plan_s, "check_cpu_s": check_s, **said}))
    took, batch = json.loads(kept.read_text()), MODELS[name][1][devices]
    row = {
        "what": f"{name} on {devices} H100s: capture and plan", "value": capture_s + took["plan_cpu_s"], "unit": "CPU seconds", "limit": LIMIT_S,
        "capture_cpu_s": capture_s, **took, "degrees": degrees, "global_batch": batch, "published": published(name),
    }  # fmt: skip
    if not path.exists():
        return row
    plan = json.loads(gzip.decompress(path.read_bytes()))
    found, bound_s, two = plan["prediction"], float(Fraction(plan["bound"]["value"])), bounds(name, devices, degrees, graph)
    tokens = batch * SEQUENCE / found["time_s"] / devices
    # The table prices experts that data replicas divide. Where tensor ranks divide them further, the plan is in none of its families.
    of_table = plan["decisions"]["experts"]["options"].get("tensor", 1) == 1
    return row | {
        "step_s": found["time_s"], "bound_s": bound_s, "times_the_bound": found["time_s"] / bound_s, "tokens_per_s_gpu": tokens,
        "share_of_peak": tokens * model_flops(name) / PEAK_FLOPS, "memory_bytes": max(found["memory_peak_bytes"]),
        "worst_order_bytes": max(found["memory_worst_bytes"]), "device_bytes": 80 * 10**9, "phases_s": found["phases_s"],
        "recompute": plan["decisions"]["recompute"]["strategy"], "file_bytes": path.stat().st_size,
        **two, "gap_to_any_layout": 1 - two["universal_bound_s"] / found["time_s"], "family_is_of_the_table": of_table,
        "gap_to_family": 1 - two["family_bound_s"] / found["time_s"] if of_table else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="*", default=list(MODELS))
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--plans", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.shapes:
            graph, capture_s = captured(name, args.graphs or Path(folder))
            if args.plans:
                for devices, degrees in PLANS.get(name, ()):
                    rows.append(row := proved(name, devices, degrees, graph, capture_s, args.graphs or Path(folder)))
                    step = "step {step_s:.4g} s, {memory_bytes} bytes, worst {worst_order_bytes}" if "step_s" in row else "{plan}"
                    print(f"{{what}}: {{value:.0f}} s; {step}".format(**row), flush=True)
                    mine = [r for r in rows if r["what"].startswith(name)]
                    machine.record(f"expert_plans_{name}", mine, command=f"python benchmarks/expert_layouts.py {name} --plans", sequence=SEQUENCE)
                continue
            for devices in MODELS[name][1]:
                row = planned(name, devices, graph, capture_s)
                print(
                    f"{row['what']}: {row['value']:.0f} s; {row['layout']}, {row['step_s']:.4g} s, {row['tokens_per_s_gpu']:.0f} tokens/s a GPU; "
                    f"gaps {row['gap_to_any_layout']:.1%}, {row['gap_to_family']:.1%}; published "
                    + ", ".join(f"{p['tokens_per_s_gpu']:.0f}" for p in row["published"]), flush=True,
                )  # fmt: skip
                rows.append(row)
                machine.record("expert_layouts", rows, sequence=SEQUENCE)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
