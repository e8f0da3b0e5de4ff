"""Events of a Chrome trace as growing columns: decoded by type, a piece at a time, so that a million events never exist as objects at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...trace.trace import I64
from ...trace.vocabulary import arrow_of
from .arrows import Arrows
from .scan import Piece, salvaged

__all__ = ["Args", "EventRows", "WarningCounts", "decoded_args"]

MAX_EVENTS = 50_000_000  # of one file
MAX_NAME_CHARACTERS = 4096  # that are kept of a name
MAX_TIME_US = 4e15  # more than any clock says: the epoch was 1.8e15 µs ago
MAX_NAMES_CHARACTERS = 512 << 20  # over all different names

_RENAMED = {
    "sequence": "Sequence number", "forward_thread": "Fwd thread id", "external_id": "External id", "external_id_old": "external id",
    "python_id": "Python id", "module_id": "Python module id", "collective": "Collective name", "group": "Process Group Name",
    "group_ranks": "Process Group Ranks", "collective_sequence": "Seq", "in_elements": "In msg nelems", "out_elements": "Out msg nelems",
    "group_size": "Group size", "rank": "Rank", "source": "Src Rank", "destination": "Dst Rank",
}  # fmt: skip


class Args(msgspec.Struct, gc=False, rename=_RENAMED):
    """The arguments of an event that are used; any type is taken, and checked when it becomes a column."""

    sequence: Any = -1
    forward_thread: Any = -1
    external_id: Any = -1
    external_id_old: Any = -1
    correlation: Any = -1
    device: Any = -1
    stream: Any = -1
    python_id: Any = -1
    module_id: Any = -1
    step: Any = -1
    iteration: Any = -1
    collective: Any = None
    group: Any = ""
    group_ranks: Any = ""
    collective_sequence: Any = -1
    in_elements: Any = -1
    out_elements: Any = -1
    group_size: Any = -1
    rank: Any = -1
    source: Any = -1
    destination: Any = -1
    dtype: Any = ""
    name: Any = ""
    labels: Any = ""


class Event(msgspec.Struct, gc=False):
    ph: Any = ""
    name: Any = ""
    cat: Any = ""
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    id: Any = None
    args: Args | None = None


_NO_ARGS = Args()
_MANY = msgspec.json.Decoder(list[Event])
_ONE = msgspec.json.Decoder(Event)
INTEGER_ARGS = ("sequence", "forward_thread", "external_id", "correlation", "device", "stream", "python_id", "module_id", "step", "iteration")
COLLECTIVE_TEXTS = ("collective", "group", "group_ranks", "dtype")
COLLECTIVE_INTEGERS = ("collective_sequence", "in_elements", "out_elements", "group_size", "rank", "source", "destination")


class WarningCounts(msgspec.Struct):
    """What was wrong, counted by kind, with the first example."""

    counts: Counter[str] = msgspec.field(default_factory=Counter)
    first: dict[str, str] = msgspec.field(default_factory=dict)

    def add(self, kind: str, example: object, count: int = 1) -> None:
        if count > 0:
            self.counts[kind] += count
            self.first.setdefault(kind, str(example)[:200])


class EventRows:
    """Columns that grow: `integers[name]` and so on are lists of arrays, one per piece. Rows are in the order of the file."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems = WarningCounts()
        self.count = 0
        self.origin_us: float | None = None
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.tracks: dict[tuple[Any, Any], int] = {}
        self.spelled: dict[tuple[Any, Any], int] = {}  # tracks by what events call them: texts for numbers, too
        self.name_characters = 0
        self.columns: dict[str, list[NDArray[Any]]] = {key: [] for key in ("name", "category", "track", "start", "duration", *INTEGER_ARGS)}
        self.collectives: list[tuple[int, Args]] = []
        self.arrows = Arrows()
        self.metadata: list[tuple[str, Any, Any, Any]] = []  # kind, pid, tid, value
        self.begins: list[tuple[bool, int, int, int, float, Args]] = []  # is it the beginning, track, name, category, time, arguments
        self.ignored: Counter[str] = Counter()
        self.fractions = False  # some time is not a whole µs

    # ---- pieces ----------------------------------------------------------------------------------------------------------
    def add_piece(self, piece: Piece) -> None:
        try:
            self.add(_MANY.decode(piece.array()))
        except (msgspec.DecodeError, RecursionError, ValueError, OverflowError):
            before = self.problems.counts.total()
            self.add(event for data in piece.objects() for event in self.decoded(data))
            if self.problems.counts.total() == before:
                self.problems.add("not JSON between events, repaired", "a comma that is missing, or one too many")

    def decoded(self, data: bytes) -> list[Event]:
        """The events in bytes that may be damaged; repairs and losses are counted."""
        try:
            return [_ONE.decode(data)]
        except (msgspec.DecodeError, RecursionError, ValueError, OverflowError):
            pass
        repaired, lost = salvaged(data, lambda x: _event(x) is not None)
        mended = sum(event not in data for event in repaired)
        self.problems.add("not JSON, repaired", data[:120].decode("utf-8", "replace"), mended)
        if not mended and len(repaired) == 1:
            self.problems.add("arguments that are no object, ignored", data[:120].decode("utf-8", "replace"))
        self.problems.add("not JSON, lost", data[:120].decode("utf-8", "replace"), lost)
        return [event for event in map(_event, repaired) if event is not None]

    def add(self, events: Iterable[Event]) -> None:
        slices: list[Event] = []
        arrows: list[Event] = []
        for event in events:
            if event.ph == "X":
                slices.append(event)
            elif event.ph == "s" or event.ph == "f":
                arrows.append(event)
            else:
                self._other(event)
        if slices:
            self._slices(slices)
        if arrows:
            self._arrows(arrows)

    def _arrows(self, events: Sequence[Event]) -> None:
        time_us = _floats([e.ts for e in events])
        kept = np.flatnonzero(~np.isnan(time_us))
        if len(kept) < len(events):
            self.problems.add("event without a time, lost", events[int(np.isnan(time_us).argmax())].name, len(events) - len(kept))
            events = [events[i] for i in kept.tolist()]
        kinds = {(cat, name): arrow_of(cat, name) for cat, name in {(str(e.cat or ""), str(e.name)) for e in events}}
        keys = [(kinds[str(e.cat or ""), str(e.name)], str(e.id)) for e in events]
        self.arrows.add(keys, self._tracks(events), self.to_ns(time_us[kept]), [e.ph == "f" for e in events])

    # ---- slices ----------------------------------------------------------------------------------------------------------
    def _slices(self, events: Sequence[Event]) -> None:
        start = _floats([e.ts for e in events])
        beyond = np.abs(start) > MAX_TIME_US
        if beyond.any():
            self.problems.add("time that no clock says, lost", events[int(beyond.argmax())].name, int(beyond.sum()))
            kept = np.flatnonzero(~beyond)
            events, start = [events[i] for i in kept.tolist()], start[kept]
        if np.isnan(start).any():
            self.problems.add("slice without a time, lost", events[int(np.isnan(start).argmax())].name, int(np.isnan(start).sum()))
            kept = np.flatnonzero(~np.isnan(start))
            events, start = [events[i] for i in kept.tolist()], start[kept]
        duration = _floats([e.dur for e in events])
        for wrong, kind in ((np.isnan(duration), "slice without a duration, taken as 0"), (duration < 0, "negative duration, taken as 0")):
            if wrong.any():
                self.problems.add(kind, events[int(wrong.argmax())].name, int(wrong.sum()))
                duration[wrong] = 0.0
        args = [e.args or _NO_ARGS for e in events]
        self._append(
            _numbers(self.names, self.name_id, [e.name for e in events]), _numbers(self.categories, self.category_id, [e.cat for e in events]),
            self._tracks(events), start, duration, args,
        )  # fmt: skip

    def _append(
        self, name: list[int], category: list[int], track: list[int], start_us: NDArray[np.float64], duration_us: NDArray[np.float64],
        args: list[Args],
    ) -> None:  # fmt: skip
        base = self.count
        start_ns, duration_ns = self.to_ns(start_us), np.rint(duration_us * 1000.0)
        # What a 64-bit count of ns cannot hold is not a time; it would wrap round silently.
        beyond = (np.abs(start_ns) > 2**62) | (duration_ns > 2**61)
        if beyond.any():
            self.problems.add("time beyond 64 bits, taken as 0", list(self.names)[name[int(beyond.argmax())]], int(beyond.sum()))
            start_ns[beyond], duration_ns[beyond] = 0.0, 0.0
        numbers = np.array([integers(list(map(attrgetter(key), args))) for key in INTEGER_ARGS], np.int64)
        old = [i for i, a in enumerate(args) if a.external_id_old != -1]
        if old:
            numbers[INTEGER_ARGS.index("external_id"), old] = integers([args[i].external_id_old for i in old])
        self.append_columns(np.array(name), np.array(category), np.array(track), start_ns.astype(np.int64), duration_ns.astype(np.int64), numbers)
        self.collectives += [(base + i, a) for i, a in enumerate(args) if a.collective is not None]

    def append_columns(
        self, name: NDArray[Any], category: NDArray[Any], track: NDArray[Any], start_ns: I64, duration_ns: I64, numbers: I64
    ) -> None:  # fmt: skip
        """Rows of slices. Times in ns from the origin; `numbers`: a row for each of `INTEGER_ARGS`."""
        self.count += len(name)
        if self.count > MAX_EVENTS:
            raise FormatError(f"has more than {MAX_EVENTS} events", where=self.where, hint="cut the trace: profile fewer steps")
        self.fractions = self.fractions or bool((start_ns % 1000 != 0).any())
        columns = self.columns
        for key, values in (("name", name), ("category", category), ("track", track)):
            columns[key].append(values.astype(np.int32))
        # Copies: what is handed over may be a view of a table that is filled again.
        columns["start"].append(start_ns.astype(np.int64))
        columns["duration"].append(duration_ns.astype(np.int64))
        for key, values in zip(INTEGER_ARGS, numbers, strict=True):
            columns[key].append(values.copy())

    def to_ns(self, time_us: NDArray[np.float64]) -> NDArray[np.float64]:
        """ns from the first time seen that can be one. Subtracting first keeps the ns that a float of absolute µs still resolves."""
        if self.origin_us is None:
            possible = time_us[np.abs(time_us) < MAX_TIME_US]
            self.origin_us = float(math.floor(possible[0])) if len(possible) else None
        return np.rint((time_us - (self.origin_us or 0.0)) * 1000.0)

    # ---- tables ----------------------------------------------------------------------------------------------------------
    def name_id(self, name: Any) -> int:
        try:
            return self.names[name]
        except (KeyError, TypeError):
            text = name if isinstance(name, str) else str(name)
            if len(text) > MAX_NAME_CHARACTERS:
                self.problems.add(f"name of more than {MAX_NAME_CHARACTERS} characters, cut", text[:80])
                text = text[:MAX_NAME_CHARACTERS] + "…"
            if self.name_characters + len(text) > MAX_NAMES_CHARACTERS:
                raise FormatError(f"has more than {MAX_NAMES_CHARACTERS} characters of different names", where=self.where) from None
            if text not in self.names:
                self.name_characters += len(text)
            return self.names.setdefault(text, len(self.names))

    def category_id(self, category: Any) -> int:
        try:
            return self.categories[category]
        except (KeyError, TypeError):
            return self.categories.setdefault(str(category)[:MAX_NAME_CHARACTERS], len(self.categories))

    def track_id(self, pid: Any, tid: Any) -> int:
        found = self.tracks.setdefault((_label(pid), _label(tid)), len(self.tracks))
        if isinstance(pid, int | str) and isinstance(tid, int | str):
            self.spelled[pid, tid] = found
        return found

    def _tracks(self, events: Sequence[Event]) -> list[int]:
        return _numbers(self.spelled, lambda key: self.track_id(*key), [(e.pid, e.tid) for e in events])

    # ---- events that are not complete slices -----------------------------------------------------------------------------
    def _other(self, event: Event) -> None:
        kind = event.ph
        if kind == "M":
            value = event.args.labels if event.args and event.name == "process_labels" else event.args.name if event.args else ""
            self.metadata.append((str(event.name), _label(event.pid), _label(event.tid), value))
        elif kind in ("B", "E"):
            time = _floats([event.ts])
            if np.isnan(time[0]):
                self.problems.add("event without a time, lost", event.name)
                return
            time_ns, track = float(self.to_ns(time)[0]), self.track_id(event.pid, event.tid)
            row = (kind == "B", track, self.name_id(event.name), self.category_id(event.cat), time_ns, event.args or _NO_ARGS)
            self.begins.append(row)
        elif kind != "t":
            self.ignored[str(kind)[:16]] += 1

    def pair_begins(self) -> None:
        """Slices of the `B` and `E` events, last opened first closed on each track; those without the other are counted."""
        opened: dict[int, list[tuple[int, int, float, Args]]] = {}
        made: list[tuple[int, int, int, float, float, Args]] = []
        for begins, track, name, category, time_ns, args in sorted(self.begins, key=lambda row: row[4]):
            stack = opened.setdefault(track, [])
            if begins:
                stack.append((name, category, time_ns, args))
            elif stack:
                first = stack.pop()
                made.append((first[0], first[1], track, first[2], time_ns - first[2], first[3]))
            else:
                self.problems.add("end without a beginning", list(self.names)[name])
        names = list(self.names)
        for stack in opened.values():
            for name, *_ in stack:
                self.problems.add("beginning without an end", names[name])
        self.begins = []
        if made:
            origin = self.origin_us or 0.0
            columns = list(zip(*made, strict=True))
            start = np.array(columns[3]) / 1000.0 + origin
            self._append([*columns[0]], [*columns[1]], [*columns[2]], start, np.array(columns[4]) / 1000.0, [*columns[5]])


def _numbers(table: dict[Any, int], number: Callable[[Any], int], keys: list[Any]) -> list[int]:
    """`number` of every key, which is only asked for what `table` does not hold as it stands (new; not made into text; not cut)."""
    known = table.get
    try:
        return [found if (found := known(key)) is not None else number(key) for key in keys]
    except TypeError:  # not hashable
        return [number(key) for key in keys]


def _event(data: bytes) -> Event | None:
    try:
        return _ONE.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError):
        pass
    try:
        fields = msgspec.json.decode(data)
        if not isinstance(fields, dict):
            return None
        fields.pop("args", None)  # not an object: there is nothing in it that we use
        return msgspec.convert(fields, Event)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return None


def decoded_args(event: bytes) -> Args:
    """The arguments of a whole event."""
    return _ONE.decode(event).args or _NO_ARGS


def _label(value: Any) -> int | str:
    """A process or thread; a number in quotes, as torch 1.8 to 1.12 wrote threads, is the number, as which arrows know it."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return "" if value is None else str(value)[:MAX_NAME_CHARACTERS]
    return value


def _floats(values: list[Any]) -> NDArray[np.float64]:
    """Numbers, also as texts; NaN for what is none or not finite."""
    try:
        out = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        out = np.empty(0)
    if out.shape != (len(values),):
        out = np.array([_float(v) for v in values], np.float64)
    out[~np.isfinite(out)] = np.nan
    for i in np.flatnonzero((out == 0) | (out == 1)).tolist():
        if isinstance(values[i], bool):
            out[i] = np.nan
    return out


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def integers(values: list[Any]) -> NDArray[np.int64]:
    """Whole numbers, also as texts; -1 for what is none or beyond 64 bits."""
    try:
        out = np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError):
        out = np.empty(0, np.int64)
    if out.shape != (len(values),):
        out = np.array([_integer(v) for v in values], np.int64)
    return out


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -(2**63) <= number < 2**63 else -1
