"""A worker's side: joining a job at a switch, reducing tensors through it, and what is told when that does not go on."""

from __future__ import annotations

import secrets
import select
import time
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import GroupFailed, LinkLost, NotFinite, RankFrozen, RunTimeout, Unsupported, UsageError
from .arithmetic import limb_bits, steps_of
from .control import Aborted, Hop, Join, Leave, Left, Status, Welcome, decode, encode, kind_of
from .doctor import missing_worker
from .frames import ABORT, JOIN, LEAVE, STATUS, signature
from .operators import MODES, NUMBERS_OF
from .protocol import MAX_CHUNK, MAX_WORKERS
from .sockets import Address, inbox, open_socket, outbox
from .worker_loop import (
    CALL,
    CONTROL,
    DONE,
    END,
    FIRST,
    FLOATS,
    LEFT,
    NUMBERS,
    PROGRESS_NS,
    RESENT,
    RESULTS,
    SENT,
    SMOOTH_NS,
    SPLIT,
    WORKER,
    WORLD,
    Tensor,
    collect,
    fresh_flow,
    tensor_of,
)  # fmt: skip

__all__ = ["ARITHMETIC", "Counts", "Seat", "Stream", "ask_status"]

TURN_S = 0.2  # that the loop runs before Python looks round: for an interrupt, and for silence
ASK_S = 0.05  # between two packets that ask to join, to leave or for a status
ARITHMETIC = ("exact", "two-limb", "tree")  # of floats: one 32-bit word per element, two, or a fold of floats in the order of workers


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Who a worker is: `worker` of `children` at this switch, `workers` in the whole job (0: as many).

    `words`: of 32 bits per packet, as the switch has; `slots`: packets in flight; `above`: the way from this switch to the top; `silence_s`: that a
    switch may say nothing; `timeout_s`: that one waits for other workers.
    """

    job: str
    worker: int
    children: int
    workers: int = 0
    words: int = 256
    slots: int = 64
    mode: str = "sum"
    above: tuple[Hop, ...] = ()
    silence_s: float = 3.0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.children <= MAX_WORKERS or not 0 <= self.worker < self.children:
            raise UsageError(f"worker {self.worker} of {self.children}: a switch has 1 to {MAX_WORKERS} workers", where="worker")
        if self.workers and self.workers < self.children:
            raise UsageError(f"the job has {self.workers} workers, this switch {self.children} of them", where="workers")
        if not 1 <= len(self.job) <= 64 or self.slots < 1 or self.words < 2 or self.words % 2:
            raise UsageError("a job has a name of 1 to 64 letters, at least 1 slot, and packets of an even number of words", where="seat")


@dataclass(frozen=True)
class Counts:
    """Of a stream: packets sent, of them sent again; results taken; the smoothed round trip."""

    sent: int
    resent: int
    results: int
    round_trip_s: float


class Stream:
    """Tensors one after the other through a switch. Made by `Stream.join`; all workers make the same calls in the same order."""

    def __init__(self, sock: Any, seat: Seat, welcome: Welcome, nonce: int) -> None:
        self.sock, self.seat, self.nonce, self.world, self.slots = sock, seat, nonce, welcome.world, welcome.slots
        self.workers, self.calls, self.closed = seat.workers or seat.children, 0, False
        self.flow = fresh_flow(welcome.slots, seat.words)
        self.flow.numbers[[WORLD, WORKER]] = self.world, seat.worker
        self.box, self.out = inbox(4 * seat.words), outbox()

    @classmethod
    def join(cls, switch: Address, seat: Seat) -> Self:
        """Wait until all workers of the job have joined. Raises: Unsupported (refused), RunTimeout, LinkLost (no such switch), RunError."""
        sock = open_socket(peer=switch)
        try:
            _compile(seat.words)
            nonce = secrets.randbits(53)
            ask = Join(seat.job, seat.worker, seat.children, seat.workers or seat.children, seat.words, seat.slots, seat.mode, nonce,
                       seat.above)  # fmt: skip
            began = heard = time.monotonic()
            while True:
                now = time.monotonic()
                if now - began > seat.timeout_s:
                    raise _late(sock, seat, f"job {seat.job!r} was not complete after {seat.timeout_s:g} s", switch)
                if now - heard > seat.silence_s:
                    if _status(sock, seat.job, seat.silence_s) is None:
                        raise LinkLost(f"no switch answers at {switch}", hint="start one: meshwright collective aggregator")
                    heard = time.monotonic()
                _send(sock, encode(JOIN, seat.worker, 0, ask))
                for kind, world, packet in _received(sock, ASK_S):
                    if kind == JOIN and (welcome := decode(packet, Welcome)) is not None and welcome.nonce == nonce:
                        return cls(sock, seat, welcome, nonce)
                    if kind == ABORT and not world and (problem := decode(packet, Aborted)) is not None:
                        raise Unsupported(f"the switch refuses: {problem.reason}", where=str(switch), hint="another switch, or hosts alone",
                                          data={"code": problem.code})  # fmt: skip
        except BaseException:
            sock.close()
            raise

    # ---- tensors ---------------------------------------------------------------------------------------------------
    def all_reduce(self, array: NDArray[Any], *, arithmetic: str = "exact") -> NDArray[Any]:
        """Sum a C-contiguous int32 or float32 array over all workers, in place. `arithmetic`: of floats, as in `ARITHMETIC`.

        int32: the sum must fit whatever the others send; float32 `exact`: within n * n * m / 2^31 of the true sum in a packet whose largest magnitude
        is m, and one rounding; `two-limb`: better than any order of float32 additions; `tree`: floats added in the order of workers.
        Raises: UsageError (the stream goes on); Unsupported (overflow, nothing was sent), NotFinite, RankFrozen, LinkLost, GroupFailed: the stream is
        closed, all workers are told, and none has a wrong sum.
        """
        if self.closed:
            raise GroupFailed("the stream is closed", hint="join again")
        coded, split, steps = self._form(array, arithmetic)
        kind = ("int32", *ARITHMETIC).index(arithmetic if array.dtype == np.float32 else "int32")
        if array.size:
            self._send(array.reshape(-1), signature(self.calls, array.size, kind), coded=coded, split=split, steps=steps)
        self.calls += 1
        return array

    def combine(self, array: NDArray[Any]) -> NDArray[Any]:
        """Combine a C-contiguous array over all workers, in place, by the operator that the job's mode names.

        `int8`: int8, saturating sums; `bf16`: the bits of bfloat16 as uint16; `argmax`: `operators.ARGMAX_PAIR`; an operator of the switch's own: its
        type. Raises: UsageError (the stream goes on), NotFinite (`argmax`: what is not a number has no order), and as `all_reduce`.
        """
        if self.closed:
            raise GroupFailed("the stream is closed", hint="join again")
        mode, own = self.seat.mode, self.seat.mode.rpartition(":")[2]
        due = np.dtype(own) if mode.startswith("own:") and own in NUMBERS_OF else MODES[mode].dtype if mode in MODES else None
        if due is None:
            raise UsageError(f"a job of mode {mode!r} sums", where="combine", hint="all_reduce")
        if array.dtype != due or not array.flags.c_contiguous or not array.flags.writeable:
            raise UsageError(f"an array of {array.dtype} where {due}, contiguous and writeable, is due", where="combine")
        if mode == "argmax" and np.isnan(array["value"]).any():
            place = int(np.flatnonzero(np.isnan(array["value"].reshape(-1)))[0])
            problem = Aborted("not-finite", f"element {place} is not a number", self.seat.worker)
            self._give_up(problem)
            raise NotFinite(problem.reason, where=f"worker {self.seat.worker}", data={"element": place})
        if array.size:
            words = np.zeros(-(-array.nbytes // 4), np.int32)  # whole words: what is beyond the array's end is zero on all workers
            words.view(np.uint8)[: array.nbytes] = array.reshape(-1).view(np.uint8)
            self._send(words, signature(self.calls, array.size, len(ARITHMETIC) + 1))
            array.reshape(-1).view(np.uint8)[:] = words.view(np.uint8)[: array.nbytes]
        self.calls += 1
        return array

    def _send(self, flat: NDArray[Any], call: int, *, coded: bool = False, split: int = 0, steps: float = 0.0) -> None:
        """One tensor of whole words through the switch. Raises: as `all_reduce`."""
        numbers, each = self.flow.numbers, self.seat.words // (2 if split else 1)
        chunks = -(-flat.size // each) + (self.slots if coded else 0)
        first = int(numbers[END])
        if first + chunks >= MAX_CHUNK:
            raise Unsupported(f"a stream has at most {MAX_CHUNK} chunks", hint="join again")
        tensor = tensor_of(flat)
        numbers[[FIRST, END, LEFT, SPLIT]] = first, first + chunks, chunks, split
        numbers[CALL] = call
        self.flow.at[3:5] = flat.ctypes.data, int(steps)
        self.flow.agreed[:] = 0
        self._collect(tensor, FLOATS if coded else NUMBERS)

    def _form(self, array: NDArray[Any], arithmetic: str) -> tuple[bool, int, float]:
        """(in steps of a common exponent, bits of the lower of two words, steps of a block). Refuses what has no right sum."""
        if array.dtype not in (np.int32, np.float32) or not array.flags.c_contiguous or not array.flags.writeable:
            raise UsageError(f"an array of {array.dtype} where int32 or float32, contiguous and writeable, is due", where="all_reduce")
        if arithmetic not in ARITHMETIC:
            raise UsageError(f"no arithmetic {arithmetic!r}", where="arithmetic", hint=", ".join(ARITHMETIC))
        tree = array.dtype == np.float32 and arithmetic == "tree"
        if tree != (self.seat.mode == "tree") or self.seat.mode not in ("sum", "tree"):
            hint = "floats as 'tree' need mode='tree', and alone; operators: combine"
            raise UsageError(f"a job of mode {self.seat.mode!r} cannot", where="arithmetic", hint=hint)
        if array.dtype == np.int32:
            most = max(int(array.max(initial=0)), -int(array.min(initial=0)))
            if most > (2**31 - 1) // self.workers:
                problem = Aborted("overflow", f"{most} from each of {self.workers} workers leaves 32 bits", self.seat.worker)
                self._give_up(problem)
                raise Unsupported(problem.reason, where=f"worker {self.seat.worker}", hint="smaller numbers, or hosts alone")
            return False, 0, 0.0
        if not np.isfinite(array).all():
            place = int(np.flatnonzero(~np.isfinite(array.reshape(-1)))[0])
            problem = Aborted("not-finite", f"element {place} is {array.reshape(-1)[place]}", self.seat.worker)
            if not tree:
                self._give_up(problem)
                hint = "arithmetic='tree' adds it as floats do"
                raise NotFinite(problem.reason, where=f"worker {self.seat.worker}", hint=hint, data={"element": place})
        limbs = {"exact": 1, "two-limb": 2, "tree": 0}[arithmetic]
        return (False, 0, 0.0) if tree else (True, limb_bits(self.workers, limbs), steps_of(self.workers, limbs))

    def _collect(self, tensor: Tensor, how: int) -> None:
        fd, begin, numbers = self.sock.fileno(), True, self.flow.numbers
        asked = time.monotonic()
        while True:
            self.flow.control[0] = 0
            why = collect(fd, self.box, self.out, self.flow, tensor, how, begin, time.monotonic_ns() + int(TURN_S * 1e9))
            begin = False
            if why == DONE:
                return
            if why == CONTROL:
                packet = self.flow.control[1:].tobytes()[: int(self.flow.control[0])]
                self._hear(packet)
                continue
            now, since = time.monotonic(), (time.monotonic_ns() - int(numbers[PROGRESS_NS])) / 1e9
            if since > self.seat.silence_s and now - asked > self.seat.silence_s:
                asked = now
                self._examine(since)

    def _hear(self, packet: bytes) -> None:
        about = kind_of(packet)
        if about is not None and about[0] == ABORT and about[2] == self.world and (problem := decode(packet, Aborted)) is not None:
            self._close()
            data = {"code": problem.code, "worker": problem.worker}
            at_fault = f" (worker {problem.worker})" if problem.worker >= 0 else ""
            said = f"the switch gave the job up: {problem.reason}{at_fault}"
            raise GroupFailed(said, where=self.seat.job, hint="join again, or hosts alone", data=data)

    def _examine(self, since_s: float) -> None:
        """Nothing has come for long: is it the switch, or a worker?"""
        found = _status(self.sock, self.seat.job, self.seat.silence_s, self._hear)
        if found is None:
            self._close()
            raise LinkLost(f"the switch has said nothing for {since_s:.1f} s", where=self.seat.job, hint="hosts alone, or another switch",
                           data={"silent_s": since_s})  # fmt: skip
        if since_s < self.seat.timeout_s or not found.jobs:
            return
        missing, slot = missing_worker(found.jobs[0])
        problem = Aborted("frozen", f"slot {slot} has waited {since_s:.1f} s for worker {missing}", missing)
        self._give_up(problem)
        raise RankFrozen(problem.reason, where=self.seat.job, hint="`meshwright run doctor --aggregator ADDRESS` shows every slot",
                         data={"worker": missing, "slot": slot})  # fmt: skip

    # ---- the end ---------------------------------------------------------------------------------------------------
    def _give_up(self, problem: Aborted) -> None:
        for _ in range(3):  # nobody answers; others that miss it ask again, and are told then
            _send(self.sock, encode(ABORT, self.seat.worker, self.world, problem))
        self._close()

    def abandon(self, reason: str) -> None:
        """Give the job up: all its workers are told."""
        if not self.closed:
            self._give_up(Aborted("left", reason, self.seat.worker))

    def _close(self) -> None:
        self.closed = True
        self.sock.close()

    def close(self) -> None:
        """Wait until every worker has all its results: until then a lost one must be there to be sent again.

        Raises: LinkLost, GroupFailed, RunTimeout.
        """
        if self.closed:
            return
        began = heard = time.monotonic()
        try:
            while True:
                now = time.monotonic()
                if now - heard > self.seat.silence_s:
                    raise LinkLost("the switch does not answer", where=self.seat.job, hint="hosts alone")
                if now - began > self.seat.timeout_s:
                    raise RunTimeout(f"some workers had not finished after {self.seat.timeout_s:g} s", where=self.seat.job, hint="run doctor")
                _send(self.sock, encode(LEAVE, self.seat.worker, self.world, Leave(self.nonce)))
                for kind, world, packet in _received(self.sock, ASK_S):
                    if world == self.world and kind == LEAVE and (left := decode(packet, Left)) is not None:
                        heard = time.monotonic()
                        if left.over:
                            return
                    elif kind == ABORT:
                        self._hear(packet)
        finally:
            if not self.closed:
                self._close()

    @property
    def counts(self) -> Counts:
        n = self.flow.numbers
        return Counts(int(n[SENT]), int(n[RESENT]), int(n[RESULTS]), int(n[SMOOTH_NS]) / 1e9)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon("it ended with an error")


def ask_status(switch: Address, *, job: str = "", timeout_s: float = 3.0) -> Status:
    """What a switch says of itself. Raises: LinkLost."""
    sock = open_socket(peer=switch)
    try:
        found = _status(sock, job, timeout_s)
    finally:
        sock.close()
    if found is None:
        raise LinkLost(f"no switch answers at {switch}", where=str(switch), hint="is it the address that the aggregator listens on?")
    return found


def _status(sock: Any, job: str, timeout_s: float, hear: Any = None) -> Status | None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        _send(sock, encode(STATUS, 0, 0, Status(job)))
        for kind, _, packet in _received(sock, 2 * ASK_S):
            if kind == STATUS and (found := decode(packet, Status)) is not None:
                return found
            if hear is not None:
                hear(packet)
    return None


def _late(sock: Any, seat: Seat, what: str, switch: Address) -> RunTimeout:
    found = _status(sock, seat.job, 1.0)
    joined = f"{found.jobs[0].joined} of {seat.children} workers have joined" if found and found.jobs else "the switch knows nothing of it"
    return RunTimeout(f"{what}: {joined}", where=str(switch), hint="start the others, or check their job, worker and children")


def _send(sock: Any, packet: bytes) -> None:
    try:
        sock.send(packet)
    except OSError:  # an error that an earlier packet met; it is sent again
        return


def _received(sock: Any, wait_s: float) -> list[tuple[int, int, bytes]]:
    """Control messages that come within some time: (kind, world, packet); at the first, no longer."""
    if not select.select([sock], [], [], wait_s)[0]:
        return []
    found = []
    for _ in range(256):
        try:
            packet = sock.recv(1 << 16, 0x40)  # MSG_DONTWAIT
        except OSError:
            break
        if (about := kind_of(packet)) is not None and about[0] >= JOIN:
            found.append((about[0], about[2], packet))
    return found


def _compile(words: int) -> None:
    """Load the loop before the first packet: a worker that compiles while others send costs them their patience."""
    collect(-1, inbox(4 * words), outbox(), fresh_flow(1, words), tensor_of(np.zeros(0, np.int32)), NUMBERS, True, 0)
