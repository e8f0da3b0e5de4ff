"""The error tree: every failure that meshwright reports is one of these.

MeshwrightError
├── UsageError            exit 2   a wrong flag, name, size; nothing was tried
│   ├── UnknownName                a preset, model, strategy, dtype that does not exist
│   ├── MissingExtra               an optional package (torch, pyarrow, ...) is not installed
│   ├── StrategyNotLoaded          an installed package brings a strategy that cannot be loaded, or a name that is taken
│   └── WrongCall                  a collective whose arguments do not fit; a RuntimeError too, as torch's own backends raise
├── FormatError           exit 1   a file from outside does not say what its schema demands
├── CaptureError          exit 1   a module cannot be captured; names the operator and where
├── Unsupported           exit 2   a strategy refuses a problem rather than answer it wrongly
├── Infeasible            exit 3   no plan can exist; carries the violated limit as proof
│   └── Disconnected               some devices cannot reach each other; carries the cut
├── CheckFailed           exit 4   a plan or program is wrong; carries the verdict's witness
│   ├── Deadlock                   the cycle of steps that wait for each other
│   └── DifferentTraining          a plan trains something else than its owner's module; carries where, both numbers and the cause
├── TimeLimit             exit 5   stopped at the limit; carries the best answer so far
└── RunError              exit 1   a real run failed; names rank, step and peer
    ├── RankDied, RankFailed, RankFrozen, RankDiverged, LinkLost, LinkSlow, MessageDamaged, PlanMismatch, GroupFailed
    ├── NotFinite                  a gradient holds NaN or infinity and may not be sent
    ├── RunTimeout, PortInUse, TooFewDevices
    ├── EngineAway                 an engine (Slurm's controller, a Kubernetes API) does not answer; nothing was changed, ask again
    └── Interrupted       exit 130

Each carries `code` (stable, for scripts), `message`, `where` (file, field, rank, step), `hint` (what to do) and `data`
(JSON-able facts). `to_json()` is what `--json` prints; the Python API raises the same object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast

Surface = Literal["command", "python"]
SURFACES: tuple[Surface, ...] = ("command", "python")
FLAGS = {  # field -> option of the command line; what follows a point is the field's own name
    "data": "--dp", "tensor": "--tp", "pipeline": "--pp", "expert": "--ep", "zero": "--zero", "microbatch": "--microbatch",
    "recipe.batch_statistics": "--batch-statistics", "stated.batch_statistics": "--batch-statistics", "stated.dropout": "--dropout",
    "compare": "--gate",
}  # fmt: skip
# Further options that a text may name without a `Choice`, and what stands for them in Python; `{}`: the value, where one is named.
_IN_PYTHON = {
    "--global-batch": "global_batch={}", "--loss": "loss={}", "--optimizer": "optimizer={}", "--recompute": "recompute={}", "--shapes": "shapes={}",
    "--pipeline": "schedule={}", "--collective": "collective={}", "--no-gate": "compare=False", "--memory": "wishes=MemoryWanted",
    "--compress": "wishes=CompressWanted", "--context": "wishes=LayoutWanted(context={})",
    "--spare": "wishes=LayoutWanted(spare={})", "train plan --loss": "loss={}", "train gate --whole": "compare_step(..., whole=True)",
} | {f"--{x.replace('_', '-')}": f"recipe=Recipe({x}={{}})" for x in ("precision", "clip_norm", "clip_value", "ema", "no_decay", "reproducible")}
_OPTION = re.compile(
    r"(?<![\w-])(train (?:gate|plan) --[a-z]+|--[a-z][a-z-]*)(?: (\d+(?:\.\d+)?|N|global|local|serial|output|steps|none|tree|off|auto)(?![\w-]))?"
)


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


def _as_keyword(found: re.Match[str]) -> str:
    """What Python has for an option of the command line, with its value if there is one; options that it has not stay."""
    flag, value = found[1], found[2] or ""
    field = next((f for f, x in FLAGS.items() if x == flag and not (f.startswith("recipe.") and value == "local")), "")
    shown = value if not value or value == "N" or value[0].isdigit() else f'"{value}"'
    if field.startswith("recipe."):
        return f"recipe=Recipe({field.removeprefix('recipe.')}={shown})"
    if flag == "--gate":
        return "compare=True"
    if field:
        return f"{field.removeprefix('stated.')}={shown}"
    return _IN_PYTHON[flag].format(shown) if flag in _IN_PYTHON else found[0]


Function = TypeVar("Function", bound=Callable[..., Any])


def in_python(function: Function) -> Function:
    """A function of the Python API: what it raises is said in the words of Python."""

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except MeshwrightError as error:
            error.say_in("python")
            raise

    return cast("Function", called)


class MeshwrightError(Exception):
    """Base of all errors; `exit_code` is what the command line ends with."""

    code = "failure"
    exit_code = 1

    def __init__(self, message: str, *, where: str = "", hint: str | Hint = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.advice = hint
        self.hint = hint if isinstance(hint, str) else hint.said("command")
        self.data: dict[str, Any] = dict(data or {})
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # shown by tracebacks, which is all that users of torch see

    def say_in(self, surface: Surface) -> None:
        """Words the choices of its hint as `surface` does; an error has the command line's words before. So its texts, for Python."""
        before = f"hint: {self.hint}"
        if isinstance(self.advice, Hint):
            self.hint = self.advice.said(surface)
        if surface == "python":
            self.message, self.where, self.hint = (_OPTION.sub(_as_keyword, x) for x in (self.message, self.where, self.hint))
        self.__notes__ = [f"hint: {self.hint}" if note == before else note for note in getattr(self, "__notes__", [])]

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "where": self.where, "hint": self.hint, "data": self.data}


class UsageError(MeshwrightError):
    code, exit_code = "usage", 2


class WrongCall(UsageError, RuntimeError):
    """Who is prepared for torch's word about wrong arguments is prepared for ours."""


class UnknownName(UsageError):
    code = "unknown-name"


class MissingExtra(UsageError):
    code = "missing-extra"

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed",
            hint=f"pip install 'meshwright[{extra}]'",
            data={"package": package, "extra": extra},
        )


class StrategyNotLoaded(UsageError):
    code = "strategy-not-loaded"


class FormatError(MeshwrightError):
    code = "format"


class CaptureError(MeshwrightError):
    code = "capture"


class Unsupported(MeshwrightError):
    code, exit_code = "unsupported", 2


class Infeasible(MeshwrightError):
    code, exit_code = "infeasible", 3


class Disconnected(Infeasible):
    code = "disconnected"


class CheckFailed(MeshwrightError):
    code, exit_code = "check-failed", 4


class Deadlock(CheckFailed):
    code = "deadlock"


class DifferentTraining(CheckFailed):
    """One step of a plan is not the owner's. `data`: what, name, module, operators, rank, planned, own, error, cause, differences."""

    code = "different-training"


class TimeLimit(MeshwrightError):
    code, exit_code = "time-limit", 5


class RunError(MeshwrightError):
    code = "run"


class RankDied(RunError):
    code = "rank-died"


class RankFailed(RunError):
    code = "rank-failed"


class RankFrozen(RunError):
    """A rank answers nobody though its machine does: stopped, or hung in foreign code."""

    code = "rank-frozen"


class RankDiverged(RunError):
    """A rank called another collective than the others at the same place of their sequence."""

    code = "rank-diverged"


class LinkLost(RunError):
    """Nothing comes through a link, or a connection broke, while both ranks live."""

    code = "link-lost"


class LinkSlow(RunError):
    """A message was under way beyond the deadline."""

    code = "link-slow"


class MessageDamaged(RunError):
    """A message is not what was sent, or not the one that was due (debug mode)."""

    code = "message-damaged"


class RunTimeout(RunError):
    code = "run-timeout"


class PortInUse(RunError):
    code = "port-in-use"


class TooFewDevices(RunError):
    code = "too-few-devices"


class EngineAway(RunError):
    """An engine does not answer now. What it was told before stands in the journal."""

    code = "engine-away"


class PlanMismatch(RunError):
    """Ranks hold different plans, or a plan is for another world or fabric."""

    code = "plan-mismatch"


class GroupFailed(RunError):
    """A collective was given up: `data` names the rank at fault, the step, the link and how it was found out. The group is unusable."""

    code = "group-failed"


class NotFinite(RunError):
    """A gradient holds NaN or infinity, and its codec was not told to let it pass."""

    code = "not-finite"


class Interrupted(RunError):
    code, exit_code = "interrupted", 130
