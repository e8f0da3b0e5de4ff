"""What the owner's code may change outside of its tensors, written down and put back: a trace runs it, and must leave nothing behind.

That is what modules hold beside parameters, globals of the files that the owner's modules and his loss are written in, variables around functions,
attributes of his classes and objects, and what lists, dictionaries and sets among all of these hold. Caches of functions are emptied.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .side_effects import OF_ALL_MODULES, file_of, globals_of, is_owners, is_plain

__all__ = ["Places", "as_before"]

_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_MAX_ENTRIES = 10_000  # of a container that is written down: larger ones are data
_MAX_COPIED = 1 << 26  # elements of a tensor whose values are written down
# Of a module: what training changes, and what stands for it while it is traced, is others' to put back.
_LEFT_ALONE = OF_ALL_MODULES | {"_call_impl", "forward"}
# Of a module's hooks: those that its own code adds as it runs go again, as does what it notes of them. Others may go meanwhile.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_CACHE = type(functools.lru_cache(int))
_ABSENT = object()
Held = dict[Any, Any]


@dataclass(frozen=True)
class _Place:
    """Something that holds values by name. `said`: what it is, `{}` being the name; `held`: what it holds now; `put`: makes it hold these again."""

    said: str
    held: Callable[[], Held]
    put: Callable[[Held], None]


@dataclass
class Places:
    """All that a model and its loss (`code`) hold. `values`: also the values of tensors among them, which takes copies."""

    model: nn.Module
    code: Any = None
    values: bool = False
    path: str = ""  # of the model, in messages
    _found: list[tuple[_Place, Held]] = field(default_factory=list)
    _tensors: list[tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)  # kept alive, so that an id names one thing

    def __post_init__(self) -> None:
        self._modules(self.path, self.model)
        self._walk(self.code, "the loss")
        for names in globals_of(self.model, self.code).values():
            own = {k: v for k, v in names.items() if not k.startswith("__")}
            self._table("global {}", names, own)

    def put_back(self) -> None:
        for place, before in reversed(self._found):
            now = place.held()
            if len(before) != len(now) or any(k not in now or now[k] is not x for k, x in before.items()):
                place.put(before)
        for x, value, version in self._tensors:
            if x._version != version:
                x.data.copy_(value)

    def changed(self) -> list[str]:
        """What holds another value than it did, in words."""
        return list(self.given())

    def given(self) -> dict[str, Any]:
        """The same, with the value."""
        pairs = ((place.said.format(k), before.get(k, _ABSENT), x) for place, before in self._found for k, x in place.held().items())
        return {said: new for said, old, new in pairs if old is not new and not (is_plain(new) and old == new)}

    def tensors(self) -> list[tuple[torch.Tensor, str]]:
        """Each with what holds it, in words."""
        held = ((place.said.format(name), x) for place, _ in self._found for name, x in place.held().items())
        return [(y, said) for said, x in held for y in (x if isinstance(x, tuple) else (x,)) if isinstance(y, torch.Tensor)]

    # ---- what there is -------------------------------------------------------------------------------------------
    def _first(self, value: Any) -> bool:
        return id(value) not in self._seen and self._seen.setdefault(id(value), value) is value

    def _add(self, said: str, held: Callable[[], Held], put: Callable[[Held], None], *, copied: bool = True) -> None:
        before = held()
        self._found.append((_Place(said, held, put), before))
        for name, x in before.items():
            if not isinstance(x, torch.Tensor):
                self._walk(x, said.format(name))
            elif self.values and copied and type(x) is torch.Tensor and x.layout == torch.strided and not x.is_meta and x.numel() <= _MAX_COPIED:
                self._tensors.append((x, x.detach().clone(), x._version))

    def _table(self, said: str, table: Held, own: Mapping[Any, Any], *, copied: bool = True) -> None:
        """`own`: its names, of those that are looked at."""

        def held() -> Held:
            return {k: v for k, v in table.items() if k in own or (k not in _LEFT_ALONE and not str(k).startswith("__"))}

        def put(before: Held) -> None:
            for name in held().keys() - before.keys():
                del table[name]
            table.update(before)

        self._add(said, held, put, copied=copied)

    def _modules(self, within: str, root: nn.Module) -> None:
        for path, module in root.named_modules():
            if not self._first(module):
                continue
            prefix = ".".join(x for x in (within, path) if x).replace("{", "{{").replace("}", "}}")
            prefix += "." if prefix else ""
            self._table(f"attribute {prefix}{{}}", module.__dict__, {k: v for k, v in module.__dict__.items() if k not in _LEFT_ALONE})
            self._table(f"buffer {prefix}{{}}", module._buffers, module._buffers, copied=False)
            held = functools.partial(_hooks, module)
            self._found.append((_Place(f"attribute {prefix}{{}}", held, functools.partial(_without_others, module)), held()))
            for kind in type(module).__mro__ if is_owners(file_of(type(module)) or "<") else ():
                if is_owners(_written_in(kind)):
                    self._class(kind)

    def _class(self, kind: type) -> None:
        if not self._first(kind):
            return

        def held() -> Held:
            return {k: v for k, v in vars(kind).items() if not k.startswith("__") and not hasattr(v, "__get__")}

        def put(before: Held) -> None:
            for name in held().keys() - before.keys():
                delattr(kind, name)
            for name, value in before.items():
                setattr(kind, name, value)

        self._add(f"attribute {{}} of class {kind.__name__}", held, put)
        for value in list(vars(kind).values()):
            self._walk(value, f"a function of class {kind.__name__}")

    def _walk(self, value: Any, said: str) -> None:
        if value is None or isinstance(value, (torch.Tensor, str, int, float, bytes)):
            return
        said = said.replace("{", "{{").replace("}", "}}")
        if isinstance(value, nn.Module):
            self._modules(said.split()[1], value)
        elif not self._first(value):
            return
        elif type(value) in _CONTAINERS:
            if len(value) <= _MAX_ENTRIES:
                self._add(said, functools.partial(_entries, value), functools.partial(_refill, value))
        elif isinstance(value, tuple):
            for x in value[:_MAX_ENTRIES]:
                self._walk(x, said)
        elif isinstance(value, _CACHE):
            self._found.append((_Place(said, lambda: {"": value.cache_info().currsize or None}, lambda _: value.cache_clear()), {"": None}))
            self._walk(value.__wrapped__, said)
        elif isinstance(value, functools.partial):
            self._walk((value.func, value.args, value.keywords), said)
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            self._walk((value.__func__, getattr(value, "__self__", None)), said)
        elif isinstance(value, FunctionType):
            if is_owners(value.__code__.co_filename):
                self._variables(value)
        elif not isinstance(value, type) and hasattr(value, "__dict__") and is_owners(_written_in(type(value))):
            self._table(f"attribute {{}} of a {type(value).__name__}", vars(value), vars(value))

    def _variables(self, function: FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if self._first(cell):
                self._add("variable {} around a function", functools.partial(_content, name, cell), functools.partial(_fill, name, cell))
        if vars(function):
            self._table(f"attribute {{}} of {function.__name__}", vars(function), {k: v for k, v in vars(function).items() if k != "__wrapped__"})
            self._walk(getattr(function, "__wrapped__", None), f"function {function.__name__}")


@contextlib.contextmanager
def as_before(model: nn.Module, code: Any = None, *, values: bool = False, path: str = "") -> Iterator[Places]:
    """What runs within leaves nothing behind. `code`: the loss; `values`: tensors that are no parameters and no buffers have their values again."""
    places = Places(model, code, values, path)
    try:
        yield places
    finally:
        places.put_back()


def _hooks(module: nn.Module) -> Held:
    return {f"{table}[{key}]": hook for table in _HOOKS for key, hook in getattr(module, table, {}).items()}


def _without_others(module: nn.Module, before: Held) -> None:
    for table in _HOOKS:
        for key in [k for k in getattr(module, table, {}) if f"{table}[{k}]" not in before]:
            del getattr(module, table)[key]


def _entries(container: Any) -> Held:
    if isinstance(container, dict):
        return dict(container)
    return dict.fromkeys(container) if isinstance(container, set) else dict(enumerate(container))


def _refill(container: Any, before: Held) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before.values())


def _content(name: str, cell: Any) -> Held:
    try:
        return {name: cell.cell_contents}
    except ValueError:  # nothing yet
        return {}


def _fill(name: str, cell: Any, before: Held) -> None:
    if name in before:
        cell.cell_contents = before[name]
    else:
        del cell.cell_contents


def _written_in(kind: type) -> str:
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")
