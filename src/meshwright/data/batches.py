"""Batches of a map-style dataset as several jobs share them: which items each epoch's have, and the processes that prepare them.

Every batch has its own random numbers, by seed, epoch and number. So whoever prepares it, and however often, makes the same one.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from .alike import digest
from .batch_bytes import packed, packed_error
from .board import MAX_JOBS, Board
from .copies import SHARED_MEMORY
from .kept import Kept

__all__ = ["MAX_POLL_S", "MIN_SWEEP_S", "Batches"]

MAX_POLL_S = 0.01  # between two looks at the table
MIN_SWEEP_S = 0.1  # of waiting before the dead are looked for
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(kw_only=True)
class Batches:
    """What `SharedLoader` is given, checked. `batches`: of an epoch; `folder`: where they wait, in shared memory; `key`: of what must be equal.

    Raises: UsageError."""

    dataset: Any
    batch_size: int
    name: str
    jobs: int
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    timeout_s: float
    batches: int = field(init=False)
    folder: Path = field(init=False)
    key: int = field(init=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"{self.name!r} names no group of jobs", where="name", hint="letters, digits, '.', '_' and '-', at most 64")
        for what, most in (("jobs", MAX_JOBS), ("batch_size", 1 << 30)):
            at_least_one(what, getattr(self, what), most)
        items = len(self.dataset)
        self.batches = items // self.batch_size if self.drop_last else -(-items // self.batch_size)
        if not self.batches:
            raise UsageError(f"{items} items make no batch of {self.batch_size}", where="batch_size", hint="smaller batches, or keep the last one")
        self.collate_fn = self.collate_fn if self.collate_fn is not None else _default_collate()
        self.folder = SHARED_MEMORY / f"meshwright-data-{os.getuid()}-{self.name}"
        self.key = _fingerprint(self.dataset, self.collate_fn, self.batch_size, self.shuffle, self.drop_last, self.seed)

    def order(self, epoch: int) -> Any:
        """The items of an epoch, in the order of its batches."""
        order = np.arange(len(self.dataset))
        return np.random.default_rng((self.seed, epoch)).permutation(order) if self.shuffle else order

    def board(self, pid: int = 0, *, fresh: bool = True) -> Board:
        """This process's view of the table."""
        return Board(self.folder, self.batches, self.key, self.jobs, pid, fresh=fresh)

    def worker(self, staged: int) -> BaseProcess:
        """A process that prepares batches and ends with this one, started."""
        made = multiprocessing.get_context("fork").Process(target=_produce, args=(self, os.getpid(), max(staged, 1)), daemon=True)
        made.start()
        return made


def at_least_one(what: str, value: int, most: int) -> None:
    """Raises: UsageError."""
    if not 1 <= value <= most:
        raise UsageError(f"{value} {what}", where=what, hint=f"1 to {most}")


def _produce(loader: Batches, parent: int, staged: int) -> None:
    """A worker: claims batches and prepares them, until its job ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its job, however that ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:
        return
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    board = loader.board(fresh=False)
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


def _prepare(loader: Batches, board: Board, epoch: int, batch: int) -> None:
    items = loader.order(epoch)[batch * loader.batch_size : (batch + 1) * loader.batch_size]
    _seed(loader.seed, epoch, batch)
    index = -1
    try:
        made = []
        for index in map(int, items):
            made.append(loader.dataset[index])
        assert loader.collate_fn is not None
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
            if error.errno == errno.ENOENT and not board.folder.exists():
                raise SystemExit from None  # the last job is gone, and what waited for it
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
    """What must be equal in all jobs: the dataset's values, its transforms among them, collate_fn, and the settings."""
    plain = dataset.plain if isinstance(dataset, Kept) else dataset  # how much is kept, each job may choose
    return int.from_bytes(digest((plain, len(dataset), collate, settings)), "little") >> 1
