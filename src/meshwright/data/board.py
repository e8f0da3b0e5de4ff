"""What some jobs of one machine know of the batches that they share: one 64-bit word a batch, in a file that all of them map.

Every change of a batch is one store of its word, made under a lock of the kernel's (`flock`). A process that is killed leaves the word as it was or
as it should be, and the kernel takes the lock back. So no coordinator can be lost, and nothing is to be repaired but words that name the dead:

    free -> claimed (by a producer) -> ready (a file holds the batch; bits say which jobs have not taken it) -> done (all have; the file is gone)
           a claim of a dead producer is free again; a dead job's bits are taken out
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError, UsageError
from ..run.machine.cpu_quota import process_start_ticks

__all__ = ["MAX_JOBS", "Board"]

FREE, CLAIMED, READY, DONE = range(4)
MAX_JOBS = 32  # bits of a word
WINDOW = 3  # epochs that jobs may be apart, and one more
MAGIC = 0x6D775F626F617264  # "mw_board"
HEAD = 8  # words: magic, batches, fingerprint, jobs wanted, begun
JOB = 4  # words of a job: pid, start time, first epoch, the epoch it is in
_MASK = (1 << MAX_JOBS) - 1
_PID_BITS = 22  # Linux: at most 4 million processes


class Board:
    """The table of a folder. Every process opens its own: a lock belongs to whoever opened the file.

    `pid`: the job that joins (`number` is its place); a worker gives none. A table in which nobody lives is made anew, unless it need not be `fresh`.
    Raises: UsageError for a job that shares other batches than the living, or one too many; RunError where shared memory is full.
    """

    def __init__(self, folder: Path, batches: int, fingerprint: int, jobs: int, pid: int = 0, *, fresh: bool = True) -> None:
        self.folder, self.batches, self._fresh = folder, batches, fresh
        self._facts = (batches, fingerprint, jobs)
        while True:
            with self._room():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fd = os.open(folder / "board", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                with self.locked(), self._room():
                    if not self._removed():
                        self._begin()
                        self.number = self.join(pid) if pid else -1
                        return
                os.close(self._fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(self._fd)
                raise

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Raises: RunError where the file system is full."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            size, free = 8 * self._words, shutil.disk_usage(self.folder.parent).free
            raise RunError(
                f"the table of {self.batches} batches takes {size} bytes of shared memory, {free} are free", where=str(self.folder),
                hint="remove what lies in /dev/shm, or give it more room (mount -o remount,size=..., docker run --shm-size)",
                data={"needed_bytes": size, "free_bytes": free},
            ) from None  # fmt: skip

    @property
    def _words(self) -> int:
        return HEAD + MAX_JOBS * JOB + WINDOW * (self.batches + 1)

    def _removed(self) -> bool:
        """Whether the last job took the folder away while this process waited for the lock."""
        try:
            return os.fstat(self._fd).st_ino != (self.folder / "board").stat().st_ino
        except FileNotFoundError:
            return True

    def _begin(self) -> None:
        words = self._words
        data = os.pread(self._fd, 8 * (HEAD + MAX_JOBS * JOB), 0)
        found = np.frombuffer(data, np.int64) if len(data) == 8 * (HEAD + MAX_JOBS * JOB) else np.zeros(HEAD + MAX_JOBS * JOB, np.int64)
        jobs = found[HEAD:].reshape(MAX_JOBS, JOB)
        living = found[0] == MAGIC and (not self._fresh or any(row[0] and _lives(row) for row in jobs))
        if living and tuple(map(int, found[1:4])) != self._facts:
            raise UsageError(
                f"jobs that share batches under this name have {found[1]} of them, for {found[3]} jobs; this one has {self._facts[0]}, for "
                f"{self._facts[2]}, or another dataset, batch size, seed or transform", where=self.folder.name,
                hint="give jobs that differ different names",
                data={"batches": [int(found[1]), self._facts[0]], "jobs": [int(found[3]), self._facts[2]]},
            )  # fmt: skip
        if not living:
            os.ftruncate(self._fd, 8 * words)
            for path in self.folder.iterdir():
                if path.name != "board":
                    path.unlink(missing_ok=True)
            try:
                os.posix_fallocate(self._fd, 0, 8 * words)  # full shared memory is an error here, not a SIGBUS where a word is written
            except OSError:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise
        self._map = mmap.mmap(self._fd, 8 * words)
        self._all: NDArray[np.int64] = np.frombuffer(self._map, np.int64)
        self.jobs: NDArray[np.int64] = self._all[HEAD : HEAD + MAX_JOBS * JOB].reshape(MAX_JOBS, JOB)
        self._ring: NDArray[np.int64] = self._all[HEAD + MAX_JOBS * JOB :].reshape(WINDOW, self.batches + 1)
        if not living:
            self._all[:] = 0
            self._ring[:, 0] = -1
            self._all[1:4] = self._facts
            self._all[0] = MAGIC

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        self._all = self.jobs = self._ring = np.zeros(0, np.int64)  # nothing may point into the map
        self._map.close()
        os.close(self._fd)

    # ---- jobs; all of these under the lock ---------------------------------------------------------------------
    def join(self, pid: int, epoch: int | None = None, seen: NDArray[np.bool_] | None = None) -> int:
        """A place for this job; its first epoch is one that nobody has begun. One that comes back says the epoch that it was in, and which batches of
        it came: the others wait for it again. Raises: UsageError where there is no place, or that epoch is over."""
        first = 1 + max(int(row[0]) for row in self._ring) if epoch is None else epoch
        if epoch is not None and self._ring[epoch % WINDOW, 0] > epoch:
            raise UsageError(f"epoch {epoch} is over for the other jobs", where=self.folder.name, hint="begin anew: join without an epoch")
        for number, row in enumerate(self.jobs):
            if not row[0]:
                row[1:] = int(process_start_ticks(pid) or 0), first, first
                row[0] = pid
                if epoch is not None or (not self._all[4] and np.count_nonzero(self.jobs[:, 0]) >= self._all[3]):
                    self._all[4] = 1
                words = self.words(epoch) if epoch is not None else None
                if words is not None and seen is not None:
                    words[~seen & ((words & 3) == DONE)] = FREE
                    words[~seen & ((words & 3) == READY)] |= 1 << (2 + number)
                return number
        raise UsageError(f"more than {MAX_JOBS} jobs share batches", where=self.folder.name, hint="give some of them another name")

    def pause(self) -> None:
        """Nobody is there: the next jobs wait for each other again, and begin with an epoch of their own."""
        self._all[4] = 0

    @property
    def begun(self) -> bool:
        """Whether as many jobs have come as were wanted."""
        return bool(self._all[4])

    def present(self) -> int:
        return int(np.count_nonzero(self.jobs[:, 0]))

    def leave(self, number: int) -> None:
        self.jobs[number, 0] = 0
        self.forget(number)

    def forget(self, number: int, epoch: int | None = None) -> None:
        """A job's bits are taken out of all batches, or of those of an epoch; those that nobody else waits for are done."""
        for row in self._ring:
            if row[0] >= 0 and epoch in (None, row[0]):
                for batch in np.flatnonzero(((row[1:] & 3) == READY) & (row[1:] >> (2 + number) & 1 == 1)):
                    self.taken(int(row[0]), int(batch), number)

    def sweep(self) -> bool:
        """Dead jobs leave, what dead producers claimed is free again. Whether anything was found."""
        found = False
        for number, row in enumerate(self.jobs):
            if row[0] and not _lives(row):
                self.leave(number)
                found = True
        for row in self._ring:
            if row[0] < 0:
                continue
            for batch in np.flatnonzero((row[1:] & 3) == CLAIMED):
                word = int(row[1 + batch])
                pid, ticks = word >> 2 & (1 << _PID_BITS) - 1, word >> (2 + _PID_BITS)
                if _ticks(pid) != ticks:
                    for partial in self.folder.glob(f".{int(row[0])}-{batch}-*"):
                        partial.unlink(missing_ok=True)
                    row[1 + batch] = FREE
                    found = True
            for batch in np.flatnonzero(((row[1:] & 3) == READY) & (row[1:] >> 2 & _MASK == 0)):  # the last to take it died before it was done
                self._done(row[1:], int(row[0]), int(batch))
                found = True
        return found

    # ---- batches; all of these under the lock --------------------------------------------------------------------
    def file(self, epoch: int, batch: int) -> Path:
        return self.folder / f"{epoch}-{batch}"

    def words(self, epoch: int) -> Any:
        """The words of an epoch (int64), begun if it can be, else None: nobody may need the epoch whose place it takes."""
        row = self._ring[epoch % WINDOW]
        if row[0] == epoch:
            return self._ring[epoch % WINDOW, 1:]
        needed = any(job[0] and job[3] <= row[0] for job in self.jobs)
        if row[0] > epoch or (row[0] >= 0 and needed and not ((row[1:] & 3) == DONE).all()):
            return None
        for batch in np.flatnonzero((row[1:] & 3) == READY):  # all jobs have left that epoch early
            self.file(int(row[0]), int(batch)).unlink(missing_ok=True)
        row[0] = -1  # a process that dies here leaves an epoch that nobody is in
        row[1:] = FREE
        row[0] = epoch
        return self._ring[epoch % WINDOW, 1:]

    def claim(self, staged: int) -> tuple[int, int] | None:
        """The next batch that should be prepared, claimed for this process; None while `staged` of them wait, or there is none.

        Epochs go in order. In the lowest epoch that a job is in, batches of later ones do not count: who waits for a batch of it must get it.
        """
        inside = [int(row[3]) for row in self.jobs if row[0]]
        if not inside or not self.begun:
            return None
        waiting = 0
        for epoch in range(min(inside), min(inside) + WINDOW - 1):
            words = self.words(epoch)
            if words is None:
                return None
            state = words & 3
            waiting += int(np.count_nonzero((state == CLAIMED) | (state == READY)))
            if waiting >= staged:
                return None
            free = np.flatnonzero(state == FREE)
            if len(free):
                batch = int(free[0])
                words[batch] = CLAIMED | os.getpid() << 2 | _ticks(os.getpid()) << (2 + _PID_BITS)
                return epoch, batch
        return None

    def ready(self, epoch: int, batch: int) -> None:
        """The batch's file is written; all jobs that are in this epoch, or will be, wait for it."""
        words = self.words(epoch)
        if words is None:  # all jobs have left the epoch meanwhile
            self.file(epoch, batch).unlink(missing_ok=True)
            return
        mask = sum(1 << number for number, row in enumerate(self.jobs) if row[0] and row[2] <= epoch and row[3] <= epoch)
        words[batch] = READY | mask << 2
        if not mask:
            self._done(words, epoch, batch)

    def next_ready(self, epoch: int, number: int, seen: NDArray[np.bool_]) -> int | None:
        """The first batch that waits for this job."""
        words = self.words(epoch)
        if words is None:
            return None
        found = np.flatnonzero(((words & 3) == READY) & (words >> (2 + number) & 1 == 1) & ~seen)
        return int(found[0]) if len(found) else None

    def taken(self, epoch: int, batch: int, number: int) -> None:
        words = self.words(epoch)
        assert words is not None
        words[batch] &= ~(1 << (2 + number))
        if not int(words[batch]) >> 2 & _MASK:
            self._done(words, epoch, batch)

    def _done(self, words: NDArray[np.int64], epoch: int, batch: int) -> None:
        self.file(epoch, batch).unlink(missing_ok=True)  # before the word: a file without a word would stay
        words[batch] = DONE


def _lives(row: NDArray[np.int64]) -> bool:
    return process_start_ticks(int(row[0])) == str(int(row[1]))


def _ticks(pid: int) -> int:
    """Start time of a process, as far as it fits beside its number; -1 for one that is gone."""
    ticks = process_start_ticks(pid)
    return int(ticks) & (1 << (62 - _PID_BITS - 2)) - 1 if ticks is not None else -1
