"""The twin's messages between ranks (see `twin`), and what its ranks are made of."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import MeshwrightError
from ..run.executor.transport import Broken
from ..run.group.agreement import Agreement
from ..run.group.call import Call, Session
from ..run.group.checksums import checksum
from ..run.group.walk import Under

__all__ = [
    "DONE", "FAILED", "FAULTS", "KILLED", "RUNNING", "Fault", "Outcome", "Transport", "VirtualCall", "VirtualLog", "VirtualMessages", "VirtualRank",
    "VirtualWork",
]  # fmt: skip

FAULTS = ("kill", "freeze", "pause", "cut", "slow", "corrupt", "exception", "exit", "late")
RUNNING, DONE, FAILED, KILLED = "running", "done", "failed", "killed"


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `rank` when it comes to its `at`-th wait, counted over all its collectives (the last one is its end).

    `peer`: the other end of the link, for cut, slow (from rank to peer) and corrupt (likewise).
    """

    kind: str
    rank: int
    at: int
    peer: int = -1
    factor: float = 1e-6  # slow: share of the rate that is left
    pause_s: float = 0.0  # pause: frozen for so long


@dataclass
class VirtualCall:
    """One collective of one rank, ready to walk."""

    call: Call
    session: Session
    name: int
    combine: Any = None
    number: int = 0


@dataclass
class Outcome:
    """What became of a rank. `error`: what it raised; `error_s`: when."""

    state: str
    finished: int
    error: MeshwrightError | None = None
    error_s: float = 0.0
    waits: int = 0


class VirtualLog:
    """The recorder's face towards `view_of`, in virtual time."""

    def __init__(self, world: Transport) -> None:
        self.world = world
        self.calls: dict[int, tuple[int, int, int]] = {}
        self.number = self.running = self.last = 0
        self.place: tuple[int, int, bool, bool] = (-1, -1, False, False)
        self.since = 0.0

    def position(self) -> tuple[int, int, bool, bool, float]:
        return (*self.place, self.world.now - self.since)


@dataclass(eq=False, slots=True)
class VirtualWork:
    """A posted send or receive. `failed`: why its wait raises."""

    rank: int
    peer: int
    tag: int
    tensor: torch.Tensor
    sends: bool
    crc: Any = None
    done: bool = False
    failed: str = ""
    copy: Any = None  # what the transport has taken


class VirtualMessages:
    """One rank's messages."""

    def __init__(self, world: Transport, rank: int) -> None:
        self.world, self.rank, self.mask = world, rank, 0
        self.counts: dict[tuple[bool, int, int], int] = defaultdict(int)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> VirtualWork:
        return self.post(VirtualWork(self.rank, peer, tag ^ self.mask, tensor, True))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> VirtualWork:
        return self.post(VirtualWork(self.rank, peer, tag ^ self.mask, tensor, False))

    def post(self, work: VirtualWork) -> VirtualWork:
        if self.world.pair_closed(self.rank, work.peer):
            raise Broken(work.peer, "connection closed")
        self.world.post(work)
        return work


@dataclass(eq=False)
class VirtualRank:
    number: int
    calls: deque[VirtualCall]
    log: VirtualLog
    messages: VirtualMessages
    agreement: Agreement
    state: str = RUNNING
    walker: Iterator[Any] | None = None
    under: Under = field(default_factory=Under)
    finish: Callable[[], None] | None = None
    current: VirtualCall | None = None
    waiting: VirtualWork | None = None
    wait_id: int = 0
    waits: int = 0
    finished: int = 0
    frozen: bool = False
    left: bool = False
    inbox: list[Callable[[], None]] = field(default_factory=list)  # what arrives while frozen
    error: MeshwrightError | None = None
    error_s: float = 0.0
    posted: list[VirtualWork] = field(default_factory=list)
    closed: bool = False


class Transport(ABC):
    """Links between ranks. `at`, `to`, `wake` and `kill` are the world's."""

    now: float
    checks: bool
    buffered: bool
    timeout_s: float
    random: random.Random
    ranks: list[VirtualRank]
    links: dict[tuple[int, int], tuple[float, float]]
    default: tuple[float, float]
    free: dict[tuple[int, int], float]
    cut: set[frozenset[int]]
    full: set[frozenset[int]]
    shut: set[frozenset[int]]
    damage: set[tuple[int, int]]
    fault_s: float | None
    queues: dict[tuple[int, int, int], tuple[deque[VirtualWork], deque[VirtualWork]]]
    _wire: dict[tuple[int, int], float]

    @abstractmethod
    def at(self, time_s: float, what: Callable[[], None], label: str = "") -> None:
        """Do `what` at this time."""

    @abstractmethod
    def to(self, rank: VirtualRank, what: Callable[[], None]) -> None:
        """Do `what` at a rank, when it is not frozen."""

    @abstractmethod
    def wake(self, work: VirtualWork) -> None:
        """A work is over: its rank goes on."""

    @abstractmethod
    def kill(self, rank: VirtualRank) -> None:
        """The rank is gone from now on."""

    def pair_closed(self, a: int, b: int) -> bool:
        return self.ranks[a].closed or frozenset((a, b)) in self.shut

    def post(self, work: VirtualWork) -> None:
        key = (work.rank, work.peer, work.tag) if work.sends else (work.peer, work.rank, work.tag)
        self.ranks[work.rank].posted.append(work)
        sends, receives = self.queues[key]
        (sends if work.sends else receives).append(work)
        if sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            self.transfer(send, receive)

    def transfer(self, send: VirtualWork, receive: VirtualWork) -> None:
        a, b = send.rank, receive.rank
        rate, latency = self.links.get((a, b), self.default)
        size = send.tensor.numel() * send.tensor.element_size()
        if self.buffered and not self.checks:
            send.copy = send.tensor.clone()
            self.at(self.now + latency, lambda: self.taken(send))
        start = max(self.now, self.free[a, b])
        self.free[a, b] = end = start + size / rate
        jitter = 1 + 0.2 * self.random.random()
        self.at(end + latency * jitter, lambda: self.arrive(send, receive), f"message {a} -> {b} tag {send.tag}")

    def taken(self, send: VirtualWork) -> None:
        rank = self.ranks[send.rank]
        if rank.frozen:
            rank.inbox.append(lambda: self.taken(send))
        elif not send.failed and not send.done and rank.state != KILLED:
            send.done = True
            rank.posted.remove(send)
            self.wake(send)

    def arrive(self, send: VirtualWork, receive: VirtualWork) -> None:
        if send.failed or receive.failed or receive.done:
            return
        a, b = self.ranks[send.rank], self.ranks[receive.rank]
        if frozenset((a.number, b.number)) in self.cut or KILLED in (a.state, b.state):
            return
        for rank in (a, b):
            if rank.frozen:  # its transport stands still too
                rank.inbox.append(lambda: self.arrive(send, receive))
                return
        if send.tensor.numel() != receive.tensor.numel():
            self.kill(b)  # as gloo does
            return
        if self.checks:
            receive.crc = [b.messages.mask, receive.tag, 0, receive.tensor.numel() * receive.tensor.element_size(), checksum(send.tensor)]
        receive.tensor.copy_(send.tensor if send.copy is None else send.copy)
        if (a.number, b.number) in self.damage:
            self.damage.discard((a.number, b.number))
            self.fault_s = self.now
            flat = receive.tensor.reshape(-1).view(torch.uint8)
            flat[self.random.randrange(flat.numel())] ^= 1 << self.random.randrange(8)
        for work, rank in ((send, a), (receive, b)):
            if work.done:
                continue
            work.done = True
            rank.posted.remove(work)
            self.wake(work)

    def close(self, rank: VirtualRank) -> None:
        """All of a rank's connections end: by its death, a wait that timed out, an abort."""
        if rank.closed:
            return
        rank.closed = True
        self._break(rank, None)
        for peer in self.ranks:
            pair = frozenset((rank.number, peer.number))
            if peer is not rank and pair not in self.cut:
                _, latency = self.links.get((rank.number, peer.number), self.default)
                self.at(self.now + latency * (1 + self.random.random()), lambda peer=peer: self.to(peer, lambda: self._shut(rank, peer)))  # type: ignore[misc]

    def _shut(self, gone: VirtualRank, peer: VirtualRank) -> None:
        self.shut.add(frozenset((gone.number, peer.number)))
        self._break(peer, gone.number)

    def _break(self, rank: VirtualRank, other: int | None) -> None:
        kept = []
        for work in rank.posted:
            if other is None or work.peer == other:
                work.failed = "closed"
                self.wake(work)
            else:
                kept.append(work)
        rank.posted = kept

    def wire(self, source: int, target: int) -> float:
        """When the next thing on a control connection arrives: never before the one ahead of it."""
        latency = self.default[1] + (100 * self.timeout_s if frozenset((source, target)) in self.full else 0.0)
        arrives = self.now + latency * (1 + 2 * self.random.random())
        self._wire[source, target] = arrives = max(arrives, self._wire[source, target] + 1e-9)
        return arrives
