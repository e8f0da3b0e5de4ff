"""Tables of strategies in docs: generated ones are those of today; those with columns of their own name every strategy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.decide.strategies import answering
from meshwright.drive.strategies import decisions
from meshwright.fabric.machines import GPUS, MACHINES, SOURCES
from meshwright.report import preset_text
from meshwright.report.strategies_text import rewritten, strategy_table

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", sorted(p.name for p in DOCS.glob("*.md")))
def test_generated_tables_are_those_of_today(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert preset_text.rewritten(rewritten(text)) == text, "python tools/strategy_tables.py writes them"


def test_the_page_of_presets_has_every_machine_device_and_source() -> None:
    text = (DOCS / "presets.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")}
    assert {f"`{name}`" for name in GPUS} | set(SOURCES) <= rows
    assert {f"`{m.name}`" + "".join(f", `{a}`" for a in m.aliases) for m in MACHINES.values()} <= rows


def test_every_decision_with_a_choice_has_a_table() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in DOCS.glob("*.md"))
    for part in ("collective", "pipeline", "traffic", "layout operators", "memory regions", "memory step"):
        assert f"<!-- strategies: {part} -->\n| strategy |" in pages, part


@pytest.mark.parametrize(
    ("page", "decision", "question", "more"),
    [("sparse_collectives.md", "collective.sparse", "", {"dense"}), ("layout_search.md", "layout", "layers", set())],
)
def test_tables_with_columns_of_their_own_name_every_strategy(page: str, decision: str, question: str, more: set[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    table = next(t for t in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE) if re.match(r"\| (name|method) \|", t))
    first = [row.split("|")[1].strip(" `") for row in table.splitlines()[2:]]
    kinds = decisions()[decision]
    assert set(first) == {kind.name for kind in (answering(kinds, question) if question else kinds)} | more


def test_a_table_has_a_row_per_module_and_says_where_methods_come_from() -> None:
    table = strategy_table("pipeline")
    assert "| `zb1p`, `zb2p`, `interleaved-zb` | " in table and "Zero Bubble Pipeline Parallelism, ICLR 2024 |" in table
    assert strategy_table("memory", "regions").count("\n") == 4 and "`none`" in strategy_table("memory", "regions")
