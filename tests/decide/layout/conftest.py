"""What several files of layout tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from captured import captured
from meshwright.graph.graph import OpGraph

MODEL = f"{Path(__file__).parents[3] / 'examples' / 'gpt.py'}:small"


@pytest.fixture(scope="session")
def graph() -> OpGraph:
    """Of examples/gpt.py:small; nobody changes it."""
    pytest.importorskip("torch")
    return captured(MODEL)
