"""README is two screens at most, has what a newcomer looks for, and says what quickstart's page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from meshwright.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCREEN_LINES, LINE, WORDS = 60, 100, 700


def rendered_lines(text: str) -> int:
    """As a page of 100 characters a line shows it: links and marks left out, paragraphs wrapped, a line between blocks."""
    lines = 0
    for block in re.split(r"\n\n+", re.sub(r"!\[[^\]]*\]\([^)]*\)", "picture\n" * 8, text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block).replace("**", "").replace("`", "")
        rows = plain.splitlines() if plain.startswith(("|", "-", "```", "$", "picture")) else [" ".join(plain.split())]
        lines += sum(max(1, -(-len(row) // LINE)) for row in rows) + 1
    return lines


def test_it_is_two_screens_at_most() -> None:
    assert rendered_lines(README) <= 2 * SCREEN_LINES and len(README.split()) <= WORDS


def test_a_line_of_many_words_counts_as_many() -> None:
    assert rendered_lines("word " * 60) == 4 and rendered_lines("| a |\n|---|\n| b |") == 4 and rendered_lines("![x](y.svg)") == 9


def test_it_has_one_picture_two_commands_four_jobs_and_peers() -> None:
    section = {s.partition("\n")[0]: s for s in README.split("\n## ")}
    assert len(re.findall(r"!\[", README)) == 1
    assert re.findall(r"^\./(\w+)", section["Two commands"], re.MULTILINE) == ["quickstart", "test"]
    assert len(re.findall(r"^\| (?!job)\w.*`meshwright ", section["Four jobs"], re.MULTILINE)) == 4
    assert len(re.findall(r"^\| ", section["Beside other tools"], re.MULTILINE)) >= 6


def test_its_commands_lack_no_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They name the reader's files; nothing else is wrong with them. The one that names none is asked about a fabric that is none."""
    monkeypatch.chdir(tmp_path)
    for words in (shlex.split(command) for command in re.findall(r"`meshwright ([^`]*)`", README)):
        assert main(["nowhere" if word == "dgx-a100:2" else word for word in words]) == 2
        said = capsys.readouterr().err
        assert re.match(r"error: (my\.py|rank0\.json\.gz|no fabric is called 'nowhere')", said), (words, said)


def test_what_it_shows_of_quickstart_stands_on_its_page() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(layout .*?)```", README, re.DOTALL)
    assert shown.splitlines() and all(line in page for line in shown.splitlines())
    assert all(figure in page for figure in re.findall(r"\d[\d.]+ (?:ms|s)\b", README))


def test_every_peer_has_a_row_in_the_longer_table() -> None:
    longer = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    peers = re.findall(r"^\| (?!\*\*)(\w[^|]*?) \|", README.partition("## Beside other tools")[2].partition("\n## ")[0], re.MULTILINE)
    assert peers and all(name.strip() in longer for row in peers for name in row.split(","))
