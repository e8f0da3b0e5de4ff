"""The greedy by which PipeFisher's authors fill bubbles, device by device, as their published script does it: to compare with, not to run.

Cite: see `fill.CITE`; the rules are those of `auto_schedule.py` of kazukiosawa/pipe-fisher.
A device walks through the idle times between its actions and, while one lasts, takes work in the order curvature A, B, sums A, B, inverses A, B;
work needs idle time `margin` longer than itself. Curvature of a micro-batch is there once so many actions of its kind have run (in every later
step always), a sum once all curvature of its letter is placed, an inverse once that and the sum are. What is left goes into the same idle times once
more if all of it fits, else into those of one more step; what fits into no idle time at all runs after the last step.
Deviations: an inverse that any of several ranks may do goes to them in turn; the script has an owner per block of layers. In Chimera each pipe's
    curvature counts its own forwards; the script counts those of the down pipe for both. Of a queue that is left over the script counts
    the whole again, what was done of it included; here what is left.
Left open there: devices do not wait for each other, so a sum may stand at different times on its ranks. That is why no plan is made of it.
Cost: O(steps · items · idle times) per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ...deferrable import Deferrable, FillWork
from .fill_place import Idle

__all__ = ["MARGIN", "GreedyCycle", "published_greedy"]

MARGIN = 0.05  # the script's default
KINDS = ("curvature A", "curvature B", "sync A", "sync B", "inverse A", "inverse B")


@dataclass(frozen=True, kw_only=True)
class GreedyCycle:
    """One device's: steps of the cycle, share of them in which it computes, and seconds that fit into no idle time."""

    steps: int
    used: float
    exposed_s: float


@dataclass
class _Work:
    """`left_s`: of a queue, one per micro-batch, all of the mean length; else one. `stage`: whose actions a queue counts."""

    kind: int
    stage: str
    left_s: list[float] = field(default_factory=list)
    taken: int = 0


# (start, end, what): an action such as 3F, work as "", the ends of a step as "|"
_Slot = tuple[float, float, str]


def published_greedy(idle: Idle, work: FillWork, *, margin: float = MARGIN) -> list[GreedyCycle]:
    """Per rank. Work of other kinds than K-FAC's is left out."""
    return [_cycle(idle, rank, _works(work.items, rank), margin) for rank in range(len(idle.gaps))]


def _works(items: Sequence[Deferrable], rank: int) -> list[_Work]:
    found: dict[tuple[int, str], _Work] = {}
    singles: list[_Work] = []
    turn = 0
    for item in items:
        kind = next((k for k, name in enumerate(KINDS) if item.name.startswith(name)), -1)
        stage = item.name.split()[2].partition(":")[0].partition(".")[0] if kind >= 0 else ""
        if kind >= 4 and len(item.ranks) > 1:
            owner, turn = item.ranks[turn % len(item.ranks)], turn + 1
            mine = owner == rank
        else:
            mine = rank in item.ranks
        if kind < 0 or not mine:
            continue
        if kind < 2:
            found.setdefault((kind, stage), _Work(kind, stage)).left_s.append(item.duration_s)
        else:
            singles.append(_Work(kind, stage, [item.duration_s]))
    for queue in found.values():
        queue.left_s = [sum(queue.left_s) / len(queue.left_s)] * len(queue.left_s)
    return sorted([*found.values(), *singles], key=lambda w: w.kind)


def _cycle(idle: Idle, rank: int, works: list[_Work], margin: float) -> GreedyCycle:
    step = _step(idle, rank)
    actions = {a[2] for a in step}
    all_run = dict.fromkeys(actions, 1 << 30)
    slots = _placed(works, step, {}, margin)
    steps, exposed = 1, 0.0
    while works:
        again = [_Work(w.kind, w.stage, list(w.left_s), w.taken) for w in works]
        full = _placed(again, slots, dict(all_run), margin)
        if not again:
            slots = full
            break
        count = len(works)
        slots = slots + _placed(works, step, dict(all_run), margin)
        steps += 1
        # as in the script: where a whole step finished no queue and no single piece, the rest is done afterwards
        if len(works) == count:
            exposed = sum(sum(w.left_s) for w in works)
            break
    busy = sum(end - start for start, end, what in slots if what != "|") + exposed
    return GreedyCycle(steps=steps, used=busy / (idle.step_s * steps) if idle.step_s else 1.0, exposed_s=exposed)


def _step(idle: Idle, rank: int) -> list[_Slot]:
    """Actions between the ends of a step; what lies between two idle times is one stretch, whose actions end at known moments."""
    rows: list[_Slot] = [(0.0, 0.0, "|")]
    gaps = idle.gaps[rank]
    ends = sorted((end, name.rstrip("0123456789")) for name, end in idle.action_end_s[rank].items())
    for end, name in ends:
        start = max([rows[-1][1], *(high for _, high, _ in gaps if high <= end)])
        rows.append((start, end, name))
    return [*rows, (idle.step_s, idle.step_s, "|")]


def _placed(works: list[_Work], step: Sequence[_Slot], run: dict[str, int], margin: float) -> list[_Slot]:
    """`step` with work in its idle times; what is placed leaves `works`. `run`: how often every kind of action has run so far."""
    found = [step[0]]
    for before, behind in pairwise(step):
        if before[2] not in ("", "|"):
            run[before[2]] = run.get(before[2], 0) + 1
        now, high = before[1], behind[0]
        while True:
            count = len(found)
            at = 0
            while at < len(works):
                w = works[at]
                while w.left_s and now + w.left_s[0] * (1 + margin) < high and _may(w, works, run):
                    seconds = w.left_s.pop(0)
                    w.taken += 1
                    found.append((now, now + seconds, ""))
                    now += seconds
                if not w.left_s:
                    del works[at]
                at += 1  # after one that is done, as in the script, the next is passed over until the walk begins anew
            if len(found) == count:
                break
        found.append(behind)
    return found


def _may(w: _Work, works: Sequence[_Work], run: dict[str, int]) -> bool:
    if w.kind < 2:
        done = max((run.get(f"{w.stage}{kind}", 0) for kind in ("F" if w.kind == 0 else "BI")), default=0)
        return done > w.taken
    letter = w.kind % 2
    before = {letter} if w.kind < 4 else {letter, letter + 2}
    return not any(other.kind in before for other in works)
