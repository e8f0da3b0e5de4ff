"""What a rank did, as pieces that do not overlap, and where ranks met: the common form of profiler traces and of our own recordings.

A host lane holds one piece at every instant (gaps are pieces too). Device activities may overlap. A meeting is a collective or a message:
every participant arrives (enters it) and leaves it. Times are integers in ns; of one rank's own clock until `aligned` shifts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["STAGES", "Activities", "Device", "Kind", "Meetings", "RankView", "Stage", "Step"]

I64 = NDArray[np.int64]


class Stage(IntEnum):
    """Phases of the training loop."""

    OTHER, DATA, FORWARD, LOSS, BACKWARD, OPTIMIZER, COMMUNICATION = range(7)


STAGES = ("other", "load data", "forward", "loss", "backward", "optimizer", "communication")


class Kind(IntEnum):
    """What a piece is: work, a copy of a tensor, waiting for a meeting, waiting for the device, loading data, starting kernels, the time between
    operators while an annotation says where (`HOST`), nothing recorded (`IDLE`), device work of a collective, device copies to or from the host."""

    COMPUTE, COPY, WAIT, SYNC, DATA, LAUNCH, HOST, IDLE, COLLECTIVE, TRANSFER = range(10)


class Activities(msgspec.Struct, frozen=True, kw_only=True):
    """Columns. `module`, `name` index the view's tables; `meeting`: -1 or the meeting that the piece is part of or waits for."""

    start: I64
    end: I64
    kind: NDArray[np.int8]
    stage: NDArray[np.int8]
    module: NDArray[np.int32]
    name: NDArray[np.int32]
    meeting: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> Activities:
        return Activities(**{k: getattr(self, k)[rows] for k in self.__struct_fields__})

    def shifted(self, ns: int) -> Activities:
        return msgspec.structs.replace(self, start=self.start + ns, end=self.end + ns)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels and copies of one rank's device, sorted by start. `launch`: when the host started each (-1: unknown); `stream`: its queue."""

    work: Activities
    launch: I64
    stream: I64


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the loop on one rank."""

    number: int
    start: int
    end: int


class Meetings(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives and messages of one rank, sorted by arrival. `key` is equal on all participants and unique on each; `queue`: meetings of one
    queue happen one after the other (a process group, a link). `arrives`, `leaves`: when this rank entered and left it. `source`,
    `destination`, `size_bytes`: -1 where unknown; `everyone`: nobody leaves before all have arrived (not so for messages and broadcasts)."""

    key: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    queue: tuple[str, ...] = ()
    arrives: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    leaves: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    source: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    destination: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    size_bytes: I64 = msgspec.field(default_factory=lambda: np.zeros(0, np.int64))
    everyone: NDArray[np.bool_] = msgspec.field(default_factory=lambda: np.zeros(0, bool))

    def __len__(self) -> int:
        return len(self.key)


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one rank. `host` tiles [first step's start, last step's end]; `clock_ns` was added to its times."""

    rank: int
    source: str
    steps: Sequence[Step]
    host: Activities
    device: Device | None
    meetings: Meetings
    modules: tuple[str, ...]
    names: tuple[str, ...]
    kinds: dict[str, str] = msgspec.field(default_factory=dict)  # class of each module, where known
    overlap_ns: int = 0  # communication under way while the rank computes
    clock_ns: int = 0
    machine: str = ""  # host name, where the trace says it: ranks of one machine share a clock
    warnings: tuple[str, ...] = ()

    def aligned(self, ns: int) -> RankView:
        """The same on another clock."""
        meetings = msgspec.structs.replace(self.meetings, arrives=self.meetings.arrives + ns, leaves=self.meetings.leaves + ns)
        steps = [Step(number=s.number, start=s.start + ns, end=s.end + ns) for s in self.steps]
        device = self.device
        if device is not None:
            device = msgspec.structs.replace(device, work=device.work.shifted(ns), launch=np.where(device.launch >= 0, device.launch + ns, -1))
        return msgspec.structs.replace(self, steps=steps, host=self.host.shifted(ns), device=device, meetings=meetings, clock_ns=self.clock_ns + ns)
