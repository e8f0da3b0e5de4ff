"""Draws the pictures of docs/methods/ from plans of ours: `python tools/method_pictures.py [NAME ...]`.

A picture is what a command draws of the plan that it makes; `COMMANDS` has them all. Equal versions draw equal pictures. Run it again when a method's
plan is to look different: `python tools/method_pictures.py chimera`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import method_drawings as drawings

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
TRAIN = "train plan --model examples/gpt.py:tiny --fabric two-islands:2 --global-batch 16 --microbatch 4"
KFAC = "--work kfac --curvature-s 0.025547 --inverse-s 0.071667 --layers 6 --precondition-s 0.0068"
MEASURED = {"fusionaware": "memory_curve_swiglu.svg"}  # drawn by a benchmark, of measured steps
STORAGES = "id,lower,upper,size\nweights,0,9,4096\nconv1,0,3,6144\nrelu1,2,5,6144\nconv2,4,7,3072\nskip,1,6,2048\nlogits,6,9,1024\n"
CLICKS = {
    "schema": "meshwright.tables", "version": 1, "name": "clicks", "batch": 256,
    "tables": [
        {"name": "user", "rows": 20000, "dim": 32, "pooling": 3}, {"name": "item", "rows": 8000, "dim": 64, "pooling": 12},
        {"name": "shop", "rows": 500, "dim": 16}, {"name": "word", "rows": 4000, "dim": 16, "pooling": 20, "mode": "mean"},
    ],
}  # fmt: skip
EDGE = """schema = "meshwright.fabric"
version = 1
name = "edge"
devices = [
  { name = "cam", kind = "cpu", runs = { camera = 1000000000, fp32 = 200000000 } },
  { name = "box", kind = "cpu", flops = { fp32 = "4GFLOP/s" } },
  { name = "hub", kind = "cpu", flops = { fp32 = "2GFLOP/s" } },
]
links = [
  { src = "cam", dst = "box", rate = "10MB/s", both_ways = true },
  { src = "box", dst = "hub", rate = "50MB/s", both_ways = true },
  { src = "cam", dst = "hub", rate = "10MB/s", both_ways = true },
]
"""
JOBS, SHARES = "synthetic:jobs=12,per_hour=40,seed=2", ("proportional", "tune", "priced")
CLASSIC = ("ring", "bruck", "direct", "pat")
DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
# The last command of a row draws; those before it make what it draws.
COMMANDS: dict[str, list[str]] = {
    "adares": [],  # drawn of what its benchmark found
    "forestcoll": ["collective plan all-gather --fabric two-islands:2 --size 64KiB --strategy forestcoll"],
    "taccl": ["collective plan all-gather --fabric ndv2:1 --size 1MiB --strategy taccl"],
    "blink": ["collective plan broadcast --fabric dgx1-v100:1 --devices 0,1,4,5,6 --size 8MiB --strategy blink"],
    "blueconnect": ["collective plan all-reduce --fabric two-islands:2 --size 1MiB --strategy blueconnect"],
    "cloudcollectives": ["collective plan all-reduce --fabric two-islands:4 --devices 0,4,1,5,2,6,3,7 --size 1MiB --strategy cloudcollectives"],
    "megatron": [TRAIN],
    "sequence": [f"{TRAIN} --tp 2 --dp 2 --pp 1 --sequence-parallel on"],
    "chimera": ["pipeline plan --stages 4 --microbatches 4 --strategy chimera"],
    "zerobubble": ["pipeline plan --stages 4 --microbatches 8 --strategy zb1p"],
    "breadthfirst": ["pipeline plan --stages 4 --microbatches 8 --strategy breadth-first"],
    "pipefisher": [
        "pipeline plan --stages 4 --microbatches 4 --forward-s 0.009748 --backward-s 0.01645 --strategy 1f1b",
        f"pipeline fill pipeline.json {KFAC} --out filled.json",
        "program show filled.json",
    ],
    "oktopk": [
        "collective sparse --fabric star:4?link=12.5MB/s --elements 1000000 --density 0.01 --strategies oktopk --out sparse.json",
        "program show sparse.json",
    ],
    "staticmemory": ["memory pack storages.csv -o placed.csv"],
    "monet": ["memory plan --model examples/gpt.py:tiny --budget 70% --strategy monet"],  # times its operators
    "autoddl": ["layout plan benchmarks/autoddl.py:fc_heavy --fabric star:4?link=100Mbit/s --out layout.json"],
    "directconnect": [
        "fabric design --nodes 8 --ports 2 --row 1 --out pod.toml",
        "collective plan all-gather --fabric pod.toml --size 1MiB --strategy bfb",
    ],
    "hammingmesh": ["fabric design --accelerators 16 --row 3 --out mesh.toml", "fabric show mesh.toml"],
    "tutel": [
        "experts compare --fabric star:4?link=12.5MB/s --experts 2 --model-dim 256 --inner 1024 --capacities 64,128,256,512,1024 --chunks 1 "
        "--algorithms linear --json",
    ],
    "switchml": ["collective plan all-reduce --fabric dgx-h100:1 --devices 0,1,2,3 --size 16MiB --strategy switchml --in-network"],
    "flare": [f"collective sparse-switch --tree 8,8 --size 4MiB --rate 100Gbit/s --density {d} --json" for d in DENSITIES],
    "vmlifetime": [
        "cluster plan vms:hosts=12,days=4,before_days=3,warm_days=1,load=0.5,owners=60,seed=5 --warm-up 1d --strategy best-fit --out best.json",
        "cluster plan vms:hosts=12,days=4,before_days=3,warm_days=1,load=0.5,owners=60,seed=5 --warm-up 1d --strategy aligned --out aligned.json",
    ],
    "megablocks": [],  # its blocks follow from a routing of our kernels
    "coordl": [],  # drawn of what its benchmark measured
    "adaqp": ["graph compare rmat:2000,20000 --fabric star:4?link=12.5MB/s --method own --like 4 --curve --json"],
    "neuroshard": [f"tables plan clicks.json --fabric laptop:2 --strategy {s} --json" for s in ("dim-greedy", "neuroshard")],
    "synergy": [f"cluster plan {JOBS} --fabric dgx1-v100:1 --cores 24 --memory 500GB --allocation {a} --json" for a in SHARES],
    "hotline": ["trace annotate trace.json --model examples/gpt.py:tiny --json"],  # of a trace that is taken here
    "giph": [
        "place fit --updates 25 --devices 8 --out moves.safetensors",
        "place plan tasks.json --fabric edge.toml --strategy giph --net moves.safetensors",
    ],
    "classic": [f"collective compare all-gather --fabric two-islands:4 --sizes 1KiB:16MiB:4 --strategies {','.join(CLASSIC)} --json"],
    "nccl": ["collective nccl all-reduce --fabric dgx-h100:2 --sizes 1KiB:1GiB:16 --json"],
    "context": ["train plan --model examples/llama.py:tiny --fabric two-islands --devices 0-3 --global-batch 4 --context 4 --dp 1 --tp 1 --pp 1"],
    "rotor": ["memory plan --model examples/gpt.py:tiny --budget 70% --strategy rotor"],  # times its operators
    "metis": ["layout search --model examples/gpt.py:medium --fabric examples/fabrics/mixed_generations.toml --global-batch 64 --json"],
    "zero": ["train plan --model examples/gpt.py:tiny --fabric two-islands:2 --global-batch 16 --microbatch 4 --dp 4 --tp 1 --pp 1 --zero 3"],
    "onefoneb": ["pipeline plan --stages 4 --microbatches 8 --strategy 1f1b"],
    "dualpipe": ["pipeline plan --stages 4 --microbatches 8 --strategy dualpipe"],
    "cupcake": [
        "traffic plan --profile profile.json --strategy ddp-buckets --codecs none --out ddp.json",
        "traffic plan --profile profile.json --codecs none --out none.json",
        "traffic plan --profile profile.json --out cupcake.json",
    ],
}
DRAWN = {  # by tools/method_drawings.py, of what the last command wrote
    "staticmemory": lambda: drawings.arena_svg(Path("placed.csv")),
    "autoddl": lambda: drawings.layout_svg(Path("layout.json")),
    "tutel": lambda: drawings.degrees_svg(Path("printed-0.json")),
    "flare": lambda: drawings.sparse_svg([Path(f"printed-{i}.json") for i in range(len(DENSITIES))]),
    "vmlifetime": lambda: drawings.hosts_svg({"best fit": Path("best.json"), "aligned": Path("aligned.json")}),
    "megablocks": drawings.blocks_svg,
    "coordl": lambda: drawings.reads_svg(ROOT / "benchmarks" / "results" / "data_cache.json"),
    "adaqp": lambda: drawings.bits_svg(Path("printed-0.json")),
    "neuroshard": lambda: drawings.tables_svg({"by columns": Path("printed-0.json"), "NeuroShard": Path("printed-1.json")}),
    "synergy": lambda: drawings.cores_svg({name: Path(f"printed-{i}.json") for i, name in enumerate(SHARES)}),
    "hotline": lambda: drawings.modules_svg(Path("printed-0.json")),
    "classic": lambda: drawings.sizes_svg(Path("printed-0.json")),
    "metis": lambda: drawings.stages_svg(Path("printed-0.json")),
    "nccl": lambda: drawings.nccl_svg(Path("printed-0.json")),
    "adares": lambda: drawings.curves_svg(ROOT / "benchmarks" / "results" / "resize.json"),
    "cupcake": lambda: drawings.traffic_svg({"DDP's buckets": Path("ddp.json"), "grouped": Path("none.json"), "and fp16": Path("cupcake.json")}),
}  # fmt: skip


def draw(name: str) -> None:
    """Writes the picture of one method. Raises: SystemExit where a command of it fails."""
    from meshwright.cli import main

    target, here = PAGES / f"{name}.svg", Path.cwd()
    with tempfile.TemporaryDirectory(prefix="picture-") as folder:
        for link in ("examples", "benchmarks"):
            Path(folder, link).symlink_to(ROOT / link)
        os.chdir(folder)
        try:
            Path("profile.json").write_text(profile_json(), encoding="utf-8")
            files = {"storages.csv": STORAGES, "clicks.json": json.dumps(CLICKS), "edge.toml": EDGE, "tasks.json": json.dumps(task_graph())}
            for file, text in files.items():
                Path(file).write_text(text, encoding="utf-8")
            if name == "hotline":
                write_trace(Path("trace.json"))
            commands = COMMANDS[name] if name in DRAWN else [*COMMANDS[name][:-1], f"{COMMANDS[name][-1]} --svg picture.svg"]
            for command in commands:
                run(main, command)
            if name in DRAWN:
                Path("picture.svg").write_text(DRAWN[name](), encoding="utf-8")
            target.write_text(Path("picture.svg").read_text(encoding="utf-8"), encoding="utf-8")
        finally:
            os.chdir(here)


def run(main: object, command: str) -> None:
    """What the nth command with --json prints goes to printed-N.json."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed if "--json" in command else sys.stdout):
        if main(shlex.split(command)):  # type: ignore[operator]
            raise SystemExit(f"error: meshwright {command}")
    if "--json" in command:
        number = len(list(Path.cwd().glob("printed-*.json")))
        Path(f"printed-{number}.json").write_text(printed.getvalue(), encoding="utf-8")


def task_graph() -> dict[str, object]:
    """Four pictures from a camera: each is cut, looked at and described; at the end all are told together."""
    tasks = [{"name": f"shoot{i}", "work": 5e6, "kind": "camera"} for i in range(4)]
    edges = []
    for i in range(4):
        tasks += [{"name": f"cut{i}", "work": 1e7}, {"name": f"look{i}", "work": 6e7}]
        edges += [{"src": f"shoot{i}", "dst": f"cut{i}", "size_bytes": 60_000}, {"src": f"cut{i}", "dst": f"look{i}", "size_bytes": 20_000}]
        edges.append({"src": f"look{i}", "dst": "tell", "size_bytes": 200})
    return {"schema": "meshwright.tasks", "version": 1, "name": "pictures", "tasks": [*tasks, {"name": "tell", "work": 1e7}], "edges": edges}


def write_trace(path: Path) -> None:
    """Three steps of a small GPT under torch's profiler, without a word of ours."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import tiny

    module, (tokens, targets) = tiny()
    optimizer = torch.optim.AdamW(module.parameters())
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3)) as profiler:
        for _ in range(5):
            torch.nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(path))


def profile_json() -> str:
    """Five gradients, and two codecs with straight costs: 1 ms and 6 ns a byte to send; for half precision 0.1 ms and 1 ns an element to encode."""
    tensors = {"head": 512_000, "block3": 1_048_576, "block2": 1_048_576, "block1": 1_048_576, "stem": 9_408}
    elements, biggest = list(tensors.values()), 10_000_000

    def codec(name: str, code_ns: int, per_element_ns: int, element_bytes: int) -> dict[str, object]:
        code = {"sizes": [0, biggest], "times_ns": [code_ns, code_ns + per_element_ns * biggest], "r2": None}
        send = {"sizes": [0, 4 * biggest], "times_ns": [1_000_000, 1_000_000 + 24 * biggest], "r2": None}
        payloads = [n * element_bytes for n in elements]
        return {"codec": name, "encode": code, "exchange": send, "decode": code, "payload_bytes": payloads, "evidence": "assumed"}

    rows = [{"name": n, "shape": [k], "ready_ns": (4 + 8 * i) * 1_000_000} for i, (n, k) in enumerate(tensors.items())]
    codecs = [codec("none", 0, 0, 4), codec("fp16", 100_000, 1, 2)]
    profile = {"tensors": rows, "codecs": codecs, "ranks": 4, "source": "straight costs"}
    return json.dumps({"schema": "meshwright.traffic-profile", "version": 1, "profile": profile})


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["MESHWRIGHT_CACHE"] = os.environ["MESHWRIGHT_PROGRESS"] = "0"
    if unknown := [w for w in sys.argv[1:] if w not in {*COMMANDS, *MEASURED}]:
        raise SystemExit(f"error: no picture {unknown[0]!r}; there are: {', '.join(COMMANDS)}")
    for method in sys.argv[1:] or (*COMMANDS, *MEASURED):
        if method in MEASURED:
            (PAGES / f"{method}.svg").write_text((ROOT / "benchmarks" / "results" / MEASURED[method]).read_text(encoding="utf-8"), encoding="utf-8")
        else:
            draw(method)
