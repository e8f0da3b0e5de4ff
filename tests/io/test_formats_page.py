"""The fabrics on docs/formats.md are read as they stand, and the page names every field."""

import json
import re
from dataclasses import fields
from pathlib import Path

from meshwright.fabric import Device, Link, Switch
from meshwright.io.fabric_document import DTYPES, fabric_from_document
from meshwright.io.fabric_toml import parse_fabric_toml

PAGE = Path("docs/formats.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Fabrics") :].partition("\n## ")[0]


def test_examples_on_the_page():
    (toml,), (document,) = (re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL) for kind in ("toml", "json"))
    fabric = parse_fabric_toml(toml)
    fabric.require_connected()
    assert (len(fabric.devices), len(fabric.links)) == (4, 8)
    assert len(fabric_from_document(json.loads(document)).links) == 1


def test_every_field_and_dtype_is_on_the_page():
    for noun in (Device, Switch, Link):
        for field in fields(noun):
            assert f"`{field.name}`" in SECTION, field.name
    assert " ".join(DTYPES) in SECTION
