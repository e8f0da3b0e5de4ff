"""Documents as tables: CSV on the command line, pandas and Arrow from Python."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest

from meshwright.cli import main
from meshwright.errors import MissingExtra, UsageError
from meshwright.report.tables import csv_text, rows_of, to_arrow, to_pandas

DOCUMENT = {
    "schema": "meshwright.test", "version": 1, "bound": {"time_s": 0.5}, "notes": ["a", "b"],
    "rows": [
        {"name": "ring, wide", "time_s": 1.5, "best": True, "parts": [1, 2], "bound": {"x": 2}},
        {"name": "tree", "why": None, "more": [{"a": 1}, {"a": 2, "deep": [{"b": 3}]}]},
    ],
    "others": [{"name": "x"}],
}  # fmt: skip


def test_rows_are_flat_and_the_first_list_of_records() -> None:
    assert rows_of(DOCUMENT) == [
        {"name": "ring, wide", "time_s": 1.5, "best": True, "parts": "1 2", "bound.x": 2}, {"name": "tree", "why": None, "more.a": 1},
        {"name": "tree", "why": None, "more.a": 2, "more.deep": '[{"b": 3}]'},
    ]  # fmt: skip
    assert rows_of(DOCUMENT, "others") == [{"name": "x"}]
    assert rows_of({"schema": "s", "bound": {"time_s": 0.5}, "notes": ["a", "b"]}) == [{"schema": "s", "bound.time_s": 0.5, "notes": "a b"}]
    with pytest.raises(UsageError, match="has no rows 'notes'") as error:
        rows_of(DOCUMENT, "notes")
    assert error.value.hint == "it has: rows, others"


def test_csv_has_a_heading_and_every_column_once() -> None:
    found = list(csv.DictReader(io.StringIO(csv_text(DOCUMENT))))
    assert found[0]["name"] == "ring, wide" and found[0]["best"] == "true" and found[0]["why"] == "" and found[1]["bound.x"] == ""
    assert list(found[0]) == ["name", "time_s", "best", "parts", "bound.x", "why", "more.a", "more.deep"]


def test_output_csv_of_a_command_holds_what_its_document_holds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collective", "compare", "all-reduce", "--fabric", "laptop:4", "--sizes", "1MiB", "--strategies", "ring,double-tree"]
    assert main([*words, "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main([*words, "--output", "csv"]) == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    rows = rows_of(document)
    assert len(found) == len(rows) >= 1 and list(found[0]) == list(dict.fromkeys(k for r in rows for k in r))
    assert main([*words, "--output", "xml"]) == 2
    assert "invalid choice: 'xml'" in capsys.readouterr().err


def test_a_data_frame_and_an_arrow_table_where_the_packages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bottleneck", None)  # pandas takes our folder tests/bottleneck for a package of that name
    mixed = {"rows": [{"value": 1, "note": None}, {"value": 2.5, "note": "x"}, {"value": "all", "note": None}]}
    for make, package, extra in ((to_pandas, "pandas", "frames"), (to_arrow, "pyarrow", "frames")):
        try:
            __import__(package)
        except ModuleNotFoundError:
            with pytest.raises(MissingExtra) as error:
                make(DOCUMENT)
            assert error.value.data == {"package": package, "extra": extra}
            continue
        made = make(DOCUMENT)
        names = list(made.columns) if package == "pandas" else made.column_names
        assert names == ["name", "time_s", "best", "parts", "bound.x", "why", "more.a", "more.deep"]
        assert len(made) == 3
        records = made.to_dict("records") if package == "pandas" else made.to_pylist()
        for record, row in zip(records, rows_of(DOCUMENT), strict=True):
            assert {k: v for k, v in record.items() if k in row and row[k] is not None} == {k: v for k, v in row.items() if v is not None}
        made = make(mixed)  # Arrow has one kind a column
        assert (list(made["value"]) if package == "pandas" else made["value"].to_pylist()) in ([1, 2.5, "all"], ["1", "2.5", "all"])


def test_lists_of_lists_of_records_are_one_list():
    document = {"schema": "s", "version": 1, "capacities": [[{"capacity": 8, "time_s": 1.0}, {"capacity": 8, "time_s": 2.0}], [{"capacity": 16}]]}
    assert rows_of(document) == [{"capacity": 8, "time_s": 1.0}, {"capacity": 8, "time_s": 2.0}, {"capacity": 16}]
    assert rows_of({"schema": "s", "pairs": [[1, 2], [3, 4]]}) == [{"schema": "s", "pairs": "[[1, 2], [3, 4]]"}]
