"""The pages of docs/reference are what tools/reference.py writes today."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwright.cli.commands import COMMANDS
from meshwright.cli.frame import _load, _parser

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import reference  # noqa: E402


@pytest.mark.parametrize("page", reference.PAGES_WRITTEN)
def test_a_page_is_that_of_today(page: str) -> None:
    written = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert written == reference.PAGES_WRITTEN[page](), "python tools/reference.py writes it"


def test_every_option_of_every_command_is_on_the_page() -> None:
    """Read from the parsers, not from the tool."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0].strip(): part for part in page.replace("\n### ", "\n## ").split("\n## ")}
    for command in COMMANDS:
        section = sections[" ".join(command)]
        for action in _parser(command, _load(command))._actions:
            if not {"--help", "--json", "--debug", "--quiet"} & set(action.option_strings):
                assert all(option in section for option in action.option_strings), (command, action.option_strings)
    assert "--json" in page and "--debug" in page


def test_every_method_is_on_the_page() -> None:
    from meshwright.drive.strategies import decisions

    page = (ROOT / "docs" / "reference" / "methods.md").read_text(encoding="utf-8")
    headings = {name for line in page.splitlines() if line.startswith("### ") for name in line[4:].split(", ")}
    assert {kind.name for kinds in decisions().values() for kind in kinds} == headings


def test_every_option_says_what_it_does() -> None:
    parsers = {command: _parser(command, _load(command)) for command in COMMANDS}
    assert not [(command, action.dest) for command, parser in parsers.items() for action in parser._actions if not action.help]
