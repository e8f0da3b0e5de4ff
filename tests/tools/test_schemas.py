"""Published schemas: what they let through, what they refuse, and that a change which breaks readers is not written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import schemas

ROOT = Path(__file__).parents[2]

ROWS = [{"name": f"r{i}", "time_s": i / 2, "ranks": i, "why": None if i % 2 else "slow", "by": {f"0->{i}": 1}} for i in range(10)]
DOCUMENT = {"schema": "meshwright.toy", "version": 1, "rows": ROWS, "ok": True}


def recorded(folder: Path, *documents: dict) -> str:
    folder.mkdir(exist_ok=True)
    for i, document in enumerate(documents):
        (folder / f"{i}.json").write_text(json.dumps(document))
    return str(folder)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(schemas, "FOLDER", tmp_path / "schemas")
    (tmp_path / "schemas").mkdir()
    return tmp_path


def test_a_schema_takes_its_documents_and_refuses_others(place: Path) -> None:
    assert schemas.main([recorded(place / "a", DOCUMENT)]) == 0
    schema = schemas.published(DOCUMENT)
    assert schema and schemas.problems(schema, DOCUMENT) == []
    row = schema["properties"]["rows"]["items"]
    assert row["properties"]["time_s"] == {"type": "number"} and row["properties"]["ranks"] == {"type": "integer"}
    assert row["properties"]["why"] == {"type": ["null", "string"]} and row["required"] == ["by", "name", "ranks", "time_s", "why"]
    assert row["properties"]["by"] == {"type": "object", "additionalProperties": {"type": "number"}}

    def said(**changes: object) -> list[str]:
        return schemas.problems(schema, DOCUMENT | changes)

    assert said(rows=[{**ROWS[0], "ranks": 1.5}]) == [".rows[0].ranks: is number, not integer"]
    assert said(rows=[{k: v for k, v in ROWS[0].items() if k != "why"}]) == []  # only recorded rows are known
    assert said(more=1) == [".more: is not published"] and said(ok="yes") == [".ok: is string, not boolean"]
    assert said(version=2) == [".version: is 2, not 1"]
    assert said(rows=[{**ROWS[0], "by": {"1->2": "x"}}]) == [".rows[0].by.1->2: is string, not number"]


def test_a_field_may_be_added_and_none_taken_away(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert schemas.main([recorded(place / "a", *[DOCUMENT] * 8)]) == 0
    assert schemas.main([recorded(place / "b", DOCUMENT | {"more": [1.5]})]) == 0
    wider = schemas.published(DOCUMENT)
    assert wider and schemas.problems(wider, DOCUMENT) == [] and wider["properties"]["more"]["items"] == {"type": "number"}
    lacking = {k: v for k, v in DOCUMENT.items() if k != "ok"}
    assert schemas.main([recorded(place / "c", lacking)]) == 1
    assert "toy-1.json: .ok: is missing\nraise the version of these" in capsys.readouterr().err and schemas.published(DOCUMENT) == wider
    assert schemas.main(["--break", str(place / "c")]) == 0 and "ok" not in schemas.published(DOCUMENT)["required"]


def test_what_is_published_is_of_the_dialect_and_listed() -> None:
    files = sorted((ROOT / "docs" / "schemas").glob("*.json"))
    page = (ROOT / "docs" / "schemas" / "index.md").read_text(encoding="utf-8")
    assert len(files) > 40 and page == schemas.index()
    for path in files:
        schema = json.loads(path.read_text(encoding="utf-8"))
        name, _, version = path.stem.rpartition("-")
        assert schema["$schema"] == schemas.DIALECT and schema["$id"] == f"meshwright.{name}/{version}" and f"({path.name})" in page
        assert schema["properties"]["schema"] == {"const": f"meshwright.{name}"} and schema["properties"]["version"] == {"const": int(version)}
