"""Deferrable work in a pipeline's idle time, checked against the step as it runs without it. Shares nothing with the planner.

From the stated items and placements alone: every item is done, whole, on ranks that may do it; nothing overlaps on a rank, the step's own actions
included; nothing starts before what it waits for; collectives run at one time on all their ranks; groups lie in one step; deadlines hold; nothing
ends after the step does; memory fits; the bound follows from its certificate and the certificate from the items and the idle time.
Times are exact rationals of the floats given; two that meet may differ by `TOLERANCE` of a step, as sums of floats do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from ..bound import fraction_of
from .verdict import Finding

__all__ = ["Actions", "check_filling", "fill_time"]

TOLERANCE = Fraction(1, 10**9)
Actions = Sequence[Sequence[tuple[str, float, float]]]  # per rank: (action such as 3F0, start, end) without the work


class _Wrong(Exception):
    def __init__(self, message: str, **witness: Any) -> None:
        super().__init__(message)
        self.witness = witness


def fill_time(data: Mapping[str, Any]) -> Fraction:
    """Seconds of a cycle that the certificate proves: steps = work / idle time of a step, rounded up, at least one."""
    work, idle, step, rounding = (fraction_of(str(data[k])) for k in ("work_s", "idle_s", "step_s", "rounding"))
    if work < 0 or idle < 0 or step < 0 or not 0 <= rounding <= TOLERANCE:
        raise ValueError("a figure is out of range")
    if work and not idle:
        raise ValueError("work, and no idle time at all")
    # Rounded up: a cycle has whole steps. `rounding` makes up for work that was added up in floats, so the bound stays below the truth.
    return step * max(1, -(-(work * (1 - rounding)) // idle) if idle else 1)


def check_filling(document: Mapping[str, Any], actions: Actions, step_s: float) -> list[Finding]:
    """Findings about the document of a filled plan (`plan.job["fill"]`); `actions`, `step_s`: the step as simulated without the work."""
    try:
        _Filling(document, actions, step_s).check()
    except _Wrong as wrong:
        return [Finding(check="fill", message=str(wrong), witness=wrong.witness)]
    except (KeyError, ValueError, TypeError, IndexError) as error:
        return [Finding(check="fill", message=f"the work lacks or mangles {error}", witness={})]
    return []


class _Filling:
    def __init__(self, document: Mapping[str, Any], actions: Actions, step_s: float) -> None:
        self.d, self.step, self.steps = document, Fraction(step_s), int(document["steps"])
        self.slack = self.step * TOLERANCE
        self.items: dict[str, Mapping[str, Any]] = {str(i["name"]): i for i in document["items"]}
        if len(self.items) != len(document["items"]):
            raise _Wrong("two items have one name")
        self.own = [[(Fraction(s), Fraction(e)) for _, s, e in row] for row in actions]
        self.end = [{a: Fraction(e) for a, _, e in row} for row in actions]
        self.rows: dict[str, dict[int, list[tuple[int, Fraction, Fraction]]]] = {n: {} for n in self.items}
        for p in document["placements"]:
            if str(p["item"]) not in self.rows:
                raise _Wrong(f"places {p['item']!r}, which is no item")
            row = (int(p["step"]), Fraction(p["start_s"]), Fraction(p["end_s"]))
            self.rows[str(p["item"])].setdefault(int(p["rank"]), []).append(row)

    def check(self) -> None:
        if Fraction(self.d["step_s"]) > self.step + self.slack or Fraction(self.d["step_s"]) < self.step - self.slack:
            raise _Wrong(f"says that a step takes {self.d['step_s']} s, it takes {float(self.step)} s")
        for name, item in self.items.items():
            self.whole(name, item)
        self.apart()
        for name, item in self.items.items():
            self.in_time(name, item)
        self.groups()
        self.memory()
        self.bound()

    # ---- each item ---------------------------------------------------------------------------------------------
    def whole(self, name: str, item: Mapping[str, Any]) -> None:
        used = self.rows[name]
        may = {int(r) for r in item["ranks"]}
        # Together: on all its ranks at once. Else on one of them.
        if (item["together"] and set(used) != may) or (not item["together"] and (len(used) != 1 or not set(used) <= may)):
            raise _Wrong(f"{name} runs on ranks {sorted(used)}, it may on {sorted(may)}{' together' if item['together'] else ''}", item=name)
        for rank, rows in used.items():
            done = sum((e - s for _, s, e in rows), Fraction(0))
            if abs(done - Fraction(item["duration_s"])) > self.slack * (1 + len(rows)):
                raise _Wrong(f"{name} gets {float(done)} s of {item['duration_s']} s", item=name, rank=rank)
            if len(rows) > 1 and not item["piece_s"]:
                raise _Wrong(f"{name} is cut into pieces, and must be whole", item=name)
            for step, start, end in rows:
                if not 0 <= step < self.steps or start < 0 or end < start or end > self.step + self.slack:
                    raise _Wrong(f"{name} lies outside its step", item=name, rank=rank, step=step)
                if item["deadline_steps"] and step >= item["deadline_steps"]:
                    raise _Wrong(f"{name} misses its deadline of {item['deadline_steps']} steps", item=name, step=step)
        if item["together"] and len({tuple(rows) for rows in used.values()}) > 1:
            raise _Wrong(f"{name} does not run at one time on all its ranks", item=name)

    def in_time(self, name: str, item: Mapping[str, Any]) -> None:
        for rank, rows in self.rows[name].items():
            first = min((step, start) for step, start, _ in rows)
            if first[0] < item["ready_step"]:
                raise _Wrong(f"{name} starts in step {first[0]}, before step {item['ready_step']}", item=name)
            for at, action in item["actions"]:
                if action not in self.end[int(at)]:
                    raise _Wrong(f"{name} waits for {action}, which rank {at} does not run", item=name)
                # Actions are those of step 0, where the work arises; (step, time) compare as pairs.
                if first < (0, self.end[int(at)][action] - self.slack):
                    raise _Wrong(f"{name} starts before {action} of rank {at} is complete", item=name, rank=rank)
            for other in item["after"]:
                if other not in self.rows:
                    raise _Wrong(f"{name} comes after {other!r}, which is no item", item=name)
                last = max((step, end) for own in self.rows[other].values() for step, _, end in own)
                if first < (last[0], last[1] - self.slack):
                    raise _Wrong(f"{name} starts before {other} is complete", item=name, rank=rank, step=first[0])

    # ---- all together --------------------------------------------------------------------------------------------
    def apart(self) -> None:
        """Nothing overlaps on a rank in any step."""
        for rank, own in enumerate(self.own):
            work: dict[int, list[tuple[Fraction, Fraction, str]]] = {}
            for name, used in self.rows.items():
                for step, start, end in used.get(rank, ()):
                    work.setdefault(step, []).append((start, end, name))
            for step, rows in work.items():
                # Sorted by start, an overlap of any two shows between neighbours.
                busy = sorted([(s, e, "an action") for s, e in own if e > s] + [r for r in rows if r[1] > r[0]])
                for (_, e, a), (s, _, b) in pairwise(busy):
                    if s < e - self.slack:
                        raise _Wrong(f"{a} and {b} overlap on rank {rank}", rank=rank, step=step)

    def groups(self) -> None:
        steps: dict[str, set[int]] = {}
        for name, item in self.items.items():
            if item["group"]:
                steps.setdefault(item["group"], set()).update(step for rows in self.rows[name].values() for step, _, _ in rows)
        for group, found in steps.items():
            if len(found) > 1:
                raise _Wrong(f"group {group} lies in steps {sorted(found)}, not in one", group=group)

    def memory(self) -> None:
        """Peak of the step + what is there all the time + most that waits for its work: no more than it says, and than the cap."""
        d = self.d
        for rank in range(len(self.own)):
            events: list[tuple[tuple[int, Fraction], int]] = []
            for name, item in self.items.items():
                rows = self.rows[name].get(rank)
                if rows and item["keeps_bytes"]:
                    born = max([(int(item["ready_step"]), Fraction(0))] + [(0, self.end[int(r)][a]) for r, a in item["actions"]])
                    events += [(born, int(item["keeps_bytes"])), (max((step, end) for step, _, end in rows), -int(item["keeps_bytes"]))]
            held = peak = 0
            for _, change in sorted(events):
                held += change
                peak = max(peak, held)
            total = int(d["base_bytes"][rank]) + int(d["resident_bytes"][rank]) + peak
            if total != int(d["memory_bytes"][rank]):
                raise _Wrong(f"rank {rank} holds up to {total} bytes, it says {d['memory_bytes'][rank]}", rank=rank)
            cap = int(d["cap_bytes"][rank]) if d["cap_bytes"] else 0
            if cap and total > cap:
                raise _Wrong(f"rank {rank} holds up to {total} bytes, above its {cap}", rank=rank)

    def bound(self) -> None:
        """The certificate's work and idle time, counted again."""
        data = self.d["bound"]["certificate"]["data"]
        ranks = {int(r) for r in data["ranks"]}
        work = Fraction(0)
        for item in self.items.values():
            may = {int(r) for r in item["ranks"]}
            # Only what must run on these ranks counts: an item that may also run elsewhere forces nothing.
            work += Fraction(item["duration_s"]) * (len(ranks & may) if item["together"] else int(may <= ranks))
        idle = len(ranks) * self.step - sum((e - s for r in ranks for s, e in self.own[r]), Fraction(0))
        if ranks and (fraction_of(data["work_s"]) > work or fraction_of(data["idle_s"]) < idle - self.slack * len(ranks)):
            raise _Wrong("the bound's certificate has other work or idle time than the items and the step", ranks=sorted(ranks))
        if fill_time(data) != fraction_of(self.d["bound"]["value"]):
            raise _Wrong(f"the certificate gives {fill_time(data)} s, claimed is {self.d['bound']['value']}")
        if fraction_of(self.d["bound"]["value"]) > self.steps * self.step + self.slack:
            raise _Wrong("the cycle is shorter than its bound")
