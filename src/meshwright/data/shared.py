"""Batches that several jobs of one machine share: each is read and prepared once an epoch, and every job gets each exactly once.

Cite: J. Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training (VLDB 2021, arXiv 2007.06775), section 5.3 (coordinated prep).
Left open by the paper: who takes over the batches of a job that dies. Ours: each worker of each job may prepare any batch, so the next free does.
Deviations: batches belong to no job beforehand. There is no coordinator, but a table in shared memory (`board`). Jobs take batches in the order in
which they are ready, the lowest first, so their orders may differ a little.
Invariant: a job that lives gets every batch of an epoch once; an epoch has its own permutation and random numbers; at most `staged` batches wait.
Cost: one copy of a batch, to shared memory; jobs map it, and pages that a job changes are copied for it alone.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RunError, RunTimeout, UsageError
from .batch_bytes import mapped, packed, packed_error, unpacked
from .board import MAX_JOBS, Board

__all__ = ["SharedLoader"]

SHARED_MEMORY = Path("/dev/shm")
MAX_POLL_S = 0.01  # between two looks at the table
MIN_SWEEP_S = 0.1  # of waiting before the dead are looked for
MAX_WAIT_S = 300.0  # for the next batch, or for the other jobs at the start
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class SharedLoader:
    """Iterates over batches of a map-style dataset that jobs under the same name share.

    name: of the group of jobs on this machine. jobs: how many share; the first epoch begins when all are there. A job that comes later begins with
        the next epoch, one that ends or dies is no longer waited for.
    dataset, batch_size, shuffle, seed, drop_last, collate_fn: as torch's DataLoader has them, and equal in all jobs. Random numbers of Python, NumPy
        and torch are seeded by epoch and batch, so that augmentation is new in each epoch.
    workers: processes of this job that prepare batches, for itself and the others; at least 1.
    staged: most batches that wait in shared memory (default: 2 for each job and worker). timeout_s: longest wait for a batch, or for the other jobs.

    with SharedLoader(dataset, 32, name="sweep", jobs=4) as loader:
        for epoch in range(10):
            for batch in loader: ...

    Raises: UsageError for arguments that do not fit, or jobs that share other batches; RunTimeout; RunError with the item where preparing failed.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, name: str, jobs: int, workers: int = 1, shuffle: bool = True, drop_last: bool = False, seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None, staged: int | None = None, timeout_s: float = MAX_WAIT_S,
    ) -> None:  # fmt: skip
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} names no group of jobs", where="name", hint="letters, digits, '.', '_' and '-', at most 64")
        for what, value, least, most in (("jobs", jobs, 1, MAX_JOBS), ("workers", workers, 1, 1024), ("batch_size", batch_size, 1, 1 << 30)):
            if not least <= value <= most:
                raise UsageError(f"{value} {what}", where=what, hint=f"{least} to {most}")
        batches = len(dataset) // batch_size if drop_last else -(-len(dataset) // batch_size)
        if not batches:
            raise UsageError(f"{len(dataset)} items make no batch of {batch_size}", where="batch_size", hint="smaller batches, or keep the last one")
        self.dataset, self.batch_size, self.batches, self.shuffle, self.seed = dataset, batch_size, batches, shuffle, seed
        self.collate_fn = collate_fn if collate_fn is not None else _default_collate()
        self.timeout_s, self.jobs = timeout_s, jobs
        self.folder = SHARED_MEMORY / f"meshwright-data-{os.getuid()}-{name}"
        self._key = _fingerprint(dataset, self.collate_fn, batch_size, shuffle, drop_last, seed)
        self._board: Board | None = Board(self.folder, batches, self._key, jobs, os.getpid())
        self._number = self._board.number
        self._epoch = int(self._board.jobs[self._number, 2])
        staged = staged if staged is not None else 2 * (jobs + workers)
        arguments = (self, os.getpid(), max(staged, 1))
        self._workers = [multiprocessing.get_context("fork").Process(target=_produce, args=arguments, daemon=True) for _ in range(workers)]
        for worker in self._workers:
            worker.start()

    def __len__(self) -> int:
        return self.batches

    def __enter__(self) -> SharedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the group; its last job removes what is in shared memory."""
        board, self._board = self._board, None
        if board is None:
            return
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
        with board.locked():
            board.leave(self._number)
            board.sweep()
            if not board.present():
                shutil.rmtree(self.folder, ignore_errors=True)
        board.close()

    def __iter__(self) -> Iterator[Any]:
        """The next epoch's batches. One that is left early counts as taken: the other jobs go on."""
        board = self._board
        if board is None:
            raise UsageError("the loader is closed", where=self.folder.name, hint="make another")
        epoch, self._epoch = self._epoch, self._epoch + 1
        seen = np.zeros(self.batches, bool)
        try:
            for _ in range(self.batches):
                batch = self._wait(board, epoch, seen)
                seen[batch] = True
                data = mapped(board.file(epoch, batch))
                with board.locked():
                    board.taken(epoch, batch, self._number)
                yield unpacked(data, f"{self.folder.name}: epoch {epoch}, batch {batch}")
        finally:
            if self._board is not None:
                with board.locked():
                    board.jobs[self._number, 3] = epoch + 1
                    board.forget(self._number, epoch)  # what it did not take of an epoch that it left early

    def _wait(self, board: Board, epoch: int, seen: Any) -> int:
        begin, pause = time.monotonic(), 0.0002
        while True:
            with board.locked():
                found = board.next_ready(epoch, self._number, seen) if board.begun else None
                if found is None and time.monotonic() - begin > MIN_SWEEP_S:
                    board.sweep()
                if not board.jobs[self._number, 0]:
                    raise RunError("this job was taken for dead", where=self.folder.name, hint="a process that joined must be the one that reads")
            if found is not None:
                return found
            waited = time.monotonic() - begin
            if waited > self.timeout_s:
                here = f"{board.present()} of {self.jobs} jobs are there"
                if board.begun:
                    here = f"no batch of epoch {epoch} is ready, {int(seen.sum())} of {self.batches} came"
                hint = "start the other jobs, or say jobs= as many as there are"
                raise RunTimeout(f"waited {waited:.0f} s: {here}", where=self.folder.name, hint=hint)
            if not any(worker.is_alive() for worker in self._workers):
                hint = "see what they said on stderr"
                raise RunError("all processes of this job that prepare batches have ended", where=self.folder.name, hint=hint)
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)

    def order(self, epoch: int) -> Any:
        """The items of an epoch, in the order of its batches."""
        order = np.arange(len(self.dataset))
        return np.random.default_rng((self.seed, epoch)).permutation(order) if self.shuffle else order


def _produce(loader: SharedLoader, parent: int, staged: int) -> None:
    """A worker: claims batches and prepares them, until its job ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its job, however that ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:
        return
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    board = Board(loader.folder, loader.batches, loader._key, loader.jobs)
    pause, waited = 0.0002, 0.0
    while True:
        with board.locked():
            claimed = board.claim(staged)
            if claimed is None and waited > MIN_SWEEP_S:
                board.sweep()
                waited = 0.0
        if claimed is None:
            time.sleep(pause)
            waited += pause
            pause = min(2 * pause, MAX_POLL_S)
            continue
        pause = 0.0002
        _prepare(loader, board, *claimed)


def _prepare(loader: SharedLoader, board: Board, epoch: int, batch: int) -> None:
    items = loader.order(epoch)[batch * loader.batch_size : (batch + 1) * loader.batch_size]
    _seed(loader.seed, epoch, batch)
    index = -1
    try:
        made = []
        for index in map(int, items):
            made.append(loader.dataset[index])
        parts = packed(loader.collate_fn(made))
    except Exception as error:
        lines = traceback.format_exception_only(error)
        parts = packed_error(f"item {index}: {''.join(lines).strip()}")
    target = board.file(epoch, batch)
    partial = target.with_name(f".{target.name}-{os.getpid()}")
    begin = time.monotonic()
    while True:
        try:
            with partial.open("wb") as file:
                file.writelines(parts)
            break
        except OSError as error:
            partial.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC:
                raise
            if time.monotonic() - begin > loader.timeout_s / 2:  # no job made room
                free = shutil.disk_usage(SHARED_MEMORY).free
                parts = packed_error(f"a batch of {sum(map(len, parts))} bytes does not fit into shared memory, {free} bytes are free")
                begin = time.monotonic()
            time.sleep(MAX_POLL_S)
    with board.locked():
        partial.rename(target)
        board.ready(epoch, batch)


def _seed(seed: int, epoch: int, batch: int) -> None:
    state = np.random.SeedSequence((seed, epoch, batch)).generate_state(3, np.uint32)
    random.seed(int(state[0]))
    np.random.seed(int(state[1]))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int(state[2]))


def _default_collate() -> Callable[[list[Any]], Any]:
    from torch.utils.data import default_collate

    return default_collate  # type: ignore[no-any-return]


def _fingerprint(dataset: Any, collate: Any, *settings: object) -> int:
    """What must be equal in all jobs, as far as it can be seen: the dataset's class and length, collate_fn's name, and the settings."""
    kind = type(dataset)
    text = repr((kind.__module__, kind.__qualname__, len(dataset), getattr(collate, "__qualname__", repr(type(collate))), settings))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
