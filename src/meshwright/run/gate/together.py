"""All ranks of a program in one process, without sockets: threads of which one runs at a time, and messages that are handed over in memory.

A rank gives way only where it waits for a message that has not been sent, so what ranks do is never interleaved: global state of torch (its
generator) is theirs in turn, and the same program always runs in the same order.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import Deadlock
from ..executor.transport import Messages, Transport

__all__ = ["InMemory", "ranks_together"]


class _GivenUp(Exception):
    """Another rank failed, and this one waits for it."""


@dataclass
class _Sent:
    """A message of which a copy was taken; nothing is left to wait for."""


@dataclass
class _Awaited:
    """A receive by its message: the n-th from `peer` with `tag`."""

    tensor: torch.Tensor
    key: tuple[int, int, int, int]


@dataclass
class _Room:
    """What the ranks share. `turns[r]` is released when rank r may run; `in_vain`: how many waited in a row and found nothing."""

    ranks: int
    turns: list[threading.Semaphore] = field(init=False)
    done: set[int] = field(default_factory=set)
    messages: dict[tuple[int, int, int, int], torch.Tensor] = field(default_factory=dict)
    in_vain: int = 0
    failed: bool = False

    def __post_init__(self) -> None:
        self.turns = [threading.Semaphore(0) for _ in range(self.ranks)]

    def next_after(self, rank: int) -> int | None:
        later = ((rank + i) % self.ranks for i in range(1, self.ranks + 1))
        return next((r for r in later if r not in self.done), None)

    def give_way(self, rank: int) -> None:
        """Let another rank run until this one's turn comes again. Raises: Deadlock where none can go on."""
        self.in_vain += 1
        if self.in_vain > self.ranks - len(self.done):
            raise Deadlock("the ranks of the plan wait for each other", where=f"rank {rank}", hint="this is a fault of meshwright: please report it")
        other = self.next_after(rank)
        if other is not None and other != rank:
            self.turns[other].release()
            self.turns[rank].acquire()
        if self.failed:
            raise _GivenUp

    def leave(self, rank: int) -> None:
        self.done.add(rank)
        self.in_vain = 0
        other = self.next_after(rank)
        if other is not None:
            self.turns[other].release()


class InMemory:
    """A rank's transport in a room."""

    grouped = False

    def __init__(self, room: _Room, rank: int) -> None:
        self.room, self.rank = room, rank
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        self.awaited: dict[tuple[int, int], int] = defaultdict(int)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        number, self.sent[peer, tag] = self.sent[peer, tag], self.sent[peer, tag] + 1
        self.room.messages[self.rank, peer, tag, number] = tensor.detach().clone()
        self.room.in_vain = 0
        return _Sent()

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        number, self.awaited[peer, tag] = self.awaited[peer, tag], self.awaited[peer, tag] + 1
        return _Awaited(tensor, (peer, self.rank, tag, number))

    def exchange(self, sends: Messages, receives: Messages) -> Sequence[Any]:
        works = [self.receive(*one) for one in receives]
        return [*works, *(self.send(*one) for one in sends)]

    def wait(self, work: Any) -> None:
        if isinstance(work, _Sent):
            return
        while work.key not in self.room.messages:
            self.room.give_way(self.rank)
        self.room.in_vain = 0
        message = self.room.messages.pop(work.key)
        room = work.tensor if message.shape == work.tensor.shape else work.tensor.view(-1)[: message.numel()]  # as gloo: a message may be shorter
        room.copy_(message)


def ranks_together(ranks: int, body: Callable[[int, Transport], Any]) -> list[Any]:
    """`body(rank, transport)` of every rank, one at a time; their results by rank.

    Raises: what the first rank that failed raised; Deadlock where all wait.
    """
    room = _Room(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        room.turns[rank].acquire()
        try:
            if not room.failed:
                results[rank] = body(rank, InMemory(room, rank))
        except _GivenUp:
            pass  # another rank failed: its error is the one that is raised
        except BaseException as error:
            errors.append(error)
            room.failed = True
        finally:
            room.leave(rank)

    threads = [threading.Thread(target=run, args=(r,), daemon=True, name=f"rank {r}") for r in range(ranks)]
    for t in threads:
        t.start()
    room.turns[0].release()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results
