"""A trace of a real run as columns: slices on tracks, their nesting, and what the profiler said about each of them.

One row per slice that has a start and a length, sorted by (track, start, longest first), so that a track is a contiguous range and a
parent comes before its children. Times are integers in ns from `origin_ns`. A column holds `ABSENT` where the file did not say.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..notebook_repr import repr_html

__all__ = ["ABSENT", "Collectives", "Trace", "TraceWarning", "Track"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

ABSENT = -1  # in a column where the file did not say


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """A thread of a process, or a stream of a device. `pid` and `tid` are as the file has them: numbers, or texts."""

    pid: int | str
    tid: int | str
    process: str = ""
    thread: str = ""
    labels: str = ""  # of the process: "CPU", "GPU 0"


class TraceWarning(msgspec.Struct, frozen=True, kw_only=True):
    """Something in the file that was not as it should be: what, how often, and where first."""

    kind: str
    count: int
    first: str


class Collectives(msgspec.Struct, frozen=True, kw_only=True):
    """What slices of collectives say about themselves, a row each; `slice` is the row in the trace. Texts are "" where absent."""

    slice: I32
    operation: tuple[str, ...] = ()  # "allreduce", "_allgather_base", ...
    group: tuple[str, ...] = ()  # name of the process group
    ranks: tuple[str, ...] = ()  # the group's, as the file writes them
    dtype: tuple[str, ...] = ()
    sequence: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))  # the call's number within its group
    in_elements: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    out_elements: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    group_size: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    rank: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    source: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))  # of a send, receive, broadcast
    destination: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.slice)


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of equal length. `name`, `category` index `names`, `categories`; `track` indexes `tracks`; `parent` is a row or `ABSENT`.

    `flows[kind]` is (row the arrow leaves, row it enters) for kinds such as "fwdbwd" and "ac2g". `track_start` has one more entry than
    there are tracks. `origin_ns` is on the file's clock, to which `base_time_ns` adds the epoch (0: unknown).
    """

    source: str  # the file's name, for messages
    names: tuple[str, ...]
    categories: tuple[str, ...]
    tracks: tuple[Track, ...]
    track_start: I64
    name: I32
    category: I32
    track: I32
    start_ns: I64
    duration_ns: I64
    parent: I32
    sequence: I64  # autograd's sequence number
    forward_thread: I64  # of a backward operator: number of the thread that ran its forward
    external_id: I64
    correlation: I64
    device: I64
    stream: I64
    python_id: I64  # number of a Python call; modules: `module_id` as well
    module_id: I64
    step: I64  # id of the program step (our own traces)
    iteration: I64
    collectives: Collectives
    flows: Mapping[str, tuple[I32, I32]] = msgspec.field(default_factory=dict)
    rank: int | None = None
    world_size: int | None = None
    origin_ns: int = 0
    base_time_ns: int = 0
    events_end: int = -1  # of a file without damage: place of the bracket that closes its events, unpacked; -1: it has to be repaired
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)  # texts and numbers of the document's own keys
    ignored: Mapping[str, int] = msgspec.field(default_factory=dict)  # events that are not slices, by phase letter
    warnings: tuple[TraceWarning, ...] = ()

    _repr_html_ = repr_html

    def __len__(self) -> int:
        return len(self.name)

    @property
    def end_ns(self) -> I64:
        return self.start_ns + self.duration_ns

    def rows(self, track: int) -> slice:
        return slice(int(self.track_start[track]), int(self.track_start[track + 1]))

    def name_of(self, row: int) -> str:
        return self.names[int(self.name[row])]

    def in_category(self, *categories: str) -> NDArray[np.bool_]:
        """Which slices are of one of the categories (told without regard to case)."""
        wanted = {c.lower() for c in categories}
        return np.array([c.lower() in wanted for c in self.categories], bool)[self.category]

    def where_name(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which slices have a name for which `wanted` (one entry per name) is true."""
        return wanted[self.name]
