"""The deterministic twin: all ranks of a group in one thread, in virtual time, with faults as data.

What runs is the real thing wherever that is possible: `walk` over the compiled code of every rank, `Agreement`, the views and the rule. What is
replaced is the world: links with a rate and a latency, the clock, and the order in which things that could happen at once do happen, which a seed
decides. Equal seeds give equal runs to the last event.

Messages behave as gloo's do: a send is a rendezvous and does not copy (data leaves at the moment of the transfer), tags match in order, a wait that
times out closes all connections of its rank, and a message longer than its receive ends the receiving process.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import MessageDamaged
from ..run.executor.transport import Broken
from ..run.group.agreement import Agreement, Message
from ..run.group.checksums import check
from ..run.group.health import claim_of, error_of
from ..run.group.messages import mask_of
from ..run.group.record_file import pack_call
from ..run.group.verdict import CRAWLS, CUT, SILENT, Claim, Verdict, View
from ..run.group.views import view_of
from ..run.group.walk import Under, walk
from .group_twin_transport import (
    DONE,
    FAILED,
    FAULTS,
    KILLED,
    RUNNING,
    Fault,
    Outcome,
    Transport,
    VirtualCall,
    VirtualLog,
    VirtualMessages,
    VirtualRank,
    VirtualWork,
)

__all__ = ["FAULTS", "Fault", "Outcome", "VirtualCall", "VirtualWorld"]


class VirtualWorld(Transport):
    """`calls[rank]`: its collectives in order; `links[a, b]`: (bytes per second, latency), `default` elsewhere. `checks`: debug mode."""

    def __init__(
        self, calls: Sequence[Sequence[VirtualCall]], *, seed: int, faults: Sequence[Fault] = (), timeout_s: float = 1.0, grace_s: float = 0.25,
        links: Mapping[tuple[int, int], tuple[float, float]] | None = None, default: tuple[float, float] = (1e9, 20e-6), checks: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.timeout_s, self.checks = len(calls), timeout_s, checks
        self.random = random.Random(seed)
        self.buffered = self.random.random() < 0.5  # the transport takes a message off its sender's hands before it arrives
        self.now = 0.0
        self.links, self.default = dict(links or {}), default
        self.free: dict[tuple[int, int], float] = defaultdict(float)
        self.cut: set[frozenset[int]] = set()
        self.shut: set[frozenset[int]] = set()  # pairs of which one side has closed its connection, and the other knows
        self.full: set[frozenset[int]] = set()  # links whose queue holds back control messages too
        self.damage: set[tuple[int, int]] = set()
        self.faults = {(f.rank, f.at): f for f in faults}
        self.fault_s: float | None = None
        self.events: list[tuple[float, float, int, Callable[[], None], str]] = []
        self._serial = 0
        self._wire: dict[tuple[int, int], float] = defaultdict(float)  # when the last message of a control connection arrives
        self.queues: dict[tuple[int, int, int], tuple[deque[VirtualWork], deque[VirtualWork]]] = defaultdict(lambda: (deque(), deque()))
        self.ranks = [self._make(rank, list(own), grace_s) for rank, own in enumerate(calls)]
        for rank in self.ranks:
            self.soon(rank, lambda rank=rank: self.advance(rank))  # type: ignore[misc]

    def _make(self, number: int, calls: list[VirtualCall], grace_s: float) -> VirtualRank:
        log = VirtualLog(self)
        agreement = Agreement(number, self.size, grace_s, lambda: self._look(number), lambda peer: self._judge(number, peer))
        return VirtualRank(number, deque(calls), log, VirtualMessages(self, number), agreement)

    def _judge(self, rank: int, peer: int) -> str:
        pair = frozenset((rank, peer))
        return CUT if pair in self.cut else CRAWLS if pair in self.full else SILENT

    # ---- time --------------------------------------------------------------------------------------------------
    def at(self, time_s: float, what: Callable[[], None], label: str = "") -> None:
        """`label`: what this is, for `choices`; timers have none."""
        self._serial += 1
        heapq.heappush(self.events, (time_s, self.random.random(), self._serial, what, label))

    def soon(self, rank: VirtualRank, what: Callable[[], None]) -> None:
        """After a little while that the seed decides; not while the rank is frozen."""
        self.at(self.now + self.random.random() * 30e-6, lambda: self.to(rank, what), f"rank {rank.number}")

    def choices(self) -> list[str]:
        """What could happen next, whatever the times are."""
        return sorted({e[4] for e in self.events if e[4]})

    def choose(self, label: str) -> None:
        """Let it happen now, before everything else."""
        event = min((e for e in self.events if e[4] == label), key=lambda e: e[2])
        self.events.remove(event)
        heapq.heapify(self.events)
        event[3]()

    def state(self) -> tuple[Any, ...]:
        """Where everybody is: equal states have equal futures while nothing fails."""
        return (*((r.waits, r.finished, r.state) for r in self.ranks), *self.choices())

    def to(self, rank: VirtualRank, what: Callable[[], None]) -> None:
        if rank.state == KILLED:
            return
        if rank.frozen:
            rank.inbox.append(what)
        else:
            what()

    def run(self, most_s: float = 1e9, most_events: int = 1_000_000) -> list[Outcome]:
        """Until nothing is left to happen. Raises: AssertionError for a world that does not come to rest (a hang would show so)."""
        for _ in range(most_events):
            if not self.events:
                break
            time_s, _, _, what, _ = heapq.heappop(self.events)
            self.now = max(self.now, time_s)
            assert self.now <= most_s, "virtual time runs away"
            what()
        else:
            raise AssertionError("the world does not come to rest")
        return [Outcome(r.state, r.finished, r.error, r.error_s, r.waits) for r in self.ranks]

    # ---- a rank's thread ---------------------------------------------------------------------------------------
    def advance(self, rank: VirtualRank) -> None:
        """Walk on until something has to be waited for."""
        while rank.state == RUNNING:
            if rank.walker is None and not self._begin(rank):
                return
            try:
                assert rank.walker is not None
                step, work, peer, receives = next(rank.walker)
            except StopIteration:
                self._finish(rank)
                continue
            except Broken:
                self.lost(rank, "closed")
                return
            except Exception as error:
                self.fail(rank, error)
                return
            rank.waits += 1
            if not work.done:
                rank.log.place, rank.log.since = (step, peer, receives, True), self.now
            rank.waiting = work
            rank.wait_id += 1
            if self._strikes(rank):
                return
            if not self._ready(rank, rank.wait_id):
                return

    def _begin(self, rank: VirtualRank) -> bool:
        if not rank.calls:
            rank.state = DONE
            rank.waits += 1
            self._strikes(rank)
            return False
        item = rank.current = rank.calls.popleft()
        log = rank.log
        log.number = log.running = log.last = log.number + 1
        session = item.session
        size_bytes = session.elements * session.dtype.itemsize
        call = pack_call(session.op, session.root, "sum" if item.combine else "", str(session.dtype)[6:])
        log.calls[log.number] = call, size_bytes, item.name
        log.place = -1, -1, False, False
        rank.messages.mask = mask_of(log.number, call, size_bytes, item.name)
        rank.messages.counts.clear()
        bound, rank.finish = session.with_tensors(item.call)
        rank.under = Under()
        rank.walker = walk(bound, rank.messages, item.combine, rank.under)
        return True

    def _finish(self, rank: VirtualRank) -> None:
        assert rank.finish is not None
        rank.finish()
        rank.walker = rank.current = None
        rank.log.running = 0
        rank.finished += 1

    def _ready(self, rank: VirtualRank, wait_id: int) -> bool:
        """Whether the wait is over; otherwise something will come back here, at the deadline at the latest."""
        work = rank.waiting
        if work is None or rank.wait_id != wait_id or rank.state != RUNNING:
            return False
        if work.failed:
            self.lost(rank, work.failed)
            return False
        if not work.done:
            self.at(self.now + self.timeout_s, lambda: self.to(rank, lambda: self._deadline(rank, wait_id)))
            return False
        rank.waiting = None
        step, peer, receives, _ = rank.log.place
        rank.log.place = step, peer, receives, False
        if self.checks and not work.sends and work.crc is not None:
            try:
                check(work.crc, (*work.crc[:4],), work.tensor, work.peer, rank.number, range(self.size))
            except MessageDamaged as error:
                assert rank.current is not None
                error.where, error.data["step"] = rank.current.session.code.unrolled.describe(step), step
                self.fail(rank, error)
                return False
        return True

    def _deadline(self, rank: VirtualRank, wait_id: int) -> None:
        work = rank.waiting
        if work is not None and rank.wait_id == wait_id and rank.state == RUNNING and not work.done:
            self.lost(rank, work.failed or "deadline")

    def wake(self, work: VirtualWork) -> None:
        rank = self.ranks[work.rank]
        if rank.waiting is work:
            wait_id = rank.wait_id
            self.soon(rank, lambda: self.advance(rank) if self._ready(rank, wait_id) else None)

    # ---- failures ----------------------------------------------------------------------------------------------
    def _strikes(self, rank: VirtualRank) -> bool:
        """Apply the fault that is due here; True if the rank does not go on by itself."""
        fault = self.faults.pop((rank.number, rank.waits), None)
        if fault is None:
            return False
        if fault.kind != "corrupt":
            self.fault_s = self.now
        pair = (rank.number, fault.peer)
        if fault.kind == "kill":
            self.kill(rank)
        elif fault.kind in ("freeze", "pause"):
            rank.frozen = True
            if fault.kind == "pause":
                self.at(self.now + fault.pause_s, lambda: self.thaw(rank))
            wait_id = rank.wait_id
            rank.inbox.append(lambda: self.advance(rank) if rank.waiting is None or self._ready(rank, wait_id) else None)
        elif fault.kind == "cut":
            self.cut.add(frozenset(pair))
            return False
        elif fault.kind == "slow":
            rate, latency = self.links.get(pair, self.default)
            self.links[pair] = rate * fault.factor, latency
            if self.random.random() < 0.5:
                self.full.add(frozenset(pair))
            return False
        elif fault.kind == "corrupt":
            self.damage.add(pair)
            return False
        elif fault.kind == "exception":
            self.fail(rank, ValueError("planted"))
        elif fault.kind == "exit":
            self.leave(rank, "exited")
        elif fault.kind == "late":
            rank.log.place = -1, -1, False, False
            rank.state = "busy" if rank.state == RUNNING else rank.state
        return fault.kind != "late" or rank.state == "busy"

    def kill(self, rank: VirtualRank) -> None:
        if rank.state == KILLED:
            return
        self.close(rank)
        rank.state = KILLED
        for peer in self.ranks:
            if peer is not rank and frozenset((rank.number, peer.number)) not in self.cut:
                self.at(self.wire(rank.number, peer.number), lambda peer=peer: self.to(peer, lambda: self._gone(rank, peer)))  # type: ignore[misc]

    def _gone(self, rank: VirtualRank, peer: VirtualRank) -> None:
        peer.agreement.closed(self.now, rank.number)
        self.deal(peer)

    def thaw(self, rank: VirtualRank) -> None:
        rank.frozen = False
        inbox, rank.inbox = rank.inbox, []
        for what in inbox:
            self.to(rank, what)

    def leave(self, rank: VirtualRank, state: str) -> None:
        """The process ends in good order: it says so, then its connections end."""
        view = self._look(rank.number)
        view.state, view.final = state, True
        for peer in range(self.size):
            if peer != rank.number:
                self.carry(rank, peer, Message(view=view))
        self.kill(rank)

    def lost(self, rank: VirtualRank, why: str) -> None:
        """A wait failed. gloo closes everything after a timeout."""
        rank.state = "judging" if rank.error is None else FAILED
        if why == "deadline":
            self.close(rank)
        rank.agreement.alarm(self.now, why)
        self.deal(rank)

    def fail(self, rank: VirtualRank, error: Exception) -> None:
        rank.state = "judging" if rank.error is None else FAILED
        item = rank.current
        during = f"collective {rank.log.number} ({item.session.op})" if item is not None else "its own work"
        claim: Claim = claim_of(error, rank.number, range(self.size), during)
        rank.agreement.alarm(self.now, "", claim)
        self.deal(rank)

    def _look(self, number: int) -> View:
        rank = self.ranks[number]
        code = rank.current.session.code if rank.current is not None else None
        return view_of(rank.log, number, code, rank.under)  # type: ignore[arg-type]

    def deal(self, rank: VirtualRank) -> None:
        """What the control thread does after every event."""
        agreement = rank.agreement
        out, agreement.out = agreement.out, []
        for peer, message in out:
            self.carry(rank, peer, message)
        if agreement.verdict is not None:
            self.ended(rank, agreement.verdict)
        elif agreement.next_s < float("inf"):
            due = agreement.next_s
            self.at(due, lambda: self.to(rank, lambda: self.tick(rank, due)))

    def tick(self, rank: VirtualRank, due_s: float) -> None:
        if rank.agreement.next_s == due_s:
            rank.agreement.tick(max(self.now, due_s))
            self.deal(rank)

    def carry(self, rank: VirtualRank, peer: int, message: Message) -> None:
        if frozenset((rank.number, peer)) in self.cut:
            return
        other = self.ranks[peer]

        def arrive() -> None:
            other.agreement.receive(self.now, rank.number, msgspec.structs.replace(message))
            self.deal(other)

        self.at(self.wire(rank.number, peer), lambda: self.to(other, arrive))

    def ended(self, rank: VirtualRank, verdict: Verdict) -> None:
        if rank.error is not None:
            return
        rank.error, rank.error_s = error_of(verdict, range(self.size)), self.now
        if rank.state != DONE:
            rank.state = FAILED
        self.close(rank)
