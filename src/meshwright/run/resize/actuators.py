"""A new size as orders to engines: a Kubernetes pod in place, a Slurm job, the workers of a data loader. Nothing here runs a command."""

from __future__ import annotations

import json
import math
import re
import shlex
from typing import Any

from ...errors import UsageError

__all__ = ["LoaderWorkers", "kubernetes_resize", "slurm_update"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # of pods, namespaces and containers
_JOB = re.compile(r"[0-9]{1,10}([_+][0-9]{1,10})?")  # with the number in an array or in a heterogeneous job
MIB = 1 << 20
PREFETCH = 2  # batches ahead of each worker, torch's default


def kubernetes_resize(namespace: str, pod: str, container: str, *, cores: float | None = None, memory_bytes: int | None = None) -> tuple[str, str]:
    """(patch, command): the JSON of a strategic merge patch of the `resize` subresource (Kubernetes 1.33; limits and requests alike, so that the pod
    keeps its class), and the kubectl line that sends it. Memory is rounded up to MiB, cores to thousandths.

    Raises: UsageError for a name that Kubernetes would not take, or nothing to change."""
    for what, name in (("namespace", namespace), ("pod", pod), ("container", container)):
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name[:64]!r} is no name of a {what}", where=what, hint="small letters, digits, - and .")
    size = {}
    if cores is not None:
        size["cpu"] = f"{math.ceil(_size(cores) * 1000 - 1e-6)}m"
    if memory_bytes is not None:
        size["memory"] = f"{math.ceil(_size(memory_bytes) / MIB)}Mi"
    _size(len(size))
    patch = json.dumps({"spec": {"containers": [{"name": container, "resources": {"requests": size, "limits": size}}]}}, separators=(",", ":"))
    words = ["kubectl", "patch", "pod", pod, "--namespace", namespace, "--subresource", "resize", "--type", "strategic", "--patch", patch]
    return patch, shlex.join(words)


def slurm_update(job: str, *, cores: float | None = None, memory_bytes: int | None = None) -> str:
    """The scontrol line that changes a job that waits. Slurm changes neither cores nor memory of a job that runs: its limits are those of its
    control group, `job_<id>`, which `run.machine.limits` writes. Cores and MiB are rounded up.

    Raises: UsageError for what is no job, or nothing to change."""
    if not _JOB.fullmatch(job):
        raise UsageError(f"{job[:64]!r} is no job", where="job", hint="its number, as squeue shows it")
    words = ["scontrol", "update", f"JobId={job}"]
    if cores is not None:
        words.append(f"MinCPUsNode={math.ceil(_size(cores) - 1e-6)}")
    if memory_bytes is not None:
        words.append(f"MinMemoryNode={math.ceil(_size(memory_bytes) / MIB)}")
    _size(len(words) - 3)
    return shlex.join(words)


def _size(value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"a size of {value:g}", where="size", hint="cores or memory, above 0")
    return value


class LoaderWorkers:
    """Workers of a torch DataLoader by cores: the next epoch starts with them. A loader with persistent workers keeps those that it has until it is
    made anew; `change` says whether the next epoch will differ."""

    def __init__(self, loader: Any, *, cores_per_worker: float = 1.0, most: int = 64) -> None:
        if not cores_per_worker > 0 or most < 1:
            raise UsageError(f"{cores_per_worker:g} cores for a worker, at most {most}", where="loader", hint="above 0; at least 1")
        self.loader, self.cores_per_worker, self.most = loader, cores_per_worker, most

    def change(self, cores: float) -> bool:
        wanted = max(1, min(self.most, math.floor(_size(cores) / self.cores_per_worker + 1e-6)))
        if wanted == self.loader.num_workers or (self.loader.persistent_workers and getattr(self.loader, "_iterator", None) is not None):
            return False
        self.loader.num_workers = wanted
        if self.loader.prefetch_factor is None:  # it was made without workers
            self.loader.prefetch_factor = PREFETCH
        return True
