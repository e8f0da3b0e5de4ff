"""Lower bounds on the time of a step, each with a certificate that `meshwright.check` works out again.

For a placement (copies, micro-batches per copy, split or whole backward), the largest of:
  idle     a device does all its work, idles before its first backward, and idles after its last forward or its last backward. Before the first
           backward can begin it runs forwards only, and no more than it can keep. After its last forward, and after its last I, it has the backwards
           and W's of what it keeps, no more, while that micro-batch still has its way to go. The two stretches of idle time are apart where it cannot
           keep all its micro-batches at once;
  entry    all forwards of one stage and copy, the last of which still has the rest of its way up and down to go;
  memory   an activation is kept from its F to the end of its backward, at least its way up and down from there: bytes x seconds that a device
           must hold over its cap, between the first forward's start and the end.
Whatever the placement: all work over all speeds, and one micro-batch's way on the fastest devices.
All in exact rationals of the given floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from math import inf
from typing import Any

from ...bound import Bound, Certificate
from .orders import action_s, activation_bytes, border_delays, pair_s
from .problem import Action, PipelineProblem, Schedule

__all__ = ["any_bound", "facts_of", "schedule_bound"]


def schedule_bound(problem: PipelineProblem, schedule: Schedule, *, cap_bytes: Sequence[int] = ()) -> Bound:
    """No order on this placement is faster; with `cap_bytes` (activations per device), none that fits."""
    facts = facts_of(problem, schedule)
    way = [_Way(facts, c) for c in range(schedule.copies)]
    caps = cap_bytes or (0,) * schedule.devices
    found = [_idle(facts, way, d, caps[d]) for d in range(schedule.devices)]
    found += [_entry(facts, way, c, s) for c in range(schedule.copies) for s in range(schedule.stages)]
    found += [_memory(facts, way, d, cap) for d, cap in enumerate(caps) if cap > 0]
    value, form = max(found, key=lambda x: x[0])
    return _bound(value, {**facts, **form})


def any_bound(problem: PipelineProblem) -> Bound:
    """No schedule of any kind is faster: the cheaper of whole and split backward everywhere, any piece on any device, messages free."""
    work = path = Fraction(0)
    longest = max(Fraction(max(b, i + w)) for b, i, w in zip(problem.backward_s, problem.input_grad_s, problem.weight_grad_s, strict=True))
    for s in range(problem.devices):
        f, b = Fraction(problem.forward_s[s]), Fraction(problem.backward_s[s])
        i, w = Fraction(problem.input_grad_s[s]), Fraction(problem.weight_grad_s[s])
        # whatever of a forward may be hidden beside a backward
        f = min(f, max(Fraction(0), Fraction(problem.pair_s[s]) - longest)) if problem.pair_s else f * (1 - Fraction(problem.pair_overlap))
        if s or problem.first_input_grad:
            work += f + min(b, i + w)
            path += f + min(b, i)
        else:  # how much of the first stage's input gradient is left out depends on how it is cut
            work += f + min(b, w)
            path += f
    data = {
        "form": "any", "microbatches": problem.microbatches, "work_s": str(work), "path_s": str(path),
        "speeds": [str(Fraction(x)) for x in problem.speeds],
    }  # fmt: skip
    total, quickest = sum((Fraction(x) for x in problem.speeds), Fraction(0)), max(Fraction(x) for x in problem.speeds)
    return _bound(max(problem.microbatches * work / total, path / quickest), data)


def _bound(value: Fraction, data: dict[str, Any]) -> Bound:
    return Bound(quantity="pipeline step time", value=str(value), unit="s", certificate=Certificate(kind="pipeline", data=data))


def facts_of(problem: PipelineProblem, schedule: Schedule) -> dict[str, Any]:
    """Everything that certificates of a placement use, as strings: exact seconds per copy and stage."""
    counts = [schedule.copy_of.count(c) for c in range(schedule.copies)]
    kinds = ("F", "I", "W") if schedule.split else ("F", "B")
    grouped: dict[tuple[str, int, int], set[int]] = {}
    beside: dict[tuple[int, int], dict[int, Action]] = {}  # a forward per stage of which a backward runs beside it
    for order in schedule.orders:
        for a in order:
            grouped.setdefault((a.kind, a.copy, a.stage), set()).add(a.count)
            if a.beside >= 0 and a.kind == "F":
                beside.setdefault((a.copy, a.stage), {})[a.beside] = a

    def seconds(kind: Any, c: int, s: int) -> str:
        # several micro-batches at once may take less each: the least of them holds for all
        whole = [action_s(problem, schedule, Action(kind, s, 0, c, k)) / k for k in grouped.get((kind, c, s), ())]
        if kind == "F" and (paired := beside.get((c, s))):
            # of a pair, what is more than the backward takes alone: with it all F and all backwards add up to no more than they take
            whole += [max(0.0, pair_s(problem, schedule, a) - _backward_s(problem, schedule, a)) for a in paired.values()]
        return str(min(map(Fraction, whole), default=Fraction(0)))

    table = {k: [[seconds(k, c, s) for s in range(schedule.stages)] for c in range(schedule.copies)] for k in kinds}
    delays = border_delays(problem, schedule)
    return {
        "devices": schedule.devices, "stages": schedule.stages, "placement": [list(x) for x in schedule.placement], "microbatches": counts,
        "split": schedule.split, "seconds": table, "up_s": [[str(Fraction(a)) for a, _ in row] for row in delays],
        "down_s": [[str(Fraction(b)) for _, b in row] for row in delays],
        "activation_bytes": [activation_bytes(problem, schedule, s) for s in range(schedule.stages)],
    }  # fmt: skip


def _backward_s(problem: PipelineProblem, schedule: Schedule, forward: Action) -> float:
    """Alone, of the backward beside a forward."""
    alone = replace(problem, pair_s=(), pair_overlap=0.0)  # the sum of both
    return pair_s(alone, schedule, forward) - action_s(problem, schedule, forward._replace(beside=-1))


class _Way:
    """Seconds up and down the stages of one copy."""

    def __init__(self, facts: dict[str, Any], copy: int) -> None:
        table = facts["seconds"]
        back = "I" if facts["split"] else "B"
        self.forward = [Fraction(x) for x in table["F"][copy]]
        self.backward = [Fraction(x) for x in table[back][copy]]
        self.weight = [Fraction(x) for x in table["W"][copy]] if facts["split"] else [Fraction(0)] * len(self.forward)
        self.up = [Fraction(x) for x in facts["up_s"][copy]]
        self.down = [Fraction(x) for x in facts["down_s"][copy]]
        # sums from the first stage on: those of every stage are asked for
        self.forwards, self.backwards = _running(self.forward), _running(self.backward)
        self.ups, self.downs = _running(self.up), _running(self.down)

    def head(self, stage: int) -> Fraction:
        return self.forwards[stage] + self.ups[stage]

    def tail(self, stage: int) -> Fraction:
        """After the backward (I) of `stage`: those below it, and the first stage's W."""
        return self.backwards[stage] + self.downs[stage] + self.weight[0]

    def above(self, stage: int) -> Fraction:
        """From the end of F of `stage` to the start of its backward."""
        sums = ((self.forwards, stage + 1), (self.backwards, stage + 1), (self.ups, stage), (self.downs, stage))
        return sum((total[-1] - total[s] for total, s in sums), Fraction(0))


def _running(values: list[Fraction]) -> list[Fraction]:
    return list(accumulate(values, initial=Fraction(0)))


def _hosted(facts: dict[str, Any], device: int) -> list[tuple[int, int]]:
    counts = facts["microbatches"]
    return [(c, s) for c, where in enumerate(facts["placement"]) for s, d in enumerate(where) if d == device and counts[c]]


def _idle(facts: dict[str, Any], way: list[_Way], device: int, cap_bytes: int) -> tuple[Fraction, dict[str, Any]]:
    held = _hosted(facts, device)
    form = {"form": "idle", "device": device, "cap_bytes": cap_bytes}
    if not held:
        return Fraction(0), form

    def kept(seconds: Callable[[_Way, int], Fraction]) -> Fraction:
        """The most seconds of what the device can keep at once."""
        rows = [(facts["activation_bytes"][s], seconds(way[c], s), facts["microbatches"][c]) for c, s in held]
        return _fullest(rows, cap_bytes)

    work = sum((facts["microbatches"][c] * (way[c].forward[s] + way[c].backward[s] + way[c].weight[s]) for c, s in held), Fraction(0))
    # what it runs first has come up to it, whichever of its stages that is: at least the shortest way
    head = min(way[c].head(s) for c, s in held)
    first_backward = min(way[c].head(s) + way[c].forward[s] + way[c].above(s) for c, s in held)
    before = max(head, first_backward - kept(lambda w, s: w.forward[s]))
    after_backward = max(Fraction(0), min(way[c].tail(s) for c, s in held) - kept(lambda w, s: w.weight[s]))
    last_way = min(way[c].above(s) + way[c].backward[s] + way[c].tail(s) for c, s in held)
    after = max(after_backward, last_way - kept(lambda w, s: w.backward[s] + w.weight[s]))
    full = cap_bytes and sum(facts["microbatches"][c] * facts["activation_bytes"][s] for c, s in held) > cap_bytes
    # where all forwards may run before the first backward, what follows the last of them may be the same idle time
    return work + (before + after if full else max(before + after_backward, head + after)), form


def _fullest(rows: Sequence[tuple[int, Fraction, int]], cap_bytes: int) -> Fraction:
    """The largest sum of values of so many items (bytes, value, how many) as fit into the cap, or parts of them; 0: all fit."""
    sizes = {size for size, _, _ in rows}
    room = Fraction(cap_bytes - cap_bytes % max(sizes) if len(sizes) == 1 and max(sizes) else cap_bytes)  # of equal items whole ones fit
    total = Fraction(0)
    for size, value, many in sorted(rows, key=lambda r: -r[1] / r[0] if r[0] else -inf):
        count = Fraction(many) if not size or not cap_bytes else min(Fraction(many), room / size)
        room -= count * size
        total += count * value
    return total


def _entry(facts: dict[str, Any], ways: list[_Way], copy: int, stage: int) -> tuple[Fraction, dict[str, Any]]:
    form = {"form": "entry", "copy": copy, "stage": stage}
    many = facts["microbatches"][copy]
    if not many:
        return Fraction(0), form
    way = ways[copy]
    # the stage runs all its forwards one after the other; the last of them still goes to the top and all the way down
    return way.head(stage) + many * way.forward[stage] + way.above(stage) + way.backward[stage] + way.tail(stage), form


def _memory(facts: dict[str, Any], way: list[_Way], device: int, cap_bytes: int) -> tuple[Fraction, dict[str, Any]]:
    form = {"form": "memory", "device": device, "cap_bytes": cap_bytes}
    held = _hosted(facts, device)
    if not held:
        return Fraction(0), form
    # bytes x seconds that must be held, over the cap: so long at least from the first forward's start to the last byte's end
    area = Fraction(0)
    for c, s in held:
        kept = way[c].forward[s] + way[c].above(s) + way[c].backward[s] + way[c].weight[s]
        area += facts["microbatches"][c] * facts["activation_bytes"][s] * kept
    tail = Fraction(0) if facts["split"] else min(way[c].tail(s) for c, s in held)
    return min(way[c].head(s) for c, s in held) + area / cap_bytes + tail, form
