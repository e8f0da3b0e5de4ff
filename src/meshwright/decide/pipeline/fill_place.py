"""The idle time of a step, and one order of items put into it: each where it ends first, over as many steps as it takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from ...deferrable import Deferrable, FillWork
from ...errors import Infeasible, UsageError
from .orders import message_s
from .peaks import held_peaks
from .problem import PipelineProblem

__all__ = ["Attempt", "Idle", "Placement", "Rule"]

Moment = tuple[int, float]  # (step of the cycle, seconds since its start)
Rule = Callable[[Deferrable], tuple[object, ...]]


@dataclass(frozen=True, kw_only=True)
class Idle:
    """One step as it runs without the work: per rank, idle (start, end, actions before it); end of every action; seconds of the step and of work."""

    step_s: float
    gaps: tuple[tuple[tuple[float, float, int], ...], ...]
    action_end_s: tuple[dict[str, float], ...]
    busy_s: tuple[float, ...]

    def idle_s(self, rank: int) -> Fraction:
        return sum((Fraction(e) - Fraction(s) for s, e, _ in self.gaps[rank]), Fraction(0))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """(Part of) an item on a rank, in seconds since the start of that step; `place`: actions of the rank before it."""

    item: str
    rank: int
    step: int
    start_s: float
    end_s: float
    place: int


class Attempt:
    """One order of the items, each put where it ends first."""

    def __init__(self, problem: PipelineProblem, idle: Idle, work: FillWork, margin: float, most_steps: int, label: str) -> None:
        self.problem, self.idle, self.work, self.margin, self.most_steps, self.label = problem, idle, work, margin, most_steps, label
        self.free: list[list[list[tuple[float, float, int]]]] = [[] for _ in idle.gaps]  # [rank][step] -> gaps left
        self.largest = [max((e - s for s, e, _ in g), default=0.0) for g in idle.gaps]
        self.placed: list[Placement] = []
        self.end: dict[str, list[tuple[int, Moment]]] = {}  # item -> (rank, end) of each rank that does it
        self.items = {i.name: i for i in work.items}

    @property
    def steps(self) -> int:
        return 1 + max((p.step for p in self.placed), default=0)

    def value(self) -> tuple[float, ...]:
        return (self.steps, max(self.kept_peaks(), default=0), max(((p.step, p.end_s) for p in self.placed), default=(0, 0.0))[1])

    def run(self, rule: Rule) -> Attempt:
        waiting = dict(self.items)
        members: dict[str, list[Deferrable]] = {}
        for i in self.work.items:
            if i.group:
                members.setdefault(i.group, []).append(i)
        while waiting:
            outside = {n for i in waiting.values() for n in i.after if n in waiting and not (i.group and self.items[n].group == i.group)}
            ready = [i for i in waiting.values() if not any(n in outside and n in waiting for n in i.after)]
            ready = [i for i in ready if not i.group or self._group_ready(members[i.group], waiting)]
            if not ready:
                raise UsageError("items of a group wait for items that wait for the group", where=sorted(waiting)[0])
            chosen = min(ready, key=rule)
            row = members[chosen.group] if chosen.group else [chosen]
            self.put_group(row) if chosen.group else self.put(chosen, self.most_steps - 1)
            for i in row:
                del waiting[i.name]
        return self

    def _group_ready(self, row: list[Deferrable], waiting: dict[str, Deferrable]) -> bool:
        own = {i.name for i in row}
        return not any(n in waiting and n not in own for i in row for n in i.after)

    # ---- one item ----------------------------------------------------------------------------------------------
    def ready(self, item: Deferrable, rank: int) -> Moment:
        now: Moment = (item.ready_step, 0.0)
        for at, action in item.actions:
            far = self._lag(at, rank, 0)
            now = max(now, (0, self.idle.action_end_s[at][action] + far))
        for name in item.after:
            ends = self.end[name]
            own = [e for r, e in ends if r == rank]
            for r, (step, t) in [(rank, own[0])] if own else ends:
                now = max(now, (step, t + self._lag(r, rank, self.items[name].message_bytes)))
        return now

    def _lag(self, a: int, b: int, size_bytes: int) -> float:
        data = self.problem.data
        return message_s(self.problem, size_bytes, a // data, b // data) if a != b and a // data != b // data else 0.0

    def gaps(self, rank: int, step: int) -> list[tuple[float, float, int]]:
        rows = self.free[rank]
        while len(rows) <= step:
            rows.append(list(self.idle.gaps[rank]))
        return rows[step]

    def fit(self, rank: int, ready: Moment, seconds: float, last_step: int) -> tuple[int, float, int] | None:
        """(step, start, number of the gap) of the first idle time that is long enough."""
        for step in range(ready[0], last_step + 1):
            rows = self.gaps(rank, step)
            after = ready[1] if step == ready[0] else 0.0
            first = max(0, bisect_right(rows, (after, float("inf"), 0)) - 1)
            for number in range(first, len(rows)):
                start = max(rows[number][0], after)
                if start <= rows[number][1] and start + seconds * (1 + self.margin) <= rows[number][1]:
                    return step, start, number
            if step > ready[0] + 1 and seconds * (1 + self.margin) > self.largest[rank]:
                return None
        return None

    def take(self, name: str, rank: int, step: int, start: float, number: int, seconds: float) -> Moment:
        rows = self.gaps(rank, step)
        low, high, place = rows[number]
        end = start + seconds
        rows[number : number + 1] = [g for g in ((low, start, place), (end, high, place)) if g[1] > g[0]]
        self.placed.append(Placement(item=name, rank=rank, step=step, start_s=start, end_s=end, place=place))
        return step, end

    def put(self, item: Deferrable, last_step: int) -> None:
        if item.deadline_steps:
            last_step = min(last_step, item.deadline_steps - 1)
        if item.together:
            self.end[item.name] = self.put_together(item, last_step)
            return
        pieces = item.pieces
        each = item.duration_s / pieces
        options = []
        for rank in item.ranks:
            found = self.plan_pieces(item, rank, pieces, each, last_step)
            if found is not None:
                options.append((found[-1][0], found[-1][1] + found[-1][3], rank, found))
        if not options:
            raise self.nowhere(item, each, last_step)
        # where it ends first; the same end goes to the lowest rank, so that equal inputs give equal cycles
        _, _, rank, rows = min(options)
        end: Moment = (0, 0.0)
        for step, start, _, seconds in rows:
            gaps = self.gaps(rank, step)
            number = next(n for n, g in enumerate(gaps) if g[0] <= start <= g[1] and start + seconds <= g[1])
            end = self.take(item.name, rank, step, start, number, seconds)
        self.end[item.name] = [(rank, end)]

    def plan_pieces(self, item: Deferrable, rank: int, pieces: int, each: float, last_step: int) -> list[tuple[int, float, int, float]] | None:
        """(step, start, gap, seconds) of runs of pieces, nothing taken yet."""
        rows: list[tuple[int, float, int, float]] = []
        now = self.ready(item, rank)
        while pieces:
            found = self.fit(rank, now, each, last_step)
            if found is None:
                return None
            step, start, number = found
            high = self.gaps(rank, step)[number][1]
            many = pieces
            if start + many * each * (1 + self.margin) > high:
                many = max(1, min(pieces, int((high - start) / (each * (1 + self.margin)))))
                while many > 1 and start + many * each * (1 + self.margin) > high:
                    many -= 1
            seconds = item.duration_s if many == item.pieces else many * each
            if start + seconds > high:
                many, seconds = (many - 1, (many - 1) * each) if many > 1 else (1, each)
            rows.append((step, start, number, seconds))
            pieces -= many
            now = (step, start + seconds)
        return rows

    def put_together(self, item: Deferrable, last_step: int) -> list[tuple[int, Moment]]:
        now = max(self.ready(item, r) for r in item.ranks)
        while True:
            found = [self.fit(r, now, item.duration_s, last_step) for r in item.ranks]
            if any(f is None for f in found):
                raise self.nowhere(item, item.duration_s, last_step)
            latest = max((f[0], f[1]) for f in found if f is not None)
            if all(f is not None and (f[0], f[1]) == latest for f in found):
                ends = []
                for rank, f in zip(item.ranks, found, strict=True):
                    assert f is not None
                    ends.append((rank, self.take(item.name, rank, f[0], f[1], f[2], item.duration_s)))
                return ends
            now = latest  # the latest of its ranks is the first moment that can suit all: from there again

    def put_group(self, row: list[Deferrable]) -> None:
        """All items of a group in one step, the first in which all fit."""
        ordered: list[Deferrable] = []
        while len(ordered) < len(row):
            done = {i.name for i in ordered} | self.end.keys()
            ordered += [i for i in row if i not in ordered and all(n in done for n in i.after)]
        ranks = sorted({r for i in row for r in i.ranks})
        first = max(i.ready_step for i in row)
        for i in row:
            first = max([first] + [m[0] for n in i.after if n in self.end for _, m in self.end[n]])
        error: Infeasible | None = None
        for step in range(first, min(first + 3, self.most_steps)) if not self._roomy(row) else range(first, self.most_steps):
            before = {r: list(self.gaps(r, step)) for r in ranks}
            count = len(self.placed)
            try:
                for i in ordered:
                    self.put(_from(i, step), step)
                return
            except Infeasible as refused:
                error = refused
                # all or nothing: what some of the group have taken in this step is given back
                for r in ranks:
                    self.free[r][step] = before[r]
                del self.placed[count:]
                for i in row:
                    self.end.pop(i.name, None)
        assert error is not None
        raise error

    def _roomy(self, row: list[Deferrable]) -> bool:
        """Whether an untouched step has room for each of them alone."""
        return all(any(i.duration_s / i.pieces * (1 + self.margin) <= self.largest[r] for r in i.ranks) for i in row)

    def nowhere(self, item: Deferrable, seconds: float, last_step: int) -> Infeasible:
        largest = max(self.largest[r] for r in item.ranks)
        if seconds * (1 + self.margin) > largest:
            return Infeasible(
                f"needs {seconds:g} s at a stretch, the longest idle time of its ranks is {largest:g} s", where=item.name,
                hint="cut it into smaller pieces (more layers, a smaller piece_s), or take a schedule with longer bubbles",
                data={"item": item.name, "needs_s": seconds, "longest_idle_s": largest},
            )  # fmt: skip
        return Infeasible(
            f"does not fit within {last_step + 1} steps", where=item.name, hint="allow more steps, a later deadline, or less work",
            data={"item": item.name, "steps": last_step + 1},
        )  # fmt: skip

    # ---- memory ------------------------------------------------------------------------------------------------
    def kept_peaks(self) -> tuple[int, ...]:
        """Most bytes that wait for their work, per rank; at one moment what is freed goes first."""
        events: list[list[tuple[Moment, int]]] = [[] for _ in self.idle.gaps]
        last: dict[tuple[str, int], Moment] = {}
        for p in self.placed:
            last[p.item, p.rank] = max(last.get((p.item, p.rank), (0, 0.0)), (p.step, p.end_s))
        for (name, rank), end in last.items():
            item = self.items[name]
            if item.keeps_bytes:
                born = max([(item.ready_step, 0.0)] + [(0, self.idle.action_end_s[r][a]) for r, a in item.actions])
                events[rank] += [(born, item.keeps_bytes), (end, -item.keeps_bytes)]
        return held_peaks(events)


def _from(item: Deferrable, step: int) -> Deferrable:
    return msgspec.structs.replace(item, ready_step=max(item.ready_step, step))
