"""From the engine's arrays to a `Timeline`, or to the error that says why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckFailed, Deadlock
from ..program.calls import InlinedProgram
from ..program.phases import PHASES, phases
from ..program.program import Program
from ..timeline import Spans, Timeline
from .critical import critical_path
from .memory import memory_over_time
from .network import Network
from .tables import ProgramTables, State

__all__ = ["make_timeline", "refuse_unfinished"]

F64 = NDArray[np.float64]


def refuse_unfinished(p: Program, t: ProgramTables, s: State) -> None:
    """Raise Deadlock when lanes are blocked for ever, CheckFailed when messages were sent that nobody receives."""
    stuck = np.flatnonzero(s.lane["turn"] < t.lane_repeat)
    if len(stuck):
        blocked = [_blocked(p, t, s, int(lane)) for lane in stuck[:32]]
        first = blocked[0]
        raise Deadlock(
            f"{len(stuck)} of {len(t.lane_start)} lanes wait for ever; {first['step']}, iteration {first['iteration']}, for {first['waits_for']}",
            where=p.name,
            hint="see `meshwright program stats` for the smallest channel depths, or look for the cycle in data['blocked']",
            data={"blocked": blocked, "lanes_blocked": len(stuck)},
        )
    left = np.flatnonzero(s.channel["sent"] != s.channel["consumed"])
    if len(left):
        c = int(left[0])
        count = int(s.channel["sent"][c] - s.channel["consumed"][c])
        raise CheckFailed(
            f"channel {c} from rank {int(p.channels.src[c])} to rank {int(p.channels.dst[c])}: {count} messages are sent but never received",
            where=p.name,
            hint="every send needs a receive on the same channel",
            data={"channels": left[:64].tolist(), "undelivered": [int(s.channel["sent"][x] - s.channel["consumed"][x]) for x in left[:64]]},
        )


def _blocked(p: Program, t: ProgramTables, s: State, lane: int) -> dict[str, Any]:
    step, phase, at = (int(s.lane[name][lane]) for name in ("at", "phase", "sub"))
    if phase == 0:
        why = f"the end of {p.describe(int(t.after_step[at]))}"
    elif phase == 1 and t.in_ptr[step] <= at < t.in_ptr[step + 1]:
        why = f"a message on channel {int(t.in_channel[at])} from rank {int(p.channels.src[t.in_channel[at]])}"
    elif phase == 3:
        c = int(t.out_channel[at])
        why = f"a credit of channel {c} (depth {int(t.depth[c])}) from rank {int(p.channels.dst[c])}"
    else:
        why = "its compute unit"
    return {"lane": lane, "step": p.describe(step), "step_id": step, "iteration": int(s.lane["turn"][lane]), "waits_for": why}


def make_timeline(
    inlined: InlinedProgram, t: ProgramTables, s: State, network: Network, *, fabric_name: str, makespan_s: float, record: bool, memory: bool,
    staging: bool, attributes: dict[str, Any],
) -> Timeline:  # fmt: skip
    p = inlined.program
    peaks: Sequence[int] = ()
    curves: Mapping[int, Any] = {}
    if memory:
        peaks, curves = memory_over_time(p, s.step["first_start"], s.step["last_end"], makespan_s, staging=staging, curves=record)
    used = np.bincount(network.route_link, minlength=len(network.link_names))
    busy = {name: float(s.link["busy"][k]) for k, name in enumerate(network.link_names) if used[k]}
    path: list[tuple[int, int]] = []
    slack = None
    spans = _no_spans()
    if record:
        lane_of = p.lane_of_step()
        spans = _spans(inlined, t, s, lane_of)
        path, slack = critical_path(t, s, lane_of, makespan_s)
    return Timeline(
        origin="simulated", run_fabric=fabric_name, spans=spans, makespan_s=makespan_s, memory_peak_bytes=peaks, link_busy_s=busy,
        counters={f"memory of rank {rank}": curve for rank, curve in curves.items()}, critical_path=path, slack_s=slack, attributes=attributes,
    )  # fmt: skip


def _no_spans() -> Spans:
    none, zero = np.zeros(0, np.int32), np.zeros(0)
    return Spans(rank=none, lane=none, step=none, iteration=none, start_s=zero, end_s=zero)


def _spans(inlined: InlinedProgram, t: ProgramTables, s: State, lane_of: NDArray[np.int32]) -> Spans:
    p = inlined.program
    step = np.repeat(np.arange(len(t.kind), dtype=np.int32), t.repeat)
    iteration = (np.arange(len(step)) - t.record_at[step]).astype(np.int32)
    lane = lane_of[step]
    phase = np.array(PHASES, dtype=object)[phases(inlined)[step]]
    return Spans(
        rank=p.lanes.actor[lane].astype(np.int32), lane=lane, step=step, iteration=iteration,
        start_s=s.instance["start"].copy(), end_s=s.instance["end"].copy(), phase=phase.tolist(),
    )  # fmt: skip
