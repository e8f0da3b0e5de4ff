"""What to do about an error, where that is a choice: the choice is data, and every surface says it in its own words.

    Hint("state that it is meant with {}, or plan with {}", Choice("stated.batch_statistics", "local"), Choice("data", 1))

is `--batch-statistics local` and `--dp 1` on the command line, `batch_statistics="local"` and `data=1` in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["SURFACES", "Choice", "Hint", "Surface"]

Surface = Literal["command", "python"]
SURFACES: tuple[Surface, ...] = ("command", "python")
FLAGS = {  # field -> option of the command line; what follows a point is the field's own name
    "data": "--dp", "tensor": "--tp", "pipeline": "--pp", "expert": "--ep", "zero": "--zero", "microbatch": "--microbatch",
    "recipe.batch_statistics": "--batch-statistics", "stated.batch_statistics": "--batch-statistics", "stated.dropout": "--dropout",
    "compare": "--gate",
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """`field`: of the plan's degrees (`data`, `tensor`, ...), of its recipe (`recipe.batch_statistics`), of what the gate is told
    (`stated.dropout`) or whether it compares (`compare`); `value`: what to choose; None: the field alone."""

    field: str
    value: str | int | bool | None = None

    def said(self, surface: Surface) -> str:
        name = self.field.rpartition(".")[2]
        if surface == "command":
            flag = FLAGS[self.field]
            return f"--no-{flag[2:]}" if self.value is False else flag if self.value is None or self.value is True else f"{flag} {self.value}"
        if self.value is None:
            return f"{name}="
        shown = f'{name}="{self.value}"' if isinstance(self.value, str) else f"{name}={self.value}"
        return f"recipe=Recipe({shown})" if self.field.startswith("recipe.") else shown


@dataclass(frozen=True, init=False)
class Hint:
    """A sentence with a `{}` for each choice."""

    text: str
    choices: tuple[Choice, ...]

    def __init__(self, text: str, *choices: Choice) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "choices", choices)

    def said(self, surface: Surface) -> str:
        return self.text.format(*(c.said(surface) for c in self.choices))

    def to_json(self) -> list[dict[str, Any]]:
        return [{"field": c.field, "value": c.value} for c in self.choices]
