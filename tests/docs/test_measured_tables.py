"""What pages say was measured is what the benchmarks' raw output says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "measured_tables.py"))
PAGES = [p for p in sorted((ROOT / "docs").rglob("*.md")) if "<!-- measured:" in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_pages_say_what_was_measured(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TOOL["rewritten"](text) == text, "python tools/measured_tables.py writes them"


def test_every_table_is_on_a_page() -> None:
    found = [name for page in PAGES for _, name, _ in TOOL["PART"].findall(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(TOOL["TABLES"])


def test_a_page_of_other_figures_is_found() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    head = TOOL["PART"].search(text).end(1)
    assert TOOL["rewritten"](text[:head] + "| of | yesterday |\n" + text[head:]) == text
