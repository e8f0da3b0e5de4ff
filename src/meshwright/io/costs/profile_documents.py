"""Our own files beside a layer profile: layouts, the runtime's fields, measured runs. JSON, typed, versioned, unknown fields refused.

    {"schema": "meshwright.training-runtime", "version": 1, "runtime": {"p2p": "blocking", "gpus_per_server": {"A100": 4}, ...}}
    {"schema": "meshwright.profiled-layout", "version": 1, "layout": {"stages": [{"layers": 12, "replicas": [{"device": "A100", "tensor": 4}]}], ...}}
    {"schema": "meshwright.measured-runs", "version": 1, "runs": [{"layout": {...}, "time_s": 1.31, "memory_peak_bytes": [...]}]}
"""

from __future__ import annotations

import math
import os
from typing import Any

import msgspec

from ...errors import FormatError, Unsupported
from ...profile.network import MeasuredRun, ProfiledLayout, TrainingRuntime
from ..limits import MaxBytes
from ..strict_json import read_versioned, write_document

__all__ = ["read_layout", "read_measured_runs", "read_runtime", "write_runtime"]

VERSION = 1  # of all three kinds of document


class _Runtime(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    version: int
    runtime: TrainingRuntime


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    version: int
    layout: ProfiledLayout


class _Runs(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    version: int
    runs: list[MeasuredRun]


def read_runtime(path: str | os.PathLike[str]) -> TrainingRuntime:
    """Raises: UsageError (no such file), FormatError naming the field."""
    return read_versioned(path, _Runtime, schema="meshwright.training-runtime", version=VERSION, limit=MaxBytes.PROFILE_DOCUMENT)[0].runtime


def read_layout(path: str | os.PathLike[str]) -> ProfiledLayout:
    """Raises: UsageError (no such file), FormatError naming the field, Unsupported for a context degree."""
    document, where = read_versioned(path, _Layout, schema="meshwright.profiled-layout", version=VERSION, limit=MaxBytes.PROFILE_DOCUMENT)
    _require_whole(document.layout, where)
    return document.layout


def _require_whole(layout: ProfiledLayout, where: str) -> None:
    if layout.context > 1:
        hint = "`layout search` prices context degrees"
        raise Unsupported(f"context degree {layout.context}: measured layer times are of whole sequences", where=where, hint=hint)


def read_measured_runs(path: str | os.PathLike[str]) -> tuple[MeasuredRun, ...]:
    """Raises: UsageError (no such file), FormatError for anything wrong, also a time that is not positive, Unsupported for a context degree."""
    document, where = read_versioned(path, _Runs, schema="meshwright.measured-runs", version=VERSION, limit=MaxBytes.PROFILE_DOCUMENT)
    for i, run in enumerate(document.runs):
        _require_whole(run.layout, f"{where}: runs[{i}].layout")
        if not (math.isfinite(run.time_s) and run.time_s > 0):
            raise FormatError(f"must be > 0, got {run.time_s}", where=f"{where}: runs[{i}].time_s")
        if run.memory_peak_bytes and len(run.memory_peak_bytes) != len(run.layout.stages):
            raise FormatError("needs one number per stage", where=f"{where}: runs[{i}].memory_peak_bytes")
    return tuple(document.runs)


def runtime_document(runtime: TrainingRuntime) -> dict[str, Any]:
    return {"schema": "meshwright.training-runtime", "version": VERSION, "runtime": msgspec.to_builtins(runtime)}


def write_runtime(path: str | os.PathLike[str], runtime: TrainingRuntime) -> None:
    """Write all or nothing; equal runtimes give equal bytes."""
    text = msgspec.json.encode(runtime_document(runtime), order="deterministic")
    write_document(path, msgspec.json.format(text, indent=1) + b"\n")
