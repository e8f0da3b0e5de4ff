"""Device time of one rank as HolisticTraceAnalysis cuts it: idle, compute, the rest, and communication hidden behind compute.

`kernel_s` runs from the first device activity to the end of the last; compute is the union of kernels that are neither collectives nor copies; the
rest is communication and copies outside compute. Overlap is the share of the union of collectives during which compute runs.
With several profiler steps, only work that was launched before the last step (or, `last_step`, before its end) counts: as that tool does.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np

from ..trace.trace import ABSENT, Trace
from ..trace.vocabulary import DEVICE, RUNTIME, STEP
from .tiles import union_ns

__all__ = ["DeviceTimes", "device_times"]

_COLLECTIVE = re.compile(r"^nccl.*Kernel")
_OTHER = re.compile(r"^nccl.*Kernel|.*Memcpy|Memset|.*Sync")


class DeviceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds over all chosen steps; `overlap` is a share of communication (nan without any)."""

    idle_s: float
    compute_s: float
    other_s: float
    kernel_s: float
    communication_s: float
    overlap: float
    steps: tuple[int, ...] = ()  # the profiler's numbers of the steps covered; empty without marks: the whole trace


def device_times(trace: Trace, *, last_step: bool = True) -> DeviceTimes | None:
    """None for a trace without device activities."""
    rows = np.flatnonzero(trace.in_category(*DEVICE) & (trace.stream != ABSENT))
    steps = np.flatnonzero(trace.where_name(np.array([bool(STEP.match(n)) for n in trace.names], bool)) & trace.in_category("user_annotation"))
    end = trace.end_ns
    numbers = sorted({int(trace.name_of(r).partition("#")[2]) for r in steps.tolist()})
    if len(numbers) > 1:
        calls = trace.in_category(*RUNTIME) & (trace.correlation != ABSENT)
        calls &= trace.start_ns <= end[steps].max() if last_step else trace.start_ns < trace.start_ns[steps].max()
        rows = rows[np.isin(trace.correlation[rows], trace.correlation[calls])]
    if not len(rows):
        return None
    collective, other = (np.array([bool(p.match(n)) for n in trace.names], bool)[trace.name[rows]] for p in (_COLLECTIVE, _OTHER))
    start, finish = trace.start_ns[rows], end[rows]
    compute, communication = union_ns(start[~other], finish[~other]), union_ns(start[collective], finish[collective])
    kernel, busy = int(finish.max() - start.min()), union_ns(start, finish)
    both = compute + communication - union_ns(start[~other | collective], finish[~other | collective])
    return DeviceTimes(
        idle_s=(kernel - busy) / 1e9, compute_s=compute / 1e9, other_s=(busy - compute) / 1e9, kernel_s=kernel / 1e9,
        communication_s=communication / 1e9, overlap=both / communication if communication else float("nan"),
        steps=tuple(numbers if last_step or len(numbers) < 2 else numbers[:-1]),
    )  # fmt: skip
