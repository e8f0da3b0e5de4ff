"""List scheduling of a pipeline under a cap on kept activations: the device that is free takes the most urgent work that is ready.

Shared by the zero-bubble, V-shaped and Chimera schedules and by the search. What is urgent is a `Rule`. With `patience` a device rather
waits for work known to come (its predecessor runs already, so the moment is known) than start something less urgent that would delay it.
Cap: activations count from the start of F to the end of the backward (W when split). A forward of a device's c-th stage of v (of its copy)
leaves room for one micro-batch in each of the v-1-c later ones, so the oldest micro-batch always gets through: no cap that holds one
micro-batch deadlocks on one copy. With several copies each has its own share of the cap.
Only the order is kept: times are worked out again by whoever asks.
Cost: O(actions · log) for the events plus the ready lists, which hold at most a few actions per device and stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from operator import itemgetter

from ...errors import Infeasible
from ...kernels.effort import look
from .orders import action_s, border_delays
from .problem import Action, PipelineProblem, Schedule

__all__ = ["RULES", "Rule", "list_orders", "require_room"]

NEVER = float("inf")
Urgency = tuple[float, float, int, int]
Ready = tuple[float, Urgency, float, Action]  # from when it may start, how urgent it is, its seconds, what it is
URGENCY = itemgetter(1)


@dataclass(frozen=True)
class Rule:
    """`kinds`: from most to least urgent. `late_first`: later stages of a device first, else earlier. `patience`: wait for more urgent work
    that comes within this share of what would be started. `fixed`: per device the order of all actions but W, which then fill the gaps.
    `bonus`: makes single actions more (> 0) or less urgent, in places of the queue; by (kind, stage, micro-batch)."""

    kinds: str = "BIFW"
    late_first: bool = True
    patience: float = 1.0
    fixed: tuple[tuple[Action, ...], ...] = ()
    bonus: Mapping[tuple[str, int, int], float] | None = None


RULES = tuple(
    Rule(kinds, late, patience) for kinds in ("BIFW", "FBIW", "BIWF") for late in (True, False) for patience in (1.0, 0.0, 0.5)
)  # fmt: skip


def list_orders(problem: PipelineProblem, base: Schedule, rule: Rule, cap: Sequence[Sequence[int]]) -> Schedule:
    """`base` with orders of its own: its placement, copies, groups of forwards (from its orders) and split are kept.

    cap[device][copy]: most activations kept, in micro-batches of one stage. Raises: Infeasible when a cap is too small for one micro-batch.
    """
    require_room(base, cap)
    return _Listing(problem, base, rule, cap).run()


def require_room(base: Schedule, cap: Sequence[Sequence[int]]) -> None:
    """Raises: Infeasible when a cap is too small for one micro-batch."""
    for d in range(base.devices):
        for c in range(base.copies):
            need = sum(1 for copy, _ in base.hosted(d) if copy == c) * max((a.count for a in base.orders[d] if a.copy == c), default=0)
            if cap[d][c] < need:
                raise Infeasible(
                    f"a micro-batch needs {need} stage activations on device {d}, the cap allows {cap[d][c]}", where="memory",
                    hint="raise the memory cap, or use smaller micro-batches", data={"needed": need, "cap": cap[d][c]},
                )  # fmt: skip


class _Listing:
    def __init__(self, problem: PipelineProblem, base: Schedule, rule: Rule, cap: Sequence[Sequence[int]]) -> None:
        self.base, self.rule = base, rule
        self.left = [list(row) for row in cap]
        self.delay = border_delays(problem, base)
        self.seconds: dict[tuple[str, int, int, int], float] = {}
        for order in base.orders:
            for a in order:
                key = (a.kind, a.stage, a.copy, a.count)
                if key not in self.seconds:
                    self.seconds[key] = action_s(problem, base, a)
        self.later: dict[tuple[int, int], int] = {}  # (copy, stage) -> later stages of that copy on its device
        for d in range(base.devices):
            held = base.hosted(d)
            for c, s in held:
                self.later[c, s] = sum(1 for copy, stage in held if copy == c and stage > s)
        self.rank = {k: i for i, k in enumerate(rule.kinds)}
        self.ready: list[list[Ready]] = [[] for _ in range(base.devices)]
        self.free = [0.0] * base.devices
        self.orders: list[list[Action]] = [[] for _ in range(base.devices)]
        self.missing: dict[tuple[str, int, int], int] = {}
        self.since: dict[tuple[str, int, int], float] = {}
        self.action: dict[tuple[str, int, int], Action] = {}
        self.forward: dict[tuple[int, int], Action] = {}
        self.events: list[tuple[float, int]] = []
        self.place = [{(a.kind, a.stage, a.microbatch): i for i, a in enumerate(order)} for order in rule.fixed]
        self.next = [0] * base.devices
        self._enter()

    def _enter(self) -> None:
        top = self.base.stages - 1
        for order in self.base.orders:
            for a in order:
                self.action[a.kind, a.stage, a.microbatch] = a
                if a.kind == "F":
                    for m in range(a.microbatch, a.microbatch + a.count):
                        self.forward[a.stage, m] = a
        for key, a in self.action.items():
            # forward waits for the stage before, W for its I, a backward for its own forward and, below the top, the backward above
            needs = {"F": 1 if a.stage else 0, "W": 1}.get(a.kind, 2 if a.stage < top else 1)
            self.missing[key], self.since[key] = needs, 0.0
            if not needs:
                self.ready[self.base.device(a)].append(self.waiting(a, 0.0))

    def run(self) -> Schedule:
        for d in range(self.base.devices):
            heappush(self.events, (0.0, d))
        while self.events:
            look()
            now, d = heappop(self.events)
            if now < self.free[d]:  # busy meanwhile: its own end is an event too, and asks again
                continue
            chosen = self.choose(d, now)
            if chosen is not None:
                self.start(d, chosen, now)
        if sum(map(len, self.orders)) < len(self.action):
            raise Infeasible(
                f"{self.base.name}: no order within the memory cap was found by list scheduling", where="memory",
                hint="raise the memory cap", data={"placed": sum(map(len, self.orders)), "actions": len(self.action)},
            )  # fmt: skip
        return replace(self.base, orders=tuple(map(tuple, self.orders)))

    def waiting(self, a: Action, since: float) -> Ready:
        stage = -a.stage if self.rule.late_first else a.stage
        bonus = self.rule.bonus.get((a.kind, a.stage, a.microbatch), 0.0) if self.rule.bonus else 0.0
        urgency = (self.rank[a.kind] - bonus, a.microbatch - bonus, stage, a.microbatch)
        return since, urgency, self.seconds[a.kind, a.stage, a.copy, a.count], a

    def allowed(self, d: int, a: Action) -> bool:
        if self.place and a.kind != "W" and self.place[d][a.kind, a.stage, a.microbatch] != self.next[d]:
            return False
        return a.kind != "F" or self.left[d][a.copy] - a.count >= self.later[a.copy, a.stage] * a.count

    def choose(self, d: int, now: float) -> Ready | None:
        able = [x for x in self.ready[d] if self.allowed(d, x[3])]
        here = [x for x in able if x[0] <= now]
        if not here:
            soon = min((x[0] for x in able), default=NEVER)
            if soon < NEVER:
                heappush(self.events, (soon, d))
            return None
        best = min(here, key=URGENCY)
        if self.rule.patience and len(here) < len(able):
            until, kind = now + self.rule.patience * best[2], best[1][0]
            soon = min((x[0] for x in able if now < x[0] < until and x[1][0] < kind), default=NEVER)
            if soon < NEVER:
                fits = [x for x in here if now + x[2] <= soon]
                if not fits:
                    heappush(self.events, (soon, d))
                    return None
                best = min(fits, key=URGENCY)
        return best

    def start(self, d: int, chosen: Ready, now: float) -> None:
        a, end = chosen[3], now + chosen[2]
        self.ready[d] = [x for x in self.ready[d] if x is not chosen]
        self.orders[d].append(a)
        self.free[d] = end
        if self.place and a.kind != "W":
            self.next[d] += 1
        if a.kind == "F":
            self.left[d][a.copy] -= a.count
        elif a.kind == ("W" if self.base.split else "B"):
            self.left[d][a.copy] += a.count
        for m in range(a.microbatch, a.microbatch + a.count):
            self.release(a, m, end)
        heappush(self.events, (end, d))

    def release(self, a: Action, m: int, end: float) -> None:
        """Tell what waits for micro-batch m of `a`."""
        top, back = self.base.stages - 1, "I" if self.base.split else "B"
        if a.kind == "F":
            self.tell((back, a.stage, m), end)
            if a.stage < top:
                onward = self.forward[a.stage + 1, m]
                self.tell((onward.kind, onward.stage, onward.microbatch), end + self.delay[a.copy][a.stage][0], share=onward.count)
        elif a.kind in "BI":
            if a.kind == "I":
                self.tell(("W", a.stage, m), end)
            if a.stage:
                self.tell((back, a.stage - 1, m), end + self.delay[a.copy][a.stage - 1][1])

    def tell(self, key: tuple[str, int, int], at: float, *, share: int = 1) -> None:
        """One of the things that `key` waits for is there from `at` on. Of a grouped forward, `share` micro-batches make one."""
        self.since[key] = max(self.since[key], at)
        if share > 1:
            part = ("part", key[1], key[2])
            self.missing[part] = self.missing.get(part, share) - 1
            if self.missing[part]:
                return
        self.missing[key] -= 1
        if not self.missing[key]:
            a = self.action[key]
            d = self.base.device(a)
            self.ready[d].append(self.waiting(a, self.since[key]))
            heappush(self.events, (max(self.since[key], self.free[d]), d))
