"""A map-style dataset whose files stay in the page cache up to a budget, and are never exchanged: the MinIO cache.

Cite: J. Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training (VLDB 2021, arXiv 2007.06775), section 5.1.
An epoch uses every item once, in an order that nobody knows before. So all items are equally worth keeping, and whatever a cache exchanges it loses:
with room for a share c of equal items, an LRU cache finds c + (1 - c) ln(1 - c) of them in an epoch, one that never exchanges finds c.
Left open by the paper: how members are chosen by many processes. Ours: by a seeded order of the files, the same in every worker, rank and job.
Deviations: the cache is the kernel's page cache. Members are read as always; every other file leaves the page cache right after its read
(`posix_fadvise`), so the kernel never has to look for room and never takes a member. There is no second copy and no server, and processes that know
nothing of each other share the members. `check()` asks the kernel which pages are there; `readmit()` reads what was lost.
Where a file system's pages are not held (network and user-space file systems), `medium="shared-memory"` keeps copies of whole files there (`copies`).
Invariant: with no other reader, the members' pages are in the page cache from the first epoch on, and an epoch reads all other bytes once.
Cost: a look at each file's size when it is made; one system call more per item that is no member.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError
from ..profile.input_plan import MIN_HELD_SHARE as MIN_RESIDENT_SHARE  # below, the budget is more than the machine leaves
from ..profile.input_plan import Medium
from . import pages
from .copies import LISTS, Copies, redirected
from .limits import memory_budget_bytes, room_budget_bytes
from .watch import Watch

__all__ = ["FileRange", "Kept", "Residency", "by_number", "files_of", "ranges_of"]

MAX_ITEMS = 100_000_000  # of a dataset: a byte each in every worker


class FileRange(NamedTuple):
    """The bytes of an item: a whole file, or part of one (`length` 0: to the end)."""

    path: str
    offset: int = 0
    length: int = 0


Files = Callable[[int], "str | os.PathLike[str] | FileRange | Iterable[str | os.PathLike[str] | FileRange]"]


@dataclass(frozen=True)
class Residency:
    """What the page cache holds. Bytes in whole pages; `changed`: items whose file is not what it was when members were chosen."""

    members: int
    items: int
    member_bytes: int
    total_bytes: int
    resident_bytes: int
    others_resident_bytes: int
    changed: int

    @property
    def holds(self) -> bool:
        return self.resident_bytes >= MIN_RESIDENT_SHARE * self.member_bytes

    def __str__(self) -> str:
        text = f"{self.members} of {self.items} items are kept, {self.member_bytes} of {self.total_bytes} bytes"
        text += f"; {self.resident_bytes} of these are in memory"
        if self.changed:
            text += f"; {self.changed} items have changed and are not kept any more"
        if not self.holds:
            text += f": the budget is more than this machine leaves, {self.resident_bytes // pages.PAGE * pages.PAGE} would stay"
        return text


class Kept:
    """`dataset`, item for item; its files are kept up to `budget_bytes` (default: below a memory limit of this process's groups what they
    do not hold when it is made, less items on their way; else three quarters of the machine's memory). Workers of a loader start later and take
    more: where they do, a warning says how much stays.

    files: from an index to its path, to a `FileRange`, or to several of them. Left out: the paths in the dataset's `samples`, `imgs`, `files` or
        `paths` (torchvision's folders), or its own `files_of` (`TarSamples`, `MdsSamples`).
    seed: members are the first files of an order drawn from it. Processes that share a machine must use the same seed, files and budget.
    medium: "page-cache", or "shared-memory": the dataset must list its paths in one of the four attributes, and reads copies of members.

    It can be pickled, indexed by lists (`__getitems__`), and hands on all other attributes. Files on a network file system may not be cached by the
    kernel at all: `check()` says so.

    Raises: UsageError for a dataset whose files are not known, a budget above the limit, no items; OSError for a file that is not there.
    """

    def __init__(
        self, dataset: Any, budget_bytes: int | None = None, *, files: Files | None = None, seed: int = 0, medium: Medium = "page-cache"
    ) -> None:
        if medium not in ("page-cache", "shared-memory"):
            raise UsageError(f"a medium {str(medium)[:32]!r}", where="medium", hint="page-cache or shared-memory")
        self.dataset = self.plain = dataset  # plain: with its own paths, where copies stand in for them
        self.seed, self.medium = seed, medium
        self._files = files_of(dataset) if files is None else files
        memory_budget_bytes(budget_bytes)  # refuses what does not fit before files are looked at
        items = len(dataset)
        if not 0 < items <= MAX_ITEMS:
            raise UsageError(f"a dataset of {items} items cannot be kept", where="dataset", hint=f"1 to {MAX_ITEMS} items")
        used: dict[str, int] = {}  # bytes of a file that items use: to the end of the last range
        shared: set[str] = set()  # files of several items
        largest = 0
        for index in range(items):
            item_bytes = 0
            for path, offset, length in self.ranges(index):
                if path in used:
                    shared.add(path)
                end = offset + length if length else pages.file_bytes(path)
                used[path] = max(used.get(path, 0), end)
                item_bytes += pages.rounded(end - offset)
            largest = max(largest, item_bytes)
        self.budget_bytes = room_budget_bytes(budget_bytes, largest)
        copied = medium == "shared-memory"
        self._until = _chosen(used, set() if copied else shared, self.budget_bytes, seed)
        self._copies = Copies(self._until, seed) if copied else None
        if self._copies is not None:
            self.dataset = redirected(dataset, self._copies)
        self.total_bytes = sum(map(pages.rounded, used.values()))
        self.member_bytes = sum(map(pages.rounded, self._until.values()))
        self._watch = None if copied else Watch(self.budget_bytes)
        self._member = np.zeros(items, bool)
        self._size = np.zeros(items, np.int64)
        for index in range(items):
            found = self.ranges(index)
            ends = [(path, offset + length if length else used[path]) for path, offset, length in found]
            self._member[index] = all(end <= self._until.get(path, 0) for path, end in ends)
            self._size[index] = sum(pages.file_bytes(path) for path in {path for path, _ in ends})

    def ranges(self, index: int) -> list[FileRange]:
        """The files of an item."""
        return ranges_of(self._files(index))

    def __len__(self) -> int:
        return len(self._member)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        self._read(index)
        return item

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """What torch's loaders call for a batch."""
        many = getattr(self.dataset, "__getitems__", None)
        found = many(indices) if many else [self.dataset[i] for i in indices]
        for index in indices:
            self._read(index)
        return found

    def _read(self, index: int) -> None:
        """What was read of an item that is no member leaves the page cache; also what has grown or shrunk since, as the budget did not count it."""
        index = int(index)
        found = self.ranges(index)
        if self._member[index]:
            if sum(pages.file_bytes(path) for path in {x.path for x in found}) == self._size[index]:
                if self._watch is not None:
                    self._watch((x.path, self._until[x.path]) for x in found)
                return
            self._member[index] = False
            for each in found:
                self._until.pop(each.path, None)
        self._drop(found)

    def _drop(self, found: list[FileRange]) -> None:
        """These bytes, but for those at the beginning of their file that are kept."""
        for path, offset, length in found:
            begin = max(offset, self._until.get(path, 0))
            if not length or begin < offset + length:
                pages.drop(path, begin, offset + length - begin if length else 0)

    @property
    def members(self) -> int:
        return int(self._member.sum())

    def check(self) -> Residency:
        """What of the members is in the page cache, and what of the others. Reads nothing. Raises: OSError for a file that is gone."""
        there, others, kept = 0, 0, 0
        seen: dict[str, int] = {}
        as_chosen = np.ones(len(self), bool)
        left: set[str] = set()
        for index in range(len(self)):
            sizes = {x.path: pages.file_bytes(x.path) for x in self.ranges(index)}
            as_chosen[index] = sum(sizes.values()) == self._size[index]
            left.update(() if as_chosen[index] else sizes)
            seen.update(sizes)
        for path, size in seen.items():
            until = 0 if path in left else min(self._until.get(path, 0), size)
            kept += pages.rounded(until)
            if self._copies is not None:
                there += pages.rounded(size) if until and self._copies.has(path) else 0
                continue
            inside = pages.rounded(pages.resident_bytes(path, 0, until)) if until else 0
            there += inside
            others += pages.rounded(pages.resident_bytes(path)) - inside if until < size else 0
        return Residency(
            members=int((self._member & as_chosen).sum()), items=len(self), member_bytes=kept, total_bytes=self.total_bytes, resident_bytes=there,
            others_resident_bytes=others, changed=int((~as_chosen).sum()),
        )  # fmt: skip

    def close(self) -> None:
        """Copies in shared memory go with the last process that closes or ends; the page cache needs no end."""
        if self._copies is not None:
            self._copies.close()

    def readmit(self) -> int:
        """Reads the members' bytes that the page cache lacks, and drops what is there of others; how many bytes were lacking."""
        lacking = 0
        for path, until in self._until.items():
            if self._copies is not None:
                lacking += 0 if self._copies.has(path) or self._copies.path_of(path) == path else until
                continue
            missing = until - pages.resident_bytes(path, 0, until)
            if missing > 0:
                pages.fetch(path, 0, until)
                lacking += missing
        for index in np.flatnonzero(~self._member):
            self._drop(self.ranges(int(index)))
        return lacking


def _chosen(used: dict[str, int], shared: set[str], budget_bytes: int, seed: int) -> dict[str, int]:
    """Of each member file the bytes that are kept: whole files in a seeded order while they fit, then the beginning of the largest file of several
    items that does not fit."""
    order = sorted(used, key=lambda path: hashlib.blake2b(path.encode("utf-8", "surrogateescape"), key=str(seed).encode(), digest_size=8).digest())
    kept, left, rest = dict[str, int](), budget_bytes, ""
    for path in order:
        if pages.rounded(used[path]) <= left:
            kept[path] = used[path]
            left -= pages.rounded(used[path])
        elif path in shared and used[path] > used.get(rest, 0):
            rest = path
    if rest and left >= pages.PAGE:
        kept[rest] = left // pages.PAGE * pages.PAGE
    return kept


def ranges_of(found: Any) -> list[FileRange]:
    """What a function from indices to files may return, as a list."""
    if isinstance(found, FileRange):
        return [found]
    if isinstance(found, str | os.PathLike):
        return [FileRange(os.fspath(found))]
    return [x if isinstance(x, FileRange) else FileRange(os.fspath(x)) for x in found]


def files_of(dataset: Any) -> Files:
    """From an index to the files of that item, for datasets that say where their items lie. Raises: UsageError."""
    own = getattr(dataset, "files_of", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    for name in LISTS:
        listed = getattr(dataset, name, None)
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed or len(listed) != len(dataset):
            continue
        first = listed[0]
        if isinstance(first, str | os.PathLike):
            return _Listed(listed, None)
        if isinstance(first, Sequence) and first and isinstance(first[0], str | os.PathLike):
            return _Listed(listed, 0)
    raise UsageError(
        f"the files of a {type(dataset).__name__} are not known", where="dataset",
        hint="give a function from an index to its path or to a FileRange(path, offset, length): Kept(..., files=function), --files FILE.py:function",
    )  # fmt: skip


def by_number(dataset: Any) -> bool:
    """Whether items can be asked for by their number. torch's iterable datasets inherit a `__getitem__` that only raises."""
    iterable = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not iterable


@dataclass(frozen=True)
class _Listed:
    """Paths in a list, or at a position of each of its rows."""

    listed: Sequence[Any]
    at: int | None

    def __call__(self, index: int) -> str:
        row = self.listed[index]
        return str(os.fspath(row if self.at is None else row[self.at]))
