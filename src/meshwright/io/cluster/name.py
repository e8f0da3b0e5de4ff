"""How a queue is named: a file of any form that is read, or `synthetic:jobs=300,per_hour=20,split=20/70/10,seed=1`; and how machines are: a file, or
`vms:hosts=200,days=14,load=0.7,seed=1`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...cluster.generate import reprofiled, synthetic
from ...cluster.generate_vms import synthetic_vms
from ...cluster.queue import Queue
from ...cluster.vms import VmTrace
from ...errors import UsageError
from ..limits import MaxBytes
from ..strict_json import read_document
from .queue import queue_of
from .traces import philly_queue, read_gavel, read_gavel_rates, read_job_table
from .vm_traces import HUAWEI, HUAWEI_STAYS, read_azure_packing, read_huawei
from .vms import SCHEMA, read_vms

__all__ = ["is_vms", "load_queue", "load_vms"]

MAX_SYNTHETIC = 1_000_000
MAX_SYNTHETIC_HOSTS = 10_000
PEEK = 4096  # bytes of a file that say what it is
_VMS = {"hosts": int, "days": float, "before_days": float, "load": float, "owners": int, "long": float, "warm_days": float, "hint": float,
    "low": float,
    "seed": int}
_OPTIONS = {"jobs": int, "per_hour": float, "seed": int, "most_gpus": int}


def load_queue(name: str, *, split: Sequence[float] | None = None, seed: int = 0, rates: str = "") -> Queue:
    """`split`: draw published profiles anew, shares of image, language and speech models. `rates`: Gavel's throughputs, for its traces.

    Raises: UsageError for a name that is no file and for options that do not exist; FormatError."""
    found = _synthetic(name.partition(":")[2]) if name == "synthetic" or name.startswith("synthetic:") else _file(name, rates)
    return found if split is None else reprofiled(found, split, seed=seed)


def _file(name: str, rates: str) -> Queue:
    path = Path(name)
    if path.suffix == ".csv":
        return read_job_table(path)
    if path.suffix in (".tsv", ".trace"):
        if not rates:
            raise UsageError("a trace of Gavel counts steps", where=name, hint="--rates FILE: its simulation_throughputs.json")
        return read_gavel(path, rates=read_gavel_rates(rates))
    data, where = read_document(path, limit=MaxBytes.QUEUE), path.name
    return philly_queue(data, where) if data.lstrip()[:1] == b"[" else queue_of(data, where)


def _synthetic(text: str) -> Queue:
    options: dict[str, Any] = {"jobs": 300, "per_hour": 20.0}
    for part in text.split(",") if text else ():
        key, _, value = part.partition("=")
        try:
            if key == "split":
                options["split"] = tuple(float(x) for x in value.split("/"))
            else:
                options[key] = _OPTIONS[key](value)
        except (KeyError, ValueError):
            known = "jobs, per_hour, split=20/70/10, seed, most_gpus"
            raise UsageError(f"{part[:64]!r} is no option of a synthetic queue", where="synthetic", hint=f"there are: {known}") from None
    if not 1 <= options["jobs"] <= MAX_SYNTHETIC or options.get("seed", 0) < 0:
        raise UsageError(f"{options['jobs']} jobs, seed {options.get('seed', 0)}", where="synthetic",
            hint=f"1 to {MAX_SYNTHETIC} jobs, a seed from 0 on")
    return synthetic(**options)


def is_vms(name: str) -> bool:
    """Whether the name is of machines and not of a queue. What cannot be read is of a queue: its reader says why."""
    if name == "vms" or name.startswith("vms:"):
        return True
    try:
        with Path(name).open("rb") as file:
            head = file.read(PEEK)
    except OSError:
        return False
    line = head.partition(b"\n")[0].decode("utf-8", "replace").lower()
    columns = {c.strip() for c in line.split(",")}
    huawei = columns.issuperset(HUAWEI) or columns.issuperset(HUAWEI_STAYS)
    return head.startswith(b"SQLite format 3\0") or huawei or f'"{SCHEMA}"'.encode() in head or name.endswith(".vms.json.gz")


def load_vms(name: str) -> VmTrace:
    """Raises: UsageError for a name that is no file and for options that do not exist; FormatError."""
    if name == "vms" or name.startswith("vms:"):
        return _synthetic_vms(name.partition(":")[2])
    path = Path(name)
    if path.suffix == ".csv":
        return read_huawei(path)
    return read_vms(path) if path.suffix in (".json", ".gz") else read_azure_packing(path)


def _synthetic_vms(text: str) -> VmTrace:
    options: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        key, _, value = part.partition("=")
        try:
            options[key] = _VMS[key](value)
        except (KeyError, ValueError):
            raise UsageError(f"{part[:64]!r} is no option of synthetic machines", where="vms", hint=f"there are: {', '.join(_VMS)}") from None
    if not 1 <= options.get("hosts", 1) <= MAX_SYNTHETIC_HOSTS or options.get("seed", 0) < 0:
        raise UsageError(f"{options.get('hosts', 1)} hosts, seed {options.get('seed', 0)}", where="vms",
            hint=f"1 to {MAX_SYNTHETIC_HOSTS} hosts, a seed from 0 on")
    return synthetic_vms(**options)
