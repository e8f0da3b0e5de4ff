"""Walking a rank's code with real tensors.

`Bound` ties code to tensors once; views are made then, so a walk touches no shapes. `walk` is a generator that yields whenever it has to wait for a
peer: the thread of a process group blocks on what it yields, the deterministic twin (`twin`) schedules thousands of such walks in virtual time.
Both run this code and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .code import Op, RankCode

__all__ = ["Bound", "Messages", "Wait", "bind", "walk"]

Reduce = Callable[[torch.Tensor, torch.Tensor], Any]  # in place into the first
Wait = tuple[int, Any, int, int]  # (step, work, peer, 1 = waits for a message, 0 = for a send to be taken)


class Messages(Protocol):
    """Non-blocking messages; tensors are contiguous and stay alive until waited on. `run.transport` has the real ones."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...
    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...


@dataclass(frozen=True)
class Bound:
    """Rows of (op, step, tensor, source, key, peer, tag)."""

    rows: tuple[tuple[int, int, torch.Tensor | None, torch.Tensor | None, int, int, int], ...]
    code: RankCode


def bind(code: RankCode, buffers: Sequence[torch.Tensor], staging: Sequence[torch.Tensor]) -> Bound:
    """`buffers`: flat tensors of the rank's buffers; `staging`: of its slots, at least as long as `code.staging` asks."""

    def view(place: tuple[int, int, int]) -> torch.Tensor:
        space, low, high = place
        return (buffers[space] if space >= 0 else staging[-1 - space])[low:high]

    rows = []
    for i in code.instructions:
        tensor = view(i.place) if i.op not in (Op.TAKE, Op.DONE) else None
        source = view(i.source) if i.op in (Op.COPY, Op.ADD) else None
        rows.append((int(i.op), i.step, tensor, source, i.key, i.peer, i.tag))
    return Bound(tuple(rows), code)


def walk(bound: Bound, messages: Messages, reduce: Reduce) -> Iterator[Wait]:
    """Run the code once. Whoever drives it waits for each yielded work before it goes on."""
    works: dict[int, Any] = {}
    send, receive = messages.send, messages.receive
    for op, step, tensor, source, key, peer, tag in bound.rows:
        if op == Op.TAKE:
            yield step, works.pop(key), peer, 1
        elif op == Op.DONE:
            yield step, works.pop(-1 - key), peer, 0
        elif op == Op.POST:
            works[key] = receive(tensor, peer, tag)
        elif op == Op.SEND:
            works[-1 - key] = send(tensor, peer, tag)
        elif op == Op.ADD:
            reduce(tensor, source)
        elif tensor is not None:
            tensor.copy_(source)
