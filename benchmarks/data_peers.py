"""Nodes that keep files together: what they read from storage, beside nodes of which each keeps what fits for itself.

As root: `python benchmarks/data_peers.py`. Four nodes in network namespaces, each with its own disk of 20 MiB/s and room for a third of its files.
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

import machine
import numpy as np
from data_cache import EPOCHS, Files, forget, groups, read_bytes, write_files

NODES, NODE_FILES, NODE_FILE_BYTES = 4, 120, 1 << 20
WAYS = ("alone", "together")


def peers() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    run = [sys.executable, "-m", "meshwright"]
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="data-peers-") as name:
        for node in range(NODES):
            (Path(name) / str(node)).mkdir()
            write_files(Path(name) / str(node), NODE_FILES, NODE_FILE_BYTES)
        subprocess.run([*run, "lab", "up", f"star:{NODES}?link=1Gbit/s", "--name", "datapeers", "--no-verify", "--quiet"], check=True)
        try:
            for way in WAYS:
                for path in Path(name).rglob("*.bin"):
                    forget(path)
                child = [sys.executable, __file__, "--node", way, "--folder", name]
                subprocess.run([*run, "lab", "run", "datapeers", "--", *child], check=True)
                raw[way] = [json.loads((Path(name) / f"{way}-{node}.json").read_text()) for node in range(NODES)]
        finally:
            subprocess.run([*run, "lab", "down", "datapeers", "--quiet"], check=True)
    later = {way: [e for node in found for e in node["epochs"][1:]] for way, found in raw.items()}
    rows = [
        {"what": f"bytes from storage of an epoch from the second on, all nodes, {way}" + " (asked: 0)" * (way == "together"),
         "value": sum(e["read_bytes"] for e in found) / (EPOCHS - 1), "unit": "B"}
        for way, found in later.items()
    ]  # fmt: skip
    time_s = {way: statistics.median(e["time_s"] for e in found) for way, found in later.items()}
    rows.append({"what": "time of an epoch, alone over together", "value": time_s["alone"], "unit": "s", "peer": time_s["together"]})
    for row in rows:
        print(row, flush=True)
    return rows, {"raw": raw}


def node_here(folder: Path, way: str) -> None:
    """One node: reads all files in an order of its own, four epochs."""
    import socket

    from meshwright.data import Kept, PeerFiles

    rank = int(os.environ["RANK"])
    with groups(folder, 0, 20 << 20) as made:
        for group in made:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 9))
            mine = f"{probe.getsockname()[0] if rank else os.environ['MASTER_ADDR']}:{29000 + rank}"
        (folder / f"{way}-address-{rank}").write_text(mine)
        while len(list(folder.glob(f"{way}-address-*"))) < NODES:
            time.sleep(0.01)
        time.sleep(0.2)
        nodes = [(folder / f"{way}-address-{r}").read_text() for r in range(NODES)]
        plain, budget = Files(folder / str(rank)), NODE_FILES * NODE_FILE_BYTES // 3
        dataset: Any = PeerFiles(plain.paths, nodes, rank, budget) if way == "together" else Kept(plain, budget)
        rng, found = np.random.default_rng(rank), []
        for epoch in range(EPOCHS):
            (folder / f"{way}-{epoch}-{rank}").touch()
            while len(list(folder.glob(f"{way}-{epoch}-*"))) < NODES:
                time.sleep(0.01)
            before, begin = read_bytes(), time.perf_counter()
            for index in rng.permutation(NODE_FILES):
                assert len(dataset[int(index)]) == NODE_FILE_BYTES
            found.append({"time_s": time.perf_counter() - begin, "read_bytes": read_bytes() - before})
        (folder / f"{way}-done-{rank}").touch()
        while len(list(folder.glob(f"{way}-done-*"))) < NODES:
            time.sleep(0.01)
        served = dataset.served.__dict__ if way == "together" else {}
        (folder / f"{way}-{rank}.json").write_text(json.dumps({"epochs": found, "served": served}))
        (Path("/sys/fs/cgroup/blkio") / "cgroup.procs").write_text(str(os.getpid()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node:
        return node_here(args.folder, args.node)
    rows, facts = peers()
    machine.record("data_peers", rows, command="python benchmarks/data_peers.py", **facts)


if __name__ == "__main__":
    main()
