"""How a queue is named: a file of any form that is read, or `synthetic:jobs=300,per_hour=20,split=20/70/10,seed=1`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...cluster.generate import reprofiled, synthetic
from ...cluster.queue import Queue
from ...errors import UsageError
from ..limits import MaxBytes
from ..strict_json import read_document
from .queue import queue_of
from .traces import philly_queue, read_alibaba, read_gavel, read_gavel_rates

__all__ = ["load_queue"]

MAX_SYNTHETIC = 1_000_000
_OPTIONS = {"jobs": int, "per_hour": float, "seed": int, "most_gpus": int}


def load_queue(name: str, *, split: Sequence[float] | None = None, seed: int = 0, rates: str = "") -> Queue:
    """`split`: draw published profiles anew, shares of image, language and speech models. `rates`: Gavel's throughputs, for its traces.

    Raises: UsageError for a name that is no file and for options that do not exist; FormatError."""
    found = _synthetic(name.partition(":")[2]) if name == "synthetic" or name.startswith("synthetic:") else _file(name, rates)
    return found if split is None else reprofiled(found, split, seed=seed)


def _file(name: str, rates: str) -> Queue:
    path = Path(name)
    if path.suffix == ".csv":
        return read_alibaba(path)
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
