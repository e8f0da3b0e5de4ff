"""Hints carry choices; every surface says them in its own words."""

from __future__ import annotations

import pytest

from meshwright.errors import FLAGS, Choice, Hint, UsageError


@pytest.mark.parametrize(
    ("choice", "command", "python"),
    [
        (Choice("data", 1), "--dp 1", "data=1"), (Choice("data"), "--dp", "data="), (Choice("zero", 0), "--zero 0", "zero=0"),
        (Choice("recipe.batch_statistics", "global"), "--batch-statistics global", 'recipe=Recipe(batch_statistics="global")'),
        (Choice("stated.dropout", "local"), "--dropout local", 'dropout="local"'), (Choice("compare", False), "--no-gate", "compare=False"),
        (Choice("compare", True), "--gate", "compare=True"),
    ],
)  # fmt: skip
def test_a_choice_is_said_as_each_surface_says_it(choice: Choice, command: str, python: str) -> None:
    assert choice.said("command") == command and choice.said("python") == python and choice.field in FLAGS


def test_an_error_says_its_hint_and_its_note_again() -> None:
    error = UsageError("wrong", hint=Hint("plan with {} or {}", Choice("tensor", 1), Choice("pipeline", 1)))
    assert error.hint == "plan with --tp 1 or --pp 1" and error.__notes__ == ["hint: plan with --tp 1 or --pp 1"]
    error.say_in("python")
    assert error.hint == error.to_json()["hint"] == "plan with tensor=1 or pipeline=1"
    assert error.__notes__ == ["hint: plan with tensor=1 or pipeline=1"]
    plain = UsageError("wrong", hint="look")
    plain.say_in("python")
    assert plain.hint == "look"
