"""The original trace once more, with all its events and, on tracks of their own, the steps, stages and modules that were found.

The original is copied byte for byte, a piece at a time; only of a damaged one is what was not JSON replaced by its repaired form. Times are
written as exact decimals of µs on the original's clock.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from ...annotate.ranges import Range, ranges
from ...annotate.result import Annotation
from ...annotate.slices import ANNOTATION_CATEGORY
from ...errors import FormatError, UsageError
from ...trace.trace import Trace
from ..atomic import write_chunks
from .scan import Piece, TraceScan, is_object, salvaged

__all__ = ["write_annotated"]

_RAW = msgspec.json.Decoder(list[msgspec.Raw])
_FIRST_ADDED_THREAD = 2_000_000_000  # numbers of added threads begin here, beyond what systems give


def write_annotated(source: str | os.PathLike[str], annotation: Annotation, path: str | os.PathLike[str]) -> None:
    """Write `path` (`.json`, or `.json.gz` packed) from the file that was annotated, all or nothing.

    Raises: UsageError for another ending or a file that cannot be read; FormatError if it is no trace any more.
    """
    name = str(path)
    if not name.removesuffix(".gz").endswith(".json"):
        raise UsageError("an annotated trace ends in .json or .json.gz", where=name, hint="e.g. -o annotated.json.gz")
    if str(source).removesuffix(".gz").endswith((".pftrace", ".perfetto-trace")):
        raise UsageError("only Chrome traces (.json) are written once more", where=str(source), hint="leave -o out")
    chunks = _chunks(source, annotation)
    write_chunks(path, _packed(chunks) if name.endswith(".gz") else chunks)


def _packed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(6, wbits=31)
    for chunk in chunks:
        yield packer.compress(chunk)
    yield packer.flush()


def _chunks(source: str | os.PathLike[str], annotation: Annotation) -> Iterator[bytes]:
    if annotation.trace.events_end >= 0:
        yield from _inserted(TraceScan(source), annotation)
    else:
        yield from _mended(source, annotation)


def _inserted(scan: TraceScan, annotation: Annotation) -> Iterator[bytes]:
    """The file as it is, with our events before the bracket that closes its own."""
    place, at = annotation.trace.events_end, 0
    last = b""
    for chunk in scan.unpacked():
        if at <= place < at + len(chunk):
            before = chunk[: place - at]
            if chunk[place - at : place - at + 1] != b"]":
                break
            yield before
            empty = (last + before).rstrip()[-1:] == b"["
            yield from _joined(_events(annotation), begun=not empty)
            yield b"\n" + chunk[place - at :]
        else:
            yield chunk
        last, at = chunk[-4096:], at + len(chunk)
    if at <= place:
        raise FormatError("has changed since it was read", where=scan.where, hint="run the command again")


def _joined(events: Iterable[bytes], *, begun: bool) -> Iterator[bytes]:
    rest = iter(events)
    while several := list(islice(rest, 10_000)):
        yield (b",\n" if begun else b"\n") + b",\n".join(several)
        begun = True


def _mended(source: str | os.PathLike[str], annotation: Annotation) -> Iterator[bytes]:
    """Every event that can be read or repaired, then ours."""
    scan = TraceScan(source)
    begun = False
    sound = True  # what stands around the events can be kept
    for piece in scan:
        if not begun:
            sound = scan.head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[" or is_object(scan.head.removeprefix(b"\xef\xbb\xbf") + b"]}")
            yield scan.head if sound else b'{"traceEvents":['
        yield (b",\n" if begun else b"\n") + _copied(piece)
        begun = True
    if not begun:
        yield scan.head
    rest = [event for data in scan.swallowed for event in salvaged(data, is_object)[0]]
    yield from _joined([*rest, *_events(annotation)], begun=begun)
    bare = scan.head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
    # The scan stops behind the bracket that closes the events.
    tail = b"]" + scan.tail
    kept = scan.whole and sound and (bare or is_object(b'{"a":[' + tail.strip()))
    yield b"\n" + (tail if kept else b"]\n" if bare else b"]}\n")


def _copied(piece: Piece) -> bytes:
    try:
        array = piece.array()
        _RAW.decode(array)
        return array[1:-1]
    except (msgspec.DecodeError, RecursionError, ValueError):
        return b",\n".join(event for data in piece.objects() for event in salvaged(data, is_object)[0])


def _events(annotation: Annotation) -> Iterator[bytes]:
    trace = annotation.trace
    found = ranges(annotation)
    taken = {t.tid for t in trace.tracks}
    number: dict[int, int] = {}
    for track in sorted({r.track for r in found}):
        tid = _FIRST_ADDED_THREAD + track
        while tid in taken:
            tid += len(trace.tracks)
        taken.add(tid)
        number[track] = tid
        of = trace.tracks[track]
        title = f"modules of {of.thread or of.tid}"
        yield msgspec.json.encode({"ph": "M", "name": "thread_name", "pid": of.pid, "tid": tid, "args": {"name": title}})
    for r in found:
        yield _slice(trace, annotation, r, number[r.track])


def _slice(trace: Trace, annotation: Annotation, r: Range, tid: int) -> bytes:
    args: dict[str, object] = {"kind": r.kind, "evidence": r.evidence.name.lower()}
    if r.module >= 0 and annotation.tree is not None:
        module = annotation.tree.modules[r.module]
        args["module"] = module.path
        if module.kind:
            args["class"] = module.kind
    if r.estimated:
        args["estimated"] = True
    event = {"ph": "X", "cat": ANNOTATION_CATEGORY, "name": r.name, "pid": trace.tracks[r.track].pid, "tid": tid, "args": args}
    times = f',"ts":{_microseconds(trace.origin_ns + r.start_ns)},"dur":{_microseconds(r.end_ns - r.start_ns)}}}'
    return msgspec.json.encode(event)[:-1] + times.encode()


def _microseconds(time_ns: int) -> str:
    sign, size = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return f"{sign}{size // 1000}.{size % 1000:03d}"
