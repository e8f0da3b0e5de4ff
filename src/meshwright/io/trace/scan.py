"""The events of a Chrome trace file, as bytes, a few MiB at a time: plain or gzip, whole or damaged.

Only brackets and strings are looked at here (`kernels.json_objects`), so a file of any length is read in bounded memory. What is not
JSON is repaired object by object where the intention is plain: control characters and unescaped quotes in names, backslashes of Windows
paths, `nan` and `inf`, bytes that are not UTF-8, a missing comma. What cannot be repaired is counted, never guessed.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, UsageError
from ...kernels.json_objects import DEPTH, DONE, LISTS, OPEN, STATE_WORDS, scan_objects

__all__ = ["Piece", "Plain", "TraceScan", "is_object", "repaired", "salvaged"]

CHUNK_BYTES = 1 << 20  # read (and unpacked) at once: what stays in a processor's cache while it is read
MAX_AGAIN_BYTES = 1 << 16  # of an event that lies across chunks and is read again as a whole, as plain events are; longer ones are read on
MAX_OBJECT_BYTES = 4 << 20  # of one event; beyond it a string was left open: look for the next event inside
MAX_HEAD_BYTES = 64 << 20  # before the first event
MAX_TAIL_BYTES = 64 << 20  # after the last event
MAX_UNPACKED_BYTES = 64 << 30  # of a whole trace: more is a file made to exhaust memory

FEW_BYTES = 4096  # of plain events between others that are looked for one by one
_BRACKETS = b"{]"  # an event begins, or the events end

_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_NEXT_EVENT = re.compile(rb'\}\s*,?\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp)"\s*:)')
_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?\s*")  # what may stand first
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_BETWEEN = bytes(c if c >= 32 else 32 for c in range(256))
_BAD_ESCAPE = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})")  # a pair, or half of one
_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,])\s*[-+]?(?:nan|inf(?:inity)?)\s*(?=[,}\]])", re.IGNORECASE)
_INNER_TEXT = re.compile(rb'("(?:name|cat)"\s*:\s*")(.*?)("\s*(?=,\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp)"\s*:|\}))', re.DOTALL)


class Plain(Protocol):
    """Reads plain events of a buffer from a position between events, and says where it stopped; is told of those that others read."""

    def __call__(self, buffer: bytes, position: int) -> int: ...

    def other(self, clean: bool) -> None: ...


class Piece(msgspec.Struct, frozen=True):
    """Whole objects in `data`, object i at `data[starts[i]:ends[i]]`."""

    data: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def array(self) -> bytes:
        """The objects with what stands between them, as a JSON array."""
        return b"[" + self.data[int(self.starts[0]) : int(self.ends[-1])] + b"]"

    def objects(self) -> Iterator[bytes]:
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            yield self.data[start:end]


class TraceScan:
    """One pass over a file: iterate for pieces; then `head` and `tail` are what stands around the events, `truncated` and `lost` what is not there.

    `whole` says that the events' array was closed. Raises, while iterating: UsageError if the file cannot be read, FormatError if it is no
    trace or unpacks beyond the cap.
    """

    def __init__(self, path: str | os.PathLike[str], plain: Plain | None = None) -> None:
        self.path = Path(path)
        self.plain = plain  # reads what events it can; pieces are what it leaves
        self.where = self.path.name
        self.head = b""
        self.tail = b""
        self.whole = False
        self.closed_at = -1  # place of the bracket that closes the events, in the unpacked file
        self.cut_short = False  # the file, or its gzip stream, ends early
        self.swallowed: list[bytes] = []  # objects that never closed

    def __iter__(self) -> Iterator[Piece]:
        chunks = self.unpacked()
        buffer = self._find_array(chunks)
        dropped = len(self.head)
        state = np.zeros(STATE_WORDS, np.int64)
        # State is kept between chunks, so objects, strings and escapes may lie across their edges.
        state[OPEN] = -1
        starts, ends = np.zeros(CHUNK_BYTES // 16, np.int64), np.zeros(CHUNK_BYTES // 16, np.int64)
        position, most = 0, len(starts)
        while True:
            while position < len(buffer) and not state[DONE]:
                if self.plain and not state[DEPTH] and not state[LISTS]:
                    before, position = position, self.plain(buffer, position)
                    # What is not plain comes alone or in long rows: few are looked for at first, then twice as many.
                    most = 1 if position - before > FEW_BYTES else min(2 * most, len(starts))
                    if position == len(buffer):
                        break
                clean = bool(state[DEPTH]) or buffer[position] in _BRACKETS
                alone = self.plain and not state[LISTS]
                found, position = scan_objects(np.frombuffer(buffer, np.uint8), position, state, starts[:most], ends[:most])
                if found:
                    if self.plain:
                        self.plain.other(clean)
                    if alone and not state[LISTS]:  # what follows is read again: it may be plain, and commas are counted there
                        position = int(ends[found - 1])
                        state[:] = 0
                        state[OPEN] = -1
                    yield Piece(buffer, starts[:found].copy(), ends[:found].copy())
            if state[DONE]:
                self.whole = True
                self.closed_at = dropped + position - 1
                self.tail = self._rest(buffer[position:], chunks)
                return
            # An object that is still open stays, everything before it has been given away.
            keep = int(state[OPEN]) if state[OPEN] >= 0 else len(buffer)
            again = self.plain and not state[LISTS] and len(buffer) - keep <= MAX_AGAIN_BYTES
            buffer, position, dropped = buffer[keep:], 0 if again else position - keep, dropped + keep
            if again:
                state[:] = 0
            state[OPEN] = 0 if state[OPEN] >= 0 and not again else -1
            # No event is as long: a quote was lost, and everything since counted as text.
            if len(buffer) > MAX_OBJECT_BYTES:
                kept = self._resynchronise(buffer, state)
                buffer, position, dropped = kept, 0, dropped + len(buffer) - len(kept)
            chunk = next(chunks, b"")
            if not chunk:
                if buffer:
                    self.swallowed.append(buffer)
                self.cut_short = True
                return
            buffer += chunk

    def _resynchronise(self, buffer: bytes, state: NDArray[np.int64]) -> bytes:
        """Give up the object that never closes, as far as the last event that begins inside it."""
        last = 0
        for match in _NEXT_EVENT.finditer(buffer):
            last = match.end()
        last = last or len(buffer)
        self.swallowed.append(buffer[:last])
        state[:] = 0
        state[OPEN] = -1
        return buffer[last:]

    def _find_array(self, chunks: Iterator[bytes]) -> bytes:
        buffer, start, end = b"", b"", 0
        for buffer in _doubling(chunks):
            # A byte order mark and blanks may stand first; then a bare list of events, or an object that holds one.
            first = _BLANK.match(buffer)
            start = buffer[first.end() : first.end() + 1] if first else b""
            if start == b"[":
                self.head = buffer[: buffer.index(b"[") + 1]
                return buffer[len(self.head) :]
            if start and start != b"{":
                break
            end = next((m.end() for m in _ARRAY.finditer(buffer) if _depth(buffer[: m.start()]) == 1), 0)
            if end or len(buffer) > MAX_HEAD_BYTES:
                break
        # A head with a quote too many has no depth: then the first list of that name.
        match = _ARRAY.search(buffer) if start == b"{" else None
        end = end or (match.end() if match else 0)
        if end:
            self.head = buffer[:end]
            return buffer[end:]
        hint = "give a trace written by torch.profiler, by Chrome or Perfetto as JSON, or by meshwright"
        raise FormatError("is not a Chrome trace: no list of events, and no object with traceEvents", where=self.where, hint=hint)

    def _rest(self, rest: bytes, chunks: Iterator[bytes]) -> bytes:
        parts, size = [rest], len(rest)
        for chunk in chunks:
            size += len(chunk)
            if size > MAX_TAIL_BYTES:
                break
            parts.append(chunk)
        return b"".join(parts)

    def unpacked(self) -> Iterator[bytes]:
        """The file's bytes, unpacked, a few MiB at a time."""
        try:
            with self.path.open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                yield from self._inflate(file) if packed else iter(lambda: file.read(CHUNK_BYTES), b"")
        except OSError as error:
            raise UsageError(f"cannot read: {error.strerror}", where=str(self.path), hint="check the path") from error

    def _inflate(self, file: BinaryIO) -> Iterator[bytes]:
        inflater, total = zlib.decompressobj(wbits=31), 0
        data = b""
        while True:
            data = data or file.read(1 << 20)
            if not data:
                return
            try:
                out = inflater.decompress(data, CHUNK_BYTES)
            except zlib.error:
                self.cut_short = True
                return
            # `decompress` was told how much to make, so input may be left over.
            data = inflater.unconsumed_tail
            # Several gzip streams may follow one another; each needs a new inflater.
            if inflater.eof:
                data, inflater = inflater.unused_data, zlib.decompressobj(wbits=31)
            total += len(out)
            if total > MAX_UNPACKED_BYTES:
                raise FormatError(
                    f"unpacks to more than {MAX_UNPACKED_BYTES} bytes",
                    where=self.where, hint="it is damaged or made to exhaust memory: get it again",
                )  # fmt: skip
            if out:
                yield out


def _doubling(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """What was read so far: at first, whenever it has doubled, and at the end; so that looking through all of it each time costs twice its length."""
    buffer, given = b"", 0
    for chunk in chunks:
        buffer += chunk
        if len(buffer) >= 2 * given:
            given = len(buffer)
            yield buffer
    if len(buffer) > given:
        yield buffer


def _depth(head: bytes) -> int:
    """How many brackets are open at its end."""
    found = [m.group() for m in _BRACKET.finditer(head) if m.group()[:1] != b'"']
    return sum(1 if x in b"{[" else -1 for x in found)


def salvaged(data: bytes, valid: Callable[[bytes], bool]) -> tuple[list[bytes], int]:
    """The events that can be read out of damaged bytes, repaired, and how many could not."""
    whole = repaired(data, valid)
    if whole is not None:
        return [whole], 0
    events, lost, start = [], 0, 0
    bounds = [(match.start() + 1, match.end()) for match in _NEXT_EVENT.finditer(data)]
    for end, following in [*bounds, (len(data), len(data))]:
        event = repaired(data[start:end], valid) if end - start < len(data) else None
        if event is None and end == len(data):  # brackets that close what stands around the events
            event = repaired(data[start : data.rfind(b"}", start, data.rfind(b"}")) + 1], valid)
        if event is None:
            lost += 1
        else:
            events.append(event)
        start = following
    return events, lost


def repaired(data: bytes, valid: Callable[[bytes], bool]) -> bytes | None:
    """`data` made valid JSON by the least change that does it, or None."""
    data = data.strip().rstrip(b",")
    steps: tuple[Callable[[bytes], bytes], ...] = (
        lambda x: x,
        lambda x: x.translate(_BETWEEN),
        lambda x: _NOT_A_NUMBER.sub(b"null", _BAD_ESCAPE.sub(rb"\\\\", x.decode("utf-8", "replace").encode())),
        lambda x: _SURROGATE.sub(lambda m: rb"\ufffd" if m[1] else m[0], x),
    )
    for step in steps:
        data = step(data)
        if valid(data):
            return data
    quoted = _INNER_TEXT.sub(lambda m: m[1] + re.sub(rb'(?<!\\)"', rb'\\"', m[2]) + m[3], data)
    return quoted if valid(quoted) else None


def is_object(data: bytes) -> bool:
    """Whether the bytes are one JSON object."""
    try:
        return isinstance(msgspec.json.decode(data), dict)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False
