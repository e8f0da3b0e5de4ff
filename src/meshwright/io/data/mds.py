"""MosaicML's MDS shards: `index.json` beside files of samples.

A shard begins with a count (uint32) and count + 1 offsets (uint32). A sample has the sizes (uint32) of its columns without a fixed one, then the
columns' bytes. Columns stay bytes here, but for text and numbers; `pkl` columns are never unpickled. Compressed shards are refused.
Source: mosaicml/streaming, docs "Main concepts: dataset format" and `streaming/base/format/mds` (0.13).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, UsageError
from ..strict_json import decode, read_at_most

__all__ = ["MdsShard", "read_mds_index", "read_mds_offsets", "split_mds_sample"]

MAX_INDEX_BYTES = 256 << 20  # of index.json: a few hundred bytes a shard
MAX_SAMPLES = 100_000_000  # of a shard: offsets are 4 bytes each
NUMBERS = {
    "uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q", "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q", "int": "<q",
    "float16": "<e", "float32": "<f", "float64": "<d",
}  # fmt: skip


class _File(msgspec.Struct):
    basename: str
    bytes: int


class MdsShard(msgspec.Struct):
    """A line of `index.json`."""

    column_encodings: list[str]
    column_names: list[str]
    column_sizes: list[int | None]
    samples: int
    raw_data: _File
    format: str = "mds"
    compression: str | None = None


class _Index(msgspec.Struct):
    shards: list[MdsShard]
    version: int = 2


def read_mds_index(path: str | os.PathLike[str]) -> list[MdsShard]:
    """The shards that an `index.json` names. Raises: UsageError where there is none; FormatError."""
    where, data = read_at_most(path, MAX_INDEX_BYTES)
    if len(data) > MAX_INDEX_BYTES:
        raise FormatError(f"more than {MAX_INDEX_BYTES} bytes", where=where, hint="divide the dataset")
    try:
        shards = decode(data, msgspec.json.Decoder(_Index), where).shards
    except FormatError as error:
        raise FormatError(f"no index of MDS shards: {error.message}", where=error.where, hint="give the folder that MDSWriter wrote") from error
    for number, shard in enumerate(shards):
        at = f"{where}: shards[{number}]"
        if shard.format != "mds" or shard.compression:
            text = f"a shard of format {shard.format}, compression {shard.compression}"
            raise FormatError(text, where=at, hint="write it with MDSWriter, compression=None")
        if not len(shard.column_names) == len(shard.column_encodings) == len(shard.column_sizes):
            raise FormatError("columns have unlike numbers of names, encodings and sizes", where=at, hint="write the index again")
        if Path(shard.raw_data.basename).name != shard.raw_data.basename or not 0 <= shard.samples <= MAX_SAMPLES:
            text = f"a file {shard.raw_data.basename!r} of {shard.samples} samples"
            raise FormatError(text, where=at, hint="a name without folders, a count from 0")
    return shards


def read_mds_offsets(path: str | os.PathLike[str], samples: int) -> list[int]:
    """Where the shard's samples begin, and where the last ends. Raises: UsageError; FormatError for a file that is not what the index says."""
    where, size = Path(path).name, 0
    try:
        with Path(path).open("rb") as file:
            head = file.read(4 * (samples + 2))
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path), hint="check the path") from error
    if len(head) < 4 * (samples + 2) or (count := struct.unpack_from("<I", head)[0]) != samples:
        said = struct.unpack_from("<I", head)[0] if len(head) >= 4 else 0
        raise FormatError(f"the shard holds {said} samples, the index says {samples}", where=where, hint="copy the dataset again")
    offsets = list(struct.unpack_from(f"<{count + 1}I", head, 4))
    if any(a > b for a, b in zip([4 * (samples + 2), *offsets[:-1]], offsets, strict=True)) or offsets[-1] > size:
        raise FormatError("samples overlap or end beyond the file", where=where, hint="the shard is cut short: copy it again")
    return offsets


def split_mds_sample(shard: MdsShard, data: bytes, where: str) -> dict[str, Any]:
    """The columns of a sample: text, numbers, else bytes. Raises: FormatError."""
    free = [i for i, size in enumerate(shard.column_sizes) if size is None]
    hint = "the shard does not hold what its index says: copy the dataset again"
    if len(data) < 4 * len(free):
        raise FormatError("a sample is shorter than its sizes", where=where, hint=hint)
    sizes = dict(zip(free, struct.unpack_from(f"<{len(free)}I", data), strict=True))
    at, found = 4 * len(free), dict[str, Any]()
    for i, (name, encoding) in enumerate(zip(shard.column_names, shard.column_encodings, strict=True)):
        size = sizes[i] if shard.column_sizes[i] is None else int(shard.column_sizes[i] or 0)
        part = data[at : at + size]
        at += size
        if len(part) != size:
            raise FormatError(f"column {name} ends beyond its sample", where=where, hint=hint)
        if encoding == "str":
            found[name] = part.decode(errors="replace")
        elif encoding in NUMBERS and size == struct.calcsize(NUMBERS[encoding]):
            found[name] = struct.unpack(NUMBERS[encoding], part)[0]
        else:
            found[name] = part
    return found
