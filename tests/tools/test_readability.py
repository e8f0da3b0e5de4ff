"""tools/readability.py counts sentences of prose, passives and jargon, and nothing of code and tables."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import readability  # noqa: E402

PAGE = """# A heading is no sentence

The planner cuts the model into stages. It is [checked](x.md) twice, and `a.b` stays.

```console
$ this is no sentence at all
```

| a table | is none |
|---|---|

- The first item has a full sentence.
- The second one is written here. It ends.
"""


def test_sentences_of_prose_only() -> None:
    found = readability.sentences(readability.prose(PAGE))
    assert found == [
        "The planner cuts the model into stages.", "It is checked twice, and CODE stays.", "The first item has a full sentence.",
        "The second one is written here.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "passive"),
    [
        ("The plan is checked.", True), ("It was then quickly written.", True), ("They have been cut.", True), ("It gets moved.", True),
        ("The plan is red.", False), ("The checker proves the plan.", False), ("It is the best.", False),
    ],
)  # fmt: skip
def test_passive(sentence: str, passive: bool) -> None:
    assert bool(readability.PASSIVE.search(sentence)) is passive


def test_restructured_text() -> None:
    text = "Title\n=====\n\n.. note::\n   Left out entirely here.\n\nThe text is kept here. See :ref:`the other page <x>` too.\n"
    assert readability.sentences(readability.prose(text, rst=True)) == ["The text is kept here.", "See the other page too."]


def test_jargon_counts_unless_it_is_explained(tmp_path: Path) -> None:
    body = "The zorbel moves along. " * 5
    for i in range(20):
        (tmp_path / f"other{i}.md").write_text("The other pages moves along here. " * 5)
    (tmp_path / "a.md").write_text(body)
    (tmp_path / "b.md").write_text("# Zorbel\n\n" + body)
    figures = {f.page: f for f in readability.compared({str(tmp_path): readability.pages_of(tmp_path)})[str(tmp_path)]}
    assert figures["a.md"].unexplained == pytest.approx(1 / 3, abs=0.01) and figures["b.md"].unexplained == 0
    assert figures["a.md"].sentences == 5 and figures["a.md"].mean == 4


def test_stems() -> None:
    assert len({readability.stem(w) for w in ("planned", "planning")}) == 1 and readability.stem("Links") == "link"
    assert Counter(map(readability.stem, ["chunks", "chunk"]))["chunk"] == 2
