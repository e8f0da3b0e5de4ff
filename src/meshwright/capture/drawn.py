"""A module made without the memory of its large tensors: what was done to them is written down, and done when a value is asked for.

A rank holds a part of a model. Where no file has the weights, it draws them as one process would, from the same seed. Every large tensor that is made
here stays on the meta device, and its calls are noted (`_Made`). Calls that draw are run once on memory that is thrown away, so that the generator
stands where it would; what they drew is drawn again, from the state noted then, when a parameter's value is wanted. So values are the bits of the
whole model, a rank needs the memory of its own part and of one whole tensor, and the time is at most twice that of drawing the model.
Limits: a value that is asked for while the module is made (`item`, a branch on it) is worked out at once and kept. What cannot be noted (an in-place
call on several tensors, a view of another type, a generator of the owner's) ends the attempt: the function is called again, and all is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

__all__ = ["MIN_BYTES", "DrawnWeights", "made_lazily"]

MIN_BYTES = 1 << 20  # of a tensor whose making is put off
_aten = torch.ops.aten
WHOLE = {_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.fill_.Scalar}  # nothing that was there is left
EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default, _aten.empty_like.default}


_Known = dict[tuple[int, int], torch.Tensor]


class _NotNoted(Exception):
    """A call that cannot be done later."""


@dataclass(frozen=True)
class _View:
    """A tensor over what was made, as it was after so many calls."""

    made: _Made
    calls: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def value(self, known: _Known) -> torch.Tensor:
        return self.made.value(self.calls, known).as_strided(self.shape, self.strides, self.offset)


@dataclass
class _Call:
    """`out`: which of its results is meant. `generator`: the state that it draws from."""

    func: Any
    args: Any
    kwargs: Any
    out: int = 0
    generator: torch.Tensor | None = None

    def run(self, known: _Known, target: torch.Tensor | None = None) -> torch.Tensor:
        args, kwargs = (tree_map(lambda x: x.value(known) if isinstance(x, _View) else x, given) for given in (self.args, self.kwargs))
        with torch.random.fork_rng(devices=[], enabled=self.generator is not None):
            if self.generator is not None:
                torch.set_rng_state(self.generator)
            found = self.func(*args, **kwargs) if target is None else self.func(target, *args[1:], **kwargs)
        result: torch.Tensor = found[self.out] if isinstance(found, (tuple, list)) else found
        return result


@dataclass(eq=False)
class _Made:
    """Memory that is not there: the call that makes it, and calls that change it, each with the view that it changes. `storage`: its key."""

    first: _Call
    storage: torch.UntypedStorage
    dtype: torch.dtype
    changes: list[tuple[_View, _Call]] = field(default_factory=list)

    @property
    def drawn(self) -> bool:
        """Whether anything was ever put there."""
        return self.first.func not in EMPTY or bool(self.changes)

    def value(self, calls: int, known: _Known) -> torch.Tensor:
        """Never changed by who asks. `known`: what was worked out for the same question."""
        key = (id(self), calls)
        if key not in known:
            made = self.first.run(known)
            if self.changes[:calls] and self.first.func not in EMPTY:
                made = made.clone()  # the call may have given one of its inputs back
            for view, call in self.changes[:calls]:
                call.run(known, made.as_strided(view.shape, view.strides, view.offset))
            known[key] = made
        return known[key]


class _Deferring(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, min_bytes: int) -> None:
        super().__init__()
        self.min_bytes = min_bytes
        self.made: dict[int, _Made] = {}  # by the address of a storage
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.refused = ""  # what could not be noted, should the function go on after it

    def view(self, x: torch.Tensor) -> _View | None:
        made = self.made.get(x.untyped_storage()._cdata) if isinstance(x, torch.Tensor) else None
        if made is None:
            return None
        if x.dtype != made.dtype:
            raise self.refuse("a view of another type")
        return _View(made, len(made.changes), tuple(x.shape), tuple(x.stride()), x.storage_offset())

    def refuse(self, what: str) -> _NotNoted:
        self.refused = what
        return _NotNoted(what)

    def noted(self, given: Any) -> Any:
        """Arguments as they are kept: views of what is not there, copies of what may change."""

        def keep(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return self.view(x) or x.detach().clone()

        return tree_map(keep, given)

    def real(self, given: Any) -> Any:
        known: _Known = {}
        return tree_map(lambda x: v.value(known).clone() if isinstance(x, torch.Tensor) and (v := self.view(x)) else x, given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if not tree_any(lambda x: isinstance(x, torch.Tensor) and self.view(x) is not None, (args, kwargs)):
            return self.fresh(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:  # another look at the same memory
            made = self.made[args[0].untyped_storage()._cdata]
            func(*args, **kwargs)
            if args[0].untyped_storage()._cdata != made.storage._cdata or args[0].untyped_storage().nbytes() != made.storage.nbytes():
                raise self.refuse(str(func))
            return args[0]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if written:
            if written != [0] or not isinstance(args[0], torch.Tensor) or kwargs.get("generator") is not None:
                raise self.refuse(str(func))
            if self.view(args[0]) is None:  # what is there is changed by what is not
                return func(args[0], *self.real(args[1:]), **self.real(kwargs))
            return self.change(func, args, kwargs, draws)
        if draws:
            return func(*self.real(args), **self.real(kwargs))
        on_meta = {k: torch.device("meta") if isinstance(v, torch.device) else v for k, v in kwargs.items()}
        try:
            found = func(*tree_map(_shape, args), **tree_map(_shape, on_meta))
        except (RuntimeError, NotImplementedError):  # it depends on values
            return func(*self.real(args), **self.real(kwargs))
        several = isinstance(found, (tuple, list))
        for i, x in enumerate(found if several else (found,)):
            if not isinstance(x, torch.Tensor):
                return func(*self.real(args), **self.real(kwargs))
            self.put(x, _Call(func, self.noted(args), self.noted(kwargs), i))
        return found

    def fresh(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call on what is there, or on nothing."""
        if tree_any(lambda x: isinstance(x, torch.Tensor), (args, kwargs)) or kwargs.get("generator") is not None or "device" not in kwargs:
            return func(*args, **kwargs)
        meta = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
        where = torch.device(kwargs["device"] or "cpu").type
        small = not isinstance(meta, torch.Tensor) or not meta.is_floating_point() or meta.untyped_storage().nbytes() < self.min_bytes
        if (small and where != "meta") or where not in ("cpu", "meta"):  # torch puts a number that it copies where the tensor lies
            return func(*args, **kwargs)
        call = _Call(func, args, kwargs := {**kwargs, "device": torch.device("cpu")})
        if torch.Tag.nondeterministic_seeded in func.tags:
            call.generator = torch.get_rng_state()
            func(*args, **kwargs)
        self.put(meta, call)
        return meta

    def change(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], draws: bool) -> Any:
        target, view = args[0], self.view(args[0])
        assert view is not None
        call = _Call(func, (None, *self.noted(args[1:])), self.noted(kwargs))
        if draws:
            call.generator = torch.get_rng_state()
            func(self.thrown_away(view, target.dtype), *args[1:], **kwargs)
        made = view.made
        if func in WHOLE and target.is_contiguous() and target.numel() * target.element_size() == made.storage.nbytes():
            flat = (made.storage.nbytes() // target.element_size(),)
            made = _Made(_Call(_aten.empty.memory_format, (flat,), {"dtype": target.dtype, "device": torch.device("cpu")}), made.storage, made.dtype)
            self.made[made.storage._cdata] = made  # what was there before is kept by those who read it
        made.changes.append((view, call))
        return target

    def thrown_away(self, view: _View, dtype: torch.dtype) -> torch.Tensor:
        """Memory to draw into, the same again and again: freed and taken anew, holes between what stays would add up to the whole model."""
        size = (1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True))) * dtype.itemsize
        if self.scratch.nbytes < size:
            self.scratch = torch.empty(0, dtype=torch.uint8)
            self.scratch = torch.empty(-(-size // 16) * 16, dtype=torch.uint8)
        return self.scratch.view(dtype).as_strided(view.shape, view.strides, 0)

    def put(self, x: torch.Tensor, call: _Call) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in self.made:  # else a view
            self.made[storage._cdata] = _Made(call, storage, x.dtype)


class _LikeReal(TorchFunctionMode):  # type: ignore[misc]
    """Who asks where a tensor lies is told what he would be told otherwise: initialisers leave alone what is on the meta device."""

    ANSWERS: ClassVar = {
        torch.Tensor.is_meta.__get__: False, torch.Tensor.is_cpu.__get__: True, torch.Tensor.device.__get__: torch.device("cpu"),
    }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in self.ANSWERS and args[0].untyped_storage().device.type == "meta":
            return self.ANSWERS[func]
        return func(*args, **(kwargs or {}))


def _shape(x: Any) -> Any:
    return x.to("meta") if isinstance(x, torch.Tensor) else x


@dataclass
class DrawnWeights:
    """Parameters of a module by name, whole or not there yet; what ranks read their parts of, as of `WeightFiles`."""

    known_as: dict[str, str]
    values: dict[str, torch.Tensor | _View]

    def part(self, name: str, dtype: torch.dtype, axis: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """A parameter, or these ranges of its dimension `axis`, one after the other; a tensor of its own."""
        with torch.no_grad():
            x = self.values[name]
            whole = x.value({}) if isinstance(x, _View) else x.detach()
            if ranges is not None:
                whole = torch.cat([whole.narrow(axis, low, high - low) for low, high in ranges], dim=axis)
            return whole.to(dtype, copy=ranges is None and not isinstance(x, _View), memory_format=torch.contiguous_format)

    def close(self) -> None:
        self.values.clear()


def made_lazily(make: Callable[[], Any], *, min_bytes: int | None = None) -> tuple[Any, DrawnWeights | None]:
    """(what `make` returns, a module first; its weights where some are on the meta device now). Everything else that it returns has values.

    The generator stands where `make` leaves it. Raises: what `make` raises.
    """
    state, mode = torch.get_rng_state(), _Deferring(MIN_BYTES if min_bytes is None else min_bytes)
    try:
        with _LikeReal(), mode:
            made = make()
        return _settled(made, mode)
    except Exception:  # of ours, or of code that does not take the meta device; if it is the function's own, it comes again
        torch.set_rng_state(state)
        return make(), None


def _settled(made: Any, mode: _Deferring) -> tuple[Any, DrawnWeights | None]:
    """Buffers and what came with the module get their values. Raises: _NotNoted."""
    if mode.refused:
        raise _NotNoted(mode.refused)
    if not mode.made:
        return made, None
    if not isinstance(made, tuple) or not made or not isinstance(made[0], nn.Module):
        raise _NotNoted("something else than a module and its inputs")
    module, known = made[0], _Known()

    def real(x: Any) -> Any:
        view = mode.view(x) if isinstance(x, torch.Tensor) else None
        return x if view is None else view.value(known).clone()

    values: dict[str, torch.Tensor | _View] = {}
    for name, p in module.named_parameters():
        view = mode.view(p)
        if p.is_meta and (view is None or not view.made.drawn):
            raise _NotNoted(f"parameter {name!r} has no value")
        values[name] = view or p
    buffers: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for owner in module.modules():
            for name, b in owner._buffers.items():
                if b is not None and b.is_meta:
                    owner._buffers[name] = buffers[id(b)] = buffers.get(id(b), real(b))
        rest = tree_map(real, made[1:])
    put_off = any(isinstance(x, _View) for x in values.values())
    return (module, *rest), DrawnWeights({n: n for n in values}, values) if put_off else None
