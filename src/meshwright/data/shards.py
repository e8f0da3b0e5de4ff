"""Datasets of items inside shards, read at their offsets: each item is its raw bytes, for a transform to decode."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..io.data import read_mds_index, read_mds_offsets, read_tar_index, split_mds_sample
from . import pages
from .kept import FileRange

__all__ = ["MdsSamples", "TarSamples"]

Transform = Callable[[dict[str, Any]], Any]


class TarSamples:
    """The samples of tar archives in WebDataset's naming: `{"__key__": key, extension: bytes, ...}`, or what `transform` makes of it.

    Raises: UsageError, FormatError (see `read_tar_index`).
    """

    def __init__(self, archives: Sequence[str | os.PathLike[str]], transform: Transform | None = None) -> None:
        self.archives = [os.fspath(a) for a in archives]
        self.transform = transform
        self.index = [(number, sample) for number, archive in enumerate(self.archives) for sample in read_tar_index(archive)]

    def __len__(self) -> int:
        return len(self.index)

    def files_of(self, index: int) -> FileRange:
        number, sample = self.index[index]
        return FileRange(self.archives[number], *sample.span)

    def __getitem__(self, index: int) -> Any:
        number, sample = self.index[index]
        begin, length = sample.span
        data = pages.read(self.archives[number], begin, length, ahead=False)  # the next item is elsewhere
        item = {"__key__": sample.key} | {name: data[offset - begin : offset - begin + size] for name, offset, size in sample.files}
        return self.transform(item) if self.transform else item


class MdsSamples:
    """The samples of a folder of MDS shards: columns by name, text and numbers decoded, all else bytes; or what `transform` makes of them.

    Raises: UsageError, FormatError (see `read_mds_index`, `read_mds_offsets`).
    """

    def __init__(self, folder: str | os.PathLike[str], transform: Transform | None = None) -> None:
        self.transform = transform
        self.shards = read_mds_index(Path(folder) / "index.json")
        self.paths = [str(Path(folder) / s.raw_data.basename) for s in self.shards]
        self.offsets = [read_mds_offsets(path, s.samples) for path, s in zip(self.paths, self.shards, strict=True)]
        self.first = [0, *accumulate(s.samples for s in self.shards)]

    def __len__(self) -> int:
        return self.first[-1]

    def _at(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect.bisect_right(self.first, index) - 1
        return shard, index - self.first[shard]

    def files_of(self, index: int) -> FileRange:
        shard, at = self._at(index)
        begin, end = self.offsets[shard][at : at + 2]
        return FileRange(self.paths[shard], begin, end - begin)

    def __getitem__(self, index: int) -> Any:
        shard, at = self._at(index)
        path, begin, length = self.files_of(index)
        item = split_mds_sample(self.shards[shard], pages.read(path, begin, length, ahead=False), f"{Path(path).name}: sample {at}")
        return self.transform(item) if self.transform else item
