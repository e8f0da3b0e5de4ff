"""Ranks as real processes over gloo, kept for many tests: each case is one function run by all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["RankPool"]


class RankPool:
    """`run(function, *args)`: `function(rank, group, *args)` in `ranks` processes; function and arguments must be importable or plain data."""

    def __init__(self, most: int, *, timeout_s: float = 150.0) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.timeout_s, self.runs = timeout_s, 0
        self.lost = ""  # the case in which a rank hung or ended: from then on nobody knows what the pipes hold
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(most):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, str(Path(__file__).resolve()), str(rank), str(theirs.fileno())]
                self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
            self.pipes.append(Connection(ours.detach()))
            # where the functions are, and what lets processes hand tensors to each other
            self.pipes[-1].send((sys.path, bytes(multiprocessing.current_process().authkey)))

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        if self.lost:
            raise RuntimeError(f"a rank was lost in {self.lost}; look there first")
        self.runs += 1
        store = str(Path(self.folder.name) / f"store-{self.runs}")
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks, store, self.timeout_s, args))
        found = []
        try:
            for pipe in self.pipes[:ranks]:
                if not pipe.poll(self.timeout_s):
                    raise TimeoutError("a rank hangs")
                found.append(pipe.recv())
        except (TimeoutError, EOFError):
            self.lost = os.environ.get("PYTEST_CURRENT_TEST") or function.__name__
            raise
        failed = [text for ok, text in found if not ok]
        if failed:
            raise RuntimeError(failed[0])
        return [result for _, result in found]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.folder.cleanup()


def _serve(rank: int, pipe: Connection) -> None:
    sys.path[:], multiprocessing.current_process().authkey = pipe.recv()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, ranks, store, timeout_s, args = pipe.recv()
        except (EOFError, OSError):
            return
        torch.manual_seed(0)  # whatever the cases before drew
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore("ranks", dist.FileStore(store, ranks)), rank, ranks, timedelta(seconds=timeout_s))
            pipe.send((True, function(rank, group, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Connection(int(sys.argv[2])))
