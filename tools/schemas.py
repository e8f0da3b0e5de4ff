"""JSON Schemas of what commands print with `--json`: `python tools/schemas.py FOLDER` widens docs/schemas/ by the documents in FOLDER.

Tests record them: `MESHWRIGHT_RECORD_DOCUMENTS=FOLDER pytest tests` keeps every document that a command makes. Without the variable each of them is
compared with its schema, so that no command prints what is not published (`tests/conftest.py`).

What a schema says: the types of all fields, and which are always there (`required`: in every one of MIN_SEEN documents or more). Within a version
fields may be added. Where a document lacks a required field or has another type, the version is to be raised: this tool then refuses (`--break`
widens all the same). The dialect is 2020-12; only type, const, properties, required, additionalProperties, items, and $id and title are used.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
FIELD = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")  # a key of any other form is a name of the user's: the object is a table
MIN_SEEN = 8  # objects at a place before a field that all of them have counts as required
MAX_FIELDS = 48  # different keys at a place beyond which it is a table of names
COUNTS = re.compile(r"(^|_)(bytes|ns|version|ranks?|steps?|count|devices|data|tensor|pipeline|context|seed|elements|microbatches|exit_code)$")
MAX_ITEMS = 200  # of a list that are looked at: what is alike in them is alike in the rest
TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", tuple: "array", dict: "object"}
# Objects whose keys are names of the user's that look like fields: the last part of their place.
TABLES = frozenset({"options", "costs", "table", "parameters", "versions", "phases", "environment", "rates", "totals", "attributes"})
OPEN = frozenset({"data"})  # objects that hold whatever is to be said: facts of an error, proofs of a bound


def file_of(document: dict[str, Any]) -> str:
    return f"{document['schema'].removeprefix('meshwright.')}-{document['version']}.json"


def _types(schema: dict[str, Any]) -> list[str]:
    said = schema.get("type", [])
    return [said] if isinstance(said, str) else said


def _either(a: dict[str, Any], b: dict[str, Any]) -> str | list[str]:
    types = sorted({*_types(a), *_types(b)})
    if "number" in types and "integer" in types:
        types.remove("integer")
    return types[0] if len(types) == 1 else types


def widened(schema: dict[str, Any], value: Any, place: str = "") -> dict[str, Any]:
    """The schema that holds for `value` too. `x-seen`: how many objects were looked at, which `finished` takes out."""
    kind = TYPES[type(value)]
    if kind == "integer" and not COUNTS.search(place):
        kind = "number"  # that it has no fraction is chance
    found = {**schema, "type": _either(schema, {"type": kind})}
    if kind == "array" and value:
        items = schema.get("items", {})
        for item in value[:MAX_ITEMS]:
            items = widened(items, item, place)
        found["items"] = items
    if kind == "object" and place in OPEN:
        return {"type": _either(schema, {"type": kind})}
    if kind == "object":
        known = dict(schema.get("properties", {}))
        named = "additionalProperties" in schema or place in TABLES or any(not FIELD.fullmatch(key) for key in value)
        if named or len({*known, *value}) > MAX_FIELDS:
            each = schema.get("additionalProperties", {})
            for inner in known.values():
                each = united(each, inner)
            for key in value:
                each = widened(each, value[key], key)
            return {k: v for k, v in found.items() if k not in ("properties", "required", "x-seen")} | {"additionalProperties": each}
        for key in value:
            known[key] = widened(known.get(key, {}), value[key], key)
        found["properties"] = dict(sorted(known.items()))
        always = set(schema.get("required", [])) & set(value) if "properties" in schema else set(value)
        found |= {"required": sorted(always), "x-seen": schema.get("x-seen", 0) + 1}
    return found


def united(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The schema of what either allows; of objects the fields of both, none required."""
    found: dict[str, Any] = {"type": _either(a, b)} if a or b else {}
    for key in ("items", "additionalProperties"):
        if key in a or key in b:
            found[key] = united(a.get(key, {}), b.get(key, {}))
    if "properties" in a or "properties" in b:
        ours, theirs = a.get("properties", {}), b.get("properties", {})
        found["properties"] = {k: united(ours.get(k, {}), theirs.get(k, {})) for k in sorted({*ours, *theirs})}
        found["required"] = []
    return found


def finished(schema: dict[str, Any]) -> dict[str, Any]:
    """As it is published: without counts, and without fields that are required on too little evidence."""
    found = {k: v for k, v in schema.items() if k != "x-seen"}
    if schema.get("x-seen", MIN_SEEN) < MIN_SEEN or not schema.get("required"):
        found.pop("required", None)
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = finished(found[key])
    if "properties" in found:
        found["properties"] = {k: finished(v) for k, v in found["properties"].items()}
    return found


def problems(schema: dict[str, Any], value: Any, place: str = "") -> list[str]:
    """Where `value` is not what the schema says, as lines `place: what`.

    Below the first level a schema knows the recorded documents only: what none of them had, lacked or left null is not a mistake there.
    """
    kind = TYPES.get(type(value), type(value).__name__)
    types = _types(schema)
    if place.count(".") > 1 and kind == "null":
        return []
    if types and kind not in types and not (kind == "integer" and "number" in types):
        return [f"{place or '(document)'}: is {kind}, not {' or '.join(types)}"]
    if "const" in schema and value != schema["const"]:
        return [f"{place}: is {value!r}, not {schema['const']!r}"]
    found = []
    if kind == "array" and "items" in schema:
        for i, item in enumerate(value[:MAX_ITEMS]):
            found += problems(schema["items"], item, f"{place}[{i}]")
    if kind == "object":
        found += [f".{key}: is missing" for key in schema.get("required", []) if key not in value and not place]
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for key, inner in value.items():
            if key in fields:
                found += problems(fields[key], inner, f"{place}.{key}")
            elif isinstance(rest, dict):
                found += problems(rest, inner, f"{place}.{key}")
            elif fields and not place:
                found.append(f".{key}: is not published")
    return found


def published(document: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of a document's name and version."""
    path = FOLDER / file_of(document)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def index() -> str:
    lines = [
        "# JSON Schemas", "", "With `--json` a command prints one document. Its fields `schema` and `version` say its form. Each file below is the",
        "JSON Schema (2020-12) of one form and version.", "",
        "- Within a version fields may be added. No field is taken away, and none changes its type.",
        "- Otherwise the version is raised, and the old schema stays here.", "- `required` are the fields that every document has.",
        "- Every document that a command makes in this repository's tests of commands is compared with its schema.",
        "- Below the first level a schema lists the fields that recorded documents had.", "",
        "The schemas are made from documents that commands made in tests (`tools/schemas.py`). What a field means is in",
        "[file formats](../formats.md) and on the page of the command.", "", "| schema | version | file |", "|---|---|---|",
    ]  # fmt: skip
    for path in sorted(FOLDER.glob("*.json")):
        name, _, version = path.stem.rpartition("-")
        lines.append(f"| `meshwright.{name}` | {version} | [{path.name}]({path.name}) |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    grown: dict[str, dict[str, Any]] = {}
    broken: list[str] = []
    for path in sorted(Path(w) for w in words if w != "--break" for w in Path(w).glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        name = file_of(document)
        old = published(document)
        if name not in grown:
            grown[name] = {"x-seen": MIN_SEEN, **old} if old else {}
        if old:
            broken += [f"{name}: {p}" for p in problems(old, document) if not p.endswith("is not published")]
        grown[name] = widened({k: v for k, v in grown[name].items() if k not in ("$schema", "$id", "title")}, document)
    if broken and "--break" not in words:
        print("\n".join(dict.fromkeys(broken)), "raise the version of these, or give --break", sep="\n", file=sys.stderr)
        return 1
    for name, schema in grown.items():
        kind, _, version = name.removesuffix(".json").rpartition("-")
        said = finished(schema)
        said["properties"] |= {"schema": {"const": f"meshwright.{kind}"}, "version": {"const": int(version)}, "cut": {"type": "object"}}
        said["required"] = sorted({*said.get("required", []), "schema", "version"})
        head = {"$schema": DIALECT, "$id": f"meshwright.{kind}/{version}", "title": f"meshwright.{kind}, version {version}"}
        (FOLDER / name).write_text(json.dumps(head | said, indent=1) + "\n", encoding="utf-8")
    (FOLDER / "index.md").write_text(index(), encoding="utf-8")
    print(f"{len(grown)} schemas from {len(list(words))} folders are in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
