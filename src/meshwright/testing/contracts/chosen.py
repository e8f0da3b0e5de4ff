"""Which strategies a battery runs on: those of a decision's tuple, or those that a package brings (`__main__`)."""

from __future__ import annotations

from typing import Any

import pytest

from ...cite import Cite
from ...decide.strategies import answering
from ...drive.strategies import decisions

__all__ = ["KINDS", "named_and_cited", "parametrized"]

KINDS = pytest.StashKey[dict[str, tuple[type[Any], ...]]]()  # by decision: what a package brings, where one is checked


def parametrized(metafunc: pytest.Metafunc, decision: str) -> None:
    """Gives every test that asks for a `kind`, or for a `<question>_kind`, the strategies that it is about."""
    chosen = metafunc.config.stash.get(KINDS, None)
    kinds = decisions()[decision] if chosen is None else chosen.get(decision, ())
    for argument in metafunc.fixturenames:
        if argument == "kind" or argument.endswith("_kind"):
            question = argument.removesuffix("kind").removesuffix("_")
            metafunc.parametrize(argument, answering(kinds, question) if question else kinds, ids=lambda kind: kind.__name__)


def named_and_cited(kind: Any) -> None:
    """A name of small letters, digits, + and -, and a citation that can be printed."""
    assert kind.name and not set(kind.name) - set("abcdefghijklmnopqrstuvwxyz0123456789+-")
    assert isinstance(kind.cite, Cite) and kind.cite.key and kind.cite.title in kind.cite.line()
    assert kind() == kind(), "options are compared by value, and have defaults"
