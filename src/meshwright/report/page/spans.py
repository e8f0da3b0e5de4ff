"""The timeline of the page: rows of spans as columns, few enough for a page, predictions and measurements of a lane next to each other.

Times are whole ticks from each timeline's first span; a tick is a power of ten of a second. Beyond MAX_SPANS, neighbours in a row that begin in
the same short stretch of time are one span that says how many it stands for and how long they took together; beyond MAX_ROWS, messages that
share a link with others and then rows of later ranks are left out. Both are said in `notes`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...io.trace.events import build_trace
from ...io.trace.slices import Slices, Trace, take
from ...program.program import Kind, Part, Program, Role
from ...timeline import Timeline
from .packed import clean, pack

__all__ = ["MAX_ROWS", "MAX_SPANS", "Row", "TimelineView", "alike_groups", "rows_view", "tick_of", "timeline_block", "timeline_view"]

I64 = NDArray[np.int64]
MAX_SPANS = 250_000  # of one timeline: beyond it neighbours are joined
MAX_ROWS = 12_000  # of one timeline: beyond it messages share rows
NANOSECOND_EXPONENT = -9  # ticks are no finer than 10^-9 s unless a timeline is short
ALIKE_PARTS = 500  # of a timeline: rows whose kinds of work take as many of them each are alike
MAX_TICKS = 2_000_000_000  # of a timeline: times fit into 32 bits


@dataclass(frozen=True)
class Row:
    """`who`: `rank 3`, `critical path` or `links`; `origin`: `predicted`, `measured`; `role`: of the lane; spans [first, last) of the columns."""

    who: str
    origin: str
    lane: str
    role: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class TimelineView:
    """Columns of equal length. `name` and `category` index the lists; `count` spans are shown as one that were busy for `busy` ticks."""

    tick_exponent: int  # a tick is 10 ** tick_exponent seconds
    end: int  # ticks of the longest timeline
    rows: tuple[Row, ...]
    start: I64
    duration: I64
    name: I64
    category: I64
    step: I64
    iteration: I64
    count: I64
    busy: I64
    names: Sequence[str]
    categories: Sequence[str]
    notes: tuple[str, ...] = ()
    trace: Trace = field(repr=False)
    trace_category: I64 = field(repr=False)  # per slice of the trace

    @property
    def tick_s(self) -> float:
        return 10.0**self.tick_exponent


def tick_of(end_s: float) -> int:
    """Exponent of the finest tick, at most a nanosecond, with which `end_s` stays below MAX_TICKS."""
    if end_s <= 0:
        return NANOSECOND_EXPONENT
    exponent = math.ceil(math.log10(end_s / MAX_TICKS))
    return exponent if exponent > NANOSECOND_EXPONENT else max(exponent, NANOSECOND_EXPONENT - 6)


def timeline_view(
    program: Program, timelines: Sequence[Timeline], *, collective: bool = False, most_spans: int = MAX_SPANS, most_rows: int = MAX_ROWS
) -> TimelineView:
    """`program` is the one whose step ids the timelines carry. Of a collective, categories say what a step does instead of a training phase.

    Raises: UsageError for a timeline of another program.
    """
    trace = build_trace(program, timelines, counters=False)
    slices, notes = trace.slices, list[str]()
    of_trace, categories = _categories(program, slices, trace, collective)
    dropped = ("counters",) if timelines[0].transfers is not None else ("counters", "links")
    wanted = np.array([not trace.processes[t.process].startswith(dropped) for t in trace.tracks] or [False], np.bool_)
    chosen = np.flatnonzero(wanted[slices.track])
    slices, category = take(slices, chosen), of_trace[chosen]
    order, kept = _ordered(program, trace, slices, most_rows, notes)
    return rows_view(take(slices, order), category[order], kept, categories, trace, of_trace, notes, most_spans=most_spans)


def rows_view(
    slices: Slices, category: I64, kept: Mapping[int, tuple[str, str, str, str]], categories: Sequence[str], trace: Trace, of_trace: I64,
    notes: Sequence[str] = (), *, most_spans: int = MAX_SPANS,
) -> TimelineView:  # fmt: skip
    """Slices in the order of their rows as columns, few enough. `kept`: who, origin, lane and role of every track."""
    notes = list(notes)
    end_s = float(slices.end_s.max(initial=0.0))
    exponent = tick_of(end_s)
    start = np.rint(slices.start_s / 10.0**exponent).astype(np.int64)
    finish = np.rint(slices.end_s / 10.0**exponent).astype(np.int64)
    groups = _groups(slices.track, start, finish, most_spans)
    total = len(start)
    columns, names = _merged(slices, category, start, finish, groups, list(trace.names))
    if len(groups) < total:
        notes.append(f"{total:,} spans are shown as {len(groups):,}: short ones that stand close together in a row are one, which says how many")
    bounds = np.flatnonzero(np.diff(slices.track[groups], prepend=-1, append=-2)) if len(groups) else np.zeros(1, np.int64)
    rows = tuple(
        Row(*kept[int(slices.track[groups[low]])], int(low), int(high)) for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    )
    return TimelineView(
        tick_exponent=exponent, end=int(finish.max(initial=0)), rows=rows, **columns, names=names, categories=categories, notes=tuple(notes),
        trace=trace, trace_category=of_trace,
    )  # fmt: skip


def timeline_block(view: TimelineView, title: str, rank_name: Callable[[int], str]) -> dict[str, Any]:
    """What the page's script reads of a timeline. `rank_name`: what the rows of a rank are headed by."""
    columns = {
        "start": view.start, "duration": view.duration, "name": view.name, "category": view.category, "step": view.step, "iteration": view.iteration,
    }  # fmt: skip
    if len(view.count) and int(view.count.max()) > 1:
        columns |= {"count": view.count, "busy": np.minimum(view.busy, (1 << 31) - 1)}
    whos = list(dict.fromkeys(row.who for row in view.rows))
    place = {who: k for k, who in enumerate(whos)}
    named = {who: rank_name(int(who.removeprefix("rank "))) if who.startswith("rank ") else who for who in whos}
    return {
        "title": clean(title), "tick_s": view.tick_s, "end": view.end, "categories": view.categories, "notes": list(view.notes),
        "groups": [clean(named[who]) for who in whos], "alike": alike_groups(view, whos),
        "rows": [[place[row.who], row.origin, clean(row.lane), row.role, row.first, row.last] for row in view.rows],
        "packed": pack(columns, {"names": view.names}),
    }  # fmt: skip


def alike_groups(view: TimelineView, whos: Sequence[str]) -> list[int]:
    """Of every group of rows the first one that does the same: rows of the same roles, of each kind of work as much, begun and ended at once."""
    part = max(view.end / ALIKE_PARTS, 1.0)
    facts: dict[str, list[tuple[object, ...]]] = {who: [] for who in whos}
    kinds, lengths = max(len(view.categories), 1), [row.last - row.first for row in view.rows]
    spans = np.concatenate([np.arange(row.first, row.last) for row in view.rows]) if view.rows else np.zeros(0, np.int64)
    cell = np.repeat(np.arange(len(lengths)), lengths) * kinds + view.category[spans]
    of_rows = np.rint(np.bincount(cell, weights=view.busy[spans], minlength=kinds * len(lengths)) / part).astype(np.int64).reshape(-1, kinds)
    for row, spent in zip(view.rows, of_rows.tolist(), strict=True):
        ends = (int(view.start[row.first]), int(view.start[row.last - 1] + view.duration[row.last - 1])) if row.last > row.first else (0, 0)
        facts[row.who].append((row.origin, row.role, *spent, *(round(x / part) for x in ends)))
    first: dict[tuple[object, ...], int] = {}
    return [first.setdefault((who.startswith("rank ") or who, *sorted(facts[who], key=repr)), k) for k, who in enumerate(whos)]


def _categories(program: Program, slices: Slices, trace: Trace, collective: bool) -> tuple[I64, list[str]]:
    if not collective:
        return slices.category, list(trace.categories)
    names = ["critical path", "send", "receive", "receive and add", "receive and send on", "copy", "other", "link"]
    parts = program.steps.parts
    receives, sends, adds = (parts & Part.RECV) > 0, (parts & Part.SEND) > 0, (parts & Part.ADD) > 0
    of_step = np.select([receives & sends, receives & adds, receives, sends], [4, 3, 2, 1], 5)
    of_step = np.append(np.where(program.steps.kind == Kind.TRANSFER, of_step, 6), 6)  # the last: of no step
    path, link = (trace.categories.get(name, -1) for name in ("critical path", "link"))
    found = np.select([slices.category == path, slices.category == link], [0, 7], of_step[slices.step])
    return found.astype(np.int64), names


def _ordered(
    program: Program, trace: Trace, slices: Slices, most_rows: int, notes: list[str]
) -> tuple[I64, dict[int, tuple[str, str, str, str]]]:  # fmt: skip
    """Spans in the order of rows (critical path, rank by rank, links; of a lane first predicted, then measured), and what each row is."""
    lane_of = program.lane_of_step()
    at_track, first = np.unique(slices.track, return_index=True)
    first_step = dict(zip(at_track.tolist(), slices.step[first].tolist(), strict=True))
    links: dict[str, int] = {}  # by name, so that what was measured on one stands below what was predicted for it
    keys: list[tuple[tuple[int, int, str, int], int]] = []
    said: dict[int, tuple[str, str, str, str]] = {}
    for track, step in sorted(first_step.items()):
        who, _, origin = trace.processes[trace.tracks[track].process].partition(" · ")
        lane = int(lane_of[step]) if step >= 0 else -1
        label = within = trace.tracks[track].name
        role = Role(int(program.lanes.role[lane])).name.lower() if lane >= 0 else "other"
        role = "compute" if role == "filler" else role  # what fills idle time is work too; its label says that it fills
        rank = -1
        if who.startswith("rank "):
            rank = int(who.removeprefix("rank "))
            label = label.partition(" ")[2].partition(" ")[2] if lane >= 0 else label  # without `lane 5`
        elif who == "links":
            rank, role = len(lane_of), "link"
            link, _, within = label.partition(" (also")
            lane = links.setdefault(link.partition(" · ")[0], len(links))
        else:
            role, label = "path", ""
        said[track] = (who, origin, label, role)
        keys.append(((rank, lane, within, int(not origin.startswith("predicted"))), track))
    twice = Counter((who, origin, label) for who, origin, label, _ in said.values())
    for (_, lane, _, _), track in keys:
        who, origin, label, role = said[track]
        if twice[who, origin, label] > 1:
            said[track] = (who, origin, f"{label} (lane {lane})", role)
    tracks = [track for _, track in sorted(keys)]
    if len(tracks) > most_rows:
        total = len(tracks)
        tracks = [t for t in tracks if said[t][3] != "link" or "also under way" not in said[t][2]]
        if len(tracks) < total:
            notes.append(f"{total - len(tracks):,} rows of messages that share a link with others are left out")
    if len(tracks) > most_rows:
        notes.append(f"{len(tracks) - most_rows:,} of {len(tracks):,} rows are left out, those of the last ranks")
        tracks = tracks[:most_rows]
    place = np.full(len(trace.tracks) or 1, -1, np.int64)
    place[tracks] = np.arange(len(tracks))
    at = place[slices.track]
    order = np.argsort(at, kind="stable")
    return order[at[order] >= 0], said


def _groups(track: I64, start: I64, finish: I64, most: int) -> I64:
    """First spans of what is shown as one: every span alone, or runs that begin in the same stretch, as short a stretch as gives `most` runs."""
    if len(track) <= most:
        return np.arange(len(track), dtype=np.int64)
    changes = np.diff(track, prepend=-1) != 0
    width = max(int(finish.max(initial=1)) // (1 << 20), 1)
    while True:
        long = finish - start >= width
        first = changes | (np.diff(start // width, prepend=-1) != 0) | long | np.concatenate([[False], long[:-1]])
        if int(first.sum()) <= most or width > int(finish.max(initial=0)):
            return np.flatnonzero(first)
        width *= 2


def _merged(slices: Slices, category: I64, start: I64, finish: I64, groups: I64, names: list[str]) -> tuple[dict[str, I64], list[str]]:
    """Columns of the groups and the names they use: from the first start to the last end, named and coloured by the longest span in them."""
    count = np.diff(groups, append=len(start))
    if len(groups) == len(start):
        return {
            "start": start, "duration": finish - start, "name": slices.name, "category": category, "step": slices.step, "iteration": slices.iteration,
            "count": count, "busy": finish - start,
        }, names  # fmt: skip
    own = np.repeat(np.arange(len(groups)), count)
    longest = np.lexsort((start - finish, own))[groups]  # the first of every group when its spans are sorted by length
    alone = count == 1
    first, last = np.minimum.reduceat(start, groups), np.maximum.reduceat(finish, groups)
    used, name = np.unique(slices.name[longest], return_inverse=True)
    return {
        "start": first, "duration": last - first, "name": name.astype(np.int64), "category": category[longest],
        "step": np.where(alone, slices.step[longest], -1), "iteration": np.where(alone, slices.iteration[longest], 0), "count": count,
        "busy": np.add.reduceat(finish - start, groups),
    }, [names[i] for i in used.tolist()]  # fmt: skip
