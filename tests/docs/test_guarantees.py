"""docs/guarantees.md names exactly the modules that the checker shares with what it checks."""

from __future__ import annotations

import re
from pathlib import Path

import grimp

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
CHECKED = ("decide", "drive", "lower", "simulate", "run")


def reached(graph: grimp.ImportGraph, roots: set[str]) -> set[str]:
    """Modules that some of `roots` import, directly or through others."""
    seen: set[str] = set()
    todo = list(roots)
    while todo:
        fresh = graph.find_modules_directly_imported_by(todo.pop()) - seen
        seen |= fresh
        todo += fresh
    return seen


def room(graph: grimp.ImportGraph, name: str) -> set[str]:
    return {m for m in graph.modules if f"{m}.".startswith(f"meshwright.{name}.")}


def test_the_page_names_what_is_shared() -> None:
    graph = grimp.build_graph("meshwright", cache_dir=None)
    checkers = room(graph, "check")
    others = set().union(*(room(graph, name) for name in CHECKED))
    assert len(checkers) > 30 and len(others) > 400
    shared = (reached(graph, checkers) - checkers) & reached(graph, others)
    table = PAGE.read_text().partition("## What the checker shares")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [f"meshwright.{name}" for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert sorted(named) == sorted(shared)
