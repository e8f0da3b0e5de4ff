"""Parts of tensors from a safetensors file, by reading exactly their bytes, counted.

Format (safetensors): eight bytes, the little-endian length of a JSON header; the header, `{name: {dtype, shape, data_offsets}}`; the tensors.
Files come from outside: sizes are capped and every offset is checked before it is used.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from ..errors import FormatError
from ..plan.regions import Box, Lying

__all__ = ["ShardFile", "digest_of", "require_digest", "runs", "crc32_of"]

MAX_HEADER_BYTES = 256 << 20  # of the JSON header, which is read whole
BLOCK_BYTES = 1 << 20  # read at once, so that memory does not grow with a tensor
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of the contiguous stretches of a box in a row-major array, in order."""
    k = len(shape)
    while k > 0 and box[k - 1] == (0, shape[k - 1]):
        k -= 1
    inner = prod(shape[k:])
    if k == 0:
        yield 0, inner
        return
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    low, high = box[k - 1]
    for at in product(*(range(a, b) for a, b in box[: k - 1])):
        yield sum(i * s for i, s in zip(at, strides, strict=False)) + low * strides[k - 1], (high - low) * inner


class ShardFile:
    """An open file; `read_bytes` counts the tensor bytes read so far. Raises: FormatError naming file, tensor and range."""

    def __init__(self, path: Path) -> None:
        self.path, self.read_bytes = path, 0
        try:
            self.handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise FormatError(f"cannot be read: {error.strerror}", where=str(path), hint="the shard is missing") from None
        try:
            self.stored = self._header()
        except BaseException:
            os.close(self.handle)
            raise

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.handle)

    def _header(self) -> dict[str, _Stored]:
        size = os.fstat(self.handle).st_size
        length = int.from_bytes(os.pread(self.handle, 8, 0), "little")
        # The length comes from the file: it must fit into the file, and under the cap, before it is believed.
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise FormatError(f"is no safetensors file: a header of {length} bytes in a file of {size}", where=str(self.path))
        try:
            fields = msgspec.json.decode(os.pread(self.handle, length, 8), type=dict[str, msgspec.Raw])
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items() if name != "__metadata__"}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"has a broken header: {error}", where=str(self.path)) from None
        found = {}
        for name, e in entries.items():
            start, stop = e.data_offsets
            dtype = DTYPES.get(e.dtype)
            if dtype is None or min(e.shape, default=0) < 0 or not 0 <= start <= stop <= size - 8 - length:
                raise FormatError(f"{name}: {e.dtype} {list(e.shape)} at bytes {start}-{stop} is not in the file", where=str(self.path))
            # With this, no range inside the tensor can leave its bytes.
            if stop - start != prod(e.shape) * dtype.itemsize:
                raise FormatError(f"{name}: {stop - start} bytes for {e.dtype} {list(e.shape)}", where=str(self.path))
            found[name] = _Stored(dtype, e.shape, 8 + length + start, 8 + length + stop)
        return found

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> _Stored:
        """The entry of a tensor that must have this shape and type."""
        stored = self.stored.get(name)
        if stored is None:
            raise FormatError(f"{name} is not in the file", where=str(self.path), hint="it is not the file that the checkpoint's index names")
        if stored.shape != tuple(shape) or stored.dtype != dtype:
            raise FormatError(
                f"{name} is {list(stored.shape)} {stored.dtype} and not what the index says, {list(shape)} {dtype}", where=str(self.path),
                hint="the checkpoint is damaged",
            )  # fmt: skip
        return stored

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, where: Lying, into: Any) -> None:
        """Fill `into`, a writable buffer of bytes, with what lies at `where` of the tensor, which has `shape` in this file."""
        stored, view, at = self.tensor(name, shape, dtype), memoryview(into), 0
        for first, count in runs(where.shape, where.box):
            size = count * dtype.itemsize
            done = 0
            while done < size:
                offset = stored.start + (where.first + first) * dtype.itemsize + done
                # Straight into the caller's buffer; a read may give less than was asked for.
                got = os.preadv(self.handle, [view[at + done : at + size]], offset)
                if got <= 0:
                    raise FormatError(f"{name}: ends at byte {offset} of {stored.start}-{stored.stop}", where=str(self.path), hint="it is cut short")
                done += got
            at += size
        self.read_bytes += at


def digest_of(path: Path) -> str:
    """sha256 of a file's content. Raises: FormatError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path), hint="the shard is missing") from None
    return digest.hexdigest()


def require_digest(path: Path, digest: str | None, sums: Mapping[str, int] | None = None) -> None:
    """The file is the one that a checkpoint's index names. `sums`: CRC-32 of its tensors, to name the one that is damaged.

    Raises: FormatError, with `file` and `damaged` as data; or when it cannot be read.
    """
    if digest_of(path) != digest:
        damaged = _damaged_tensor(path, sums) if sums is not None else ""
        raise FormatError(
            f"is not the file that the checkpoint's index names (its digest differs){f': {damaged}' if damaged else ''}", where=str(path),
            hint="the checkpoint is damaged", data={"file": path.name, "damaged": damaged},
        )  # fmt: skip


def _damaged_tensor(path: Path, sums: Mapping[str, int]) -> str:
    """Which tensor of a file is not what was saved, by CRC-32: "name, bytes a-b"; empty when all are (the damage is elsewhere)."""
    try:
        with ShardFile(path) as file:
            for name, stored in sorted(file.stored.items()):
                found, at = 0, stored.start
                while at < stored.stop:
                    block = os.pread(file.handle, min(BLOCK_BYTES, stored.stop - at), at)
                    if not block:
                        break
                    found, at = zlib.crc32(block, found), at + len(block)
                if name in sums and sums[name] != found:
                    return f"{name}, bytes {stored.start}-{stored.stop}"
                if name not in sums:
                    return f"{name}, which was not saved"
    except FormatError as error:
        return error.message
    return ""


def crc32_of(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
