"""Embedding tables in files: our own form (`meshwright.tables`, docs/formats.md), and the statistics of the public `dlrm_datasets`.

The statistics are what NeuroShard's tools make of facebookresearch/dlrm_datasets: a list of `{"row", "pooling_factor", "bin_0" ... "bin_16"}`, with
"dim" where it was chosen. Those of DreamShard and AutoShard stand under "tables", with an "index"; some say "num_embeddings" and "embedding_dim". The
data sets state no columns, so they are given (`dim`), for all tables or one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, UsageError
from ...graph.embeddings import BINS, Table, Tables
from ..limits import MaxBytes
from ..strict_json import decode, header, read_document, refuse_ambiguous, write_document

__all__ = ["SCHEMA", "VERSION", "read_tables", "write_tables"]

SCHEMA, VERSION = "meshwright.tables", 1
DEFAULT_BATCH = 65_536  # samples of a batch of dlrm_datasets
ROWS, COLUMNS = ("row", "rows", "num_embeddings"), ("dim", "embedding_dim")
FIELDS = {*ROWS, *COLUMNS, "pooling_factor", "name", "index", *(f"bin_{i}" for i in range(BINS))}


class _File(Tables, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    schema: str = SCHEMA
    version: int = VERSION


def read_tables(path: str | os.PathLike[str], *, batch: int | None = None, dim: Sequence[int] = ()) -> Tables:
    """The tables in a JSON file (or .json.gz) of either form. `batch`: instead of the file's; `dim`: columns of tables without, taken in turn.

    Raises: UsageError (no such file), FormatError naming the field."""
    where, data = Path(path).name or str(path), read_document(path, limit=MaxBytes.TABLES)
    document = decode(data, msgspec.json.Decoder(Any), where)
    refuse_ambiguous(data, where)
    try:
        listed = document["tables"] if isinstance(document, dict) and document.keys() == {"tables"} else document
        if isinstance(listed, list):
            return _statistics(listed, batch or DEFAULT_BATCH, dim, Path(path).name.partition(".")[0])
        header(data, schema=SCHEMA, version=VERSION, where=where)
        found = decode(data, msgspec.json.Decoder(_File), where)
        fields = {f: getattr(found, f) for f in Tables.__struct_fields__}
        return Tables(**{**fields, "batch": batch or found.batch})
    except UsageError as error:
        raise FormatError(error.message, where=f"{where}: {error.where}", hint=error.hint) from None


def write_tables(path: str | os.PathLike[str], tables: Tables) -> None:
    fields = {f: msgspec.to_builtins(getattr(tables, f)) for f in Tables.__struct_fields__}
    write_document(path, msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, "version": VERSION, **fields}), indent=1) + b"\n")


def _statistics(rows: list[Any], batch: int, dim: Sequence[int], name: str) -> Tables:
    found = []
    for i, row in enumerate(rows):
        where = f"[{i}]"
        if not isinstance(row, dict) or not row.keys() <= FIELDS or not {"pooling_factor"} < row.keys():
            other = sorted(row.keys() - FIELDS)[:1] if isinstance(row, dict) else []
            raise UsageError(f"is no table's statistics{f', with {other[0][:32]!r}' if other else ''}", where=where,
                hint='{"row", "pooling_factor", "bin_0" ... "bin_16"} and "dim"')
        columns = next((row[n] for n in COLUMNS if n in row), dim[i % len(dim)] if dim else None)
        numbers = [next((row[n] for n in ROWS if n in row), None), columns, row["pooling_factor"], *(row.get(f"bin_{k}", 0.0) for k in range(BINS))]
        if columns is None:
            raise UsageError("states no columns", where=where, hint="the data sets have none: give them with --dim, e.g. --dim 64 or --dim 128,64,32")
        if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in numbers) or not all(isinstance(x, int) for x in numbers[:2]):
            raise UsageError("holds something that is no number, or rows that are no whole number", where=where)
        shares = tuple(float(x) for x in numbers[3:])
        found.append(Table(
            name=str(row.get("name", f"table_{i}")), rows=int(numbers[0]), dim=int(columns), pooling=float(numbers[2]),
            histogram=shares if sum(shares) > 0 else (),
        ))  # fmt: skip
    return Tables(tables=tuple(found), batch=batch, name=name[:128] or "tables")
