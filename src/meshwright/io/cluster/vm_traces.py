"""Published traces of machines: Azure Packing 2020 (a SQLite database), Huawei-East-1 (CSV).

A database from outside is opened read-only and as a file that nobody changes. It is asked for columns of two plain tables and nothing else: views,
virtual tables and computed columns are refused, and no function of SQL may run.
Sources: github.com/Azure/AzurePublicDataset (AzureTracesForPacking2020), github.com/huaweicloud/VM-placement-dataset.
"""

from __future__ import annotations

import csv
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...cluster.vms import MAX_VMS, VmTrace
from ...errors import FormatError, UsageError
from ..limits import MaxBytes
from ..strict_json import read_text

__all__ = ["read_azure_packing", "read_huawei"]

DAY_S = 86_400.0
AZURE_RESOURCES = ("core", "memory", "hdd", "ssd", "nic")
AZURE_TABLES = {"vm": ("vmId", "tenantId", "vmTypeId", "priority", "starttime", "endtime"), "vmType": ("vmTypeId", "machineId", *AZURE_RESOURCES)}
MAX_TYPES = 100_000  # rows of vmType; the public one has below 10,000
MAX_CELL = 256  # characters of a value; names of the public one have below 20
HUAWEI = ("vmid", "cpu", "memory", "time", "type")
HUAWEI_STAYS = ("vmid", "cpu", "mem", "at", "lt")  # the same recording as others pass it on: a line for each machine that ended
HUAWEI_HOST = (80.0, 180.0)  # cores, GB: two processors of 40 cores and 90 GB, as Huawei's simulator VMAgent has them
MAX_ROW_BYTES = 1 << 20
MAX_LINE = 4096


def _only_reads(action: int, *_: Any) -> int:
    return sqlite3.SQLITE_OK if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ) else sqlite3.SQLITE_DENY


def _opened(path: Path, where: str) -> sqlite3.Connection:
    try:
        with path.open("rb") as file:
            magic, size = file.read(16), path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=where) from None
    if magic != b"SQLite format 3\0" or size > MaxBytes.AZURE_PACKING:
        raise FormatError(f"{size} bytes, no SQLite database or too large", where=where, hint=f"at most {MaxBytes.AZURE_PACKING} bytes")
    found = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    found.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_ROW_BYTES)
    found.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
        found.execute(f"PRAGMA {setting}")
    return found


def _plain_tables(base: sqlite3.Connection, where: str) -> dict[str, list[str]]:
    """Columns, as they are written, of the two tables."""
    found = {}
    for table, wanted in AZURE_TABLES.items():
        row = base.execute("SELECT type, rootpage FROM sqlite_master WHERE name = ? COLLATE NOCASE", (table,)).fetchall()
        if len(row) != 1 or row[0][0] != "table" or not row[0][1]:
            raise FormatError(f"there is no plain table {table}", where=where, hint="AzurePackingTraceV1, unpacked")
        columns = {str(c[1]).lower(): (str(c[1]), c[6]) for c in base.execute(f"PRAGMA table_xinfo({table})")}
        lacks = [name for name in wanted if columns.get(name.lower(), ("", 1))[1] != 0]
        if lacks:
            raise FormatError(f"table {table} lacks plain columns: {', '.join(lacks)}", where=where)
        found[table] = [columns[name.lower()][0].replace('"', '""') for name in wanted]
    return found


def _number(value: Any, what: str, where: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and least <= value <= most):
        raise FormatError(f"{what} is {str(value)[:32]!r}", where=where, hint=f"a number from {least:g} to {most:g}")
    return float(value)


def read_azure_packing(path: str | os.PathLike[str]) -> VmTrace:
    """Kinds of host are its machines, owners its tenants. The recording begins at 0, with all that came before and is still there, and ends with the
    last arrival. Raises: UsageError (no such file), FormatError naming table and row."""
    where = Path(path).name or str(path)
    base = _opened(Path(path), where)
    try:
        columns = _plain_tables(base, where)
        base.set_authorizer(_only_reads)
        types = _asked(base, "vmType", columns["vmType"], MAX_TYPES, where)
        return _azure(_asked(base, "vm", columns["vm"], MAX_VMS, where), types, where)
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:  # the last: of sqlite's own message, which quotes a damaged schema
        raise FormatError(f"the database cannot be read: {str(error)[:120]}", where=where) from None
    finally:
        base.close()


def _asked(base: sqlite3.Connection, table: str, columns: list[str], most: int, where: str) -> list[tuple[Any, ...]]:
    names = ", ".join('"' + c + '"' for c in columns)
    rows: list[tuple[Any, ...]] = []
    for row in base.execute(f'SELECT {names} FROM "{table}" LIMIT {most + 1}'):
        if any(isinstance(x, (str, bytes)) and len(x) > MAX_CELL for x in row):
            raise FormatError(f"a value of more than {MAX_CELL} characters", where=f"{where}: {table} {len(rows)}")
        rows.append(row)
    if not rows or len(rows) > most:
        raise FormatError(f"table {table} has {len(rows)} rows or more", where=where, hint=f"1 to {most}")
    return rows


def _azure(rows: list[tuple[Any, ...]], types: list[tuple[Any, ...]], where: str) -> VmTrace:
    shapes = {t: n for n, t in enumerate(sorted({str(row[0]) for row in types}))}
    kinds = {m: n for n, m in enumerate(sorted({str(row[1]) for row in types}))}
    size = np.full((len(shapes), len(kinds), len(AZURE_RESOURCES)), np.inf)
    for i, row in enumerate(types):
        size[shapes[str(row[0])], kinds[str(row[1])]] = [
            _number(0 if x is None else x, name, f"{where}: vmType {i}", 0, 1e6) for name, x in zip(AZURE_RESOURCES, row[2:], strict=True)
        ]  # fmt: skip
    owners: dict[str, int] = {}
    found: list[tuple[int, float, float, int, bool]] = []
    for i, (_, tenant, kind, priority, start, end) in enumerate(rows):
        at = f"{where}: vm {i}"
        if str(kind) not in shapes:
            raise FormatError(f"unknown type {str(kind)[:32]!r}", where=at)
        start_s = _number(start, "starttime", at, -1e5, 1e5) * DAY_S
        end_s = math.inf if end is None else _number(end, "endtime", at, -1e5, 1e5) * DAY_S
        if end_s < start_s:
            raise FormatError(f"it ends {start_s - end_s:g} s before it starts", where=at)
        if end_s > max(start_s, 0.0):
            found.append((shapes[str(kind)], start_s, end_s, owners.setdefault(str(tenant), len(owners)),
                _number(priority, "priority", at, 0, 10) > 0))
    return _made("azure packing 2020", AZURE_RESOURCES, tuple(kinds), tuple(shapes), size, found, where)


def _made(
    name: str, resources: tuple[str, ...], kinds: tuple[str, ...], shapes: tuple[str, ...], size: Any, found: list[tuple[int, float, float, int,
        bool]],
    where: str,
) -> VmTrace:  # fmt: skip
    found.sort(key=lambda row: (row[1], row[3], row[0], row[2]))
    if not found or found[-1][1] <= 0:
        raise FormatError("no machine comes after the beginning", where=where)
    shape, start, end, owner, low = zip(*found, strict=True)
    try:
        return VmTrace(
            name=name, resources=resources, kinds=kinds, shapes=shapes, size=size, shape=np.array(shape, np.int32), arrival_s=np.array(start,
                np.float64),
            end_s=np.array(end, np.float64), owner=np.array(owner, np.int32), low=np.array(low, np.bool_), since_s=0.0, until_s=float(start[-1]),
        )  # fmt: skip
    except UsageError as error:
        raise FormatError(error.message, where=f"{where}: {error.where}", hint=error.hint) from None


def _field(text: str, what: str, where: str, most: float) -> float:
    try:
        value: Any = float(text)
    except ValueError:
        value = text
    return _number(value, what, where, 0, most)


def read_huawei(path: str | os.PathLike[str], *, host: tuple[float, float] = HUAWEI_HOST) -> VmTrace:
    """`Huawei-East-1.csv`: creates (type 0) and deletes (1) at seconds; or `Huawei-East-1-lt.csv`: arrivals and lifetimes. It names no hosts: they
    have `host` cores and GB. It names no owners: machines of a shape are of one owner. Raises: UsageError (no such file), FormatError naming the
    line."""
    where, text = read_text(path, MaxBytes.CLUSTER_TRACE)
    lines = text.splitlines()
    if any(len(line) > MAX_LINE for line in lines):
        raise FormatError(f"a line of more than {MAX_LINE} characters", where=where)
    shapes: dict[tuple[float, float], int] = {}
    try:
        rows = csv.reader(lines, strict=True)
        header = [h.strip().lower() for h in next(rows, [])]
        form = HUAWEI_STAYS if set(HUAWEI_STAYS) <= set(header) else HUAWEI
        if any(name not in header for name in form):
            raise FormatError(f"lacks columns: {', '.join(n for n in form if n not in header)}", where=f"{where}:1")
        found = (_stays if form is HUAWEI_STAYS else _creates_and_deletes)(_chosen(rows, header, form, where), shapes)
    except csv.Error as error:
        raise FormatError(f"not CSV: {str(error)[:80]}", where=where) from None
    size = np.array([[[c / host[0], m / host[1]]] for c, m in shapes]).reshape(len(shapes), 1, 2)
    return _made("huawei-east-1", ("cores", "memory"), ("host",), tuple(f"{c:g}c{m:g}g" for c, m in shapes), size, found, where)


def _chosen(rows: Iterable[list[str]], header: list[str], form: tuple[str, ...], where: str) -> Iterator[tuple[str, list[str]]]:
    """Each line's place and the values of the form's columns."""
    place = [header.index(name) for name in form]
    for number, row in enumerate(rows, start=2):
        at = f"{where}:{number}"
        if len(row) != len(header):
            raise FormatError(f"{len(row)} columns, the first line has {len(header)}", where=at)
        if number - 2 > 2 * MAX_VMS:
            raise FormatError("too many machines", where=at)
        yield at, [row[k].strip() for k in place]


def _shape(shapes: dict[tuple[float, float], int], cores: str, memory: str, at: str) -> int:
    found = shapes.setdefault((_field(cores, "cpu", at, 1e6), _field(memory, "memory", at, 1e9)), len(shapes))
    if found >= MAX_TYPES:
        raise FormatError("too many shapes", where=at)
    return found


def _creates_and_deletes(rows: Iterable[tuple[str, list[str]]], shapes: dict[tuple[float, float], int]) -> list[tuple[int, float, float, int, bool]]:
    alive: dict[str, tuple[int, float]] = {}
    found: list[tuple[int, float, float, int, bool]] = []
    last_s = 0.0
    for at, (vm, cores, memory, time, what) in rows:
        at_s = _field(time, "time", at, 1e9)
        if what not in ("0", "1") or at_s < last_s or (vm in alive) == (what == "0"):
            raise FormatError(f"type {what[:8]!r} of machine {vm[:32]!r} at {at_s:g} s", where=at,
                hint="0 creates, 1 deletes what is there; times do not fall")
        last_s = at_s
        if what == "0":
            alive[vm] = (_shape(shapes, cores, memory, at), at_s)
            continue
        shape, start_s = alive.pop(vm)
        if at_s > start_s:
            found.append((shape, start_s, at_s, shape, False))
    return found + [(shape, start_s, math.inf, shape, False) for shape, start_s in alive.values()]


def _stays(rows: Iterable[tuple[str, list[str]]], shapes: dict[tuple[float, float], int]) -> list[tuple[int, float, float, int, bool]]:
    found = []
    for at, (_, cores, memory, arrival, lifetime) in rows:
        shape, at_s, stay_s = _shape(shapes, cores, memory, at), _field(arrival, "at", at, 1e9), _field(lifetime, "lt", at, 1e9)
        if stay_s > 0:
            found.append((shape, at_s, at_s + stay_s, shape, False))
    return found
