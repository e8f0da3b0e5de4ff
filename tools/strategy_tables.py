"""Writes the generated tables into docs/*.md: `python tools/strategy_tables.py`. `tests/docs/test_strategy_tables.py` compares them."""

from pathlib import Path

from meshwright.report import preset_text, strategies_text

for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md")):
    text = page.read_text(encoding="utf-8")
    if (today := preset_text.rewritten(strategies_text.rewritten(text))) != text:
        page.write_text(today, encoding="utf-8")
