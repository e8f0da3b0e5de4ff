"""What every schedule must satisfy, what it keeps, and when each action runs if messages never queue behind each other.

`times` is the planners' own quick clock: an action starts when the one before it on its device and what it needs are done; a message takes
latency + bytes/rate. It neither knows shared links nor back-pressure: figures that are printed come from `meshwright.simulate`.
Cost: O(actions).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckFailed, Deadlock
from .problem import KIND_CODES, Action, Columns, Kind, PipelineProblem, Schedule

__all__ = [
    "Times", "action_s", "activation_bytes", "check_orders", "in_flight_peaks", "kept_peak_bytes", "message_bytes", "message_s", "pair_s",
    "saved_bytes", "stage_share", "times", "weight_bytes",
]  # fmt: skip

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def stage_share(schedule: Schedule, stage: int) -> int:
    """The stage of the problem that a schedule's stage is a piece of."""
    return stage // schedule.chunks


def action_s(problem: PipelineProblem, schedule: Schedule, action: Action) -> float:
    """Seconds of one action on its device. Of an overlapped pair the forward has the pair's time, and the backward, which ends with it, none."""
    if action.beside >= 0:
        return pair_s(problem, schedule, action) if action.kind == "F" else 0.0
    s = stage_share(schedule, action.stage)
    speed = problem.speeds[schedule.device(action)]
    work = {"F": problem.forward_s, "B": problem.backward_s, "I": problem.input_grad_s, "W": problem.weight_grad_s}[action.kind][s]
    # Nothing is before the first stage: where data need no gradient, its I has nothing to do and its B is W alone.
    if action.stage == 0 and not problem.first_input_grad:
        work = 0.0 if action.kind == "I" else problem.weight_grad_s[s] if action.kind == "B" else work
    return work * action.count / (schedule.chunks * schedule.parts * speed)


def pair_s(problem: PipelineProblem, schedule: Schedule, forward: Action) -> float:
    """Seconds of a forward and the backward beside it: never less than either."""
    one = action_s(problem, schedule, forward._replace(beside=-1))
    kinds: tuple[Kind, ...] = ("I", "W") if schedule.split else ("B",)
    where = {d: c for c, row in enumerate(schedule.placement) for s, d in enumerate(row) if s == forward.beside}
    other = Action("B", forward.beside, 0, where[schedule.device(forward)])
    two = sum((action_s(problem, schedule, other._replace(kind=k)) for k in kinds), 0.0)
    if not problem.pair_s:
        return one + two - problem.pair_overlap * min(one, two)
    share = problem.pair_s[stage_share(schedule, forward.stage)] * forward.count
    return max(one, two, share / (schedule.chunks * schedule.parts * problem.speeds[schedule.device(forward)]))


def saved_bytes(problem: PipelineProblem, schedule: Schedule, copy: int, stage: int) -> int:
    """Of what `stage` keeps for a micro-batch, all but the input that another device sent."""
    where = schedule.placement[copy]
    received = message_bytes(problem, schedule, stage - 1) if stage and where[stage - 1] != where[stage] else 0
    return max(0, activation_bytes(problem, schedule, stage) - received)


def activation_bytes(problem: PipelineProblem, schedule: Schedule, stage: int) -> int:
    """Kept by `stage` for one of the schedule's micro-batches."""
    return -(-problem.activation_bytes[stage_share(schedule, stage)] // (schedule.chunks * schedule.parts))


def message_bytes(problem: PipelineProblem, schedule: Schedule, stage: int) -> int:
    """Crossing the border after `stage`, for one of the schedule's micro-batches."""
    return -(-problem.message_bytes[stage_share(schedule, stage)] // schedule.parts)


def weight_bytes(problem: PipelineProblem, schedule: Schedule, device: int) -> int:
    return sum(-(-problem.weight_bytes[stage_share(schedule, s)] // schedule.chunks) for _, s in schedule.hosted(device))


def connection(problem: PipelineProblem, a: int, b: int) -> tuple[float, int]:
    """(latency in s, rate in bytes/s) between two devices; see PipelineProblem."""
    n = problem.devices
    for low, high in ((a, b), (b, a)):
        if (low + 1) % n == high:
            return problem.p2p_latency_s[low], problem.p2p_rate_Bps[low]
    return max(problem.p2p_latency_s), min(problem.p2p_rate_Bps)


def message_s(problem: PipelineProblem, size_bytes: int, a: int, b: int) -> float:
    if a == b:
        return 0.0
    latency_s, rate_Bps = connection(problem, a, b)
    return latency_s + size_bytes / rate_Bps


# ---- structure ---------------------------------------------------------------------------------------------------------
def expected_actions(schedule: Schedule, device: int) -> set[tuple[str, int, int]]:
    """(kind, stage, micro-batch) that the device must run, each once."""
    kinds = "FIW" if schedule.split else "FB"
    held = set(schedule.hosted(device))
    return {(k, s, m) for m, c in enumerate(schedule.copy_of) for copy, s in held if copy == c for k in kinds}


def check_orders(schedule: Schedule) -> None:
    """Every device runs its actions once, F before its backward, I before W, and nobody waits for ever. Raises: CheckFailed, Deadlock."""
    columns, kinds = schedule.columns, "IW" if schedule.split else "B"
    hosts = np.array(schedule.placement)[np.array(schedule.copy_of, np.int64)].T  # [stage, micro-batch]: the device
    for device, order in enumerate(schedule.orders):
        mine = slice(columns.first[device], columns.first[device + 1])
        place, kind, stage, m = _one_by_one(columns, mine)
        _require_order(order, device, place, kind, stage, m)
        for paired in np.flatnonzero(columns.beside[mine] >= 0).tolist():
            _require_pair(order, paired, device, kinds)
        wanted = hosts == device
        held = (stage >= 0) & (stage < wanted.shape[0]) & (m >= 0) & (m < wanted.shape[1])
        right = bool(held.all()) and bool(wanted[stage, m].all()) and len(place) == (1 + len(kinds)) * int(wanted.sum())
        if not right or not np.isin(kind, [KIND_CODES[k] for k in "F" + kinds]).all():
            done = {("FBIW"[k], s, n) for k, s, n in zip(kind.tolist(), stage.tolist(), m.tolist(), strict=True)}
            asked = expected_actions(schedule, device)
            odd = sorted(done ^ asked)[0]
            raise CheckFailed(f"{'lacks' if odd in asked else 'should not run'} {odd[1]}{odd[0]}{odd[2]}", where=f"device {device}")
    _require_offloads(schedule)
    _require_live(schedule)


def _one_by_one(columns: Columns, mine: slice) -> tuple[I64, I64, I64, I64]:
    """Place, kind, stage and micro-batch of a device's actions, those on several micro-batches once for each."""
    count = columns.count[mine]
    place = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count)
    return place, columns.kind[mine][place], columns.stage[mine][place], columns.microbatch[mine][place] + within


def _require_order(order: Sequence[Action], device: int, place: I64, kind: I64, stage: I64, m: I64) -> None:
    """Nothing twice, nothing before what it needs on its device. Raises: CheckFailed of the first that is wrong."""
    if not len(place):
        return
    work = (stage - stage.min()) * (int(m.max() - m.min()) + 1) + m - m.min()
    rows = np.arange(len(place))
    seen = np.full((len(KIND_CODES), int(work.max()) + 1), len(place))  # where each is first
    np.minimum.at(seen, (kind, work), rows)
    twice = seen[kind, work] != rows
    before = np.array([-1, KIND_CODES["F"], KIND_CODES["F"], KIND_CODES["I"]])[kind]
    wrong = twice | ((before >= 0) & (seen[before, work] >= rows))
    if wrong.any():
        i = int(np.argmax(wrong))
        a = order[int(place[i])]
        what = "twice" if twice[i] else f"before {a.stage}{'FBIW'[before[i]]}{m[i]}"
        raise CheckFailed(f"runs {a} {what}", where=f"device {device}", data={"place": int(place[i])})


def _require_pair(order: Sequence[Action], place: int, device: int, kinds: str) -> None:
    """A half of an overlapped pair stands beside the other half. Raises: CheckFailed."""
    a = order[place]
    if a.beside < 0:
        return
    at = place if a.kind == "F" else place - 1 - kinds.index(a.kind)
    first, behind = order[at], order[at + 1 : at + 1 + len(kinds)]
    halves = "".join(x.kind for x in behind) == kinds and len({(x.stage, x.microbatch) for x in behind}) == 1
    if at < 0 or first.kind != "F" or not halves or any((x.stage, x.beside) != (first.beside, first.stage) for x in behind):
        raise CheckFailed(f"runs {a} without the other half of its pair beside it", where=f"device {device}", data={"place": place})


def _require_offloads(schedule: Schedule) -> None:
    """What waits in the host's memory leaves after its F and is back before its backward. Raises: CheckFailed."""
    for device, rows in enumerate(schedule.offloads):
        place = {(a.kind, a.stage, m): i for i, a in enumerate(schedule.orders[device]) for m in range(a.microbatch, a.microbatch + a.count)}
        for row in rows:
            own = ("I" if schedule.split else "B", row.stage, row.microbatch)
            if own not in place or not place["F", *own[1:]] < row.free <= row.fetch < place[own]:
                text = f"cannot let {row.stage}F{row.microbatch} wait in the host's memory from action {row.free} to {row.fetch}"
                raise CheckFailed(text, where=f"device {device}", data={"free": row.free, "fetch": row.fetch})
        if len({row[:2] for row in rows}) < len(rows):
            raise CheckFailed("moves one activation twice", where=f"device {device}")


def _require_live(schedule: Schedule) -> None:
    free = np.zeros((schedule.copies, schedule.stages))
    _, _, at = _run(schedule, np.zeros(len(schedule.columns.kind)), free, free)
    places = (at - schedule.columns.first[:-1]).tolist()
    waits = [str(order[place]) for order, place in zip(schedule.orders, places, strict=True) if place < len(order)]
    if waits:
        raise Deadlock(f"devices wait for each other: {', '.join(waits[:8])}", where=schedule.name, data={"waiting": waits[:64]})


def in_flight_peaks(schedule: Schedule) -> list[int]:
    """Most micro-batches of a stage that each device keeps activations of at once, from the order alone."""
    return _peaks(schedule, np.ones(schedule.stages, np.int64))


def kept_peak_bytes(problem: PipelineProblem, schedule: Schedule) -> list[int]:
    """Most bytes of activations each device keeps at once, from the order alone: none received ahead, no messages."""
    return _peaks(schedule, np.array([activation_bytes(problem, schedule, s) for s in range(schedule.stages)], np.int64))


def _peaks(schedule: Schedule, sizes: I64) -> list[int]:
    """Most of `sizes[stage]` per micro-batch that each device holds between F and the end of the backward."""
    c = schedule.columns
    ends = KIND_CODES["W" if schedule.split else "B"]
    change = c.count * sizes[c.stage] * ((c.kind == KIND_CODES["F"]).astype(np.int64) - (c.kind == ends))
    return [int(np.cumsum(change[a:b]).max(initial=0)) for a, b in itertools.pairwise(c.first.tolist())]


# ---- clock -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Times:
    """start_s[device][place], end_s[device][place] of every action; `makespan_s` from 0 to the last end."""

    start_s: list[list[float]]
    end_s: list[list[float]]
    makespan_s: float


def _run(schedule: Schedule, seconds: F64, up: F64, down: F64) -> tuple[F64, F64, I64]:
    """Start and end of every action, and the action that every device stands at: short of its last one, it waits for ever."""
    from ...kernels.order_times import run_orders

    c = schedule.columns
    start, end, at = np.zeros(len(seconds)), np.zeros(len(seconds)), c.first[:-1].copy()
    done = np.full((3, schedule.stages, schedule.microbatches), -1.0)
    row = np.array([0, 1, 1, 2])[c.kind]
    run_orders(row, c.stage, c.microbatch, c.copy, c.count, c.beside, c.first, seconds, up, down, done, at, start, end)
    return start, end, at


def times(problem: PipelineProblem, schedule: Schedule) -> Times:
    """When every action runs. Raises: Deadlock when the orders wait for each other."""
    delay = np.zeros((2, schedule.copies, schedule.stages))
    for copy, row in enumerate(border_delays(problem, schedule)):
        delay[:, copy, : len(row)] = np.array(row, np.float64).reshape(len(row), 2).T
    start, end, at = _run(schedule, _seconds(problem, schedule), delay[0], delay[1])
    first = schedule.columns.first.tolist()
    if at.tolist() != first[1:]:
        _require_live(schedule)
    starts, ends = ([x[a:b].tolist() for a, b in itertools.pairwise(first)] for x in (start, end))
    return Times(starts, ends, float(end.max(initial=0.0)))


def _seconds(problem: PipelineProblem, schedule: Schedule) -> F64:
    """Of every action: asked once for those that are alike."""
    c = schedule.columns
    alike = (((c.kind * schedule.stages + c.stage) * schedule.copies + c.copy) * (int(c.count.max(initial=0)) + 1) + c.count) * (schedule.stages + 1)
    _, some, which = np.unique(alike + c.beside + 1, return_index=True, return_inverse=True)
    device = np.asarray(np.searchsorted(c.first, some, side="right") - 1)
    places = np.asarray(some - c.first[device])
    found = [action_s(problem, schedule, schedule.orders[d][i]) for d, i in zip(device.tolist(), places.tolist(), strict=True)]
    return np.array(found, np.float64)[which]


def border_delays(problem: PipelineProblem, schedule: Schedule) -> list[list[tuple[float, float]]]:
    """[copy][stage] -> seconds of a message from `stage` to the next one, and back."""
    table = []
    for where in schedule.placement:
        row = []
        for s in range(schedule.stages - 1):
            size, a, b = message_bytes(problem, schedule, s), where[s], where[s + 1]
            row.append((message_s(problem, size, a, b), message_s(problem, size, b, a)))
        table.append(row)
    return table


def looped(devices: int, chunks: int) -> tuple[int, ...]:
    """Stage k on device k mod devices."""
    return tuple(k % devices for k in range(devices * chunks))


def vee(devices: int) -> tuple[int, ...]:
    """Two stages per device: r and 2·devices-1-r."""
    return tuple(k if k < devices else 2 * devices - 1 - k for k in range(2 * devices))


def actions(kind: str, pairs: Sequence[tuple[int, int]]) -> list[Action]:
    """Actions of one kind from (stage, micro-batch) pairs, copy 0."""
    return [Action(kind, s, m) for s, m in pairs]  # type: ignore[arg-type]
