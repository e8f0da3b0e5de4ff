"""Writes the tables of strategies into docs/*.md: `python tools/strategy_tables.py`. `tests/docs/test_strategy_tables.py` compares them."""

from pathlib import Path

from meshwright.report.strategies_text import rewritten

for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md")):
    text = page.read_text(encoding="utf-8")
    if (today := rewritten(text)) != text:
        page.write_text(today, encoding="utf-8")
