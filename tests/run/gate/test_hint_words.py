"""Hints carry choices; every surface says them in its own words."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.errors import FLAGS, Choice, Hint, Infeasible, MeshwrightError, UsageError, in_python


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


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ("--dp 1 and --pp 2", "data=1 and pipeline=2"), ("--loss output", 'loss="output"'), ("--no-gate", "compare=False"),
        ("without --memory and --recompute steps", 'without wishes=MemoryWanted and recompute="steps"'),
        ("--batch-statistics global", 'recipe=Recipe(batch_statistics="global")'), ("--batch-statistics local", 'batch_statistics="local"'),
        ("(--dp N --pp 1)", "(data=N pipeline=1)"), ("--microbatch as large as", "microbatch= as large as"), ("--tp-size 2", "--tp-size 2"),
        ("leave --evaluate-every out", "leave --evaluate-every out"), ("--dtype float32", "--dtype float32"), ("--zero lets", "zero= lets"),
        ("`train gate --whole` runs any", "`compare_step(..., whole=True)` runs any"), ("--clip-norm 1.0", "recipe=Recipe(clip_norm=1.0)"),
    ],
)  # fmt: skip
def test_plain_texts_are_said_in_python_too(command: str, python: str) -> None:
    error = Infeasible(f"it needs {command}", where=command, hint=f"plan with {command}")
    error.say_in("python")
    assert (error.message, error.where, error.hint) == (f"it needs {python}", python, f"plan with {python}")
    assert str(error) == f"{python}: it needs {python}" and error.__notes__ == [f"hint: plan with {python}"]


class Silent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.layer(x + y)


def test_what_python_calls_raise_has_its_words() -> None:
    with pytest.raises(UsageError, match="forward returns None") as found:
        mw.plan(Silent(), (torch.ones(4, 2), torch.ones(4, 2)), fabric="laptop:2", loss="output")
    assert found.value.hint == 'with loss="output" the module returns its loss'

    @in_python
    def called() -> None:
        """Kept."""
        raise MeshwrightError("wrong", hint="plan with --tp 1")

    with pytest.raises(MeshwrightError) as caught:
        called()
    assert caught.value.hint == "plan with tensor=1" and called.__doc__ == "Kept."
