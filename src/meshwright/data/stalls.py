"""Measures what a training loop waits for: the rates of device, preparation and storage, each apart.

Cite: J. Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training (VLDB 2021, arXiv 2007.06775), section 6.
Deviations: storage is measured by reading the items' own bytes, with as many streams as the loader has workers, not from the difference of two whole
runs. Files leave the page cache one by one (`posix_fadvise`): the machine's other caches are left alone.
Invariant: measurements of a round are taken in turns, and the median of the rounds counts, so that a busy neighbour slows all rates alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..errors import UsageError
from ..profile.input_rates import InputRates
from ..run.machine.cpu_quota import cgroup_cpu_limit
from . import pages
from .batch_bytes import packed
from .kept import FileRange, Kept, by_number, files_of, ranges_of

__all__ = ["measure_stalls"]

MIN_ITEMS = 8  # of a measurement
ALONE = 32  # items whose processor time is measured in this process


def measure_stalls(
    loader: Any, step: Callable[[Any], object] | None = None, *, device_s: float = 0.0, items: int = 256, rounds: int = 3, seed: int = 0,
    files: Callable[[int], Any] | None = None,
) -> InputRates:  # fmt: skip
    """Measures a torch DataLoader over a map-style dataset. `step(batch)` trains on a batch, and blocks until it has; or `device_s`, seconds a batch.

    Raises: UsageError for an iterable dataset, files that are not known, too few items; OSError for files that are gone.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not by_number(dataset) or loader.batch_size is None:
        raise UsageError("not a DataLoader over a map-style dataset with batches", where="loader", hint="items must be readable by number")
    plain = dataset.plain if isinstance(dataset, Kept) else dataset  # what is kept would be dropped and read again by our own measurement
    where = files or (dataset.ranges if isinstance(dataset, Kept) else files_of(dataset))
    if len(dataset) < MIN_ITEMS:
        raise UsageError(f"{len(dataset)} items are too few to measure", where="loader", hint=f"at least {MIN_ITEMS}")
    order = np.random.default_rng(seed).permutation(len(dataset))[: max(items, MIN_ITEMS)].tolist()
    listed = [ranges_of(where(index)) for index in order]
    sizes = [sum(length or pages.file_bytes(path) for path, _, length in ranges) for ranges in listed]
    warm = _Loader(loader, plain, order)
    found: dict[str, list[float]] = {"miss": [], "hit": [], "storage": [], "prepare": [], "cpu": [], "device": []}
    batch: Any = None
    try:
        if loader.num_workers:
            warm.epoch()  # the workers start, and load what they need
        for _ in range(rounds):
            half = listed[: max(len(listed) // 2, 1)]
            _drop(listed)
            found["miss"].append(_read_s(half, 1) / len(half))
            _drop(listed)
            found["storage"].append(sum(sizes) / _read_s(listed, max(loader.num_workers, 1)))
            found["hit"].append(_read_s(listed, 1) / len(listed))
            seconds, batch = warm.epoch()
            found["prepare"].append(seconds)
            found["cpu"].append(_cpu_s(plain, order[:ALONE]))
            if step is not None:
                step(batch)
                begin = time.perf_counter()
                step(batch)
                found["device"].append((time.perf_counter() - begin) / loader.batch_size)
    finally:
        warm.close()
    middle = {name: statistics.median(values) for name, values in found.items() if values}
    return InputRates(
        items=len(dataset), total_bytes=round(sum(sizes) / len(sizes) * len(dataset)), workers=loader.num_workers, cores=_cores(),
        device_s=middle.get("device", device_s / loader.batch_size), prepare_s=middle["prepare"], cpu_s=middle["cpu"], miss_s=middle["miss"],
        hit_s=middle["hit"], storage_Bps=middle["storage"], sampled=len(order), rounds=rounds, held=_held(listed[:ALONE]),
        batch_bytes=_shared_bytes(batch),
    )  # fmt: skip


def _held(listed: Sequence[Sequence[FileRange]]) -> float:
    """Share of the bytes of these items that the page cache holds right after each was read."""
    there, total = 0, 0
    for each in (x for ranges in listed for x in ranges):
        pages.fetch(*each)
        there += pages.resident_bytes(*each)
        total += each.length or pages.file_bytes(each.path)
    return there / total if total else 1.0


def _shared_bytes(batch: Any) -> int:
    """Bytes of a batch that jobs would share; 0 for one that they cannot."""
    try:
        return sum(map(len, packed(batch)))
    except UsageError:
        return 0


def _drop(listed: Sequence[Sequence[FileRange]]) -> None:
    for ranges in listed:
        for each in ranges:
            pages.drop(*each)


def _read_s(listed: Sequence[Sequence[FileRange]], streams: int) -> float:
    """Wall seconds of reading all."""
    flat = [each for ranges in listed for each in ranges]
    begin = time.perf_counter()
    if streams == 1:
        for each in flat:
            pages.fetch(*each)
    else:
        with ThreadPoolExecutor(streams) as pool:
            for _ in pool.map(lambda each: pages.fetch(*each), flat):
                pass
    return time.perf_counter() - begin


def _cpu_s(dataset: Any, order: Sequence[int]) -> float:
    """Processor seconds of an item, one thread, as a loader's worker has it. The first item is not counted: it loads what the others find loaded."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        dataset[order[0]]
        begin = time.thread_time()
        for index in order:
            dataset[index]
        return (time.thread_time() - begin) / len(order)
    finally:
        torch.set_num_threads(threads)


def _cores() -> float:
    affinity = len(os.sched_getaffinity(0))
    return min(affinity, cgroup_cpu_limit() or affinity)


class _Loader:
    """The user's loader over some items of the dataset, with its workers started once."""

    def __init__(self, loader: Any, dataset: Any, order: list[int]) -> None:
        from torch.utils.data import DataLoader, Subset

        workers = loader.num_workers
        more = {"persistent_workers": True, "prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
        self.loader = DataLoader(
            Subset(dataset, order), batch_size=loader.batch_size, num_workers=workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn, **(more if workers else {}),
        )  # fmt: skip
        self.items, self.batch_size = len(order), loader.batch_size

    def epoch(self) -> tuple[float, Any]:
        """Wall seconds between items, from the first batch to the last; and a batch. An epoch of one batch counts whole."""
        begin, first, batches, kept = time.perf_counter(), 0.0, 0, None
        for batch in self.loader:
            kept = batch
            batches += 1
            if batches == 1:
                first = time.perf_counter()
        end = time.perf_counter()
        if batches == 1 or not self.loader.num_workers:
            return (end - begin) / self.items, kept
        return (end - first) / (self.items - min(self.batch_size, self.items)), kept

    def close(self) -> None:
        """Ends the workers."""
        self.loader._iterator = None
