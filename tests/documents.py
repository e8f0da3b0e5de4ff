"""Every document that a command makes in a test of commands fits its published schema (docs/schemas), printed or not.

With `MESHWRIGHT_RECORD_DOCUMENTS=FOLDER` documents are kept there instead, for `python tools/schemas.py FOLDER`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import schemas

from meshwright.cli import frame
from meshwright.errors import MeshwrightError

KEPT_IN = os.environ.pop("MESHWRIGHT_RECORD_DOCUMENTS", "")
MAX_RECORDED_BYTES = 4 << 20
_wrong: list[str] = []


def install() -> None:
    """The frame's printing of a result, and of an error with `--json`, looks at the document first."""
    printing = frame._print

    def watched(result: frame.Result, as_json: bool, *, as_csv: bool = False) -> int:
        look(result.document)
        return printing(result, as_json, as_csv=as_csv)

    frame._print = watched
    reporting = frame._report

    def reported(error: MeshwrightError, *, as_json: bool) -> int:
        if as_json:
            look({"schema": "meshwright.error", "version": 1, "exit_code": error.exit_code, **json.loads(json.dumps(error.to_json(), default=str))})
        return reporting(error, as_json=as_json)

    frame._report = reported


def look(document: dict[str, Any]) -> None:
    """What is wrong with it is told when the test ends: an exception here would become the command's own answer."""
    if not str(document.get("schema", "")).startswith("meshwright.") or document["schema"] == "meshwright.test":
        return  # a command of a test's own
    try:
        text = json.dumps(document, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        _wrong.append(f"{document['schema']}: {error}")
        return
    plain = json.loads(text)
    if KEPT_IN and len(text) < MAX_RECORDED_BYTES:
        Path(KEPT_IN).mkdir(exist_ok=True)
        name = f"{schemas.file_of(plain).removesuffix('.json')}.{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        (Path(KEPT_IN) / name).write_text(text)
    elif not KEPT_IN:
        schema = schemas.published(plain)
        said = ["no schema is published"] if schema is None else schemas.problems(schema, plain)
        _wrong.extend(f"{schemas.file_of(plain)}: {x} (tools/schemas.py)" for x in said[:8])


def told() -> list[str]:
    """What was wrong since the last call."""
    found = list(_wrong)
    _wrong.clear()
    return found
