"""The commands of the start page and of the how-to pages, run as they stand, print what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "page_commands.py"
sys.path.insert(0, str(TOOL.parent))
import page_commands  # noqa: E402

METHODS = [page for page in page_commands.pages() if page.parent.name == "methods"]
PAGES = [page for page in page_commands.pages() if page not in METHODS]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.real
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page: Path) -> None:
    if "console" not in page.read_text(encoding="utf-8"):
        return
    done = run("check", str(page))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.real
def test_the_pages_of_methods_print_what_they_say() -> None:
    """In one process: their commands are short."""
    done = run("check", *(str(page) for page in METHODS if "```console" in page.read_text(encoding="utf-8")))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_method_page_says_what_a_reader_asks() -> None:
    index = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    assert {p.name for p in METHODS} - {"index.md"} == set(re.findall(r"\]\((\w+\.md)\)", index))
    for page in METHODS:
        if page.name != "index.md":
            text = page.read_text(encoding="utf-8")
            assert all(f"## {head}\n" in text for head in ("When it wins here", "What we changed", "Cite")), page
            assert all((page.parent / name).is_file() for name in re.findall(r"\]\((\w+\.svg)\)", text)), page


def test_every_job_has_a_page() -> None:
    index = (ROOT / "docs" / "howto" / "index.md").read_text(encoding="utf-8")
    assert {p.name for p in PAGES if p.parent.name == "howto"} - {"index.md"} == set(re.findall(r"\]\((\w+\.md)\)", index))
    for page in PAGES[1:]:
        if page.name != "index.md":
            text = page.read_text(encoding="utf-8")
            assert "**Question.**" in text and "## What to look at" in text and "## What can go wrong" in text, page


def test_a_page_that_says_something_else_is_found(tmp_path: Path) -> None:
    """A wrong line, a wrong exit code, a command that is not ours; and `write` mends the first."""
    good = "```console\n$ meshwright --version\nmeshwright 0.1.0\n```\n"
    reported: list[str] = []
    assert page_commands.page_today(good, reported) == good and reported == []
    wrong = good.replace("0.1.0", "9.9")
    assert page_commands.page_today(wrong, reported) == good and reported == []
    assert "meshwright 0.1.0" in page_commands.page_today("<!-- exit 2 -->\n" + wrong, reported) and "wrong: exit code 0, not 2" in reported[0]
    with pytest.raises(ValueError, match="not run"):
        page_commands.page_today("```console\n$ rm x\n```\n", reported)


def test_measured_numbers_are_not_compared_and_words_are() -> None:
    said = page_commands.Said("x", ["took 3.1 ms, 2 ranks"], ["took 412 us, 2 ranks"], 0, 0.0)
    assert page_commands.as_shown(said, measured=True) == said.shown
    assert page_commands.as_shown(said, measured=False) == said.printed
    other = page_commands.Said("x", ["took 3.1 ms, 2 ranks"], ["took 3.1 ms, 2 hosts"], 0, 0.0)
    assert page_commands.as_shown(other, measured=True) == other.printed
    cut = page_commands.Said("x", ["one", "..."], ["one", "two", "three"], 0, 0.0)
    assert page_commands.as_shown(cut, measured=False) == ["one", "..."]
