"""All ranks of a sparse all-reduce in one thread: each protocol is a generator, and a seeded choice says whose turn it is and what arrives.

Sends are read when they are delivered, which may be as late as the sender's own wait: a protocol that touches an array too early is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CheckFailed, Deadlock
from ..run.sparse.protocol import AllGather, AllReduce, Post, Protocol, Wait

__all__ = ["Sent", "Twin", "run_twin"]


@dataclass(frozen=True)
class Sent:
    """One message as it was posted."""

    phase: str
    source: int
    target: int
    size_bytes: int


@dataclass
class _Half:
    data: Any
    phase: str
    done: bool = False


@dataclass
class Twin:
    """`sent`: every message, in order of posting; empty ones are not posted."""

    protocols: Sequence[Protocol[Any]]
    rng: np.random.Generator
    sent: list[Sent] = field(default_factory=list)

    def run(self) -> list[Any]:
        """What the protocols return. Raises: what one of them raises (the first), Deadlock, CheckFailed for ends of a message that differ."""
        n = len(self.protocols)
        self.pairs: dict[tuple[int, int], tuple[deque[_Half], deque[_Half]]] = {}
        self.results: list[Any] = [None] * n
        self.requests: dict[int, Any] = {}
        self.ready: list[tuple[int, Any]] = [(r, None) for r in range(n)]
        self.over = 0
        while self.over < n:
            while self.ready:
                rank, answer = self.ready.pop(int(self.rng.integers(len(self.ready))))
                self._turn(rank, answer)
            if not self._collective() and not self._deliver() and self.over < n:
                raise Deadlock(f"ranks {sorted(self.requests)} wait for ever", where="sparse all-reduce twin")
        if any(a or b for a, b in self.pairs.values()):
            raise CheckFailed("messages were posted that nobody waited for", where="sparse all-reduce twin")
        return self.results

    def _turn(self, rank: int, answer: Any) -> None:
        try:
            request = self.protocols[rank].send(answer)
        except StopIteration as end:
            self.results[rank] = end.value
            self.over += 1
            return
        if isinstance(request, Post):
            self.ready.append((rank, self._post(rank, request)))
            return
        self.requests[rank] = request
        if isinstance(request, Wait):
            self._resume(rank)

    def _post(self, rank: int, request: Post) -> list[_Half]:
        halves = []
        for side, messages in enumerate((request.sends, request.receives)):
            for m in messages:
                if not len(m.data):
                    continue
                pair = (rank, m.peer) if side == 0 else (m.peer, rank)
                half = _Half(m.data, request.phase)
                self.pairs.setdefault(pair, (deque(), deque()))[side].append(half)
                halves.append(half)
                if side == 0:
                    self.sent.append(Sent(request.phase, rank, m.peer, m.data.nbytes))
        return halves

    def _resume(self, rank: int) -> bool:
        request = self.requests[rank]
        if not all(half.done for half in request.ticket):
            return False
        del self.requests[rank]
        self.ready.append((rank, None))
        return True

    def _deliver(self) -> bool:
        open_pairs = [pair for pair, (sends, receives) in self.pairs.items() if sends and receives]
        if not open_pairs:
            return False
        pair = open_pairs[int(self.rng.integers(len(open_pairs)))]
        send, receive = (side.popleft() for side in self.pairs[pair])
        if send.phase != receive.phase or send.data.nbytes != receive.data.nbytes:
            ours, theirs = f"{send.phase}, {send.data.nbytes} bytes", f"{receive.phase}, {receive.data.nbytes} bytes"
            raise CheckFailed(f"rank {pair[0]} sends {ours}, rank {pair[1]} expects {theirs}", where="sparse all-reduce twin")
        receive.data[:] = send.data
        send.done = receive.done = True
        for rank in pair:
            if isinstance(self.requests.get(rank), Wait):
                self._resume(rank)
        return True

    def _collective(self) -> bool:
        """Answer a collective that all ranks have reached."""
        asked = [self.requests.get(r) for r in range(len(self.protocols))]
        gathers = [a for a in asked if isinstance(a, AllGather)]
        reduces = [a for a in asked if isinstance(a, AllReduce)]
        if len(gathers) + len(reduces) < len(asked):
            return False
        kinds = {("gathers", a.phase, len(a.row)) for a in gathers} | {("adds", a.phase, len(a.data)) for a in reduces}
        if len(kinds) > 1:
            raise CheckFailed(f"ranks call different collectives: {sorted(kinds)}", where="sparse all-reduce twin")
        answers: list[Any] = [None] * len(asked)
        if gathers:
            answers = [np.stack([a.row for a in gathers]) for _ in asked]
        else:
            total = np.sum([a.data for a in reduces], axis=0, dtype=reduces[0].data.dtype)
            for a in reduces:
                a.data[:] = total
        self.requests.clear()
        self.ready = list(enumerate(answers))
        return True


def run_twin(protocols: Sequence[Protocol[Any]], seed: int = 0) -> tuple[list[Any], list[Sent]]:
    """(results, messages) of all ranks."""
    twin = Twin(protocols, np.random.default_rng(seed))
    return twin.run(), twin.sent
