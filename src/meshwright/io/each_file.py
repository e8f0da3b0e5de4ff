"""One function over many files, in processes of their own: a rank's trace each, so that ranks are read side by side.

As many processes as there are cores and as fit into memory together; results stand in the order of the files whatever ends first.
Few or small files are read here, one after the other: a process is only worth its start where there is work for it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import RunError
from .own_limits import free_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

__all__ = ["each_file", "processes_for", "unpacked_bytes"]

T = TypeVar("T")

MIN_PROCESS_BYTES = 4 << 20  # of an unpacked file that is worth a process: reading less takes below about 50 ms
MEMORY_FACTOR = 4  # bytes of memory per byte of a trace while it is read (benchmarks/trace_speed: 0.7 GB for 246 MB), rounded up
GZIP_FACTOR = 12  # times that the text of events is smaller under gzip


def each_file(function: Callable[[int, Path], T], paths: Sequence[Path], *, processes: int | None = None) -> list[T]:
    """[function(0, paths[0]), function(1, paths[1]), ...]; what they return is sent from one process to another. `processes`: None = as fits.

    Raises: what `function` raises, of the first file for which it does; RunError if a process was killed, which is mostly for want of memory.
    """
    paths = list(paths)
    most = processes_for([unpacked_bytes(p) for p in paths]) if processes is None else processes
    if min(most, len(paths)) < 2 or not _may_fork():
        return [function(i, path) for i, path in enumerate(paths)]
    import multiprocessing  # a tenth of the time that reading one small trace takes
    from multiprocessing.connection import wait

    found: dict[int, tuple[bool, Any]] = {}
    running: dict[Connection, tuple[BaseProcess, int]] = {}
    process: BaseProcess
    waiting = list(range(len(paths)))[::-1]
    context = multiprocessing.get_context("fork")
    try:
        for _ in range(min(most, len(paths))):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(theirs, [ours, *running], function, paths), daemon=True)
            child.start()
            theirs.close()
            running[ours] = child, waiting[-1]
            ours.send(waiting.pop())
        while running:
            ready = wait(list(running))
            for ours in [c for c in running if c in ready]:
                process, i = running[ours]
                try:
                    found[i] = ours.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    raise _killed(process, paths[i]) from None
                if waiting and all(fine for fine, _ in found.values()):
                    running[ours] = process, waiting[-1]
                    ours.send(waiting.pop())
                else:
                    del running[ours]
                    ours.close()
                    process.join()
    finally:
        for ours, (process, _) in running.items():
            process.kill()
            process.join()
            ours.close()
    for _, (fine, value) in sorted(found.items()):
        if not fine:
            raise value
    return [found[i][1] for i in range(len(paths))]


def _serve(theirs: Connection, of_others: Sequence[Connection], function: Callable[[int, Path], Any], paths: Sequence[Path]) -> None:
    """In the child: take numbers of files until there are no more, or nobody is left to ask for them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this
    for ours in of_others:
        ours.close()  # inherited: while they are open here, the others would not see that the parent is gone
    while True:
        try:
            i = theirs.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = True, function(i, paths[i])
        except Exception as error:  # raised again by the parent
            answer = False, error
        try:
            theirs.send(answer)
        except OSError:
            return


def _killed(process: BaseProcess, path: Path) -> RunError:
    code = process.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    return RunError(f"the process that read it {how}", where=str(path), hint="probably memory: give fewer ranks at once, or traces of fewer steps")


def _may_fork() -> bool:
    """Not beside other Python threads, whose locks the child would inherit as they are."""
    import multiprocessing

    return hasattr(os, "fork") and threading.active_count() == 1 and not multiprocessing.current_process().daemon


def processes_for(sizes: Sequence[int]) -> int:
    """How many files of these sizes (bytes, unpacked) to read at once: by cores, by memory, and only where each has enough to do."""
    worth = sum(size >= MIN_PROCESS_BYTES for size in sizes)
    if worth < 2:
        return 1
    from ..fabric.preset_nets import usable_cores

    most, free = max(1, min(worth, usable_cores())), free_bytes() // 2
    largest = sorted(sizes, reverse=True)
    while most > 1 and MEMORY_FACTOR * sum(largest[:most]) > free:
        most -= 1
    return most


def unpacked_bytes(path: Path) -> int:
    """Size of the text in a file, estimated where it is packed; 0 for one that cannot be looked at: reading it says why."""
    try:
        size = path.stat().st_size
    except OSError:
        return 0
    return size * GZIP_FACTOR if path.suffix == ".gz" else size
