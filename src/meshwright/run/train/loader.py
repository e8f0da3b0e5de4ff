"""A user's DataLoader or iterable dataset as samples by number: which is the j-th depends on the seed alone, not on layout, workers or resuming.

Of a DataLoader its dataset, sampler, collate function and workers are taken; batches are the plan's. Epoch e is what the sampler gives when torch's
generator (and the sampler's own) is seeded from (seed, e); then the next epoch begins, within a batch too, unless `drop_last` leaves the rest of an
epoch out. Before each item is fetched the generators of torch, numpy and `random` are seeded from (seed, its number), so random augmentation is the
same wherever an item is fetched. Workers fetch ahead what this rank will ask for, in the order that its first step showed.
An iterable dataset is read by every rank, which keeps its own items; a resumed run reads what came before again. It is read in this process: divided
among workers, its order would depend on how many there are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ...capture.resolve import user_code
from ...errors import Unsupported, UsageError
from .padding import Padding, Together
from .segments import random_seed

__all__ = ["Loaded", "Streamed", "as_samples", "seeded"]

MAX_EMPTY_EPOCHS = 2  # of an iterable dataset, one after the other, until it counts as empty


def as_samples(made: Any, name: str, seed: int, global_batch: int, padding: Padding | Together | None = None) -> Loaded | Streamed | None:
    """What a data function returned, where it is a DataLoader or an iterable dataset; None for anything else. `padding`: of items.

    Raises: Unsupported for loaders that make batches themselves or divide samples among processes; UsageError for an empty one.
    """
    loader = made if isinstance(made, DataLoader) else None
    dataset = loader.dataset if loader is not None else made
    streamed = isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"))
    if streamed:
        return Streamed(dataset, loader.collate_fn if loader is not None and loader.batch_size is not None else None, name, seed, padding)
    return Loaded(loader, name, seed, global_batch, padding) if loader is not None else None


@contextmanager
def seeded(*place: int | str) -> Iterator[None]:
    """Generators seeded from a place, and as they were afterwards."""
    seed = random_seed(*place) % (1 << 32)  # type: ignore[arg-type]
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


class _Items(torch.utils.data.Dataset):  # type: ignore[misc]
    """Items by (number of the sample, index in the dataset), each fetched with generators of its own."""

    def __init__(self, dataset: Any, seed: int, padding: Padding | None) -> None:
        self.dataset, self.seed, self.padding = dataset, seed, padding

    def __getitem__(self, at: tuple[int, int]) -> Any:
        number, index = at
        with seeded(self.seed, "item", number):
            found = self.dataset[index]
        return found if self.padding is None else self.padding(found)


class Loaded:
    """The samples of a map-style DataLoader. `rows` gives some in a row as one batch."""

    def __init__(self, loader: DataLoader[Any], name: str, seed: int, global_batch: int, padding: Padding | Together | None = None) -> None:
        if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
            raise Unsupported("the loader has a batch sampler; the plan makes the batches", where=name, hint="give it a sampler")
        if isinstance(loader.sampler, DistributedSampler):
            raise Unsupported("the loader divides samples among processes; the plan already does", where=name, hint="leave DistributedSampler out")
        self.loader, self.name, self.seed = loader, name, seed
        self.items, self.place = _Items(loader.dataset, seed, padding if isinstance(padding, Padding) else None), name.rpartition(":")[0]
        self.whole = global_batch if loader.drop_last else 1  # an epoch is a multiple of it
        collate = loader.collate_fn if loader.batch_size is not None else torch.utils.data.default_collate
        self.collate = _Collate(padding, collate) if isinstance(padding, Together) else collate
        self.epoch, self.order = -1, list[int]()
        self.length = len(self.order_of(0))
        if not self.length:
            raise UsageError("the loader gives no samples" if not self.order else f"the loader drops its {len(self.order)} samples", where=name)
        self.ahead = _Ahead(self, global_batch) if loader.num_workers else None

    def order_of(self, epoch: int) -> list[int]:
        """Indices of an epoch's samples, in order."""
        if epoch != self.epoch:
            sampler = self.loader.sampler
            with user_code(self.name, self.place), seeded(self.seed, "epoch", epoch):
                for generator in {id(g): g for x in (sampler, self.loader) if (g := getattr(x, "generator", None)) is not None}.values():
                    generator.manual_seed(random_seed(self.seed, "epoch", epoch))
                self.order = [int(i) for i in sampler]
            self.epoch = epoch
        return self.order[: len(self.order) // self.whole * self.whole]

    def places(self, first: int, count: int) -> list[tuple[int, int]]:
        """(number, index in the dataset) of samples in a row."""
        return [(n, self.order_of(n // self.length)[n % self.length]) for n in range(first, first + count)]

    def rows(self, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """Samples `first` and on, as the loader's collate function puts them together."""
        if self.ahead is not None and (batch := self.ahead.take(first, count)) is not None:
            return _tensors(batch, self.name)
        with user_code(self.name, self.place):
            items = [self.items[at] for at in self.places(first, count)]
            return _tensors(_together(self.collate, items, self.name), self.name)

    def sample(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(x[0] for x in self.rows(index, 1))

    def close(self) -> None:
        """End the workers."""
        if self.ahead is not None:
            self.ahead.stop()


class _Collate:
    """The owner's, of samples that are padded alike."""

    def __init__(self, together: Together, own: Any) -> None:
        self.together, self.own = together, own

    def __call__(self, items: Any) -> Any:
        return self.own(self.together(items))


class _Ahead:
    """Batches that workers fetch before they are asked for: a rank asks for the same places of every step, which its first step shows."""

    def __init__(self, source: Loaded, global_batch: int) -> None:
        self.source, self.batch = source, global_batch
        self.seen: list[tuple[int, int, int]] = []  # (step, place in the batch, samples) of the step that is watched
        self.coming: Iterator[tuple[int, int]] | None = None
        self.fetched: Any = None

    def take(self, first: int, count: int) -> Any:
        """The batch, if it is the one that comes next; None where it must be fetched by the caller."""
        step, place = divmod(first, self.batch)
        if self.coming is not None:
            if next(self.coming) == (first, count):
                with user_code(self.source.name, self.source.place):
                    return next(self.fetched)
            self.stop()  # asked for something else: watch again
        if self.seen and step == self.seen[-1][0] + 1 and (place, count) == self.seen[0][1:]:
            self.start(step)
            assert self.coming is not None
            next(self.coming)
            with user_code(self.source.name, self.source.place):
                return next(self.fetched)
        if self.seen and step != self.seen[-1][0]:
            self.seen = []
        self.seen.append((step, place, count))
        return None

    def start(self, step: int) -> None:
        loader, pattern = self.source.loader, [(place, count) for _, place, count in self.seen]
        self.coming = _steps(step, self.batch, pattern)
        indices = (self.source.places(first, count) for first, count in _steps(step, self.batch, pattern))
        self.fetched = iter(
            DataLoader(
                self.source.items, batch_sampler=_Endless(indices), num_workers=loader.num_workers, collate_fn=self.source.collate,
                worker_init_fn=loader.worker_init_fn, prefetch_factor=loader.prefetch_factor, multiprocessing_context=loader.multiprocessing_context,
                timeout=loader.timeout,
            )
        )  # fmt: skip

    def stop(self) -> None:
        self.coming, self.fetched, self.seen = None, None, []


def _steps(step: int, batch: int, pattern: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    while True:
        yield from ((step * batch + place, count) for place, count in pattern)
        step += 1


class _Endless:
    """A batch sampler without end."""

    def __init__(self, indices: Iterator[list[tuple[int, int]]]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.indices


class Streamed:
    """The items of an iterable dataset, one epoch after the other."""

    def __init__(self, dataset: Any, collate: Any, name: str, seed: int, padding: Padding | Together | None = None) -> None:
        self.padding = padding if isinstance(padding, Padding) else None
        collate = collate or torch.utils.data.default_collate
        self.dataset, self.name, self.seed = dataset, name, seed
        self.collate = _Collate(padding, collate) if isinstance(padding, Together) else collate
        self.place = name.rpartition(":")[0]
        self.restart()

    def restart(self) -> None:
        self.next, self.epoch = 0, -1
        self.items: Iterator[Any] = iter(())

    def item(self, index: int) -> Any:
        if index < self.next:
            self.restart()
        while True:
            found = self.advance()
            if self.next == index + 1:
                return found

    def advance(self) -> Any:
        """The next item, of the next epoch where this one is over. Raises: UsageError for a dataset without items."""
        for _ in range(MAX_EMPTY_EPOCHS):
            with user_code(self.name, self.place), seeded(self.seed, "item", self.next):
                for item in self.items:
                    self.next += 1
                    return item
            self.epoch += 1
            with user_code(self.name, self.place), seeded(self.seed, "epoch", self.epoch):
                if hasattr(self.dataset, "set_epoch"):
                    self.dataset.set_epoch(self.epoch)
                self.items = iter(self.dataset)
        raise UsageError("the dataset is empty", where=self.name)

    def rows(self, first: int, count: int) -> tuple[torch.Tensor, ...]:
        items = [self.item(i) for i in range(first, first + count)]
        items = items if self.padding is None else [self.padding(x) for x in items]
        with user_code(self.name, self.place):
            return _tensors(_together(self.collate, items, self.name), self.name)

    def sample(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(x[0] for x in self.rows(index, 1))

    def close(self) -> None:
        self.restart()


def _together(collate: Any, items: list[Any], name: str) -> Any:
    """Raises: UsageError for samples of unlike shapes, where collating does not pad them."""
    try:
        return collate(items)
    except RuntimeError as error:
        shapes = [tuple(x.shape) for item in items for x in (item if isinstance(item, (tuple, list)) else (item,)) if isinstance(x, torch.Tensor)]
        if "equal size" not in str(error):
            raise
        raise UsageError(
            f"samples of one batch have different shapes, among them {', '.join(map(str, list(dict.fromkeys(shapes))[:6]))}", where=name,
            hint="a plan is for one shape: pad to it (--data NAME?pad=VALUE,...), or give the loader a collate_fn that does",
        ) from None  # fmt: skip


def _tensors(batch: Any, name: str) -> tuple[torch.Tensor, ...]:
    """Raises: UsageError for a batch that is not tensors in the model's order."""
    if isinstance(batch, torch.Tensor):
        return (batch,)
    if not isinstance(batch, (tuple, list)) or not all(isinstance(x, torch.Tensor) for x in batch):
        kind = f"a {type(batch).__name__}" + (f" of {', '.join(map(repr, list(batch)[:4]))}" if isinstance(batch, dict) else "")
        raise UsageError(
            f"a batch is {kind}, the model takes tensors in the order of its example inputs", where=name,
            hint="give the loader a collate_fn that returns a tuple, target last",
        )  # fmt: skip
    return tuple(batch)
