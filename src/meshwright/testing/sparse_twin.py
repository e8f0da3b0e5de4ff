"""All ranks of a sparse all-reduce in one thread: each step is a generator, and a seeded choice says whose turn it is and what arrives.

Sends are read when they are delivered, which may be as late as the sender's own wait: a step that touches an array too early is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CheckFailed, Deadlock
from ..run.group.walk import Wait
from ..run.sparse.protocol import Protocol
from ..run.sparse.walk import Place, Port

__all__ = ["Sent", "Twin", "run_twin"]


@dataclass(frozen=True)
class Sent:
    """One message as it was posted; `step`: of the program."""

    phase: str
    source: int
    target: int
    size_bytes: int
    step: int


@dataclass
class _Half:
    data: Any
    phase: str
    tag: int
    done: bool = False


@dataclass(frozen=True)
class _Port:
    """A rank's port."""

    twin: Twin
    rank: int

    def send(self, data: Any, peer: int, tag: int, at: Place) -> _Half:
        self.twin.sent.append(Sent(at.phase, self.rank, peer, data.nbytes, at.step))
        return self.twin.post((self.rank, peer), 0, _Half(data, at.phase, tag))

    def receive(self, data: Any, peer: int, tag: int, at: Place) -> _Half:
        return self.twin.post((peer, self.rank), 1, _Half(data, at.phase, tag))


@dataclass
class Twin:
    """`steps[rank](port)` is what the rank does. `sent`: every message, in order of posting; empty ones are not posted."""

    steps: Sequence[Callable[[Port], Protocol[Any]]]
    rng: np.random.Generator
    sent: list[Sent] = field(default_factory=list)

    def run(self) -> list[Any]:
        """What the steps return. Raises: what one of them raises (the first), Deadlock, CheckFailed for ends of a message that differ."""
        n = len(self.steps)
        self.protocols = [step(_Port(self, rank)) for rank, step in enumerate(self.steps)]
        self.pairs: dict[tuple[int, int], tuple[deque[_Half], deque[_Half]]] = {}
        self.results: list[Any] = [None] * n
        self.requests: dict[int, Any] = {}
        self.ready = list(range(n))
        self.over = 0
        while self.over < n:
            while self.ready:
                self._turn(self.ready.pop(int(self.rng.integers(len(self.ready)))))
            if not self._collective() and not self._deliver() and self.over < n:
                raise Deadlock(f"ranks {sorted(self.requests)} wait for ever", where="sparse all-reduce twin")
        if any(a or b for a, b in self.pairs.values()):
            raise CheckFailed("messages were posted that nobody waited for", where="sparse all-reduce twin")
        return self.results

    def post(self, pair: tuple[int, int], side: int, half: _Half) -> _Half:
        self.pairs.setdefault(pair, (deque(), deque()))[side].append(half)
        return half

    def _turn(self, rank: int) -> None:
        try:
            self.requests[rank] = next(self.protocols[rank])
        except StopIteration as end:
            self.results[rank] = end.value
            self.over += 1
            return
        self._resume(rank)

    def _resume(self, rank: int) -> None:
        request = self.requests.get(rank)
        if isinstance(request, Wait) and request.work.done:
            del self.requests[rank]
            self.ready.append(rank)

    def _deliver(self) -> bool:
        open_pairs = [pair for pair, (sends, receives) in self.pairs.items() if sends and receives]
        if not open_pairs:
            return False
        pair = open_pairs[int(self.rng.integers(len(open_pairs)))]
        send, receive = (side.popleft() for side in self.pairs[pair])
        if (send.phase, send.tag, send.data.nbytes) != (receive.phase, receive.tag, receive.data.nbytes):
            ours, theirs = (f"{half.phase} (message {half.tag}), {half.data.nbytes} bytes" for half in (send, receive))
            raise CheckFailed(f"rank {pair[0]} sends {ours}, rank {pair[1]} expects {theirs}", where="sparse all-reduce twin")
        receive.data[:] = send.data
        send.done = receive.done = True
        for rank in pair:
            self._resume(rank)
        return True

    def _collective(self) -> bool:
        """Answer a sum that all ranks have reached."""
        asked = [self.requests.get(r) for r in range(len(self.steps))]
        if any(a is None or isinstance(a, Wait) for a in asked):
            return False
        kinds = {(a.phase, len(a.data)) for a in asked if a is not None}
        if len(kinds) > 1:
            raise CheckFailed(f"ranks call different collectives: {sorted(kinds)}", where="sparse all-reduce twin")
        data = [a.data for a in asked if a is not None]
        total = np.sum(data, axis=0, dtype=data[0].dtype)
        for one in data:
            one[:] = total
        self.requests.clear()
        self.ready = list(range(len(asked)))
        return True


def run_twin(steps: Sequence[Callable[[Port], Protocol[Any]]], seed: int = 0) -> tuple[list[Any], list[Sent]]:
    """(results, messages) of all ranks."""
    twin = Twin(steps, np.random.default_rng(seed))
    return twin.run(), twin.sent
