"""Batches as bytes and back: tensors and arrays as they lie in memory; lists, tuples, dictionaries, numbers and text around them as MessagePack.

Nothing that is read back can run: a batch of other things is refused by the process that made it.
"""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import RunError, UsageError

__all__ = ["mapped", "packed", "packed_error", "unpacked"]

ALIGNED_BYTES = 64  # of a tensor's first element, as torch allocates
HEAD = struct.Struct("<cQ")  # B: a batch, E: what went wrong; bytes of the text that follows
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


def packed(batch: Any) -> list[bytes | memoryview]:
    """Parts to write one after the other. Raises: UsageError naming a type that is none of the above."""
    buffers: list[np.ndarray[Any, Any]] = []
    text = _ENCODER.encode([_said(batch, buffers), [b.nbytes for b in buffers]])
    parts: list[bytes | memoryview] = [HEAD.pack(b"B", len(text)), text]
    at = HEAD.size + len(text)
    for each in buffers:
        parts += [bytes(-at % ALIGNED_BYTES), each.data.cast("B") if each.nbytes else b""]
        at += -at % ALIGNED_BYTES + each.nbytes
    return parts


def packed_error(text: str) -> list[bytes | memoryview]:
    """What is sent in place of a batch that could not be made."""
    return [HEAD.pack(b"E", len(text.encode())), text.encode()]


def _said(thing: Any, buffers: list[np.ndarray[Any, Any]]) -> Any:
    """[letter, ...] of a thing; the bytes of tensors and arrays go to `buffers`."""
    torch = sys.modules.get("torch")
    if thing is None or (isinstance(thing, bool | int | float | str | bytes) and type(thing) in (bool, int, float, str, bytes)):
        return ["v", thing]
    if torch is not None and isinstance(thing, torch.Tensor) and thing.layout == torch.strided and not thing.is_quantized:
        plain = thing.detach().cpu().contiguous()
        buffers.append(plain.view(-1).view(torch.uint8).numpy() if plain.numel() else np.zeros(0, np.uint8))
        return ["t", str(plain.dtype).removeprefix("torch."), list(plain.shape)]
    if isinstance(thing, np.ndarray | np.generic) and not thing.dtype.hasobject and thing.dtype.names is None:
        buffers.append(np.ascontiguousarray(thing).reshape(-1).view(np.uint8))
        return ["a" if isinstance(thing, np.ndarray) else "g", thing.dtype.str, list(thing.shape)]
    if type(thing) in (list, tuple):
        return ["l" if isinstance(thing, list) else "u", [_said(x, buffers) for x in thing]]
    if type(thing) is dict:
        return ["d", [[_said(k, buffers), _said(v, buffers)] for k, v in thing.items()]]
    raise UsageError(
        f"a batch holds a {type(thing).__module__}.{type(thing).__qualname__}", where="collate_fn",
        hint="give a collate_fn that returns tensors, arrays, numbers, text, and lists, tuples or dictionaries of them",
    )  # fmt: skip


def mapped(path: Path) -> mmap.mmap:
    """The file's bytes without a copy of them; what the job changes stays its own. The file may be removed meanwhile."""
    with path.open("rb", buffering=0) as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def unpacked(data: mmap.mmap | bytearray, where: str) -> Any:
    """Raises: RunError with what a worker said."""
    letter, size = HEAD.unpack_from(data)
    view = memoryview(data)
    text, at = view[HEAD.size : HEAD.size + size], HEAD.size + size
    if letter == b"E":
        raise RunError(bytes(text).decode(), where=where, hint="the dataset or collate_fn raised it; all jobs are told")
    said, sizes = _DECODER.decode(text)
    buffers = []
    for length in sizes:
        at += -at % ALIGNED_BYTES
        buffers.append(view[at : at + length])
        at += length
    return _meant(said, iter(buffers))


def _meant(said: Any, buffers: Any) -> Any:
    letter, value = said[0], said[1]
    if letter == "v":
        return value
    if letter == "t":
        import torch

        data, kind, shape = next(buffers), getattr(torch, value), tuple(said[2])
        return torch.from_numpy(np.frombuffer(data, np.uint8)).view(kind).view(shape) if len(data) else torch.empty(shape, dtype=kind)
    if letter in "ag":
        found = np.frombuffer(next(buffers), np.dtype(value)).reshape(said[2])
        return found if letter == "a" else found[()]
    if letter == "d":
        return {_meant(k, buffers): _meant(v, buffers) for k, v in value}
    items = [_meant(x, buffers) for x in value]
    return items if letter == "l" else tuple(items)
