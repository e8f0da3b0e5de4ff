"""What a sandbox of Ray (2.60) is made of: a head and further nodes, each with a label that names it, made-up GPUs, and workers on any free ports.

Nodes share one host name, so their label is how the engine `ray` tells them apart. Usage reports and the dashboard are off.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ...errors import MissingExtra, UsageError
from .ray import NAME

__all__ = ["DAEMONS", "HOST", "daemons", "not_ready", "require"]

HOST = "127.0.0.1"
DAEMONS = ("gcs_server", "raylet")
STORE_BYTES = 100 << 20  # of each node's objects: jobs here keep none, and four nodes share this machine's /dev/shm
NO_SPARE = {"RAY_prestart_worker_first_driver": "0"}  # else every node starts a worker per made-up core: half of the time to be ready
MAX_FOLDER_BYTES = 107 - len("/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")  # names of sockets hold 107 bytes
READY = Path(__file__).with_name("ray_ready.py")


def require() -> None:
    """Raises: MissingExtra."""
    if find_spec("ray") is None:
        raise MissingExtra("ray", extra="ray", needed_for="a sandbox of Ray")


def daemons(folder: Path, names: tuple[str, ...], ports: Sequence[int], *, gpus: int, cores: int, memory_bytes: int) -> list[dict[str, object]]:
    """What the holder starts: the head on the first port, then the others, which wait for it. Raises: UsageError for a folder whose name is too long
    for Ray's sockets."""
    if len(os.fsencode(folder)) > MAX_FOLDER_BYTES:
        raise UsageError(f"its folder's name has {len(os.fsencode(folder))} bytes, Ray's sockets leave {MAX_FOLDER_BYTES}", where=str(folder),
                         hint="a shorter --name, or MESHWRIGHT_SANDBOX_DIR=/tmp/s")  # fmt: skip
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", f"--node-ip-address={HOST}"]
    offers = [f"--num-cpus={cores}", f"--num-gpus={gpus}", f"--memory={memory_bytes}", f"--object-store-memory={STORE_BYTES}",
              "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--include-log-monitor=false"]  # fmt: skip
    head = ["--head", f"--port={ports[0]}", "--include-dashboard=false", "--no-monitor", f"--temp-dir={folder}/r"]
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1", **NO_SPARE}
    found: list[dict[str, object]] = []
    for n, name in enumerate(names):
        where = [f"--address={HOST}:{ports[0]}"] if n else head
        words = [*start, *where, *offers, f"--labels={NAME}={name}"]
        found.append({"name": f"ray-{name}", "argv": words, "ready": "" if n else f"{folder}/r/ray_current_cluster", "env": environment})
    return found


def not_ready(address: str, names: Sequence[str], within_s: float) -> str:
    """Why not all nodes are there; "" where they are. Asked by a process of its own: this one stays free to connect elsewhere."""
    words = [sys.executable, str(READY), address, NAME, *names]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=max(within_s, 1.0), check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {within_s:.0f} s"
    return "" if done.returncode == 0 else (done.stderr.strip() or "it ended")[-300:]
