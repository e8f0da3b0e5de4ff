"""What every schedule must satisfy, what it keeps, and when each action runs if messages never queue behind each other.

`times` is the planners' own quick clock: an action starts when the one before it on its device and what it needs are done; a message takes
latency + bytes/rate. It neither knows shared links nor back-pressure: figures that are printed come from `meshwright.simulate`.
Cost: O(actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import CheckFailed, Deadlock
from .problem import Action, Kind, PipelineProblem, Schedule

__all__ = [
    "Times", "action_s", "activation_bytes", "check_orders", "in_flight_peaks", "kept_peak_bytes", "message_bytes", "message_s", "pair_s",
    "stage_share", "times",
    "weight_bytes",
]  # fmt: skip


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
    for device, order in enumerate(schedule.orders):
        done: set[tuple[str, int, int]] = set()
        for place, a in enumerate(order):
            for m in range(a.microbatch, a.microbatch + a.count):
                key = (a.kind, a.stage, m)
                if key in done:
                    raise CheckFailed(f"runs {a} twice", where=f"device {device}", data={"place": place})
                before = {"F": None, "B": "F", "I": "F", "W": "I"}[a.kind]
                if before and (before, a.stage, m) not in done:
                    raise CheckFailed(f"runs {a} before {a.stage}{before}{m}", where=f"device {device}", data={"place": place})
                done.add(key)
            _require_pair(order, place, device, "IW" if schedule.split else "B")
        wanted = expected_actions(schedule, device)
        if done != wanted:
            odd = sorted(done ^ wanted)[0]
            raise CheckFailed(f"{'lacks' if odd in wanted else 'should not run'} {odd[1]}{odd[0]}{odd[2]}", where=f"device {device}")
    _require_live(schedule)


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


def _require_live(schedule: Schedule) -> None:
    clock = _Clock(schedule)
    while clock.advance(lambda *_: 0.0, lambda *_: 0.0):
        pass
    stuck = [d for d, order in enumerate(schedule.orders) if clock.at[d] < len(order)]
    if stuck:
        waits = [str(schedule.orders[d][clock.at[d]]) for d in stuck]
        raise Deadlock(f"devices wait for each other: {', '.join(waits[:8])}", where=schedule.name, data={"waiting": waits[:64]})


def in_flight_peaks(schedule: Schedule) -> list[int]:
    """Most micro-batches of a stage that each device keeps activations of at once, from the order alone."""
    end = "W" if schedule.split else "B"
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for a in order:
            held += a.count if a.kind == "F" else -a.count if a.kind == end else 0
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def kept_peak_bytes(problem: PipelineProblem, schedule: Schedule) -> list[int]:
    """Most bytes of activations each device keeps at once, from the order alone: none received ahead, no messages."""
    end = "W" if schedule.split else "B"
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for a in order:
            size = a.count * activation_bytes(problem, schedule, a.stage)
            held += size if a.kind == "F" else -size if a.kind == end else 0
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


# ---- clock -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Times:
    """start_s[device][place], end_s[device][place] of every action; `makespan_s` from 0 to the last end."""

    start_s: list[list[float]]
    end_s: list[list[float]]
    makespan_s: float


class _Clock:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.at = [0] * schedule.devices
        self.start: list[list[float]] = [[] for _ in range(schedule.devices)]
        self.end: list[list[float]] = [[] for _ in range(schedule.devices)]
        self.done: dict[tuple[str, int, int], float] = {}

    def advance(self, seconds, arrives) -> bool:  # type: ignore[no-untyped-def]
        """Run every device as far as it gets; False when none moved."""
        done, top, moved = self.done, self.schedule.stages - 1, False
        # In whatever order devices are visited: an action's time rests only on actions that have one already, so no later visit changes it.
        # Once up and once down, so that a chain of forwards and one of backwards are both followed in one visit.
        devices = len(self.schedule.orders)
        for d in (*range(devices), *range(devices - 2, 0, -1)):
            order = self.schedule.orders[d]
            starts, ends = self.start[d], self.end[d]
            for i in range(self.at[d], len(order)):
                a = order[i]
                kind, s, first, copy, count, beside = a
                start = ends[-1] if ends else 0.0
                if beside >= 0 and kind == "F" and beside < top:  # both halves of a pair begin when both can
                    other = order[self.at[d] + 1]
                    needed = done.get(("B", beside + 1, other.microbatch))
                    if needed is None:
                        break
                    start = max(start, needed + arrives(beside, other.copy, False))
                for m in range(first, first + count):
                    if kind == "F":
                        if not s:
                            continue
                        needed = done.get(("F", s - 1, m))
                        if needed is None:
                            break
                        start = max(start, needed + arrives(s - 1, copy, True))
                        continue
                    needed = done.get(("B" if kind == "W" else "F", s, m))
                    if needed is None:
                        break
                    start = max(start, needed)
                    if kind != "W" and s < top:
                        needed = done.get(("B", s + 1, m))
                        if needed is None:
                            break
                        start = max(start, needed + arrives(s, copy, False))
                else:
                    end = start + seconds(a)
                    starts.append(start)
                    ends.append(end)
                    # The stage before waits for the gradient of its output, which I gives as B does; nobody waits for W.
                    for m in range(first, first + count):
                        done["B" if kind == "I" else kind, s, m] = end
                    self.at[d] += 1
                    moved = True
                    continue
                break  # something that it needs has no time yet
        return moved


def times(problem: PipelineProblem, schedule: Schedule) -> Times:
    """When every action runs. Raises: Deadlock when the orders wait for each other."""
    cost: dict[tuple[str, int, int, int, int], float] = {}

    def seconds(a: Action) -> float:
        key = (a.kind, a.stage, a.copy, a.count, a.beside)
        if key not in cost:
            cost[key] = action_s(problem, schedule, a)
        return cost[key]

    delay = border_delays(problem, schedule)
    clock = _Clock(schedule)
    while clock.advance(seconds, lambda s, c, forward: delay[c][s][0 if forward else 1]):
        pass
    if any(clock.at[d] < len(order) for d, order in enumerate(schedule.orders)):
        _require_live(schedule)
    last = max((e[-1] for e in clock.end if e), default=0.0)
    return Times(clock.start, clock.end, last)


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
