"""The content hash of a program: what plans and calls name it by.

sha256 over a header (ranks, name, fold, contract) and every column in declared order, each preceded by its name and length, numbers
as little-endian integers. It does not depend on how a file encodes the columns, so files can change form without renaming programs.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from .program import Contract, Program
from .tables import Buffers, Calls, Channels, Comms, Csr, Lanes, Ops, Sizes, Steps

__all__ = ["TABLES", "column_forms", "program_hash"]

TABLES: dict[str, type[Any]] = {
    "lanes": Lanes, "steps": Steps, "channels": Channels, "buffers": Buffers, "ops": Ops, "sizes": Sizes, "comms": Comms, "calls": Calls,
}  # fmt: skip

_FORMS = {"I32": "i32", "I64": "i64", "Csr": "csr", "tuple[str, ...]": "text", "tuple[tuple[str, ...], ...]": "routes"}
# Columns whose length is not the table's: the values of the `after` lists, and the list of callees.
_OWN_LENGTH = {("steps", "after_ptr"): "i32*", ("steps", "after_step"): "i32*", ("steps", "after_lag"): "i32*", ("calls", "names"): "names"}


def column_forms(table: str) -> dict[str, str]:
    """Column -> form, in declared order: i32, i64 (one number per row), i32* (own length), csr, text (one string per row), names, routes."""
    return {f.name: _OWN_LENGTH.get((table, f.name)) or _FORMS[str(f.type)] for f in fields(TABLES[table])}


def program_hash(program: Program) -> str:
    """64 hex digits that identify `program`; equal for equal contents, in every process and on every machine."""
    fold = program.fold
    header: dict[str, Any] = {
        "name": program.name, "ranks": program.ranks, "switches": program.switches,
        "fold": None if fold is None else [*map(list, fold.axes), *([fold.fixed] if fold.fixed else []), *(["by rank"] if fold.by_rank else [])],
        "contract": None if program.contract is None else _promise(program.contract),
    }  # fmt: skip
    if len(program.contracts) > 1:
        header["contracts"] = [_promise(c) for c in program.contracts]
    digest = hashlib.sha256(b"meshwright.program 1\n")
    digest.update(msgspec.json.encode(header))
    for table in TABLES:
        for column, form in column_forms(table).items():
            value = getattr(getattr(program, table), column)
            if isinstance(value, Csr):
                _update(digest, f"{table}.{column}.ptr", value.ptr, "<i4")
                _update(digest, f"{table}.{column}.values", value.values, "<i4")
            elif form in ("text", "names", "routes"):
                digest.update(f"\n{table}.{column} ".encode() + msgspec.json.encode(value))
            else:
                _update(digest, f"{table}.{column}", value, "<i8" if form == "i64" else "<i4")
    if fold is not None:
        _update(digest, "fold.buffer_shift", np.ravel(fold.buffer_shift), "<i4")
    return digest.hexdigest()


def _promise(c: Contract) -> list[Any]:
    """A contract's fields; those that later versions added only where they are used, so that hashes of older programs stay."""
    return [c.op, c.inputs, c.outputs, c.root, *([c.ranks, c.peers] if c.ranks or c.peers else []), *_level(c)]


def _level(c: Contract) -> list[Any]:
    return [c.reproducible, c.numbers] if c.reproducible != "run" or c.numbers else []


def _update(digest: Any, name: str, values: Any, dtype: str) -> None:
    digest.update(f"\n{name} {len(values)} ".encode())
    digest.update(np.ascontiguousarray(values, dtype=dtype).data)
