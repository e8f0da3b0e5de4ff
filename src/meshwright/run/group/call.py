"""From a torch collective to a program's buffers and back.

`Call` is what torch asked for, with flat tensors. A program works in place on one buffer per rank, or from an input to an output, with scratch of
its own; `Session` knows which of the caller's tensors can be those buffers and which need a working copy: none for all-reduce, broadcast,
all-gather and all-to-all; an input that must survive (reduce-scatter, reduce at other ranks than the root) is copied once, as it is read.
A session belongs to one compiled code and one dtype; it keeps its working tensors and its bindings, so a collective that comes back on the same
tensors (a gradient bucket in every step) costs no slicing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import UsageError
from ...program.program import Program
from .chunks import BLOCKED

__all__ = ["MAX_BINDINGS", "Call", "Code", "Session"]

MAX_BINDINGS = 64  # of a session to sets of tensors, as many as a model has gradient buckets of one length; then all are made anew


@dataclass(frozen=True)
class Call:
    """`source`: flat input; `target`: flat output (the same tensor where the operation is in place). Blocks as in torch's *_into_tensor calls.

    all-reduce, broadcast, reduce: source is target. all-gather: N -> n N. reduce-scatter: n N -> N. all-to-all: n N -> n N. scatter: n N at the root
    (else None) -> N. gather: N -> n N at the root (else None).
    """

    op: str
    source: torch.Tensor | None
    target: torch.Tensor | None
    root: int = -1

    @property
    def given(self) -> torch.Tensor:
        found = self.source if self.source is not None else self.target
        assert found is not None, "torch passes at least one tensor"
        return found

    def elements(self, ranks: int) -> int:
        """Elements of a block, or of the whole tensor where there are no blocks."""
        if self.op in ("all-gather", "gather"):
            assert self.source is not None
            return int(self.source.numel())
        if self.op in ("reduce-scatter", "scatter"):
            assert self.target is not None
            return int(self.target.numel())
        return int(self.given.numel()) // (ranks if self.op in BLOCKED else 1)


class Code(Protocol):
    """One rank's part of a program for one length: `rank_code.RankCode`, `waves.WaveCode`."""

    @property
    def rank(self) -> int: ...
    @property
    def spaces(self) -> tuple[int, ...]: ...
    @property
    def roles(self) -> tuple[str, ...]: ...
    @property
    def staging(self) -> tuple[int, ...]: ...
    @property
    def elements(self) -> int: ...
    @property
    def unrolled(self) -> Program: ...

    def bind(self, buffers: Sequence[torch.Tensor], staging: Sequence[torch.Tensor]) -> Any: ...


class Session:
    """`with_tensors` gives what to walk for a call, and what to do afterwards."""

    def __init__(self, code: Code, op: str, root: int, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.code, self.op, self.root, self.elements = code, op, root, elements
        self.dtype, self.device = dtype, device
        self.staging = [torch.empty(n, dtype=dtype, device=device) for n in code.staging]
        self.own: dict[int, torch.Tensor] = {}
        self.bound: dict[tuple[int, ...], tuple[Any, list[torch.Tensor]]] = {}

    @property
    def exact(self) -> bool:
        """The caller's tensors have the buffers' length: nothing is padded."""
        return self.code.elements == self.elements

    def with_tensors(self, call: Call) -> tuple[Any, Callable[[], None]]:
        buffers, before, after = self._buffers(call)
        for copy in before:
            copy()
        # Lengths and dtype are the session's, so equal addresses are equal views. A binding keeps its tensors alive: no address comes twice.
        key = tuple(t.data_ptr() for t in buffers)
        found = self.bound.get(key)
        if found is None:
            if len(self.bound) >= MAX_BINDINGS:
                self.bound.clear()
            found = self.bound[key] = (self.code.bind(buffers, self.staging), buffers)

        def finish() -> None:
            for copy in after:
                copy()

        return found[0], finish

    def _scratch(self, number: int) -> torch.Tensor:
        if number not in self.own:
            self.own[number] = torch.empty(self.code.spaces[number], dtype=self.dtype, device=self.device)
        return self.own[number]

    def _buffers(self, call: Call) -> tuple[list[torch.Tensor], list[Callable[[], None]], list[Callable[[], None]]]:
        buffers: list[torch.Tensor] = []
        before: list[Callable[[], None]] = []
        after: list[Callable[[], None]] = []
        for number, role in enumerate(self.code.roles):
            tensor = self._borrowed(call, role, number)
            if tensor is None:
                tensor = self._scratch(number)
                if role in ("data", "input"):
                    before += self._load(call, tensor, role)
                if role in ("data", "output"):
                    after += self._store(call, tensor, role)
            elif (role == "data" and call.op == "all-gather") or (role == "data" and call.op == "gather"):
                before += self._load(call, tensor, role)
            buffers.append(tensor)
        return buffers, before, after

    def _borrowed(self, call: Call, role: str, number: int) -> torch.Tensor | None:
        """The caller's own tensor, where the program may work in it."""
        if role == "scratch" or not self.exact:
            return None
        root = call.root == self.code.rank
        found: torch.Tensor | None = None
        if role == "input":
            found = call.source if call.source is not call.target else None
        elif role == "output":
            found = call.target if call.source is not call.target else None
        elif call.op in ("all-reduce", "broadcast") or (call.op == "reduce" and root) or call.op == "all-gather" or (call.op == "gather" and root):
            found = call.target
        return found if found is not None and found.numel() == self.code.spaces[number] else None

    def _load(self, call: Call, buffer: torch.Tensor, role: str) -> list[Callable[[], None]]:
        """Copies of what the rank contributes into a working buffer."""
        source = call.source
        if source is None:
            return []
        n, padded, rank = self.elements, self.code.elements, self.code.rank
        if call.op in ("all-gather", "gather") and buffer.numel() > padded:
            place = buffer[rank * padded : rank * padded + n]
            return [] if place.data_ptr() == source.data_ptr() else [lambda: _copy(place, source)]
        return [lambda: _spread(buffer, source, self._count(buffer), n, padded)]

    def _store(self, call: Call, buffer: torch.Tensor, role: str) -> list[Callable[[], None]]:
        target = call.target
        if target is None or (call.op == "reduce" and call.root != self.code.rank):
            return []
        n, padded, rank = self.elements, self.code.elements, self.code.rank
        if call.op in ("reduce-scatter", "scatter") and buffer.numel() > padded:
            place = buffer[rank * padded : rank * padded + n]
            return [lambda: _copy(target, place)]
        return [lambda: _gathered(target, buffer, self._count(buffer), n, padded)]

    def _count(self, buffer: torch.Tensor) -> int:
        return max(1, int(buffer.numel()) // max(self.code.elements, 1))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _spread(buffer: torch.Tensor, source: torch.Tensor, blocks: int, elements: int, padded: int) -> None:
    """Blocks that follow each other into padded blocks; what is padded is zeroed, so that nothing undefined is ever added."""
    if source.numel() != blocks * elements:
        raise UsageError(f"{source.numel()} elements are no {blocks} blocks of {elements}")
    if padded == elements:
        buffer[: source.numel()].copy_(source)
        return
    rows = buffer[: blocks * padded].view(blocks, padded)
    rows[:, :elements].copy_(source.view(blocks, elements))
    rows[:, elements:].zero_()


def _gathered(target: torch.Tensor, buffer: torch.Tensor, blocks: int, elements: int, padded: int) -> None:
    target.view(blocks, elements).copy_(buffer[: blocks * padded].view(blocks, padded)[:, :elements])
