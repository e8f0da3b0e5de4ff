"""A digest of an object's values that is the same in every process, to see whether jobs prepare items in the same way.

Long lists and arrays are sampled at even distances. What has no values that can be compared (locks, open files, random generators) counts by its
type. A class may leave out by `__getstate__` what differs between processes, such as a clock.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

__all__ = ["digest"]

MAX_DEPTH = 8
MAX_LISTED = 256  # entries of a list, a mapping or an array
MAX_VALUES = 20_000  # in all; those behind them count by their type


def digest(value: object) -> bytes:
    """Eight bytes."""
    return hashlib.blake2b(repr(_Values().of(value, MAX_DEPTH)).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _spread(count: int) -> list[int]:
    """Numbers of at most MAX_LISTED of so many entries, the first and the last among them."""
    return list(range(count)) if count <= MAX_LISTED else np.linspace(0, count - 1, MAX_LISTED).astype(int).tolist()


class _Values:
    """Nested tuples of plain values, which say the same wherever they are printed."""

    def __init__(self) -> None:
        self.left = MAX_VALUES
        self.within: list[int] = []  # objects around the one that is looked at: a cycle ends there

    def of(self, x: Any, depth: int) -> Any:
        if x is None or isinstance(x, bool | int | float | complex | str | bytes):
            return x
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        self.left -= 1
        if depth == 0 or self.left < 0 or id(x) in self.within:
            return kind
        self.within.append(id(x))
        try:
            return kind, self._inside(x, depth - 1)
        finally:
            self.within.pop()

    def _inside(self, x: Any, depth: int) -> Any:
        if isinstance(x, PurePath | np.dtype):
            return str(x)
        if isinstance(x, np.generic):
            return repr(x)
        if isinstance(x, np.ndarray):
            return x.shape, str(x.dtype), self.all(x.flat[_spread(x.size)].tolist(), depth)
        if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
            plain = x.device.type == "cpu" and not x.is_sparse and not x.is_quantized
            return tuple(x.shape), str(x.dtype), self.all(x.detach().reshape(-1)[_spread(x.numel())].tolist(), depth) if plain else ()
        if isinstance(x, list | tuple | range | deque):
            return len(x), self.all([x[i] for i in _spread(len(x))], depth)
        if isinstance(x, Mapping):
            pairs = list(x.items())
            return len(pairs), self.all([pairs[i] for i in _spread(len(pairs))], depth)
        if isinstance(x, set | frozenset):
            return len(x), sorted(repr(self.of(v, depth)) for v in x) if len(x) <= MAX_LISTED else ()
        if isinstance(x, type):
            return x.__module__, x.__qualname__
        if isinstance(x, types.CodeType):
            return x.co_name, x.co_code, x.co_names, self.all(x.co_consts, depth)
        return self._callable(x, depth) if isinstance(x, _CALLED) else self._state(x, depth)

    def _callable(self, x: Any, depth: int) -> Any:
        if isinstance(x, functools.partial):
            return self.all((x.func, x.args, x.keywords), depth)
        if isinstance(x, types.MethodType):
            return self.all((x.__func__, x.__self__), depth)
        if isinstance(x, types.FunctionType):
            held = [c.cell_contents for c in x.__closure__ or () if c != types.CellType()]
            return x.__module__, x.__qualname__, self.all((x.__code__, x.__defaults__, x.__kwdefaults__, held), depth)
        return getattr(x, "__qualname__", "")

    def _state(self, x: Any, depth: int) -> Any:
        if isinstance(x, _GENERATORS) or ("torch" in sys.modules and isinstance(x, sys.modules["torch"].Generator)):
            return ()
        own: Callable[[Any], Any] = getattr(type(x), "__getstate__", object.__getstate__)
        if own is not object.__getstate__:
            try:
                return self.of(own(x), depth)
            except (TypeError, NotImplementedError, AttributeError):  # what cannot leave its process (a lock, a socket) counts by its type alone
                return ()
        slots = [s for c in type(x).__mro__ for s in _names(getattr(c, "__slots__", ())) if hasattr(x, s) and s != "__dict__"]
        return self.of(getattr(x, "__dict__", {}) | {s: getattr(x, s) for s in slots if s != "__weakref__"}, depth)

    def all(self, values: Sequence[Any], depth: int) -> tuple[Any, ...]:
        return tuple(self.of(v, depth) for v in values)


_GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
