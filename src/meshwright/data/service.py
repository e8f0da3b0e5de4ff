"""A service that prepares batches once for several jobs and sends each to each of them: `meshwright data serve`.

Cite: J. Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training (VLDB 2021, arXiv 2007.06775), section 5.3 (coordinated prep).
Left open by the paper: what happens when the coordinator dies. Ours: it knows nothing that its jobs do not. A job that comes back
to a service that was started again says its epoch and which batches of it came. A batch's random numbers follow from seed, epoch and number, so
the same one is made again.
Deviations: jobs may be on other machines. Batches travel as bytes of tensors, numbers and text (`batch_bytes`): nothing that is received can run.
Invariant: a job that lives gets every batch of an epoch once, whatever worker, job or service is killed. A guard starts a killed service again, with
the same listening socket: nobody is refused meanwhile.
Cost: one process turns over all sockets; a batch is sent from shared memory by the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import FileIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import RunError, UsageError
from .batches import MAX_POLL_S, MIN_SWEEP_S, Batches
from .wire import HEAD, HELLO, MAX_HELLO_BYTES, NEXT, WELCOME, WORD, Hello, seen_of

__all__ = ["guarded", "removed", "serve"]

MAX_GATHER_S = 2.0  # after a service was started again: so long jobs that were there come back before new ones are let in
MAX_SILENT_S = 10.0  # of a connection, before it says which job it is
MAX_IDLE_S = 1.0  # without a job, before a service that serves `once` ends
MAX_AGAIN = 1000  # starts of a service that is killed again and again
ALIVE_S = 5  # of silence before a job's machine is asked whether it is there


@dataclass(eq=False)
class _Job:
    """A connection. `number` in the table, -1: not in yet; `wants`: it asked for a batch; `sends`: which is under way."""

    channel: socket.socket
    come_s: float
    name: str = ""
    number: int = -1
    epoch: int = -1
    seen: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    inside: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    wants: bool = False
    sends: int = -1
    head: bytes = b""
    file: FileIO | None = None
    at: int = 0
    size: int = 0


class _Service:
    def __init__(self, of: Batches, listener: socket.socket, workers: int, staged: int, again: bool) -> None:
        self.of, self.listener, self.staged, self.again = of, listener, staged, again
        self.board = of.board()
        self.jobs: set[_Job] = set()
        self.begun_s = self.swept_s = self.full_s = time.monotonic()
        self.once, self.had = False, False
        self.workers = [of.worker(staged) for _ in range(workers)]
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Until it is killed, or once all have left."""
        pause = 0.0002
        while not (self.once and self._left()):
            busy = False
            for key, events in self.selector.select(pause if any(j.wants and j.sends < 0 for j in self.jobs) else MAX_POLL_S):
                busy = True
                if key.data is None:
                    self._accept()
                    continue
                try:
                    if events & selectors.EVENT_READ:
                        self._read(key.data)
                    if events & selectors.EVENT_WRITE and key.data in self.jobs:
                        self._write(key.data)
                except BlockingIOError:
                    continue
                except (OSError, EOFError, ValueError, msgspec.MsgspecError):
                    self._gone(key.data)
            for job in [j for j in self.jobs if j.hello is not None and j.number < 0]:
                self._join(job)
            for job in [j for j in self.jobs if j.wants and j.sends < 0 and j.number >= 0]:
                busy |= self._give(job)
            if time.monotonic() - self.swept_s > MIN_SWEEP_S:
                self._sweep()
            pause = 0.0002 if busy else min(2 * pause, MAX_POLL_S)

    def _left(self) -> bool:
        now_s = time.monotonic()
        if any(j.number >= 0 for j in self.jobs):
            self.had, self.full_s = True, now_s
        return now_s - self.full_s > (MAX_IDLE_S if self.had else 10 * MAX_SILENT_S if self.again else float("inf"))

    def _sweep(self) -> None:
        self.swept_s = time.monotonic()
        for job in [j for j in self.jobs if j.hello is None and self.swept_s - j.come_s > MAX_SILENT_S]:
            self._gone(job)
        self.workers = [w if w.is_alive() else self.of.worker(self.staged) for w in self.workers]
        with self.board.locked():
            self.board.sweep()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            channel, _ = self.listener.accept()
            channel.setblocking(False)
            if channel.family == socket.AF_INET:
                for option, value in ((socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, ALIVE_S), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
                    channel.setsockopt(socket.IPPROTO_TCP, option, value)
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            job = _Job(channel, time.monotonic())
            self.jobs.add(job)
            self.selector.register(channel, selectors.EVENT_READ, job)

    def _gone(self, job: _Job) -> None:
        """It has left, or was killed: nobody waits for it any more."""
        self.jobs.discard(job)
        self.selector.unregister(job.channel)
        with contextlib.suppress(OSError):
            job.channel.shutdown(socket.SHUT_RDWR)  # workers that were started meanwhile hold it, too
        job.channel.close()
        if job.file is not None:
            job.file.close()
        if job.number >= 0:
            with self.board.locked():
                self.board.leave(job.number)
                if not any(j.number >= 0 for j in self.jobs):
                    self.board.pause()

    def _read(self, job: _Job) -> None:
        data = job.channel.recv(1 << 16)
        if not data:
            raise EOFError
        job.inside += data
        if job.hello is None:
            if len(job.inside) < HELLO.size:
                return
            word, size = HELLO.unpack_from(job.inside)
            if word != WORD or size > MAX_HELLO_BYTES:
                raise ValueError("no job of ours")
            if len(job.inside) < HELLO.size + size:
                return
            job.hello = msgspec.msgpack.decode(bytes(job.inside[HELLO.size : HELLO.size + size]), type=Hello)
            del job.inside[: HELLO.size + size]
        elif len(job.inside) >= NEXT.size:
            (epoch,) = NEXT.unpack_from(job.inside)
            del job.inside[: NEXT.size]
            if job.number < 0 or job.wants or epoch not in (job.epoch, job.epoch + 1) or job.inside:
                raise ValueError("out of turn")
            if epoch > job.epoch:
                with self.board.locked():
                    self.board.jobs[job.number, 3] = epoch
                    self.board.forget(job.number, job.epoch)
                job.epoch, job.seen = epoch, np.zeros(self.of.batches, np.bool_)
            job.wants = True

    def _join(self, job: _Job) -> None:
        hello, now_s = job.hello, time.monotonic()
        assert hello is not None
        if self.again and hello.epoch < 0 and now_s - self.begun_s < MAX_GATHER_S:
            return  # those that were there come first
        why = "its name is taken by a job that lives" if any(j.name == hello.job and j is not job for j in self.jobs if j.number >= 0) else ""
        if not why:
            try:
                back = hello.epoch >= 0
                job.seen = seen_of(hello, self.of.batches) if back else np.zeros(self.of.batches, np.bool_)
                with self.board.locked():
                    job.number = self.board.join(os.getpid(), hello.epoch if back else None, job.seen if back else None)
                    job.epoch = int(self.board.jobs[job.number, 3])
                    self._past(job)
            except UsageError as error:
                why = error.message
            except ValueError:
                why = f"it had other batches than the {self.of.batches} that are served here"
        job.name = hello.job
        text = why.encode()[:4096]
        try:
            job.channel.setblocking(True)
            job.channel.sendall(WELCOME.pack(self.of.batches, max(job.epoch, 0), len(text)) + text)
            job.channel.setblocking(False)
        except OSError:
            why = why or "gone"
        if why:
            self._gone(job)

    def _past(self, job: _Job) -> None:
        """With its last batch it is in the next epoch, as far as the others must wait for it. Under the lock."""
        if job.seen.all():
            self.board.jobs[job.number, 3] = job.epoch + 1

    def _give(self, job: _Job) -> bool:
        """Opens the next batch for it, if one is ready. What it has already is not sent again."""
        none = np.zeros(self.of.batches, np.bool_)
        with self.board.locked():
            if not self.board.begun:
                return False
            while (batch := self.board.next_ready(job.epoch, job.number, none)) is not None and job.seen[batch]:
                self.board.taken(job.epoch, batch, job.number)
            if batch is None:
                return False
            job.file = self.board.file(job.epoch, batch).open("rb", buffering=0)
        job.sends, job.at, job.size = batch, 0, os.fstat(job.file.fileno()).st_size
        job.head = HEAD.pack(job.epoch, batch, job.size)
        self.selector.modify(job.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, job)
        return True

    def _write(self, job: _Job) -> None:
        if job.head:
            job.head = job.head[job.channel.send(job.head) :]
            return
        assert job.file is not None
        if job.at < job.size:
            job.at += os.sendfile(job.channel.fileno(), job.file.fileno(), job.at, job.size - job.at)
        if job.at == job.size:
            job.file.close()
            job.file = None
            job.seen[job.sends] = True
            with self.board.locked():
                self.board.taken(job.epoch, job.sends, job.number)
                self._past(job)
            job.sends, job.wants = -1, False
            self.selector.modify(job.channel, selectors.EVENT_READ, job)


def serve(of: Batches, listener: socket.socket, *, workers: int, staged: int, again: bool = False, once: bool = False) -> None:
    """Serves until it is killed. `again`: a service was here before, whose jobs come back. `once`: until all jobs that came have left."""
    service = _Service(of, listener, workers, staged, again)
    service.once = once
    service.run()


def guarded(runs: Sequence[Callable[[bool], None]], *, ending: Callable[[], bool] = lambda: False) -> int:
    """Runs each `run(again)` in a process of its own, and again when that is killed, until `ending()`, or until one returns; how many were started
    again. They end with this process. Raises: RunError for one that fails."""
    living = {_forked(run, False): run for run in runs}
    again = 0
    try:
        while not ending():
            # One by one: other children of this process are not ours to wait for.
            ended = next((found for x in living if (found := os.waitpid(x, os.WNOHANG))[0]), None)
            if ended is None:
                time.sleep(MAX_POLL_S)
                continue
            run = living.pop(ended[0])
            code = os.waitstatus_to_exitcode(ended[1])
            if code == 0:
                break
            if code > 0 or again >= MAX_AGAIN:
                raise RunError(f"the service ended with exit code {code}", where="data serve", hint="see what it said on stderr")
            again += 1
            living[_forked(run, True)] = run
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return again


def _forked(run: Callable[[bool], None], again: bool) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its guard
        if os.getppid() != guard:  # which was killed before
            os._exit(code)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        run(again)
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def removed(of: Batches) -> None:
    """Takes what waited in shared memory away; workers that were killed may write for a moment more."""
    while of.folder.exists():
        shutil.rmtree(of.folder, ignore_errors=True)
        time.sleep(MAX_POLL_S)
