"""Switches and workers of one process: each in a thread, over sockets of this machine's loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.run.aggregate.client import Seat, Stream
from meshwright.run.aggregate.injector import Injector
from meshwright.run.aggregate.server import Aggregator
from meshwright.run.aggregate.sockets import Address

HERE = Address("127.0.0.1", 0)


class Switch:
    """An aggregator that serves in a thread until `stop`."""

    def __init__(self, **options: Any) -> None:
        self.aggregator = Aggregator(HERE, **options)
        self.address = self.aggregator.address
        self.ending = threading.Event()
        self.thread = threading.Thread(target=lambda: self.aggregator.serve(self.ending.is_set))
        self.thread.start()

    def stop(self, *, silently: bool = False) -> None:
        """`silently`: as a switch that is killed, which tells nobody."""
        if self.ending.is_set():
            return
        self.ending.set()
        self.thread.join()
        if silently:
            self.aggregator.sock.close()
        else:
            self.aggregator.close()


@contextmanager
def switch(*, slots: int = 64, words: int = 64, faults: Injector | None = None, **more: Any) -> Iterator[Switch]:
    made = Switch(slots=slots, words=words, faults=faults, **more)
    try:
        yield made
    finally:
        made.stop()


def seat(worker: int, children: int, **more: Any) -> Seat:
    return Seat(**{"job": "job", "worker": worker, "children": children, "words": 64, "slots": 8, "silence_s": 5.0, "timeout_s": 100.0} | more)


def together(workers: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(worker)` for all at once: results, or the errors that they raised."""
    with ThreadPoolExecutor(workers) as pool:
        futures: list[Future[Any]] = [pool.submit(work, worker) for worker in range(workers)]
        return [f.exception() or f.result() for f in futures]


def reduced(address: Address, parts: list[NDArray[Any]], *, times: int = 1, arithmetic: str = "exact", **more: Any) -> list[Any]:
    """Every worker's results of `times` calls on copies of its part."""

    def work(worker: int) -> list[NDArray[Any]]:
        with Stream.join(address, seat(worker, len(parts), **more)) as stream:
            return [stream.all_reduce(parts[worker].copy(), arithmetic=arithmetic) for _ in range(times)]

    return together(len(parts), work)


def numbers(workers: int, elements: int, seed: int = 0) -> list[NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-(2**24), 2**24, elements, dtype=np.int32) for _ in range(workers)]


def floats(workers: int, elements: int, seed: int = 0) -> list[NDArray[Any]]:
    """Of very unlike magnitudes."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(elements) * np.exp2(rng.integers(-20, 20, elements))).astype(np.float32) for _ in range(workers)]


def fold(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The complete binary tree over the parts, left to right, an odd tail promoted."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]
