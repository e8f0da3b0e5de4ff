"""Typical mistakes are answered in two lines: what and where, and what to do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("mistakes", ROOT / "benchmarks" / "mistakes.py")
assert _spec and _spec.loader
mistakes = sys.modules["mistakes"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)


@pytest.fixture(scope="module")
def said() -> dict[str, object]:
    return {answer.command: answer for answer in mistakes.all_said()}


@pytest.mark.parametrize(("mistake", "command"), mistakes.MISTAKES, ids=[m for m, _ in mistakes.MISTAKES])
def test_a_mistake_is_answered(said, mistake, command):
    assert said[command].faults() == [], said[command].text


def test_a_bad_answer_would_be_seen():
    text = "Traceback (most recent call last):\n  File \"x.py\"\nerror: unexpected KeyError: 'a'\n"
    assert len(mistakes.Said("m", "c", 0, text).faults()) >= 5
    assert mistakes.Said("m", "c", 2, "error: no fabric is called 'x'\nhint: did you mean y?\n").faults() == []


def test_a_misspelt_option_is_named_before_what_is_missing(said):
    answer = said["collective bound all-reduce --fabirc laptop:2 --size 1MiB"]
    assert "unknown option '--fabirc'" in answer.text and "did you mean `--fabric`?" in answer.text
