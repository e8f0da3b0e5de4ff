"""What the owner changes between two steps: the plan's step goes on as it was traced, so a change that forward or the loss would see is refused.

Looked at before every step: the modules themselves (which there are, their mode, hooks, parameters and buffers by identity, whether a parameter is
trained), and every attribute, global and variable around the loss whose name is read by code that forward and the loss reach. Contents of tensors
that are parameters or buffers may change: the step works on these very tensors.

What code reaches is followed by names: a method of any class of the model, a function among the globals. So a name may count that is never read.
Cost: some 2 us a module of a transformer at every step (GPT-2: 164 modules, 285 values, 0.4 ms on a busy core).
"""

from __future__ import annotations

import dis
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ...capture.resolve import unwrapped
from ...capture.side_effects import INSTALLED, OF_ALL_MODULES, is_owners
from ...errors import UsageError

__all__ = ["AsTraced"]

MAX_ENTRIES = 1000  # of a container that are compared one by one; of larger ones their number
MAX_DEPTH = 3  # of containers and objects in each other
MAX_FUNCTIONS = 10_000  # that forward and the loss may call, by name; a transformers class reaches some 300
TABLES = (("modules", "_modules"), ("parameters", "_parameters"), ("buffers", "_buffers"))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GONE = object()
PLAIN = (bool, int, float, complex, str)
UNCHANGING = (*PLAIN, bytes, type(None), Enum, torch.dtype, torch.device)
_mode = operator.attrgetter("training")
IN_PLACE = "keep it in a buffer and change that in place (register_buffer, then .fill_() or .copy_()), or plan and parallelize again"
AGAIN = "plan and parallelize the changed module again; step.state_dict(full=True) has the weights"


@dataclass(frozen=True)
class _Value:
    """`name`: of what holds it, such as `alpha of model.encoder`; `told`: of what it holds, None for what cannot change (a number, a text) and for
    what an earlier value holds too."""

    name: str
    get: Callable[[], Any]
    held: Any
    told: Any


class AsTraced:
    """Of a model and its loss, as they are now."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None = None) -> None:
        self.paths = {f"model.{path}" if path else "model": m for path, m in model.named_modules()}
        self.modules = list(self.paths.values())
        self.modes = list(map(_mode, self.modules))
        self.structure = _Structure(self.paths)
        functions = _reached(self.modules, loss)
        self.names = frozenset(name for f in functions for name in _read_names(f.__code__)[1])
        self.values, seen = list[_Value](), set[int]()
        for name, get in (*_attributes(self.paths, self.names), *_of_loss(loss, self.names), *_outside(functions)):
            held = get()
            told = None if isinstance(held, UNCHANGING) or id(held) in seen else _told(held, self.names)
            seen.add(id(held))
            self.values.append(_Value(name, get, held, told))

    def require(self, *, training: bool = True) -> None:
        """Raises: UsageError naming the first thing that has changed. `training`: modules' modes count too, as in a training step."""
        if found := self.structure.changed():
            raise _refusal(*found)
        if training and list(map(_mode, self.modules)) != self.modes:
            path, module = next((p, m) for (p, m), mode in zip(self.paths.items(), self.modes, strict=True) if m.training != mode)
            now, then, call = ("training", "evaluation", "eval") if module.training else ("evaluation", "training", "train")
            hint = f"call {path}.{call}() before step(batch), or set the mode before parallelize"
            raise _refusal(f"{path} is in {now} mode, and was in {then} mode", hint)
        for value in self.values:
            now = value.get()
            if now is value.held and (value.told is None or _told(now, self.names) == value.told):
                continue
            if now is value.held or _told(now, self.names) != _told(value.held, self.names):
                before, after = _shown(value.held), _shown(now)
                change = f"from {before} to {after}" if before and after and before != after else "since"
                raise _refusal(f"{value.name} has changed {change}", IN_PLACE)


def _refusal(what: str, hint: str) -> UsageError:
    return UsageError(f"{what}; the step was traced before that and would go on without it", where="step", hint=hint, data={"changed": what})


# ---- modules -----------------------------------------------------------------------------------------------------------
class _Structure:
    """Which modules, parameters, buffers and hooks there are, by identity: lists that are compared as wholes, since this is done at every step."""

    def __init__(self, paths: dict[str, nn.Module]) -> None:
        self.paths, modules = list(paths), list(paths.values())
        self.modules, self.kinds, self.forwards = modules, list(map(type, modules)), list(map(_own_forward, modules))
        self.tables = [(what, getattr(m, table)) for what, table in TABLES for m in modules]
        self.contents = [tuple(table.values()) for _, table in self.tables]
        self.hooks = [getattr(m, table) for table in HOOKS for m in modules]
        self.hooked = list(map(tuple, self.hooks))
        self.parameters = [(path, p) for path, m in paths.items() for p in m._parameters.values() if p is not None]
        self.trained = [p.requires_grad for _, p in self.parameters]

    def changed(self) -> tuple[str, str] | None:
        """(what, hint) of the first change."""
        if (kinds := list(map(type, self.modules))) != self.kinds:
            return f"{self._path(kinds, self.kinds)} has another class than before", AGAIN
        if (forwards := list(map(_own_forward, self.modules))) != self.forwards:
            return f"{self._path(forwards, self.forwards)} has another forward than before", AGAIN
        if (hooked := list(map(tuple, self.hooks))) != self.hooked:
            return f"{self._path(hooked, self.hooked)} has other hooks than before", AGAIN
        for number, ((what, table), before) in enumerate(zip(self.tables, self.contents, strict=True)):
            if len(table) != len(before) or not all(map(operator.is_, table.values(), before)):
                hint = "change a buffer in place: .fill_() or .copy_()" if what == "buffers" else AGAIN
                return f"{self.paths[number % len(self.paths)]} has other {what} than before", hint
        for (path, p), before in zip(self.parameters, self.trained, strict=True):
            if p.requires_grad != before:
                return f"requires_grad of a parameter of {path} has changed", AGAIN
        return None

    def _path(self, now: list[Any], before: list[Any]) -> str:
        return self.paths[next(i for i, (x, y) in enumerate(zip(now, before, strict=True)) if x != y) % len(self.paths)]


def _own_forward(module: nn.Module) -> Any:
    return module.__dict__.get("forward")


def _attributes(paths: dict[str, nn.Module], names: frozenset[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    counted = {kind: names - OF_ALL_MODULES - _of_frameworks(kind) - {"forward"} for kind in {type(m) for m in paths.values()}}
    for path, module in paths.items():
        held = vars(module)
        for name in held.keys() & counted[type(module)]:
            yield f"{name} of {path}", functools.partial(held.get, name, GONE)


def _of_frameworks(kind: type) -> frozenset[str]:
    """Private attributes that base classes of installed packages give their instances: the state of a framework's own loop."""
    found = set[str]()
    for base in kind.__mro__:
        code = getattr(vars(base).get("__init__"), "__code__", None)
        if code is not None and any(part in code.co_filename for part in INSTALLED) and not _of_torch(base):
            found |= {s.argval for s in dis.get_instructions(code) if s.opname == "STORE_ATTR" and s.argval.startswith("_")}
    return frozenset(found)


# ---- the loss, and what is around functions --------------------------------------------------------------------------------
def _of_loss(loss: Any, names: frozenset[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Attributes of a loss that is a module, a method, or an object that is called like a function."""
    for holder in _holders(loss):
        for path, part in holder.named_modules() if isinstance(holder, nn.Module) else [("", holder)]:
            for name in (vars(part).keys() & names) - OF_ALL_MODULES:
                yield f"{name} of the loss{f'.{path}' if path else ''}", functools.partial(vars(part).get, name, GONE)


def _holders(loss: Any) -> Iterator[Any]:
    while loss is not None:
        owner = getattr(loss, "__self__", loss)
        if hasattr(owner, "__dict__") and not isinstance(owner, (FunctionType, functools.partial, type, ModuleType)):
            yield owner
        loss = getattr(loss, "func", None) or getattr(loss, "__wrapped__", None)


def _outside(functions: list[FunctionType]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Numbers, texts and containers of them among the globals that the owner's functions read, and in variables around them."""
    seen: set[tuple[int, str]] = set()
    for function in (f for f in functions if is_owners(f.__code__.co_filename)):
        names = function.__globals__
        for name in _read_names(function.__code__)[0]:
            if (id(names), name) not in seen and _counts(names.get(name)):
                seen.add((id(names), name))
                yield f"{name} of {names.get('__name__', 'a file')}", functools.partial(names.get, name, GONE)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if _counts(_content(cell)):
                yield f"{name} around {function.__qualname__}", functools.partial(_content, cell)


def _counts(value: Any) -> bool:
    return isinstance(value, (*PLAIN, torch.Tensor, list, dict, tuple, set, deque))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return GONE


# ---- what code reads -------------------------------------------------------------------------------------------------------
@functools.lru_cache(MAX_FUNCTIONS)
def _read_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(globals, attributes) that code reads, functions within it included."""
    of_globals, attributes = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            of_globals.add(step.argval)
        elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            attributes.add(step.argval)
        elif isinstance(step.argval, CodeType):
            inner = _read_names(step.argval)
            of_globals |= inner[0]
            attributes |= inner[1]
    # getattr(self, "alpha") reads as well
    attributes |= {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    return frozenset(of_globals), frozenset(attributes)


def _reached(modules: list[nn.Module], loss: Any) -> list[FunctionType]:
    """Functions that forward passes and the loss may call, but for torch's own functions; methods are those of the modules' classes."""
    kinds = list(dict.fromkeys(map(type, modules)))
    starts = [getattr(kind, "forward", None) for kind in kinds] + [vars(m).get("forward") for m in modules] + [unwrapped(loss), loss]
    starts += [getattr(type(x), "forward", None) for holder in _holders(loss) if isinstance(holder, nn.Module) for x in holder.modules()]
    starts += [hook for m in modules for table in HOOKS for hook in getattr(m, table).values()]
    todo, found = deque(starts), dict[CodeType, FunctionType]()
    while todo and len(found) < MAX_FUNCTIONS:
        function = _function(todo.popleft())
        if function is None or function.__code__ in found:
            continue
        found[function.__code__] = function
        of_globals, attributes = _read_names(function.__code__)
        around = [function.__globals__.get(name) for name in of_globals] + [_content(c) for c in function.__closure__ or ()]
        todo.extend(x for x in around if not _of_torch(x))
        todo.extend(getattr(x, name, None) for x in around if isinstance(x, ModuleType) and not _of_torch(x) for name in attributes)
        todo.extend(getattr(kind, name, None) for kind in kinds for name in attributes)
    return list(found.values())


def _function(value: Any) -> FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__wrapped__", value)
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _of_torch(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return isinstance(name, str) and name.partition(".")[0] == "torch"


# ---- values ----------------------------------------------------------------------------------------------------------------
def _told(value: Any, names: frozenset[str], depth: int = MAX_DEPTH) -> Any:
    """What is compared of a value: tensors by identity and number of changes in place, other objects by what is read of them."""
    if isinstance(value, UNCHANGING):
        return type(value), value if value == value else "nan"
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, np.generic):
        return type(value), value.item()
    if isinstance(value, (list, tuple, deque, set, dict)):
        if not depth or len(value) > MAX_ENTRIES:
            return id(value), len(value)
        if isinstance(value, set):
            return frozenset(map(repr, value))
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [(k, _told(v, names, depth - 1)) for k, v in entries]
    if depth and hasattr(value, "__dict__") and not callable(value):
        return id(value), [(k, _told(v, names, depth - 1)) for k, v in vars(value).items() if k in names]
    return id(value)


def _shown(value: Any) -> str:
    """As a message has it; "" of what has no short text."""
    return repr(value)[:40] if isinstance(value, PLAIN) else ""
