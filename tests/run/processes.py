"""Ranks as real processes over gloo, kept for a whole test module: each case is one function run by all of them."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["RankPool"]


class RankPool:
    """`run(function, *args)`: `function(rank, group, *args)` in `ranks` processes; function and arguments must be importable or plain data."""

    alive = 0  # pools: the last one to close ends the fork server, which waits for the processes of all

    def __init__(self, most: int, *, timeout_s: float = 60.0) -> None:
        RankPool.alive += 1
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "meshwright.run.rank"])
        self.folder = tempfile.TemporaryDirectory()
        self.timeout_s, self.runs = timeout_s, 0
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        self.runs += 1
        store = str(Path(self.folder.name) / f"store-{self.runs}")
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks, store, self.timeout_s, args))
        found = []
        for pipe in self.pipes[:ranks]:
            if not pipe.poll(self.timeout_s):
                raise TimeoutError("a rank hangs")
            found.append(pipe.recv())
        failed = [text for ok, text in found if not ok]
        if failed:
            raise RuntimeError(failed[0])
        return [result for _, result in found]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()
        RankPool.alive -= 1
        if RankPool.alive:
            return
        from multiprocessing import forkserver, resource_tracker

        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()


def _serve(rank: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, ranks, store, timeout_s, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore("ranks", dist.FileStore(store, ranks)), rank, ranks, timedelta(seconds=timeout_s))
            pipe.send((True, function(rank, group, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
