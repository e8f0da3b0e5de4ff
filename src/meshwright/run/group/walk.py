"""Walking a rank's code with real tensors.

Code is bound to tensors once (`RankCode.bind`); views are made then, so a walk touches no shapes. `walk` is a generator: it runs whatever can
run, the earliest in the code first, and yields the earliest message under way when everything left needs one. The thread of a process group
blocks on it; the deterministic twin (`testing.group_twin`) schedules thousands of such walks in virtual time. Both run this code and nothing else,
and however long messages take, the same additions are done in the same order (`dataflow`).

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

from .dataflow import Dataflow
from .instructions import Op

__all__ = ["MAX_TAKEN_SENDS", "Messages", "Rows", "Under", "Wait", "walk"]

MAX_TAKEN_SENDS = 512  # the last sends taken that a walk remembers; a view lists them all

Reduce = Callable[[torch.Tensor, torch.Tensor], Any]  # in place into the first


class Messages(Protocol):
    """Non-blocking messages; tensors are contiguous and stay alive until waited on. `run.executor.transport` has the real ones."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...
    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any: ...


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
    taken: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_TAKEN_SENDS))


class Rows(Protocol):
    """Code that is bound to where its data lie: rows of (op, step, tensor, source, key, peer, tag)."""

    @property
    def rows(self) -> Sequence[tuple[int, int, Any, Any, int, int, int]]: ...
    @property
    def flow(self) -> Dataflow: ...


def walk(bound: Rows, messages: Messages, reduce: Reduce, under: Under) -> Iterator[Wait]:
    """Run the code once. Whoever drives it waits for each yielded work before it goes on."""
    flow = bound.flow
    rows, followers, left = bound.rows, flow.followers, list(flow.waits)
    ready = [row for row, count in enumerate(left) if not count]  # ascending, so it is a heap
    earliest: list[int] = []  # heap of the waits for what is under way
    works: dict[int, Any] = {}
    send, receive, is_open, taken = messages.send, messages.receive, under.open, under.taken
    while ready or earliest:
        if ready:
            row = heappop(ready)
            op, step, tensor, source, key, peer, tag = rows[row]
            # A wait would block the only thread: it is put aside while anything else can run.
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
            elif op == Op.RUN:
                source()
            elif tensor is not None:
                tensor.copy_(source)
        else:
            # Nothing else can run. All ranks' codes follow one order, so the first wait of all in it can end, and its rank waits for just that.
            row = heappop(earliest)
            op, step, _, _, key, peer, _ = rows[row]
            name = -1 - key if op == Op.TAKE else key
            yield Wait(step, works.pop(name), peer, op == Op.TAKE)
            del is_open[name]
            if op == Op.DONE:
                taken.append(key)
        # The heap gives the earliest of those that can go, so with equal messages the same walk comes out.
        for follower in followers[row]:
            left[follower] -= 1
            if not left[follower]:
                heappush(ready, follower)
