"""What forward does beside computing with tensors: a recorded graph would do it once, or never again.

Numbers and texts that forward or the loss changes every time it runs (globals of its file, attributes of modules; in lists and dictionaries among
them too, whose lengths also count) are found by two traces: what changes once is a cache. They are refused with the line, for ranks run forward once
per micro-batch. Files that the owner's own code reads inside forward, what it prints, and attributes that it sets or whose contents it changes are
noticed as it happens (`calls_watched`, `contents_watched`): export sets attributes back.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import io
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from meshwright.errors import Unsupported

from .resolve import place_of, shown, unwrapped

__all__ = [
    "INSTALLED", "LIBRARIES", "OF_ALL_MODULES", "Seen", "calls_watched", "changed", "contents_watched", "file_of", "globals_of", "is_owners",
    "is_plain", "line_that_changes", "line_that_sets", "plain_values", "refuse_changing",
]  # fmt: skip

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # whose calls are not the owner's
STANDARD = str(Path(os.__file__).parent)
INSTALLED = ("site-packages", "dist-packages")
Place = tuple[str, str]  # (file, name) of a global; (path, name) of a module's attribute
OF_ALL_MODULES = frozenset(nn.Module().__dict__)
_CHANGING = frozenset(("add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "remove", "setdefault", "update"))


@dataclass
class Seen:
    """While a model was traced once: lines that printed; plain attributes that were given another value, with it and the line."""

    printed: list[str] = field(default_factory=list)
    assigned: dict[Place, tuple[nn.Module, Any, str]] = field(default_factory=dict)

    def changing(self, again: Callable[[], Seen]) -> dict[str, str]:
        """Attributes that a second trace, which begins with what this one left, changes once more: name -> line."""
        before = [(m, name, m.__dict__.get(name)) for (_, name), (m, _, _) in self.assigned.items()]
        try:
            for (_, name), (module, value, _) in self.assigned.items():
                module.__dict__[name] = value
            second = again()
        finally:
            for module, name, value in before:
                module.__dict__[name] = value
        return {f"{path}.{name}" if path else name: self.assigned[path, name][2] for path, name in self.assigned.keys() & second.assigned.keys()}


def is_owners(file: str) -> bool:
    """Whether code of that file was written by whoever brings the model."""
    return not file.startswith((*LIBRARIES, STANDARD, "<")) and not any(part in file for part in INSTALLED)


def is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def globals_of(model: nn.Module, loss: Any = None) -> dict[str, dict[str, Any]]:
    """By file, the globals of the files that the owner's modules and his loss are written in."""
    found: dict[str, dict[str, Any]] = {}
    for names in (*(getattr(type(m).forward, "__globals__", {}) for m in model.modules()), getattr(unwrapped(loss), "__globals__", {})):
        file = str(names.get("__file__", ""))
        if file and is_owners(file):
            found[file] = names
    return found


def plain_values(model: nn.Module, loss: Any = None) -> dict[Place, Any]:
    """Numbers and texts among the globals of the files that the owner's modules and his loss are written in, and in containers among these; those
    that the loss function keeps in variables around it, or in itself."""
    found: dict[Place, Any] = {}
    function = unwrapped(loss)
    for file, names in globals_of(model, loss).items():
        found |= _plain_among(file, names)
    if file := _is_owners_function(function):
        found |= _plain_among(file, inspect.getclosurevars(function).nonlocals)
        if loss is not function and not isinstance(loss, nn.Module):  # modules among the model's are watched as they are given attributes
            inner = inspect.unwrap(loss)
            held = getattr(getattr(inner, "__self__", inner), "__dict__", {})
            found |= _plain_among(file, {k: v for k, v in held.items() if k not in OF_ALL_MODULES})
    return found


def _is_owners_function(function: Any) -> str:
    """The file of a function of the owner's, else ""."""
    file = str(function.__code__.co_filename) if hasattr(function, "__code__") else ""
    return file if file and is_owners(file) else ""


def _plain_among(file: str, names: Mapping[str, Any]) -> dict[Place, Any]:
    found: dict[Place, Any] = {}
    for name, value in list(names.items()):
        if is_plain(value) and not name.startswith("__"):
            found[file, name] = value
        else:
            found |= _plain_within(file, name, value)
    return found


@contextlib.contextmanager
def contents_watched(model: nn.Module, seen: Seen) -> Iterator[None]:
    """Lists, dictionaries and sets of the owner's modules that get other contents meanwhile count as assigned: export sets them back too."""
    before = _contents(model)
    yield
    for (path, name), (module, value, held) in _contents(model).items():
        if (path, name) in before and before[path, name][2] != held:
            seen.assigned[path, name] = module, value, _line(module, file_of(type(module)), f"{name}[]")[0]


def _contents(model: nn.Module) -> dict[Place, tuple[nn.Module, Any, dict[Place, Any]]]:
    """(module, copy, what of it is plain) of each container of an owner's module."""
    return {
        (path, name): (module, copy(value), held)
        for path, module in model.named_modules() if is_owners(file_of(type(module)) or "<")
        for name, value in list(module.__dict__.items()) if name not in OF_ALL_MODULES and (held := _plain_within("", name, value))
    }  # fmt: skip


def _plain_within(file: str, name: str, value: Any) -> dict[Place, Any]:
    """How many entries a container has, and those that are numbers and texts; nothing of other values."""
    if type(value) not in (dict, list, set, deque):
        return {}
    entries = value.items() if type(value) is dict else enumerate(value) if type(value) is not set else ()
    return {(file, f"{name}[]"): len(value)} | {(file, f"{name}[{k!r}]"): v for k, v in list(entries) if is_plain(v)}


def changed(before: dict[Place, Any], after: dict[Place, Any]) -> set[Place]:
    return {k for k, v in before.items() if k in after and (after[k] != v and not (v != v and after[k] != after[k]))}


def refuse_changing(model: nn.Module, changing: set[Place], attributes: dict[str, str], loss: Any = None) -> None:
    """Raises: Unsupported naming the first of what changes every time, and the line that changes it."""
    found = [(f"{_whose(loss, name)} {name.removesuffix('[]')}", name, *_line(model, file, name, loss)) for file, name in sorted(changing)]
    of_modules = ((f"attribute {name}", name, line, False) for name, line in sorted(attributes.items()))
    for what, name, where, by_loss in (*found, *of_modules):
        raise Unsupported(
            f"{'the loss' if by_loss else 'forward'} changes {what} every time it runs; ranks run it once per micro-batch, and what is computed "
            "would depend on that",
            where=where, hint="keep what the model counts in a buffer (register_buffer), or outside of forward and the loss",
            data={"name": name},
        )  # fmt: skip


def _whose(loss: Any, name: str) -> str:
    """Variables around a loss function and its attributes are no globals."""
    function = unwrapped(loss)
    free = {*getattr(getattr(function, "__code__", None), "co_freevars", ()), *getattr(getattr(loss, "__self__", loss), "__dict__", {})}
    return "its own" if name.partition("[")[0] in free else "global"


def _line(model: nn.Module, file: str, name: str, loss: Any = None) -> tuple[str, bool]:
    """`file:line` that sets a global, or changes what it or an attribute holds, and whether that is the loss's code; of the first forward of the file
    where none is found."""
    bare = name.partition("[")[0]
    kinds = [type(m) for m in model.modules() if file_of(type(m)) == file]
    function = unwrapped(loss)
    codes = [(getattr(f, "__code__", None), False) for kind in kinds for f in (kind.forward, *vars(kind).values())]
    codes += [(function.__code__, True)] if _is_owners_function(function) == file else []
    first = ""
    for code, by_loss in codes:
        if code is None:
            continue
        first = first or f"{shown(code.co_filename)}:{code.co_firstlineno}"
        if line := line_that_sets(code, bare, inside=name != bare):
            return f"{shown(code.co_filename)}:{line}", by_loss
    return first or file, not kinds


def line_that_changes(model: nn.Module, names: Sequence[str], loss: Any = None) -> str:
    """`file:line` at which the owner's code changes one of these, or what it holds; of the model's forward where none is found."""
    functions = [f for kind in {type(m): 0 for m in model.modules()} for f in (kind.forward, *vars(kind).values())]
    codes = [f.__code__ for f in (*functions, unwrapped(loss)) if hasattr(f, "__code__") and f.__name__ != "__init__"]
    for code, name in ((c, n) for c in codes for n in names):
        if line := line_that_sets(code, name, inside=True):
            return f"{shown(code.co_filename)}:{line}"
    return place_of(type(model).forward)


def file_of(kind: type[nn.Module]) -> str:
    return str(getattr(kind.forward, "__globals__", {}).get("__file__", ""))


def line_that_sets(code: CodeType, name: str, *, inside: bool, after: int = 0) -> int:
    """The line at which code sets a name, or an entry of what it names, or calls a method of that; 0 where it does not. `after`: at this line at the
    earliest."""
    line, named, before = code.co_firstlineno, False, None
    for step in dis.get_instructions(code):
        line = (step.positions.lineno if step.positions is not None else None) or line
        if line < after:
            continue
        if step.argval == name:
            if step.opname in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"):
                return line
            named = True
        if inside and named and (step.opname == "STORE_SUBSCR" or (before == name and step.argval in _CHANGING)):
            return line
        before = step.argval
    return 0


def _caller(frame: FrameType | None) -> FrameType | None:
    """The owner's frame that a call comes from; None where a library makes it, or an import."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "importlib" in file:
            return None
        if not file.startswith(STANDARD) or any(part in file for part in INSTALLED):
            return frame if is_owners(file) else None
        frame = frame.f_back
    return None


@contextlib.contextmanager
def calls_watched(
    reads: Callable[[str], None], prints: Callable[[str], None], sets: Callable[[nn.Module, str, Any, str], None]
) -> Iterator[None]:  # fmt: skip
    """While it lasts, `reads` and `prints` are told `file:line` of the owner's code that opens a file, or prints; `sets` module, name, value and line
    of an attribute that it gives another number or text."""

    def watched(function: Callable[..., Any], tell: Callable[[str], None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = _caller(sys._getframe(1))
            if frame is not None:
                tell(f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}")
            return function(*args, **kwargs)

        return call

    places = [(builtins, "open", reads), (io, "open", reads), (builtins, "print", prints)]
    before = [getattr(module, name) for module, name, _ in places]
    plainly = nn.Module.__setattr__

    def setting(self: nn.Module, name: str, value: Any) -> None:
        if is_plain(value) and name in self.__dict__ and self.__dict__[name] != value and (frame := _caller(sys._getframe(1))) is not None:
            sets(self, name, value, f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}")
        plainly(self, name, value)

    nn.Module.__setattr__ = setting
    for (module, name, tell), function in zip(places, before, strict=True):
        setattr(module, name, watched(function, tell))
    try:
        yield
    finally:
        nn.Module.__setattr__ = plainly
        for (module, name, _), function in zip(places, before, strict=True):
            setattr(module, name, function)
