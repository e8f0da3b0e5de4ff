"""Forward passes of a segment of which chosen calls run again in backward instead of keeping what they made.

The layout names the calls (`plan.Recompute`), grouped by region. While a chosen call runs, the ATen calls it makes are noted with their arguments;
what they make is not kept: autograd gets a handle instead. The first handle of a region that backward opens runs the region's calls again, in
their order, on exactly what is kept; each result is let go after its last use. Other calls run as ever, so only what is chosen costs anything.

Deviation from `run.steps.recompute`, which follows a module that somebody else runs: the executor runs the calls itself, so nothing is matched
against an
expected sequence; and regions are replayed one by one, so the results of one layer at a time are there.
Random calls: bits of dropout are drawn by place (`run.train.dropout`), with the draws of the micro-batch they belong to; other generators are put
back
into the state they had.
Invariant: results are bit-equal to keeping everything wherever operators are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...capture.torch_private import dispatch_mode, storage_key
from ...capture.work import tensors_in
from .calls_again import Piece, generator_state, makes_storage, random_state, restore_generator
from .stand_in import as_they_are, opened

__all__ = ["ReplayedForward", "Replays"]


@dataclass
class _Call:
    """A call to run again: arguments with `Piece`s for what other such calls of its region make, and its results' storages."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    random: tuple[str, torch.Tensor] | None = None


@dataclass
class _Region:
    calls: list[_Call] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    waiting: dict[int, int] = field(default_factory=dict)  # storage -> handles not opened yet
    values: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Handle:
    forward: ReplayedForward
    region: int
    piece: Piece


def _open(kept: Any) -> torch.Tensor:
    found: torch.Tensor = kept.forward.value(kept) if isinstance(kept, _Handle) else opened(kept)
    return found


class ReplayedForward:
    """One forward pass: enter it around the calls. `outside`: storages that do not count as kept (parameters).

    `refer`: what to keep instead of a tensor (`sharded_state.referring`). `twice`: backward comes in two parts that both may ask, so results stay
    until `release`.
    """

    def __init__(
        self, regions: int, outside: Collection[int], refer: Callable[[torch.Tensor], Any] = as_they_are, *, twice: bool = False
    ) -> None:
        self.regions = [_Region() for _ in range(regions)]
        self.outside, self.refer, self.twice = outside, refer, twice
        self.kept: dict[int, int] = {}  # storage key -> bytes; what is kept stays alive, so a key names one storage
        self.noting: _Noting | None = None  # the chosen call that runs
        self.replayed = 0  # calls run again so far
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}  # a weak reference keeps an address from naming a second storage
        self._hooks: Any = None

    def __enter__(self) -> ReplayedForward:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _open)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._hooks = None
        self._numbers.clear()

    def kept_bytes(self, without: Collection[int] = ()) -> int:
        """Bytes kept for backward; `without`: storage keys that others keep."""
        return sum(size for key, size in self.kept.items() if key not in without)

    # ---- forward -----------------------------------------------------------------------------------------------
    def again(self, region: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, noted for running again."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with _Noting(self, region):
                return function(*args, **kwargs)

        return call

    def number(self, x: torch.Tensor) -> int:
        key = storage_key(x)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = (len(self._numbers) + 1, StorageWeakRef(x.untyped_storage()))
        return found[0]

    def hold(self, x: torch.Tensor) -> None:
        key = storage_key(x)
        if key not in self.outside:
            self.kept[key] = x.untyped_storage().nbytes()

    def frozen(self, tree: Any, region: _Region) -> Any:
        if isinstance(tree, torch.Tensor):
            number = self.number(tree)
            if number in region.made:
                # Made by a call that runs again: its number is enough, the tensor may go.
                return Piece.of(number, tree)
            self.hold(tree)
            return self.refer(tree.detach())
        if isinstance(tree, (list, tuple)):
            parts = [self.frozen(x, region) for x in tree]
            return parts if isinstance(tree, list) else tuple(parts)
        return {k: self.frozen(v, region) for k, v in tree.items()} if isinstance(tree, dict) else tree

    def note(self, region: int, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, random: Any = None) -> None:
        """A call that made new storages has run; it will run again as `function(*args, **kwargs)`."""
        mine = self.regions[region]
        given = {storage_key(x) for x in tensors_in((args, kwargs))}
        # A call that works in place makes no storage of its own; views of what it was given are not new either.
        fresh = [x for x in tensors_in(result) if storage_key(x) not in given]
        frozen = self.frozen(args, mine), self.frozen(kwargs, mine)
        results = tuple(self.number(x) for x in tensors_in(result))
        mine.made.update(self.number(x) for x in fresh)
        mine.calls.append(_Call(function, *frozen, results, random))

    def _pack(self, x: torch.Tensor) -> Any:
        number = self.number(x)
        for i, region in enumerate(self.regions):
            if number in region.made:
                # How often backward will ask for it: after the last time it is let go.
                region.waiting[number] = region.waiting.get(number, 0) + 1
                return _Handle(self, i, Piece.of(number, x))
        self.hold(x)
        return self.refer(x)

    def release(self) -> None:
        """Nobody will ask any more: let go of what was made again and of what it was made from, whoever still holds autograd's graph."""
        self.regions = []

    # ---- backward ----------------------------------------------------------------------------------------------
    def value(self, handle: _Handle) -> torch.Tensor:
        region, number = self.regions[handle.region], handle.piece.number
        if number not in region.values:
            self._replay(region)
        found = handle.piece.within(region.values[number])
        if not self.twice:
            region.waiting[number] -= 1
            if region.waiting[number] <= 0:
                del region.values[number]
        return found

    def _replay(self, region: _Region) -> None:
        # The last call of the region that reads a result; after it, only those that backward waits for stay.
        last = {p.number: i for i, call in enumerate(region.calls) for p in _pieces((call.args, call.kwargs))}
        before: dict[str, Any] = {}
        values = region.values
        # The graph of the first run stands; only the numbers are made again.
        with torch.no_grad():
            for i, call in enumerate(region.calls):
                if call.random is not None:
                    device, state = call.random
                    # The generator of the run itself is put back at the end: a replay must not move the draws that come after it.
                    before.setdefault(device, generator_state(device))
                    restore_generator(device, state)
                result = call.function(*_thawed(call.args, values), **_thawed(call.kwargs, values))
                for number, x in zip(call.results, tensors_in(result), strict=True):
                    if number in region.made:
                        values.setdefault(number, x.detach())
                del result
                for number in [n for n in values if last.get(n, -1) <= i and region.waiting.get(n, 0) <= 0]:
                    del values[number]
        for device, state in before.items():
            restore_generator(device, state)
        self.replayed += len(region.calls)


class Replays:
    """The regions of one segment and the forward pass that is under way. `calls`: per region the names of the nodes that run again."""

    def __init__(self, calls: Sequence[Collection[str]]) -> None:
        self.region = {name: i for i, names in enumerate(calls) for name in names}
        self.count = len(calls)
        self.current: ReplayedForward | None = None

    def wrap(self, node: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """What to run instead of a node's function. In a pass that nothing is kept of, nothing is noted."""
        region = self.region[node]

        def run(*args: Any, **kwargs: Any) -> Any:
            return (function if self.current is None else self.current.again(region, function))(*args, **kwargs)

        return run

    def whole(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function to be noted as one call where it runs inside a noted one; it must give the same again for the same arguments."""

        def run(*args: Any) -> torch.Tensor:
            noting = self.current.noting if self.current is not None else None
            if noting is None:
                return function(*args)
            noting.paused = True
            try:
                result = function(*args)
            finally:
                noting.paused = False
            noting.forward.note(noting.region, function, args, {}, result)
            return result

        return run


class _Noting(dispatch_mode()):  # type: ignore[misc]
    """Notes the ATen calls of one node."""

    def __init__(self, forward: ReplayedForward, region: int) -> None:
        super().__init__()
        self.forward, self.region, self.paused = forward, region, False

    def __enter__(self) -> Any:
        self.forward.noting = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.forward.noting = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        random = random_state(func, args, kwargs)
        result = func(*args, **kwargs)
        if makes_storage(func, args, kwargs, result):
            self.forward.note(self.region, func, args, kwargs, result, random)
        return result


def _pieces(tree: Any) -> list[Piece]:
    if isinstance(tree, Piece):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [p for part in parts for p in _pieces(part)]


def _thawed(tree: Any, values: dict[int, torch.Tensor]) -> Any:
    if isinstance(tree, Piece):
        return tree.within(values[tree.number])
    if isinstance(tree, (list, tuple)):
        parts = [_thawed(x, values) for x in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return {k: _thawed(v, values) for k, v in tree.items()} if isinstance(tree, dict) else opened(tree)
