"""A command's document as a table: for `--output csv`, pandas and Arrow.

The rows of a document are its first list of records. A document without one is a single row. Fields inside fields have names with dots
(`bound.time_s`). Lists of numbers or names are joined by spaces. A record with a list of records in it is a row for each of these, as a size with its
strategies; further lists of records are JSON. Lists of such lists, one for each size or capacity, are one list. Times are in s, sizes in bytes, as in
the document.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import pandas
    import pyarrow

__all__ = ["csv_text", "rows_of", "to_arrow", "to_pandas"]

Scalar = str | int | float | bool | None


def rows_of(document: Mapping[str, Any], key: str = "") -> list[dict[str, Scalar]]:
    """The records of a document, flat. `key`: which list of it, by default the first that holds records.

    Raises: UsageError for a key that is no list of records.
    """
    document = {name: _joined(value) for name, value in document.items()}
    lists = [name for name, value in document.items() if isinstance(value, list) and value and all(isinstance(x, Mapping) for x in value)]
    if key and key not in lists:
        raise UsageError(f"the document has no rows {key!r}", where=str(document.get("schema", "")), hint=f"it has: {', '.join(lists) or 'none'}")
    if not lists:
        return [dict(_flat(document))]
    return [row for record in document[key or lists[0]] for row in _unfolded(record)]


def _joined(value: Any) -> Any:
    """A list of lists of records as one list; all else as it is."""
    if isinstance(value, list) and value and all(isinstance(x, list) and x and all(isinstance(y, Mapping) for y in x) for x in value):
        return [y for x in value for y in x]
    return value


def _unfolded(record: Mapping[str, Any]) -> Iterator[dict[str, Scalar]]:
    """The record, once for each record of its first list of them."""
    inner = next((n for n, v in record.items() if isinstance(v, list) and v and all(isinstance(x, Mapping) for x in v)), None)
    if inner is None:
        yield dict(_flat(record))
        return
    own = dict(_flat({n: v for n, v in record.items() if n != inner}))
    for child in record[inner]:
        yield {**own, **dict(_flat(child, f"{inner}."))}


def _flat(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Scalar]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, list | tuple):
            plain = all(not isinstance(x, Mapping | list | tuple) for x in value)
            yield before + name, " ".join(map(str, value)) if plain else json.dumps(value, ensure_ascii=False)
        else:
            yield before + name, value


def _columns(rows: Sequence[Mapping[str, Scalar]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def csv_text(document: Mapping[str, Any], key: str = "") -> str:
    """The rows as CSV with a heading (RFC 4180, lines end in LF); what a row lacks is empty. Raises: as `rows_of`."""
    rows = rows_of(document, key)
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(rows), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: {True: "true", False: "false"}[value] if isinstance(value, bool) else value for name, value in row.items()})
    return out.getvalue()


def to_pandas(document: Mapping[str, Any], key: str = "") -> pandas.DataFrame:
    """The rows as a data frame. Raises: as `rows_of`; MissingExtra without pandas."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise MissingExtra("pandas", extra="frames", needed_for="a data frame") from error
    rows = rows_of(document, key)
    return pandas.DataFrame(rows, columns=_columns(rows))


def to_arrow(document: Mapping[str, Any], key: str = "") -> pyarrow.Table:
    """The rows as an Arrow table; a column of unlike kinds is one of texts. Raises: as `rows_of`; MissingExtra without pyarrow."""
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise MissingExtra("pyarrow", extra="frames", needed_for="an Arrow table") from error
    rows = rows_of(document, key)
    columns: dict[str, Any] = {}
    for name in _columns(rows):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            columns[name] = pyarrow.array([None if v is None else str(v) for v in values])
    return pyarrow.table(columns)
