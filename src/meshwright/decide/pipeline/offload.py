"""Activations that wait in the host's memory: which, and when they leave and come back, so that a schedule fits that else would not.

Cite: see CITE.
Left open by the paper: whose activations leave and when they are fetched, for any schedule. Our answer: while a device keeps more than it may at some
    action, of what is kept there that comes back latest leaves (Belady's rule), if a copy out and a copy back fit around that action.
Deviations: copies out and back share the device's copy unit; what another device sent stays (its buffer is the message's). Halves of overlapped
    pairs and their forwards' activations stay too. The order of computation is not changed.
Invariant: from `free` to `fetch` the bytes are not on the device, whatever the times: the device waits for a copy rather than exceed.
Cost: O(moves · actions) a device, a few schedules simulated. Copies are planned to take their time, half of it, and none: the fastest that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...cite import Cite
from .improve import is_large
from .judge import Judged, judge
from .lower import PlanCollective
from .orders import F64, I64, activation_bytes, saved_bytes, times, weight_bytes
from .problem import Offload, PipelineProblem, Schedule

__all__ = ["CITE", "fitting"]

CITE = Cite(
    key="wan2025pipeoffload", title="PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", year=2025, venue="ICML",
    authors="Xinyi Wan, Penghui Qi, et al.", url="https://arxiv.org/abs/2503.01328",
)  # fmt: skip
# How much of a copy's time computation leaves for it: all, and less where all is too much for the device to get below its cap.
SHARES = (1.0, 0.5, 0.0)
MAX_FITTINGS = 4  # of what arrives early, which depends on times: how often less is asked for


@dataclass
class _Kept:
    """Of one stage and micro-batch on a device: places of F, the first and the last action of its backward; bytes, and those that can leave."""

    stage: int
    microbatch: int
    forward: int
    backward: int
    end: int
    size_bytes: int
    saved_bytes: int
    free: int = -1
    fetch: int = -1


def fitting(problem: PipelineProblem, schedule: Schedule, plan_collective: PlanCollective | None = None) -> Judged | None:
    """The schedule with activations in the host's memory, judged, where it fits so; None where it does not, or nothing is copied there.

    `problem.memory_cap_bytes` and rates of copies say what there is.
    """
    if not problem.host_out_Bps or not problem.memory_cap_bytes or is_large(schedule):
        return None
    found = []
    for share in SHARES:
        target = [c - weight_bytes(problem, schedule, d) if c else 1 << 62 for d, c in enumerate(problem.memory_cap_bytes)]
        for _ in range(MAX_FITTINGS):
            made = _away(problem, schedule, target, share)
            if not any(made.offloads):
                break
            judged = judge(problem, made, plan_collective)
            if judged.over_bytes <= 0:
                found.append(judged)
                break
            over = [m - c if c else 0 for m, c in zip(judged.memory_bytes, problem.memory_cap_bytes, strict=True)]
            target = [t - max(0, x) for t, x in zip(target, over, strict=True)]
    return min(found, key=lambda j: j.time_s) if found else None


def _away(problem: PipelineProblem, schedule: Schedule, target: Sequence[int], share: float) -> Schedule:
    """`schedule` with what must leave for each device to keep at most `target` bytes by its order, as far as that is possible."""
    clock = times(problem, schedule)
    rows, moved = [], 0
    for d in range(schedule.devices):
        out_s, in_s = share / problem.host_out_Bps, share / problem.host_in_Bps
        rows.append(_of_device(_kept(problem, schedule, d), target[d], np.array(clock.start_s[d]), np.array(clock.end_s[d]), out_s, in_s))
        moved += len(rows[-1])
    note = f"{moved} activations of a stage and micro-batch wait in the host's memory"
    return replace(schedule, offloads=tuple(tuple(row) for row in rows), notes=(*schedule.notes, note))


def _kept(problem: PipelineProblem, schedule: Schedule, device: int) -> list[_Kept]:
    places: dict[tuple[int, int], list[int]] = {}
    paired = set()
    for place, a in enumerate(schedule.orders[device]):
        for m in range(a.microbatch, a.microbatch + a.count):
            places.setdefault((a.stage, m), []).append(place)
            if a.beside >= 0:
                paired.add((a.stage, m))
    found = []
    for (s, m), at in places.items():
        saved = 0 if (s, m) in paired else saved_bytes(problem, schedule, schedule.copy_of[m], s)
        found.append(_Kept(s, m, at[0], at[1], at[-1], activation_bytes(problem, schedule, s), saved))
    return found


def _of_device(kept: list[_Kept], target: int, start: F64, end: F64, out_s: float, in_s: float) -> list[Offload]:
    """`out_s`, `in_s`: seconds per byte that computation leaves for copies."""
    change = np.zeros(len(start) + 1, np.int64)
    for k in kept:
        change[k.forward] += k.size_bytes
        change[k.end + 1] -= k.size_bytes
    whole: I64 = np.cumsum(change[:-1])
    away, stays = list[_Kept](), set[int]()
    while True:
        held = whole.copy()
        for k in away:
            held[k.free : k.fetch + 1] -= k.saved_bytes
        worst = int(np.argmax(held))
        if held[worst] <= target:
            break
        able = [
            k for i, k in enumerate(kept) if k.saved_bytes and i not in stays and k not in away and k.forward < worst < k.backward
        ]  # fmt: skip
        if not able:
            break
        chosen = max(able, key=lambda k: k.backward)
        _place([*away, chosen], start, end, out_s, in_s)
        if chosen.free <= worst <= chosen.fetch and all(k.free <= k.fetch for k in away):
            away.append(chosen)
        else:
            stays.add(next(i for i, k in enumerate(kept) if k is chosen))
            _place(away, start, end, out_s, in_s)
    return [Offload(k.stage, k.microbatch, k.free, k.fetch) for k in away]


def _place(away: list[_Kept], start: F64, end: F64, out_s: float, in_s: float) -> None:
    """When each has left and when it must be asked for, copies one after the other; `free` behind `fetch` where there is no time between."""
    now = 0.0
    for k in sorted(away, key=lambda k: k.forward):
        now = max(now, float(end[k.forward])) + out_s * k.saved_bytes
        k.free = max(k.forward + 1, int(np.searchsorted(start, now - 1e-12 * now, "left")))
    now = np.inf
    for k in sorted(away, key=lambda k: -k.backward):
        now = min(now, float(start[k.backward])) - in_s * k.saved_bytes
        k.fetch = min(k.backward - 1, int(np.searchsorted(end, now + 1e-12 * abs(now), "right")) - 1)
