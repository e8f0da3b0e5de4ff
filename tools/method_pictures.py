"""Draws the pictures of docs/methods/ from plans of ours: `python tools/method_pictures.py [NAME ...]`.

A picture is what a command draws of the plan that it makes; `COMMANDS` has them all. Equal versions draw equal pictures. Run it again when a method's
plan is to look different: `python tools/method_pictures.py chimera`.
"""

from __future__ import annotations

import csv
import os
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
TRAIN = "train plan --model examples/gpt.py:tiny --fabric two-islands:2 --global-batch 16 --microbatch 4"
KFAC = "--work kfac --curvature-s 0.025547 --inverse-s 0.071667 --layers 6 --precondition-s 0.0068"
MEASURED = {"fusionaware": "memory_curve_swiglu.svg"}  # drawn by a benchmark, of measured steps
STORAGES = "id,lower,upper,size\nweights,0,9,4096\nconv1,0,3,6144\nrelu1,2,5,6144\nconv2,4,7,3072\nskip,1,6,2048\nlogits,6,9,1024\n"
# The last command of a row draws; those before it make what it draws.
COMMANDS: dict[str, list[str]] = {
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
            Path("storages.csv").write_text(STORAGES, encoding="utf-8")
            *before, last = COMMANDS[name]
            for command in before:
                run(main, command)
            if name == "staticmemory":
                run(main, last)
                Path("picture.svg").write_text(arena_svg(Path("placed.csv")), encoding="utf-8")
            else:
                run(main, f"{last} --svg picture.svg")
            target.write_text(Path("picture.svg").read_text(encoding="utf-8"), encoding="utf-8")
        finally:
            os.chdir(here)


def run(main: object, command: str) -> None:
    if main(shlex.split(command)):  # type: ignore[operator]
        raise SystemExit(f"error: meshwright {command}")


def arena_svg(placed: Path) -> str:
    """Storages in their arena: time to the right, addresses upwards."""
    from meshwright.report.svg import PALETTE, document, rect, text

    with placed.open(encoding="utf-8") as file:
        rows = [(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"]), int(r["offset"])) for r in csv.DictReader(file)]
    end, top = max(r[2] for r in rows), max(r[3] + r[4] for r in rows)
    width, height, left, above = 640, 300, 70, 20

    def y(address: int) -> float:
        return above + height * (1 - address / top)

    parts = []
    for k, (name, lower, upper, size, offset) in enumerate(rows):
        x, wide, tall = left + width * lower / end, width * (upper - lower) / end, height * size / top
        parts += [rect(x, y(offset + size), wide, tall, fill=PALETTE[k % len(PALETTE)], tip=name, rx=2),
                  text(x + 6, y(offset + size) + tall / 2 + 4, f"{name}, {size} B", fill="#ffffff")]  # fmt: skip
    parts += [text(left - 6, y(0), "0", anchor="end"), text(left - 6, y(top) + 10, f"{top} B", anchor="end")]
    parts += [text(left, above + height + 18, "time 0"), text(left + width, above + height + 18, f"time {end}", anchor="end")]
    return document(left + width + 20, above + height + 30, parts, title="An arena", summary="Storages by lifetime and address")


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
