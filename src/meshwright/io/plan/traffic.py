"""Files of gradient traffic: plans, profiles, and lists of tensors from outside.

    {"schema": "meshwright.traffic-plan", "version": 1, "plan": {"profile": {...}, "groups": [{"first": 0, "last": 12, "codec": "topk"}], ...}}
    {"schema": "meshwright.traffic-profile", "version": 1, "profile": {"tensors": [...], "codecs": [...], "ranks": 8, ...}}

A list of tensors is CSV with the columns name, shape (`64x3x3`, or a number of elements) and ready_s, in any order of rows.
Types, unknown fields and duplicate keys as in `strict_json`. A plan is data here: who uses it checks it.
"""

from __future__ import annotations

import csv
import io
import math
import os
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError
from ...traffic import MAX_TENSORS, GradientTensor, TrafficPlan, TrafficProfile
from ..limits import MaxBytes
from ..strict_json import read_document, read_versioned, write_document

__all__ = [
    "is_traffic_plan", "plan_document", "read_tensors", "read_traffic_plan", "read_traffic_profile", "write_traffic_plan", "write_traffic_profile",
]  # fmt: skip

VERSION = 1  # of plans and of profiles
_COLUMNS = ("name", "shape", "ready_s")


class _Plan(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    version: int
    plan: TrafficPlan


class _Profile(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    version: int
    profile: TrafficProfile


class _Schema(msgspec.Struct):
    schema: str = ""


def is_traffic_plan(path: str | os.PathLike[str]) -> bool:
    """Whether the file says so; never of standard input, which can be read once only. Raises: UsageError (no such file), FormatError (size)."""
    if str(path) == "-":
        return False
    try:
        return msgspec.json.decode(read_document(path, limit=MaxBytes.TRAFFIC), type=_Schema).schema == "meshwright.traffic-plan"
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False


def read_traffic_plan(path: str | os.PathLike[str]) -> TrafficPlan:
    """As it stands in the file; `drive.traffic.load_traffic_plan` checks it. Raises: UsageError (no such file), FormatError naming the field."""
    plan: TrafficPlan = read_versioned(path, _Plan, schema="meshwright.traffic-plan", version=VERSION, limit=MaxBytes.TRAFFIC)[0].plan
    return plan


def read_traffic_profile(path: str | os.PathLike[str]) -> TrafficProfile:
    """Raises: UsageError (no such file), FormatError naming the field."""
    profile: TrafficProfile = read_versioned(path, _Profile, schema="meshwright.traffic-profile", version=VERSION, limit=MaxBytes.TRAFFIC)[0].profile
    return profile


def plan_document(plan: TrafficPlan) -> dict[str, Any]:
    return {"schema": "meshwright.traffic-plan", "version": VERSION, "plan": msgspec.to_builtins(plan)}


def write_traffic_plan(path: str | os.PathLike[str], plan: TrafficPlan) -> None:
    """Write all or nothing; equal plans give equal bytes."""
    write_document(path, msgspec.json.encode(plan_document(plan)) + b"\n")


def write_traffic_profile(path: str | os.PathLike[str], profile: TrafficProfile) -> None:
    """Write all or nothing; equal profiles give equal bytes."""
    document = {"schema": "meshwright.traffic-profile", "version": VERSION, "profile": msgspec.to_builtins(profile)}
    write_document(path, msgspec.json.encode(document) + b"\n")


def read_tensors(path: str | os.PathLike[str]) -> tuple[GradientTensor, ...]:
    """The tensors of a CSV file in ready order (rows of equal time in the file's order).

    Raises: UsageError (no such file), FormatError naming line and column.
    """
    data, where = read_document(path, limit=MaxBytes.TRAFFIC_CSV), Path(path).name or str(path)
    try:
        rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig")), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"not CSV: {str(error)[:120]}", where=where) from None
    names = [c.strip() for c in rows[0]] if rows else []
    if sorted(names) != sorted(_COLUMNS):
        raise FormatError(f"its columns are {', '.join(names)[:120] or 'missing'}", where=where, hint=f"the first line names {', '.join(_COLUMNS)}")
    if not 1 <= len(rows) - 1 <= MAX_TENSORS:
        raise FormatError(f"{len(rows) - 1} tensors; 1 to {MAX_TENSORS} can be planned", where=where)
    found = []
    for line, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            raise FormatError(f"{len(row)} fields, expected {len(names)}", where=f"{where}: line {line}")
        cell = dict(zip(names, (c.strip() for c in row), strict=True))
        found.append(GradientTensor(name=cell["name"], shape=_shape(cell["shape"], where, line), ready_ns=_ready_ns(cell["ready_s"], where, line)))
    return tuple(sorted(found, key=lambda t: t.ready_ns))


def _shape(text: str, where: str, line: int) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(p.isascii() and p.isdigit() and len(p) < 14 for p in parts):
        raise FormatError(f"{text[:64]!r} is no shape", where=f"{where}: line {line}, shape", hint="e.g. 64x3x3, or the number of elements")
    return tuple(int(p) for p in parts)


def _ready_ns(text: str, where: str, line: int) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 10**6:
        raise FormatError(f"{text[:64]!r} is no time in seconds", where=f"{where}: line {line}, ready_s", hint="from the step's start, at least 0")
    return int(seconds * 1e9)
