"""Runs a module so that chosen operators are computed again in backward instead of keeping what they made.

A policy names operators of the captured graph (`decide.memory`); `calls_of` turns it into the sequence of ATen calls that the module makes, and
`recomputing` applies it: while the module's forward runs, what a chosen call makes is not kept for backward; instead its function and
arguments are remembered. The first backward that asks runs the chosen calls again, in their order, with the random state each had.

Why not `torch.utils.checkpoint` with a selective context: it runs the whole region again and takes saved results out where they are, so an
operator whose result nobody needs any more is run again as well, and a chain can only be cut by keeping a result. Here exactly the chosen
operators run again, on exactly what the policy keeps; so the bytes kept are those of the policy (tests/run), and gradients are bit-equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ...capture.diagnose import quiet
from ...capture.forward import TracedForward
from ...capture.torch_private import DispatchRecorder, dispatch_mode, storage_key
from ...capture.work import tensors_in
from ...errors import PlanMismatch, UsageError
from .calls_again import Piece, generator_state, makes_storage, random_state, restore_generator

__all__ = ["Call", "Kept", "calls_of", "recomputing"]


class Call(NamedTuple):
    """One ATen call that makes or changes a storage; `again`: computed again in backward."""

    target: str
    again: bool


@dataclass
class Kept:
    """Bytes kept for backward by the last forward of a module that runs under a policy: distinct storages, parameters excluded."""

    size_bytes: int = 0
    recomputed: int = 0  # calls run again so far


def calls_of(traced: TracedForward, module: str, recompute: Collection[str]) -> tuple[Call, ...]:
    """The calls that the module at path `module` makes, in order. `recompute`: node names of the captured graph.

    Raises: UsageError for a node that is not in the module, or when the model was not exported.
    """
    if traced.method != "export":
        raise UsageError("the model was captured as one operator: nothing in it can be chosen", where=traced.model)
    inside = {n for n, path in traced.module_paths.items() if path == module or path.startswith(f"{module}.")}
    if foreign := set(recompute) - inside:
        raise UsageError(f"operator {sorted(foreign)[0]!r} does not run in module {module!r}", where="recompute")
    recorder = _Calls(traced, inside, frozenset(recompute))
    with quiet(), traced.mode or contextlib.nullcontext(), torch.enable_grad():
        recorder.run(*(traced.value(name) for name in traced.placeholders))
    return tuple(recorder.calls)


class _Calls(fx.Interpreter):  # type: ignore[misc]
    def __init__(self, traced: TracedForward, inside: set[str], again: frozenset[str]) -> None:
        super().__init__(traced.graph_module, garbage_collect_values=False)
        self.inside, self.again, self.calls = inside, again, list[Call]()

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or n.name not in self.inside:
            return super().run_node(n)

        def seen(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            if makes_storage(func, args, kwargs, result):
                self.calls.append(Call(str(func), n.name in self.again))

        with DispatchRecorder(seen):
            return super().run_node(n)


@contextlib.contextmanager
def recomputing(module: nn.Module, calls: Sequence[Call]) -> Iterator[Kept]:
    """While it lasts, every forward of `module` with gradients enabled follows the policy. Yields the account of the last one.

    Raises (in forward): PlanMismatch when the module makes other calls than those the policy was made for.
    """
    account, original = Kept(), module.forward
    own = module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        region = _Region(calls, {storage_key(p) for p in module.parameters()}, account)
        with torch.autograd.graph.saved_tensors_hooks(region.pack, _unpack), region:
            result = original(*args, **kwargs)
        region.finish()
        return result

    module.forward = forward
    try:
        yield account
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@dataclass(frozen=True)
class _Again:
    """A call to run again: arguments with `Piece`s for what other such calls make, and the numbers of its results' storages."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    random: Any  # state of the random generator it drew from, with the device; None if it draws nothing


@dataclass
class _Handle:
    region: _Region
    piece: Piece


def _unpack(kept: Any) -> torch.Tensor:
    return kept.region.value(kept.piece) if isinstance(kept, _Handle) else kept


class _Region(dispatch_mode()):  # type: ignore[misc]
    """One forward of a module: watches its calls, decides what autograd keeps, and gives back what was not kept."""

    def __init__(self, calls: Sequence[Call], parameters: set[int], account: Kept) -> None:
        super().__init__()
        self.calls, self.parameters, self.account = calls, parameters, account
        self.at = 0
        self.numbers: dict[int, int] = {}  # storage address -> number; an address that is used again gets a new number
        self.next = 0
        self.made_again: set[int] = set()
        self.again: list[_Again] = []
        self.held: dict[int, torch.Tensor] = {}  # storages kept, by number
        self.waiting: dict[int, int] = {}  # number -> pieces handed out and not asked for yet
        self.values: dict[int, torch.Tensor] = {}

    # ---- forward ---------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        expected = self.calls[self.at] if self.at < len(self.calls) else None
        again = expected is not None and expected.again
        random = random_state(func, args, kwargs) if again else None
        result = func(*args, **kwargs)
        if not makes_storage(func, args, kwargs, result):
            return result
        if expected is None or expected.target != str(func):
            raise PlanMismatch(
                f"the module's call {self.at} is {func}, the policy was made for {expected.target if expected else 'fewer calls'}",
                where=f"call {self.at}", hint="make the policy for this module at this device and dtype",
            )  # fmt: skip
        self.at += 1
        given = {storage_key(x): self.number(x) for x in tensors_in((args, kwargs))}
        results = tuple(given[k] if (k := storage_key(x)) in given else self.fresh(x) for x in tensors_in(result))
        if again:
            self.made_again.update(results)
            self.made_again.update(given[storage_key(x)] for x in _changed(func, args, kwargs))
            self.again.append(_Again(func, self.frozen(args), self.frozen(kwargs), results, random))
        return result

    def fresh(self, x: torch.Tensor) -> int:
        self.next += 1
        self.numbers[storage_key(x)] = self.next
        return self.next

    def number(self, x: torch.Tensor) -> int:
        found = self.numbers.get(storage_key(x))
        return found if found is not None else self.fresh(x)

    def frozen(self, tree: Any) -> Any:
        """Arguments to be used again: tensors that are made again by their place, others held."""
        if isinstance(tree, torch.Tensor):
            number = self.number(tree)
            if number in self.made_again:
                return Piece.of(number, tree)
            self.hold(number, tree)
            return tree.detach()
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.frozen(x) for x in tree)
        return {k: self.frozen(v) for k, v in tree.items()} if isinstance(tree, dict) else tree

    def hold(self, number: int, x: torch.Tensor) -> None:
        if storage_key(x) not in self.parameters:
            self.held.setdefault(number, x.detach())

    def pack(self, x: torch.Tensor) -> Any:
        number = self.number(x)
        if number not in self.made_again:
            self.hold(number, x)
            return x
        self.waiting[number] = self.waiting.get(number, 0) + 1
        return _Handle(self, Piece.of(number, x))

    def finish(self) -> None:
        """Closes the forward: what was held for counting only is let go; autograd and the calls to run again hold what they need."""
        if self.at != len(self.calls):
            where = f"call {self.at}"
            raise PlanMismatch(f"the module made {self.at} calls, the policy was made for {len(self.calls)}", where=where, hint="make it again")
        self.account.size_bytes = sum(x.untyped_storage().nbytes() for x in self.held.values())
        self.held.clear()
        self.numbers.clear()

    # ---- backward --------------------------------------------------------------------------------------------------------
    def value(self, piece: Piece) -> torch.Tensor:
        if piece.number not in self.values:
            self.replay()
        found = piece.within(self.values[piece.number])
        self.waiting[piece.number] -= 1
        if self.waiting[piece.number] <= 0:
            self.values.pop(piece.number)
            self.waiting[piece.number] = 1  # a second backward over a retained graph asks again
        return found

    def replay(self) -> None:
        before: dict[str, Any] = {}
        with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            for call in self.again:
                if call.random is not None:
                    device, state = call.random
                    before.setdefault(device, generator_state(device))
                    restore_generator(device, state)
                result = call.func(*self.thawed(call.args), **self.thawed(call.kwargs))
                for number, x in zip(call.results, tensors_in(result), strict=True):
                    self.values.setdefault(number, x.detach())
            for device, state in before.items():
                restore_generator(device, state)
        self.account.recomputed += len(self.again)
        for number in [n for n in self.values if n not in self.waiting]:
            del self.values[number]

    def thawed(self, tree: Any) -> Any:
        if isinstance(tree, Piece):
            return tree.within(self.values[tree.number])
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.thawed(x) for x in tree)
        return {k: self.thawed(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Tensor arguments that a call writes."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
