"""Plans of small problems as they are on record: what a search finds, not only that it is right.

A plan that is right and slower than it was passes every checker; here it shows. Whoever means to change plans writes the record anew with
`MESHWRIGHT_ON_RECORD=write` in the environment of pytest, and says in the change which plans are others. Solvers of other versions may find other
plans that are as good: there a difference proves nothing, and the test is skipped.
"""

from __future__ import annotations

import json
import os
import platform
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from meshwright.bound import Bound
from meshwright.errors import MeshwrightError

FOLDER = Path(__file__).parent / "data" / "on_record"
WRITE = "MESHWRIGHT_ON_RECORD"
MAX_SHOWN = 6  # leaves of a value that are on record one by one; of more, their number, a sum and a checksum of the texts
TOLERANCE = 1e-9
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def leaves(value: Any) -> Iterator[float | str]:
    """The numbers and texts of a value, in order."""
    if isinstance(value, Bound):
        value = float(value)
    if isinstance(value, Fraction | np.number | np.bool_ | bool):
        yield float(value)
    elif isinstance(value, int | float | str):
        yield value
    elif isinstance(value, np.ndarray):
        yield from leaves(value.tolist())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from leaves(item)
    elif isinstance(value, frozenset | set):
        for item in sorted(value, key=str):
            yield from leaves(item)
    elif (is_dataclass(value) or isinstance(value, msgspec.Struct)) and not isinstance(value, type):
        names = [field.name for field in fields(value)] if is_dataclass(value) else value.__struct_fields__
        for item in (getattr(value, name) for name in names):
            if item is not None and item is not msgspec.UNSET:  # a new field that nothing uses yet changes no record
                yield from leaves(item)
    elif value is None or not hasattr(value, "__iter__"):
        yield "-" if value is None else type(value).__name__
    else:
        for item in value:
            yield from leaves(item)


def numbers_in(texts: str | Iterable[str]) -> list[float]:
    """What texts say in numbers: their words may become better ones."""
    return [float(x) for text in ([texts] if isinstance(texts, str) else texts) for x in NUMBER.findall(text)]


def shown(value: Any) -> Any:
    found = [*leaves(value)]
    if len(found) <= MAX_SHOWN:
        return found[0] if len(found) == 1 else found
    numbers = [float(x) for x in found if not isinstance(x, str)]
    total = sum((1 + i % 97) * x for i, x in enumerate(numbers) if np.isfinite(x))
    return [len(found), total, zlib.crc32("\0".join(x for x in found if isinstance(x, str)).encode())]


def made(plan: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a plan, or why there is none."""
    try:
        return {name: shown(value) for name, value in plan().items()}
    except MeshwrightError as refused:
        return {"refused": type(refused).__name__, "why": shown(numbers_in(refused.message))}


def _same(was: Any, now: Any) -> bool:
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(_same(a, b) for a, b in zip(was, now, strict=True))
    if isinstance(was, str) or isinstance(now, str):
        return bool(was == now)
    return bool(np.isclose(was, now, rtol=TOLERANCE, atol=1e-14, equal_nan=True))


def versions() -> dict[str, str]:
    """Of what decides the last bits of a solver's numbers."""
    found = {"machine": platform.machine()}
    for name in ("highspy", "numpy", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def require_on_record(name: str, found: dict[str, dict[str, Any]]) -> None:
    """All of `found` is as in the file of this name, case by case and figure by figure."""
    file = FOLDER / f"{name}.json"
    if os.environ.get(WRITE) == "write":
        rows = {"versions": versions(), **found}
        file.write_text("{\n" + ",\n".join(f" {json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items()) + "\n}\n", encoding="utf-8")
    record = json.loads(file.read_text(encoding="utf-8"))
    written_with = record.pop("versions")
    changed = {
        f"{case}, {figure}": (record.get(case, {}).get(figure), row.get(figure))
        for case, row in found.items() for figure in {**record.get(case, {}), **row}
        if not (figure in row and figure in record.get(case, {}) and _same(record[case][figure], row[figure]))
    }  # fmt: skip
    if changed and written_with != versions():
        pytest.skip(f"recorded with {written_with}, here {versions()}: {len(changed)} figures differ, which proves nothing")
    assert not changed, f"plans are others than on record (tests/on_record.py): {changed}"
    assert set(record) == set(found)
