"""Tensors that one run of the owner's code leaves for the next: `self.h = y.detach()`, and `y + self.h` the next time.

A trace is one run. Whatever the next one would find (in an attribute, a list, a global, a variable around a function) is not in it, and a plan would
train something else without a word. So the model is run twice beforehand, on fakes: every call is numbered by its operator and the numbers of what it
is given, whatever holds a tensor. What varies with a run (inputs, weights, random numbers) and is given to a call of the next run marks all that
comes of it. A marked loss or buffer is refused, with the line that leaves the tensor and the line that reads it. So is a loss of another number: the
second run computes something else. What is only written is harmless, and so is a cache of what is the same in every run.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import string_at
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.errors import MeshwrightError, Unsupported

from .as_before import as_before
from .resolve import place_of, shown, unwrapped
from .side_effects import LIBRARIES, line_that_changes, line_that_sets
from .torch_private import dispatch_mode, held_weakly, storage_key

__all__ = ["RUNS", "Given", "refuse_left_tensors"]

Frames = tuple[tuple[CodeType, int], ...]  # of the owner's code, innermost first
RUNS = 3  # what one leaves may be read by the one after the next
_MAX_CONTENT = 256  # bytes of a constant that are part of its number
_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")  # nothing is left of what a tensor held
_SAID = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class _Left:
    """A tensor of an earlier run that a call was given. `written`, `read`: where."""

    tensor: torch.Tensor
    written: Frames
    read: Frames


@dataclass(frozen=True)
class _Number:
    """Of a tensor's values. `varies`: from run to run; `run`: the one it was made in, 0: before all; `left`: what of an earlier run is in it."""

    number: int
    varies: bool = False
    run: int = 0
    left: _Left | None = None
    storage: int = 0
    frames: Frames = ()


@dataclass
class _Run:
    """`calls`: numbers in order; `result`: of what was returned, and of what was written to parameters and buffers; `kept`: shapes of tensors of an
    earlier run that were read, though they are the same in every run."""

    calls: list[tuple[int, Frames]] = field(default_factory=list)
    result: list[_Number] = field(default_factory=list)
    kept: list[tuple[tuple[int, ...], Frames]] = field(default_factory=list)


class _Runs(dispatch_mode()):  # type: ignore[misc]
    """Numbers calls while it is entered. `framed`: and notes the owner's lines of each."""

    supports_higher_order_operators = True

    def __init__(self, *, framed: bool) -> None:
        super().__init__()
        self.framed = framed
        self.numbers = held_weakly()
        self.written: dict[int, _Number] = {}
        self.made: dict[int, _Number] = {}
        self.storages: dict[int, Any] = {}  # held weakly: no other storage comes to stand where one was
        self.own: dict[int, str] = {}
        self.times: Counter[int] = Counter()
        self.runs: list[_Run] = []

    def run(self, function: Callable[[], Any], named: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that it returned, without their graphs. `named`: those of which a plan keeps values from run to run."""
        self.runs.append(_Run())
        self.times.clear()
        torch.clear_autocast_cache()  # where it is entered around all runs, weights that one of them cast are not left by the owner's code
        self.own = {_storage(x): n for n, x in named.items()}
        for key in self.own:
            self.written.pop(key, None)
        for name, x in (*named.items(), *inputs.items()):
            self.numbers[x] = _Number(hash(name), varies=True, run=len(self.runs), storage=_storage(x))
        with self:
            found = _tensors(function())
        written = [self.written[key] for key in self.own if key in self.written]
        self.runs[-1].result = [*map(self.number, found), *written]
        return [x.detach() for x in found]

    def left(self) -> _Left | None:
        return next((n.left for r in self.runs for n in r.result if n.left is not None), None)

    def differ(self) -> bool:
        first, *others = ([n.number for n in r.result] for r in self.runs)
        return any(x != first for x in others)

    def first_other(self) -> Frames:
        """Of the first call of a later run that was none of the first's."""
        known = {n for n, _ in self.runs[0].calls}
        other = [frames for r in self.runs for n, frames in r.calls if n not in known]
        return other[0] if other else ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        every, changed = _tensors((args, kwargs)), _changed_by(func, args, kwargs)
        lost = changed[:1] if _name(func) in _OVERWRITING and _is_all(changed[0]) else []
        frames = _frames() if self.framed else ()
        numbers = [self.number(x, frames) for x in every if not any(x is y for y in lost)]
        result = func(*args, **kwargs)
        drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        same = hash((str(func), tuple(n.number for n in numbers), _said((args, kwargs))))
        self.times[same] += drawn
        call = hash((same, self.times[same]))
        self.runs[-1].calls.append((call, frames))
        varies, left = drawn or any(n.varies for n in numbers), next((n.left for n in numbers if n.left is not None), None)
        for i, x in enumerate(_tensors(result)):
            if not any(x is y for y in changed):
                self.numbers[x] = self._made(x, hash((call, i)), varies, left, frames)
                self.made.setdefault(_storage(x), self.numbers[x])
        for i, x in enumerate(changed):
            self.written[_storage(x)] = self._made(x, hash((call, -1 - i)), varies, left, frames)
        return result

    def _made(self, x: torch.Tensor, number: int, varies: bool, left: _Left | None, frames: Frames) -> _Number:
        key = _storage(x)
        if key not in self.storages:
            self.storages[key] = StorageWeakRef(x.untyped_storage()) if x.layout == torch.strided else x
        return _Number(number, varies, len(self.runs), left, key, frames)

    def number(self, x: torch.Tensor, frames: Frames = ()) -> _Number:
        """Of what `x` holds now. `frames`: of who reads it."""
        key, now = _storage(x), len(self.runs)
        found = self.numbers.get(x)
        if found is None:
            found = self.numbers[x] = _Number(_constant(x), storage=key)
        elif found.storage != key:  # `x.data = y`
            found = self.made.get(key, found)
        both = [n for n in (self.written.get(key), found) if n is not None]
        if key in self.own:
            left = both[0].left
        else:
            left = next((n.left for n in both if n.left is not None), None)
            older = [n for n in both if 0 < n.run < now]
            if left is None and older:
                varying = [n for n in older if n.varies]
                left = _Left(x, varying[0].frames, frames) if varying else None
                if not varying:
                    self.runs[-1].kept.append((tuple(x.shape), older[0].frames))
        number = hash(tuple(n.number for n in both)) if len(both) > 1 else found.number
        return _Number(number, any(n.varies for n in both), both[0].run, left, key)


@dataclass(frozen=True)
class Given:
    """Of one run. `inputs`: other tensors than in other runs; `kept`: by name, parameters and buffers, whose values a plan keeps between runs."""

    inputs: Sequence[torch.Tensor]
    kept: Mapping[str, torch.Tensor]


def refuse_left_tensors(
    model: nn.Module, code: Any, run: Callable[[Given], Any], given: Sequence[Given], *, by_values: bool = False, path: str = ""
) -> Unsupported | bool:
    """Runs the model with each of `given` in turn, from the state in which the run before left the owner's code, and puts all back.

    code: the loss; path: of the model, where it is a part of one; by_values: tensors are real, and calls may follow them: not the calls of runs are
    compared, but what they give. False where it does not run; an error where runs differ for another reason than a tensor, if nobody says it better.
    Raises: Unsupported where a run computes with a tensor that one before it left, with the lines.
    """
    for framed in (False, True):
        with as_before(model, code, values=True, path=path) as places, _drawing_alike() as from_the_start:
            runs, held, last = _Runs(framed=framed), list[tuple[torch.Tensor, str]](), list[torch.Tensor]()
            try:
                for one in given:
                    from_the_start()
                    held += places.tensors() if framed else []
                    with _values_kept(one.kept if by_values else {}):
                        last = runs.run(partial(run, one), one.kept, {f"input {i}": x for i, x in enumerate(one.inputs)})
            except MeshwrightError:
                raise
            except Exception:
                return False
            left, changed = runs.left(), list(dict.fromkeys(places.changed()))
            if left is None and not by_values and not runs.differ():
                return True
            if framed and left is not None:
                raise _reads(held, left, model, code)
            if framed:
                return _differs(changed, runs.first_other(), model, code)
        if left is None and by_values:
            break
    with as_before(model, code, values=True), _drawing_alike() as from_the_start, _values_kept(given[-1].kept):
        from_the_start()
        alone = [x.detach().clone() for x in _tensors(run(given[-1]))]
    return True if _alike(alone, last) else _differs(changed, (), model, code)


def _alike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=False)
    same = (x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-6, equal_nan=True) for x, y in pairs)
    return len(one) == len(other) and all(same)


@contextlib.contextmanager
def _values_kept(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    before = [(x, x.detach().clone(), x._version) for x in tensors.values()]
    try:
        yield
    finally:
        for x, value, version in before:
            if x._version != version:
                x.data.copy_(value)


def _reads(held: Sequence[tuple[torch.Tensor, str]], left: _Left, model: nn.Module, code: Any) -> Unsupported:
    """`held`: what was held where before each run."""
    same = [said for x, said in held if x is left.tensor] or [said for x, said in held if _storage(x) == _storage(left.tensor)]
    holder, read = same[0] if same else "", _line(left.read)
    of_loss = bool(left.written) and left.written[0][0] is getattr(unwrapped(code), "__code__", None)
    return Unsupported(
        f"{'the loss' if of_loss else 'forward'} leaves a tensor in {holder or 'a place of its own'}, and the next time it runs computes with it"
        f"{f' ({read})' if read else ''}; ranks run it once per micro-batch, and a plan begins every time without it",
        where=_line_that_keeps(left.written, holder) or place_of(type(model).forward),
        hint="keep it in a buffer of the model, which then returns its loss" if of_loss
        else "keep it in a buffer (register_buffer), which changes once per step, or give it to forward as an input",
        data={"holder": holder, "read": read},
    )  # fmt: skip


def _differs(changed: Sequence[str], other: Frames, model: nn.Module, code: Any) -> Unsupported:
    said = f", having changed {', '.join(changed[:3])}" if changed else ""
    return Unsupported(
        f"forward computes something else the second time it runs{said}; a plan has what it computes the first time",
        where=_line(other) or line_that_changes(model, [x.split()[1].rpartition(".")[2] for x in changed], code),
        hint="run forward once before planning, so that it is as it goes on, or let it go by what it is given and by buffers",
        data={"changed": list(changed)},
    )  # fmt: skip


def _line_that_keeps(frames: Frames, holder: str) -> str:
    """Of the code that made a tensor, or called it: where it sets what holds it; else where it made it."""
    name = holder.split()[1].rpartition(".")[2] if " " in holder else ""
    for code, line in frames if name else ():
        if found := line_that_sets(code, name, inside=True, after=line):
            return f"{shown(code.co_filename)}:{found}"
    return _line(frames)


def _line(frames: Frames) -> str:
    return f"{shown(frames[0][0].co_filename)}:{frames[0][1]}" if frames else ""


@contextlib.contextmanager
def _drawing_alike() -> Iterator[Callable[[], None]]:
    """What it gives puts all generators of random numbers to where they were; so does its end."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None

    def from_the_start() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
        torch.set_rng_state(tensors)

    with torch.random.fork_rng(devices=[]):
        tensors = torch.get_rng_state()
        try:
            yield from_the_start
        finally:
            from_the_start()


@lru_cache(maxsize=4096)
def _of_libraries(file: str) -> bool:
    return file.startswith((*LIBRARIES, "<")) or (file.startswith(_PYTHON) and "site-packages" not in file)


_PYTHON = str(Path(contextlib.__file__).parent)


def _frames() -> Frames:
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(2)
    while frame is not None:
        if not _of_libraries(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    entries = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (tuple, list)) else ()
    return [x for y in entries for x in _tensors(y)]


def _changed_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return [x for i, name in written for x in _tensors(args[i] if i < len(args) else kwargs.get(name))]


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", "")).partition(".")[0]


def _is_all(x: torch.Tensor) -> bool:
    return bool(x.layout == torch.strided and x.numel() * x.element_size() == x.untyped_storage().nbytes())


def _storage(x: torch.Tensor) -> int:
    return storage_key(x) if x.layout == torch.strided else id(x)


def _constant(x: torch.Tensor) -> int:
    """Of a tensor that no call made."""
    plain = type(x) is torch.Tensor and x.device.type == "cpu" and x.layout == torch.strided
    size = x.untyped_storage().nbytes() if plain else 0
    content = string_at(x.untyped_storage().data_ptr(), size) if 0 < size <= _MAX_CONTENT else b""
    return hash((tuple(x.shape), x.stride() if plain else (), x.storage_offset() if plain else 0, str(x.dtype), content))


def _said(tree: Any) -> Any:
    """Of what a call is given, what is no tensor."""
    if isinstance(tree, (tuple, list)):
        return tuple(map(_said, tree))
    if isinstance(tree, Mapping):
        return tuple((k, _said(v)) for k, v in tree.items())
    return repr(tree) if isinstance(tree, _SAID) else type(tree).__name__
