"""What the owner's forward checks of its batch: `if labels.max() >= classes: raise ValueError(...)`, `assert ...`, `torch._check_tensor_all(...)`.

A check asks a tensor for its value, which a trace does not have. It is told from a choice (`x if mask.all() else y`) by trying both answers on fakes:
with one of them the code that asked raises, with the other it goes on. The trace takes the answer with which it goes on and says so in the graph
(`meshwright.checked`). What the asked tensor is computed of, inputs and constants alone, is split off (`split_off`): ranks compute it of every
micro-batch before a step, and raise where the owner's code would (`run.train.checks`). A check never changes what is computed, so it may be asked of
parts of a batch. Choices, numbers that are asked for, and checks of what weights have a part in are no checks here.
"""

from __future__ import annotations

import contextlib
import dis
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from .flatten import plain_call
from .regions import REGION
from .resolve import shown
from .torch_private import FakeTensorMode
from .watched import NOT_THE_OWNERS

__all__ = ["CHECKED", "Answers", "answered", "checks_of", "split_off"]

MAX_CHECKS = 64  # of one forward
CHECKED = "meshwright.checked.default"
_FAKE: Any = type(FakeTensorMode().from_tensor(torch.empty(0)))
_TENSOR = torch.Tensor
_NUMBERS = (_TENSOR.item, _TENSOR.__int__, _TENSOR.__float__, _TENSOR.__index__, _TENSOR.tolist)
_RAISE = dis.opmap["RAISE_VARARGS"]


@dataclass(frozen=True)
class Asked:
    """Where a value is asked for: the owner's line, and for the how manyth time there."""

    where: str
    time: int
    text: str = field(compare=False)


Answers = Mapping[Asked, bool]


class Answering(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, values that are asked for at known places are these answers; each is a call of `meshwright.checked`."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers, self.times = answers, Counter[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = _condition(function, args)
        if asked is None:
            return function(*args, **(kwargs or {}))
        frame = _owners_frame()
        where = f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        self.times[where] += 1
        place = Asked(where, self.times[where], linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("  #")[0].strip())
        found = self.answer(place, frame)
        if found is None:
            return function(*args, **(kwargs or {}))
        torch.ops.meshwright.checked(asked(), found, place.where, place.text)
        return found

    def answer(self, place: Asked, frame: FrameType) -> bool | None:
        return self.answers.get(place)


class _NextAsked(BaseException):
    """Forward asks for one more value."""


class _Trying(Answering):
    """Answers the first question that is not known with `guess`; after it, numbers (as messages have them) are 0, and a further question ends it."""

    def __init__(self, answers: Answers, guess: bool) -> None:
        super().__init__(answers)
        self.guess = guess
        self.place: Asked | None = None
        self.code: CodeType | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.place is not None and args and isinstance(args[0], _FAKE):
            if function is _TENSOR.__format__:
                return "0"
            if function in _NUMBERS and args[0].dtype != torch.bool:
                return [] if function is _TENSOR.tolist else 0
        return super().__torch_function__(function, types, args, kwargs)

    def answer(self, place: Asked, frame: FrameType) -> bool | None:
        if (known := self.answers.get(place)) is not None:
            return known
        if self.place is not None:
            raise _NextAsked
        self.place, self.code = place, frame.f_code
        return self.guess

    def raised(self, error: Exception) -> bool:
        """Whether the code that asked raised it, itself or by a check of torch's."""
        frames, trace = [], error.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame.f_code, trace.tb_lasti))
            trace = trace.tb_next
        code, last = frames[-1]
        own = code is self.code and code.co_code[last] == _RAISE
        return own or (code.co_name == "_check_with" and any(c is self.code for c, _ in frames))


def checks_of(run: Callable[[], Any]) -> dict[Asked, bool]:
    """The checks of a forward pass that `run` makes on fakes, up to the first value that it asks for otherwise: with the answer that goes on."""
    answers: dict[Asked, bool] = {}
    for _ in range(MAX_CHECKS):
        raises: dict[bool, bool] = {}
        place: Asked | None = None
        for guess in (False, True):
            trying, raises[guess] = _Trying(answers, guess), False
            try:
                with trying:
                    run()
            except _NextAsked:
                pass
            except Exception as error:
                raises[guess] = trying.raised(error)
            place = trying.place
        if place is None or raises[False] == raises[True]:
            break
        answers[place] = raises[False]
    return answers


def _condition(function: Any, args: Any) -> Callable[[], torch.Tensor] | None:
    """What makes the truth value that a call asks for; None for other calls."""
    if not args or not isinstance(args[0], _FAKE) or getattr(args[0], "constant", None) is not None:
        return None
    x = args[0]
    if function in (_TENSOR.__bool__, torch.is_nonzero, _TENSOR.is_nonzero) or (function is _TENSOR.item and x.dtype == torch.bool):
        return lambda: x if x.dtype == torch.bool else x != 0
    if function in (torch.equal, _TENSOR.equal) and isinstance(args[1], torch.Tensor) and x.shape == args[1].shape:
        return lambda: (x == args[1]).all()
    return None


def _owners_frame() -> FrameType:
    first = frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith((*NOT_THE_OWNERS, "<")) and frame.f_back is not None:
        frame = frame.f_back
    return frame if frame.f_back is not None else first


@torch.library.custom_op("meshwright::checked", mutates_args=())  # type: ignore[untyped-decorator]
def _checked(condition: torch.Tensor, answer: bool, where: str, text: str) -> torch.Tensor:
    return condition.clone()


@_checked.register_fake  # type: ignore[untyped-decorator]
def _(condition: torch.Tensor, answer: bool, where: str, text: str) -> torch.Tensor:
    return torch.empty_like(condition)


fx.node.has_side_effect(torch.ops.meshwright.checked.default)


def split_off(exported: Any) -> tuple[fx.Graph, fx.Node | None]:
    """Takes the checks out of the graph of an exported program: (a graph of them alone, whose placeholders carry value names; the first check that is
    not computed of inputs and constants, if there is one)."""
    graph, made = exported.graph, fx.Graph()
    checks = [n for n in graph.nodes if n.op == "call_function" and str(n.target) == CHECKED]
    values = _values(exported)
    cone = set[fx.Node]()
    for n in checks:
        stack = [n]
        while stack:
            if (x := stack.pop()) in cone:
                continue
            if not (x in values if x.op == "placeholder" else plain_call(x) and not _unknown(x)):
                return made, n
            cone.add(x)
            stack += x.all_input_nodes
    known: dict[fx.Node, fx.Node] = {}
    for x in [n for n in graph.nodes if n in cone]:
        known[x] = made.node_copy(x, known.__getitem__)
        if x.op == "placeholder":
            known[x].meta["value"] = values[x]
    made.output(())
    for n in checks:
        graph.erase_node(n)
    for x in reversed([n for n in graph.nodes if n in cone and n.op != "placeholder"]):
        if not x.users and not x.is_impure():
            graph.erase_node(x)
    return made, None


def _unknown(n: fx.Node) -> bool:
    """Whether a call may give something else in another process."""
    return str(n.target) == REGION or torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())


def _values(exported: Any) -> dict[fx.Node, str]:
    """Value names of the placeholders that stand for inputs and constants."""
    found: dict[fx.Node, str] = {}
    places = [n for n in exported.graph.nodes if n.op == "placeholder"]
    inputs = 0
    for n, spec in zip(places, exported.graph_signature.input_specs, strict=True):
        if spec.kind.name == "USER_INPUT":
            found[n], inputs = f"input:{inputs}", inputs + 1
        elif spec.kind.name == "CONSTANT_TENSOR":
            found[n] = f"buffer:{spec.target.removeprefix('model.')}"
    return found


@contextlib.contextmanager
def answered(answers: Answers) -> Iterator[None]:
    """While it lasts, checks are answered so."""
    with Answering(answers) if answers else contextlib.nullcontext():
        yield
