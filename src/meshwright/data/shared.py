"""Batches that several jobs of one machine share: each is read and prepared once an epoch, and every job gets each exactly once.

Cite: J. Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training (VLDB 2021, arXiv 2007.06775), section 5.3 (coordinated prep).
Left open by the paper: who takes over the batches of a job that dies. Ours: each worker of each job may prepare any batch, so the next free does.
Deviations: batches belong to no job beforehand. There is no coordinator, but a table in shared memory (`board`). Jobs take batches in the order in
which they are ready, the lowest first, so their orders may differ a little.
Invariant: a job that lives gets every batch of an epoch once; an epoch has its own permutation and random numbers; at most `staged` batches wait.
Cost: one copy of a batch, to shared memory; jobs map it, and pages that a job changes are copied for it alone.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import RunError, RunTimeout, UsageError
from .batch_bytes import mapped, unpacked
from .batches import MAX_POLL_S, MIN_SWEEP_S, Batches, at_least_one
from .board import Board

__all__ = ["SharedLoader"]

MAX_WAIT_S = 300.0  # for the next batch, or for the other jobs at the start


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
        at_least_one("workers", workers, 1024)
        self.of = Batches(
            dataset=dataset, batch_size=batch_size, name=name, jobs=jobs, shuffle=shuffle, drop_last=drop_last, seed=seed, collate_fn=collate_fn,
            timeout_s=timeout_s,
        )  # fmt: skip
        self.batches, self.jobs, self.folder, self.timeout_s = self.of.batches, jobs, self.of.folder, timeout_s
        self._board: Board | None = self.of.board(os.getpid())
        self._number = self._board.number
        self._epoch = int(self._board.jobs[self._number, 2])
        staged = staged if staged is not None else 2 * (jobs + workers)
        self._workers = [self.of.worker(staged) for _ in range(workers)]

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
