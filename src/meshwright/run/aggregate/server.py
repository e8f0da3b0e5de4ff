"""The switch as a process: who may use which slots, when a job begins and ends, what is wrong with it. The packets themselves: `switch_loop`."""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
import numpy as np

from ...errors import UsageError
from ...kernels.sparse_block import made_blocks
from .control import Aborted, Join, Leave, Left, Status, StatusJob, StatusSlot, Welcome, decode, encode, kind_of
from .frames import ABORT, CONTRIBUTION, JOIN, LEAVE, MAX_CONTROL_BYTES, STATUS
from .held_job import Job
from .injector import Injector, injector
from .operators import MODES, OWN, Mode, Operator, nothing
from .protocol import MAX_WORKERS, first_chunk
from .sockets import Address, address_of, inbox, open_socket, outbox, parse_address
from .sparse_rounds import MIN_WORDS, SPARSE, span_of
from .switch_loop import (
    ABORTED,
    BLAMED,
    COUNTERS,
    FIRST_POOL,
    FIRST_ROW,
    FOLDS,
    FREE,
    KIND,
    MAX_CONTROLS,
    MAX_JOBS,
    PARENT_WORKER,
    PARENT_WORLD,
    POOL_STEP,
    RUNNING,
    SLOTS,
    SPAN,
    STATE,
    WORKERS,
    WORLD,
    Controls,
    Jobs,
    Rows,
    serve,
)  # fmt: skip

__all__ = ["Aggregator"]

MAX_SLOTS, MAX_WORDS = 1 << 16, 2048  # of a switch; of a packet: 8 KiB, which frames of 9,000 bytes carry
MAX_BLOCKS, MAX_SPAN = 512, 1 << 16  # slots that sparse jobs may have, whose memory is taken when the first begins; indices of a block
TURN_S = 0.05  # that the loop runs before Python looks round
MIN_QUIET_S = 600.0  # of a job until another may have its slots
MAX_TOLD_JOBS = 3  # that hold slots, to one for whom there are none
GONE_S = 2.0  # since a worker that waits for the others asked last, twenty times a second: it has given up, or asks again and is back
MIN_ASK_S = 0.05  # between two packets that ask the switch above
LEAVES = 3  # times that the switch above is told of a job's end: nobody waits for its answer
MAX_TOLD = 5  # slots that a status names per job
MAX_ENDED = 256  # jobs that have ended well and whose workers may still ask


class Aggregator:
    """A switch with so many slots of so many 32-bit words, listening; `own`: an operator beside those of `MODES`; for sparse jobs: indices that a
    block may have, and places of its table where another switch is above.

    Raises: UsageError, PortInUse, Unsupported.
    """

    def __init__(
        self, listen: Address, *, slots: int = 512, words: int = 256, span: int = 1 << 14, places: int = 1 << 12, faults: Injector | None = None,
        own: Operator | None = None,
    ) -> None:  # fmt: skip
        limits = (("slots", slots, MAX_SLOTS), ("words", words, MAX_WORDS), ("span", span, MAX_SPAN), ("places", places, MAX_SPAN))
        for what, value, most in limits:
            if not 1 <= value <= most:
                raise UsageError(f"must be 1..{most}, got {value}", where=f"--{what}")
        self.slots, self.words, self.span, self.places = slots, words, span, places
        self.modes = MODES | ({own.mode: Mode(OWN, not own.order_free)} if own else {})
        self.sock = open_socket(listen=listen)
        self.address = Address(*self.sock.getsockname())
        rows = 2 * slots
        headers, pool = np.zeros((rows, 2), np.int64), np.zeros((rows, words), np.int32)
        names = np.zeros((MAX_JOBS, MAX_WORKERS + 1, 2), np.int64)
        at = np.array([headers.ctypes.data, pool.ctypes.data, names.ctypes.data, 4 * words])
        chunk, seen, size, call, exponent, sent_ns, tries = (np.zeros(rows, np.int64) for _ in range(7))
        self.rows = Rows(chunk, seen, np.zeros(rows, np.uint8), headers, size, call, exponent, np.full(rows, -1), sent_ns, tries, pool,
                         at, made_blocks(0, span=1, places=1, waiting=1))  # fmt: skip
        self.jobs = Jobs(
            np.zeros((MAX_JOBS, BLAMED + 1), np.int64), names, np.zeros((MAX_JOBS, MAX_WORKERS + 1), np.int64), np.zeros(len(COUNTERS), np.int64),
            own.loop if own else nothing,
        )  # fmt: skip
        self.controls = Controls(
            np.zeros((MAX_CONTROLS, MAX_CONTROL_BYTES // 8), np.int64), np.zeros(MAX_CONTROLS, np.int64), np.zeros((MAX_CONTROLS, 2), np.int64),
            np.zeros(2, np.int64),
        )  # fmt: skip
        self.box, self.out, self.faults = inbox(4 * words), outbox(), faults or injector(4 * words)
        self.known: dict[str, Job] = {}
        self.ended: deque[int] = deque(maxlen=MAX_ENDED)
        self.turn(0)  # compiles: before the first packet, or workers send all they have again and again meanwhile

    # ---- the loop --------------------------------------------------------------------------------------------------
    def serve(self, stop: Callable[[], bool]) -> None:
        """Until `stop()` says so, which is asked some 20 times a second."""
        while not stop():
            self.turn(TURN_S)

    def turn(self, seconds: float) -> None:
        """Serve for so long, or until there was a control message."""
        serve(self.sock.fileno(), self.box, self.rows, self.jobs, self.out, self.controls, self.faults, time.monotonic_ns() + int(seconds * 1e9))
        for i in range(int(self.controls.state[0])):
            packet = self.controls.words[i].tobytes()[: int(self.controls.size[i])]
            self._hear(packet, self.controls.names[i].tobytes())
        if self.controls.state[1]:
            for job in list(self.known.values()):
                if self.jobs.table[job.number, STATE] == ABORTED and job.problem is None:
                    blamed = int(self.jobs.table[job.number, BLAMED])
                    self._abort(job, Aborted("mismatch", "its call differs from that of the others (elements, dtype or mode)", blamed))
        self.controls.state[:] = 0
        for job in self.known.values():
            if job.above is not None and len(job.nonces) == job.ask.children and not job.welcomed and job.problem is None:
                self._ask_above(job)

    def close(self) -> None:
        """Workers that still wait are told."""
        for job in self.known.values():
            self._tell(job, Aborted("closed", "the switch has ended"))
        self.sock.close()

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- control messages ------------------------------------------------------------------------------------------
    def _hear(self, packet: bytes, name: bytes) -> None:
        """`name`: the sender's address as the kernel has it."""
        about = kind_of(packet)
        if about is None:
            return
        kind, worker, world = about
        if kind == JOIN and (welcome := decode(packet, Welcome)) is not None:
            self._welcome_from_above(welcome, name)
        elif kind == JOIN and (join := decode(packet, Join)) is not None:
            self._join(join, name)
        elif kind == STATUS and (status := decode(packet, Status)) is not None:
            self._say(STATUS, 0, 0, self.status(status.asked), name)
        elif kind in (CONTRIBUTION, ABORT) or (kind == LEAVE and decode(packet, Leave) is not None):  # not what the switch above answers to ours
            self._of_job(kind, worker, world, packet, name)

    def _of_job(self, kind: int, worker: int, world: int, packet: bytes, name: bytes) -> None:
        if kind == ABORT and (problem := decode(packet, Aborted)) is not None:
            of = [j for j in self.known.values() if j.problem is None and j.above_name == name]
            told = [j for j in of if (int(self.jobs.table[j.number, PARENT_WORLD]) if j.welcomed else 0) == world]
            for below in told:
                self._abort(below, problem, from_above=True)
            if told:
                return
        job = next((j for j in self.known.values() if j.world == world), None)
        if job is None:
            if world in self.ended:  # what is not LEAVE was sent twice, and all have what they want
                if kind == LEAVE:
                    self._say(LEAVE, 0, world, Left(0, True), name)
            elif kind != ABORT:
                reason = "the switch does not know this job: it was started again, or gave its slots away"
                self._say(ABORT, 0, world, Aborted("unknown", reason), name)
            return
        if job.names.get(worker) != name:
            return
        if job.problem is not None:
            self._say(ABORT, 0, world, job.problem, name)
        elif kind == ABORT and (problem := decode(packet, Aborted)) is not None:
            self._abort(job, problem)
        elif kind == LEAVE:
            job.left.add(worker)
            over = len(job.left) == job.ask.children
            self._say(LEAVE, 0, world, Left(len(job.left), over), name)
            if over:
                self._end(job)

    def _say(self, kind: int, worker: int, world: int, message: Any, name: bytes) -> None:
        address = address_of(np.frombuffer(name, np.int64))
        try:
            self.sock.sendto(encode(kind, worker, world, message), socket.MSG_DONTWAIT, (address.host, address.port))
        except OSError:  # it will ask again
            return

    # ---- jobs ------------------------------------------------------------------------------------------------------
    def _join(self, ask: Join, name: bytes) -> None:
        refusal = self._refusal(ask)
        if refusal is not None:
            self._say(ABORT, 0, 0, refusal, name)
            return
        job = self.known.get(ask.job)
        if job is not None and not job.welcomed:
            job.forget_before(time.monotonic() - GONE_S)
        again = job is not None and job.nonces.get(ask.worker, ask.nonce) != ask.nonce
        if job is not None and (job.problem is not None or (again and self._quiet_s(job) > MIN_QUIET_S)):
            self._end(job)
            job = None
        if job is None:
            job = self._begin(ask)
            if job is None:
                self._say(ABORT, 0, 0, Aborted("no-slots", f"{self._free()} of {self.slots} slots are free{self._holders()}"), name)
                return
        same = msgspec.structs.replace(ask, worker=0, slots=0, nonce=0) == msgspec.structs.replace(job.ask, worker=0, slots=0, nonce=0)
        if not same or job.nonces.get(ask.worker, ask.nonce) != ask.nonce:
            other = f"it runs already, with another such worker, {self._heard(job)}: take another name, or wait"
            reason = other if same else "others joined it with other figures"
            self._say(ABORT, 0, 0, Aborted("refused", f"job {ask.job!r}: {reason}", ask.worker), name)
            return
        job.asked_at[ask.worker] = time.monotonic()
        if not job.welcomed and ask.worker not in job.nonces:
            job.slots = min(job.slots, ask.slots)
            job.nonces[ask.worker], job.names[ask.worker] = ask.nonce, name
            self.jobs.names[job.number, ask.worker] = np.frombuffer(name, np.int64)
        if job.welcomed:
            self._say(JOIN, ask.worker, job.world, Welcome(ask.nonce, job.world, job.slots), name)
        elif len(job.nonces) == ask.children and job.above is None:
            self._start(job, -1)

    def _refusal(self, ask: Join) -> Aborted | None:
        if not 1 <= ask.children <= MAX_WORKERS or not 0 <= ask.worker < ask.children or ask.workers < ask.children or ask.slots < 1:
            return Aborted("refused", f"worker {ask.worker} of {ask.children}: a switch has 1 to {MAX_WORKERS} workers", ask.worker)
        if ask.words != self.words:
            return Aborted("refused", f"packets of {ask.words} words; this switch has slots of {self.words}", ask.worker)
        try:
            for hop in ask.above:
                parse_address(hop.address, "above")
        except UsageError as error:
            return Aborted("refused", f"the switch above: {error.message}")
        mode = self._mode(ask.mode)
        if mode is None:
            least = f"packets of {MIN_WORDS} words or more" if self.words < MIN_WORDS else f"blocks of 1 to {self.span}"
            return Aborted("refused", f"no mode {ask.mode[:48]!r}; there are {', '.join(self.modes)}, and sparse:SPAN with {least}", ask.worker)
        last = all(hop.worker == hop.children - 1 for hop in ask.above)
        if mode.folds and mode.kind != SPARSE and not last and ask.children & (ask.children - 1):
            return Aborted("refused", f"{ask.children} workers below another switch: a fold needs a power of two, but for the last", ask.worker)
        return None

    def _mode(self, name: str) -> Mode | None:
        """None: this switch has none of that name."""
        if 1 <= span_of(name) <= self.span and self.words >= MIN_WORDS:
            return Mode(SPARSE, True)
        return self.modes.get(name)

    def _used(self) -> list[tuple[int, int]]:
        """Slots that jobs have, as (first, end). A job that has failed is known for its reason only: the loop serves it no more."""
        return sorted((int(self.jobs.table[j.number, FIRST_POOL]) // 2, int(self.jobs.table[j.number, FIRST_POOL]) // 2 + j.cost)
                      for j in self.known.values() if j.problem is None)  # fmt: skip

    def _free(self) -> int:
        return self.slots - sum(end - first for first, end in self._used())

    def _heard(self, job: Job) -> str:
        return f"last heard {self._quiet_s(job):.0f} s ago, of the {MIN_QUIET_S:.0f} s that a job may be quiet"

    def _holders(self) -> str:
        """Who has the slots, quiet ones first: their workers may have died without a word."""
        most = sorted((j for j in self.known.values() if j.problem is None), key=lambda j: -self._quiet_s(j))[:MAX_TOLD_JOBS]
        return "".join(f"; job {j.name!r} has {j.cost}, {self._heard(j)}" for j in most)

    def _begin(self, ask: Join) -> Job | None:
        """A place and slots for a new job; None where there are none, not even those of jobs that were quiet for long."""
        for quiet in sorted(self.known.values(), key=lambda job: (job.problem is None, -self._quiet_s(job))):
            if (self._gap(ask) and len(self.known) < MAX_JOBS) or (quiet.problem is None and self._quiet_s(quiet) < MIN_QUIET_S):
                break
            self._end(quiet)
        gap = self._gap(ask)
        number = next((i for i in range(MAX_JOBS) if all(j.number != i for j in self.known.values())), None)
        if number is None or gap is None:
            return None
        mode = self._mode(ask.mode)
        assert mode is not None  # not refused
        job = Job(ask.job, ask, mode, number, secrets.randbits(32), gap[1])
        table = self.jobs.table[number]
        table[:] = 0
        table[[WORLD, WORKERS, KIND, FOLDS, PARENT_WORLD]] = job.world, ask.children, mode.kind, mode.folds, -1
        table[[FIRST_ROW, FIRST_POOL, POOL_STEP, SPAN]] = 2 * gap[0], 2 * gap[0], ask.children if mode.folds else 1, span_of(ask.mode)
        if mode.kind == SPARSE and not len(self.rows.blocks.state):
            room = (2 * MAX_WORKERS + 2) * self.words  # pairs that may wait: of two rounds, and of one packet
            made = made_blocks(min(self.slots, MAX_BLOCKS), span=self.span, places=self.places, waiting=room)
            self.rows = self.rows._replace(blocks=made)
        self.jobs.heard[number] = time.monotonic_ns()
        self.known[ask.job] = job
        return job

    def _gap(self, ask: Join) -> tuple[int, int] | None:
        """(first slot, how many, as asked or fewer) in the largest free stretch. A tree's rows lie at its beginning, its memory all over it."""
        mode = self._mode(ask.mode)
        each = ask.children if mode is not None and mode.folds else 1
        most_rows = MAX_BLOCKS if mode is not None and mode.kind == SPARSE else self.slots
        at, gaps = 0, []
        for first, end in [*self._used(), (self.slots, self.slots)]:
            gaps.append((min((first - at) // each, ask.slots, most_rows - at), -at))
            at = end
        most, first = max(gaps)
        return (-first, most) if most > 0 else None

    def _start(self, job: Job, parent_world: int) -> None:
        """All are here: fresh rows, and everyone is told."""
        table, rows = self.jobs.table[job.number], self.rows
        first, count = int(table[FIRST_ROW]), 2 * job.slots
        for i in range(count):
            rows.chunk[first + i] = first_chunk.py_func(i, job.slots)
        for column in (rows.seen, rows.ready, rows.size, rows.call, rows.exponent, rows.sent_ns, rows.tries):
            column[first : first + count] = 0
        rows.queued[first : first + count] = -1
        if job.mode.kind == SPARSE:
            own = slice(first // 2, first // 2 + job.slots)
            rows.blocks.keys[own], rows.blocks.array[own], rows.blocks.state[own] = -1, 0, 0
        table[SLOTS], table[PARENT_WORLD] = job.slots, parent_world
        if job.above is not None:
            table[PARENT_WORKER] = job.above.worker
            self.jobs.names[job.number, MAX_WORKERS] = np.frombuffer(job.above_name, np.int64)
        self.jobs.heard[job.number] = time.monotonic_ns()
        table[STATE], job.welcomed = RUNNING, True
        for worker, name in job.names.items():
            self._say(JOIN, worker, job.world, Welcome(job.nonces[worker], job.world, job.slots), name)

    def _ask_above(self, job: Job) -> None:
        assert job.above is not None
        now = time.monotonic()
        if now - job.asked_s < MIN_ASK_S:
            return
        job.asked_s = now
        hop = job.above
        ask = Join(job.name, hop.worker, hop.children, job.ask.workers, self.words, job.slots, job.ask.mode, job.world, job.ask.above[1:])
        self._say(JOIN, hop.worker, 0, ask, job.above_name)

    def _welcome_from_above(self, welcome: Welcome, name: bytes) -> None:
        job = next((j for j in self.known.values() if j.world == welcome.nonce), None)
        if job is None or job.welcomed or name != job.above_name or not 1 <= welcome.slots <= job.slots:
            return
        job.slots = welcome.slots
        self._start(job, welcome.world)

    def _abort(self, job: Job, problem: Aborted, *, from_above: bool = False) -> None:
        job.problem = problem
        above = int(self.jobs.table[job.number, PARENT_WORLD])
        self.jobs.table[job.number, STATE] = ABORTED
        if above >= 0 and not from_above and job.above is not None:
            self._say(ABORT, job.above.worker, above, problem, job.above_name)
        self._tell(job, problem)

    def _tell(self, job: Job, problem: Aborted) -> None:
        for worker, name in job.names.items():
            self._say(ABORT, worker, job.world, problem, name)

    def _end(self, job: Job) -> None:
        above = int(self.jobs.table[job.number, PARENT_WORLD])
        if job.problem is None and above >= 0 and job.above is not None:
            for _ in range(LEAVES):
                self._say(LEAVE, job.above.worker, above, Leave(job.world), job.above_name)
        if job.problem is None:
            self.ended.append(job.world)
        self.jobs.table[job.number, STATE] = FREE
        del self.known[job.name]

    # ---- how far everyone is ---------------------------------------------------------------------------------------
    def _quiet_s(self, job: Job) -> float:
        if not job.welcomed and time.monotonic() - max(job.asked_at.values(), default=0.0) > GONE_S:
            return inf
        return (time.monotonic_ns() - int(self.jobs.heard[job.number, : job.ask.children].max())) / 1e9

    def status(self, asked: str = "") -> Status:
        """Of all jobs, or of one."""
        jobs = [self._job_status(j) for j in self.known.values() if asked in ("", j.name)]
        found = Status(asked, self.slots, self._free(), self.words, jobs, dict(zip(COUNTERS, map(int, self.jobs.counters), strict=True)))
        while len(msgspec.json.encode(found)) > MAX_CONTROL_BYTES - 32 and found.jobs:
            found.jobs.pop()
        return found

    def _job_status(self, job: Job) -> StatusJob:
        now, n = time.monotonic_ns(), job.ask.children
        first, everyone = int(self.jobs.table[job.number, FIRST_ROW]), (1 << n) - 1
        waits = []
        for row in range(first, first + 2 * job.slots) if job.welcomed else ():
            seen = int(self.rows.seen[row])
            if seen and not self.rows.ready[row]:
                missing = [w for w in range(n) if not seen >> w & 1]
                waits.append(StatusSlot((row - first) // 2, int(self.rows.chunk[row]), missing, seen == everyone))
        waits.sort(key=lambda w: w.chunk)
        silent = [round((now - int(x)) / 1e9, 3) for x in self.jobs.heard[job.number, :n]]
        state = "over" if job.problem is not None else "running" if job.welcomed else "joining"
        return StatusJob(job.name, n, len(job.nonces), job.slots, job.ask.mode, state, waits[:MAX_TOLD], silent)
