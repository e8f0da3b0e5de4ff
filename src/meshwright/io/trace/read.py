"""Reading a Chrome or Kineto trace (torch.profiler's, our own, any tool's): streamed, every complete event kept, damage counted.

`.json`, plain or gzip (told by content), an object with `traceEvents` or a bare list; and Perfetto's own format, told by its ending.
Never raises for what an event says; see `Trace.warnings`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...kernels.nesting import parents
from ...kernels.stages import stage
from ...trace.trace import ABSENT, I32, I64, Collectives, Trace, TraceWarning, Track
from ...trace.vocabulary import category_of
from .arrows import slice_at
from .plain import PlainEvents
from .rows import COLLECTIVE_INTEGERS, COLLECTIVE_TEXTS, INTEGER_ARGS, EventRows, integers
from .scan import TraceScan

__all__ = ["read_events", "read_trace"]

_LAUNCH = "ac2g"  # Kineto also writes the end of one for each wait, which nothing launched
_PERFETTO = (".pftrace", ".perfetto-trace")
_RANK = re.compile(rb'"rank"\s*:\s*(\d{1,9})\b')
_WORLD = re.compile(rb'"world_size"\s*:\s*(\d{1,9})\b')


@stage("reading the trace")
def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Every slice of the file. Raises: UsageError if it cannot be read, FormatError if it is no trace, or larger than the caps."""
    return read_events(path, PlainEvents)


def read_events(path: str | os.PathLike[str], reader: type[PlainEvents] | None) -> Trace:
    """As `read_trace`; without a reader of plain events every event is decoded by itself, which takes longer and gives the same."""
    rows = EventRows(Path(path).name)
    plain = reader(rows) if reader else None
    scan = TraceScan(path, plain)
    if scan.where.removesuffix(".gz").endswith(_PERFETTO):
        from .perfetto_read import add_perfetto

        add_perfetto(path, rows)
        rows.pair_begins()
        return _assemble(rows, scan)
    for piece in scan:
        rows.add_piece(piece)
    if plain:
        plain.finish()
    for data in scan.swallowed:
        rows.add(rows.decoded(data))
    if scan.cut_short:
        rows.problems.add("the file ends early", f"after {rows.count} slices")
    rows.pair_begins()
    return _assemble(rows, scan)


def _assemble(rows: EventRows, scan: TraceScan) -> Trace:
    columns = {key: np.concatenate(parts) if parts else np.zeros(0, np.int64) for key, parts in rows.columns.items()}
    rows.columns.clear()
    start, duration = columns.pop("start"), columns.pop("duration")
    first = int(start.min()) if len(start) else 0
    order = _in_order(columns["track"], start - first, duration)
    start, duration = start[order] - first, duration[order]
    taken = {key: columns.pop(key)[order] for key in list(columns)}
    track = taken["track"]
    track_start = np.searchsorted(track, np.arange(len(rows.tracks) + 1)).astype(np.int64)
    # Whole µs are rounded down by the writer: a child may seem to end up to 1 µs after its parent.
    parent, overlaps = _nesting(start, duration, taken["stream"], track_start, 1 if rows.fractions else 1000)
    rows.problems.add("slices that overlap without nesting", f"{overlaps} on all tracks", overlaps)
    category, categories = _todays_words(rows, taken["category"], taken["name"])
    info = _document_keys(scan, rows)
    rank, world_size = _ranks(info, scan)
    sound = scan.whole and not any(kind.startswith(("not JSON", "the document")) for kind in rows.problems.counts)
    return Trace(
        source=scan.where, names=tuple(rows.names), categories=categories, tracks=_tracks(rows), track_start=track_start,
        name=taken["name"].astype(np.int32), category=category, track=track.astype(np.int32),
        start_ns=start, duration_ns=duration, parent=parent, **{key: taken[key] for key in INTEGER_ARGS},
        collectives=_collectives(rows, order), flows=_flows(rows, start, duration, parent, track_start, first),
        rank=rank, world_size=world_size, origin_ns=int(rows.origin_us or 0) * 1000 + first, base_time_ns=_base_time(info),
        events_end=scan.closed_at if sound else -1,
        metadata={k: str(v)[:4096] for k, v in info.items() if isinstance(v, str | int | float)}, ignored=dict(rows.ignored),
        warnings=tuple(TraceWarning(kind=k, count=c, first=rows.problems.first[k]) for k, c in sorted(rows.problems.counts.items())),
    )  # fmt: skip


def _in_order(track: I32 | I64, start: I64, duration: I64) -> I64:
    """By track, start, the longest first. Few begin at one time, so length is looked at only there: a third of the time of sorting by all three."""
    if len(start) and (int(start.max()) >> 44 or int(track.max()) >> 18):  # 4.8 h, or 262,144 tracks
        return np.lexsort((-duration, start, track))
    place = (track.astype(np.int64) << 44) | start
    order = np.argsort(place, kind="stable")
    alike = np.flatnonzero(np.diff(place[order]) == 0)
    if len(alike):
        tied = np.zeros(len(order), bool)
        tied[alike] = tied[alike + 1] = True
        at = np.flatnonzero(tied)
        rows = order[at]
        order[at] = rows[np.lexsort((-duration[rows], place[rows]))]
    return order


def _todays_words(rows: EventRows, category: I64, name: I64) -> tuple[I32, tuple[str, ...]]:
    """Categories as today's Kineto has them, of each slice, and their table."""
    table: dict[str, int] = {}
    out = np.zeros(len(category), np.int32)
    for number, said in enumerate(rows.categories):
        mine = np.flatnonzero(category == number)
        of_name = np.zeros(len(rows.names), np.int32)
        names = np.flatnonzero(np.bincount(name[mine])).tolist()
        texts = list(rows.names) if names else []
        of_name[names] = [table.setdefault(category_of(said, texts[n]), len(table)) for n in names]
        out[mine] = of_name[name[mine]]
    return out, tuple(table)


def _nesting(start: I64, duration: I64, stream: I64, track_start: I64, tolerance: int) -> tuple[I32, int]:
    """Parents, and how many slices overlap another on tracks of threads: on those of streams waits lie over kernels, in every trace."""
    end, parent = start + duration, np.full(len(start), -1, np.int32)
    stack = np.zeros(int(np.diff(track_start).max(initial=0)), np.int64)
    overlaps = 0
    for low, high in zip(track_start[:-1].tolist(), track_start[1:].tolist(), strict=True):
        part = parent[low:high]
        found = parents(start[low:high], end[low:high], tolerance, stack, part)
        overlaps += found if (stream[low:high] == ABSENT).all() else 0
        part[part >= 0] += low
    return parent, overlaps


def _tracks(rows: EventRows) -> tuple[Track, ...]:
    process: dict[Any, str] = {}
    labels: dict[Any, str] = {}
    thread: dict[tuple[Any, Any], str] = {}
    for kind, pid, tid, value in rows.metadata:
        text = value if isinstance(value, str) else str(value)
        if kind == "process_name":
            process[pid] = text
        elif kind == "process_labels":
            labels[pid] = text
        elif kind == "thread_name":
            thread[pid, tid] = text
    return tuple(
        Track(pid=pid, tid=tid, process=process.get(pid, ""), thread=thread.get((pid, tid), ""), labels=labels.get(pid, ""))
        for pid, tid in rows.tracks
    )


def _collectives(rows: EventRows, order: I64) -> Collectives:
    if not rows.collectives:
        return Collectives(slice=np.zeros(0, np.int32))
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    found = sorted(((int(place[row]), args) for row, args in rows.collectives), key=lambda item: item[0])
    texts = [tuple(str(getattr(args, key))[:4096] for _, args in found) for key in COLLECTIVE_TEXTS]
    numbers = {key: integers([getattr(args, key) for _, args in found]) for key in COLLECTIVE_INTEGERS}
    return Collectives(
        slice=np.array([row for row, _ in found], np.int32), operation=texts[0], group=texts[1], ranks=texts[2], dtype=texts[3],
        sequence=numbers.pop("collective_sequence"), **numbers,
    )  # fmt: skip


def _flows(rows: EventRows, start: I64, duration: I64, parent: I32, track_start: I64, first: int) -> Mapping[str, tuple[I32, I32]]:
    joined, lost = rows.arrows.joined(silent=_LAUNCH)
    for kind, number in lost:
        rows.problems.add("arrow without a beginning", f"{kind} {number}")
    out = {}
    for kind, ends in joined.items():
        leaves, enters = (slice_at(track, time - first, start, duration, parent, track_start) for track, time in ends)
        both = (leaves >= 0) & (enters >= 0)
        rows.problems.add("arrow that touches no slice", kind, int((~both).sum()))
        out[kind] = leaves[both], enters[both]
    return out


def _document_keys(scan: TraceScan, rows: EventRows) -> dict[str, Any]:
    """What the document says beside its events."""
    if scan.head.rstrip().removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[" or not scan.whole:
        return {}
    try:
        found = msgspec.json.decode(scan.head.removeprefix(b"\xef\xbb\xbf") + b"]" + scan.tail.rstrip())
    except (msgspec.DecodeError, RecursionError, ValueError):
        rows.problems.add("the document's other keys are not JSON", scan.head[:80].decode("utf-8", "replace"))
        return {}
    return found if isinstance(found, dict) else {}


def _ranks(info: Mapping[str, Any], scan: TraceScan) -> tuple[int | None, int | None]:
    said = info.get("distributedInfo")
    if isinstance(said, dict):
        rank, world = (_natural(said.get(key)) for key in ("rank", "world_size"))
        return rank, world
    if info or b'"distributedInfo"' not in scan.head:
        return None, None
    after = scan.head[scan.head.index(b'"distributedInfo"') :]
    found = [pattern.search(after) for pattern in (_RANK, _WORLD)]
    return tuple(int(m[1]) if m else None for m in found)  # type: ignore[return-value]


def _natural(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def _base_time(info: Mapping[str, Any]) -> int:
    value = info.get("baseTimeNanoseconds", 0)
    return value if isinstance(value, int) and 0 <= value < 2**63 else 0
