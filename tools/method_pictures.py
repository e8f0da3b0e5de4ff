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

from method_drawings import arena_svg, blocks_svg, curves_svg, degrees_svg, hosts_svg, layout_svg, sparse_svg, traffic_svg

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
TRAIN = "train plan --model examples/gpt.py:tiny --fabric two-islands:2 --global-batch 16 --microbatch 4"
KFAC = "--work kfac --curvature-s 0.025547 --inverse-s 0.071667 --layers 6 --precondition-s 0.0068"
MEASURED = {"fusionaware": "memory_curve_swiglu.svg"}  # drawn by a benchmark, of measured steps
STORAGES = "id,lower,upper,size\nweights,0,9,4096\nconv1,0,3,6144\nrelu1,2,5,6144\nconv2,4,7,3072\nskip,1,6,2048\nlogits,6,9,1024\n"
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
    "cupcake": [
        "traffic plan --profile profile.json --strategy ddp-buckets --codecs none --out ddp.json",
        "traffic plan --profile profile.json --codecs none --out none.json",
        "traffic plan --profile profile.json --out cupcake.json",
    ],
}
DRAWN = {  # by tools/method_drawings.py, of what the last command wrote
    "staticmemory": lambda: arena_svg(Path("placed.csv")),
    "autoddl": lambda: layout_svg(Path("layout.json")),
    "tutel": lambda: degrees_svg(Path("printed-0.json")),
    "flare": lambda: sparse_svg([Path(f"printed-{i}.json") for i in range(len(DENSITIES))]),
    "vmlifetime": lambda: hosts_svg({"best fit": Path("best.json"), "aligned": Path("aligned.json")}),
    "megablocks": blocks_svg,
    "adares": lambda: curves_svg(ROOT / "benchmarks" / "results" / "resize.json"),
    "cupcake": lambda: traffic_svg({"DDP's buckets": Path("ddp.json"), "grouped": Path("none.json"), "and fp16": Path("cupcake.json")}),
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
            Path("storages.csv").write_text(STORAGES, encoding="utf-8")
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
