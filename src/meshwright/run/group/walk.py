"""Walking a rank's code with real tensors.

`Bound` ties code to tensors once; views are made then, so a walk touches no shapes. `walk` is a generator: it runs whatever can run, the earliest in
the code first, and yields the earliest message under way when everything left needs one. The thread of a process group blocks on it; the
deterministic twin (`twin`) schedules thousands of such walks in virtual time. Both run this code and nothing else, and however long messages
take, the same additions are done in the same order (`dataflow`).

Going on with whichever message is over first would need a thread per channel, since gloo's works cannot be polled. It was tried: with several
ranks on a core, waking threads mostly costs more than it gains (0.65 to 2.5 times the time).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import torch

from .code import RankCode
from .instructions import Op

__all__ = ["MOST_TAKEN", "Bound", "Messages", "Under", "Wait", "bind", "walk"]

MOST_TAKEN = 512

Reduce = Callable[[torch.Tensor, torch.Tensor], Any]  # in place into the first


class Messages(Protocol):
    """Non-blocking messages; tensors are contiguous and stay alive until waited on. `run.transport` has the real ones."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...
    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...


@dataclass(frozen=True)
class Bound:
    """Rows of (op, step, tensor, source, key, peer, tag)."""

    rows: tuple[tuple[int, int, torch.Tensor | None, torch.Tensor | None, int, int, int], ...]
    code: RankCode


class Wait(NamedTuple):
    """For a message (`receives`) or for a send to be taken."""

    step: int
    work: Any
    peer: int
    receives: bool


@dataclass(slots=True)
class Under:
    """What a walk has under way, readable from other threads: a send of step s is s, a posted receive of it -1 - s. `taken`: the last sends taken."""

    open: dict[int, None] = field(default_factory=dict)
    taken: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_TAKEN))


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


def walk(bound: Bound, messages: Messages, reduce: Reduce, under: Under) -> Iterator[Wait]:
    """Run the code once. Whoever drives it waits for each yielded work before it goes on."""
    flow = bound.code.flow
    rows, followers, left = bound.rows, flow.followers, list(flow.waits)
    ready = [row for row, count in enumerate(left) if not count]  # ascending, so it is a heap
    earliest: list[int] = []  # heap of the waits for what is under way
    works: dict[int, Any] = {}
    send, receive, is_open, taken = messages.send, messages.receive, under.open, under.taken
    while ready or earliest:
        if ready:
            row = heappop(ready)
            op, step, tensor, source, key, peer, tag = rows[row]
            if op == Op.TAKE or op == Op.DONE:
                heappush(earliest, row)
                continue
            if op == Op.POST:
                is_open[-1 - key] = None
                works[-1 - key] = receive(tensor, peer, tag)
            elif op == Op.SEND:
                is_open[key] = None
                works[key] = send(tensor, peer, tag)
            elif op == Op.ADD:
                reduce(tensor, source)
            elif tensor is not None:
                tensor.copy_(source)
        else:
            row = heappop(earliest)
            op, step, _, _, key, peer, _ = rows[row]
            name = -1 - key if op == Op.TAKE else key
            yield Wait(step, works.pop(name), peer, op == Op.TAKE)
            del is_open[name]
            if op == Op.DONE:
                taken.append(key)
        for follower in followers[row]:
            left[follower] -= 1
            if not left[follower]:
                heappush(ready, follower)
