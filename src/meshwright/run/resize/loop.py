"""Commands in control groups, resized at the end of every window: what they used is read, an action is decided, limits are written.

Cores: used are processor seconds over the window; a violation is a window in which the quota was used up in more than STEAL_SHARE of its periods.
Memory: used is the most that members held without page cache; a violation is a kill for memory, or a use near the limit.
Invariant: groups and members are gone at the end, however it comes: a guard of `limits` outlives kill -9.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from ...cluster.resize import Choice, Seen, Tenants, Total, Window
from ...errors import UsageError
from ..machine.limits import Limits, Used

__all__ = ["Outcome", "ResizeCommand", "resize_commands"]

PERIOD_US = 100_000  # of the CPU quota, the kernel's default: shorter ones throttle every burst of a process that is idle on average
STEAL_SHARE = 0.05  # of periods with work in which a quota may be used up without a violation
NEAR_SHARE = 0.97  # of a memory limit: who holds so much wants more
LOOKS = 4  # at memory, per window


@dataclass(frozen=True, kw_only=True)
class ResizeCommand:
    """`start`: steps at the beginning, by resource; default the most."""

    name: str
    command: tuple[str, ...]
    start: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`totals` by resource. `throttled`: periods in which a quota was used up, `periods`: with work; `codes`: how each command ended, None: by us."""

    totals: Mapping[str, Total]
    periods: int
    throttled: int
    oom_kills: int
    codes: Mapping[str, int | None]
    windows: int


class _Member:
    def __init__(self, what: ResizeCommand, number: int, tenants: Mapping[str, Tenants], stack: ExitStack) -> None:
        self.name, self.has = what.name, {r: what.start.get(r, t.most[number]) for r, t in tenants.items()}
        self.unit = {r: t.unit for r, t in tenants.items()}
        for r, t in tenants.items():
            if not t.least[number] <= self.has[r] <= t.most[number]:
                raise UsageError(f"{what.name} begins with {self.has[r]} steps of {r}", where="start", hint=f"{t.least[number]} to {t.most[number]}")
        size = {r: self.has[r] * self.unit[r] for r in self.has}
        memory = round(size["memory"]) if "memory" in size else None
        self.limits = stack.enter_context(Limits(cores=size.get("cpu"), memory_bytes=memory, period_us=PERIOD_US, watch=True))
        # What it prints goes where we talk, so that our standard output stays ours.
        self.process = self.limits.start(what.command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
        self.last, self.most_bytes = self.limits.used(), 0

    def look(self) -> Used:
        now = self.limits.used()
        self.most_bytes = max(self.most_bytes, now.memory_bytes)
        return now

    def window(self, took_s: float) -> dict[str, tuple[float, bool]]:
        """By resource: steps used, and whether more was wanted."""
        now, last = self.look(), self.last
        self.last = now
        found = {}
        if "cpu" in self.has:
            share = (now.throttled - last.throttled) / max(1, now.periods - last.periods)
            found["cpu"] = (min((now.cpu_s - last.cpu_s) / took_s / self.unit["cpu"], self.has["cpu"]), share > STEAL_SHARE)
        if "memory" in self.has:
            used = self.most_bytes / self.unit["memory"]
            found["memory"] = (min(used, self.has["memory"]), now.oom_kills > last.oom_kills or used > NEAR_SHARE * self.has["memory"])
            self.most_bytes = now.memory_bytes
        return found

    def change(self, resource: str, steps: int) -> None:
        """What cannot be taken back stays."""
        after = self.has[resource] + steps
        size = after * self.unit[resource]
        if not steps or not (self.limits.change(cores=size) if resource == "cpu" else self.limits.change(memory_bytes=round(size))):
            return
        self.has[resource] = after


def resize_commands(
    commands: Sequence[ResizeCommand], tenants: Mapping[str, Tenants], decide: Mapping[str, Callable[[Seen], Choice]], *,
    most_windows: int | None = None, on_window: Callable[[str, Window], None] = lambda resource, window: None,
) -> Outcome:  # fmt: skip
    """Until all commands have ended, or for so many windows. `tenants` and `decide` by resource ("cpu", "memory"); tenant i is command i.

    Raises: UsageError; RunError where a control group cannot be made."""
    if not tenants or any(t.resource != r or t.names != tuple(c.name for c in commands) for r, t in tenants.items()):
        raise UsageError("tenants and commands do not have the same names, or there is no resource", where="tenants", hint="cpu, memory or both")
    window_s = next(iter(tenants.values())).window_s
    steps, violations, number = dict.fromkeys(tenants, 0), dict.fromkeys(tenants, 0), 0
    with ExitStack() as stack:
        members = [_Member(c, i, tenants, stack) for i, c in enumerate(commands)]
        begin = last = time.monotonic()
        while most_windows is None or number < most_windows:
            for look in range(1, LOOKS + 1):
                time.sleep(max(0.0, begin + (number + look / LOOKS) * window_s - time.monotonic()))
                for m in members:
                    m.look()
            now = time.monotonic()
            found = [m.window(now - last) for m in members]
            last = now
            for resource in tenants:
                seen = Seen(
                    window=number, before=np.array([m.has[resource] for m in members]), used=np.array([f[resource][0] for f in found]),
                    violated=np.array([f[resource][1] for f in found]),
                )  # fmt: skip
                choice = decide[resource](seen)
                on_window(resource, Window.of(seen, choice))
                steps[resource] += int(seen.before.sum())
                violations[resource] += int(seen.violated.sum())
                for m, step in zip(members, choice.steps.tolist(), strict=True):
                    m.change(resource, step)
            number += 1
            if all(m.process.poll() is not None for m in members):
                break
        used = [m.look() for m in members]
        codes = {m.name: m.process.poll() for m in members}
    for m in members:
        m.process.wait()
    totals = {
        r: Total(unit_hours=steps[r] * t.unit * window_s / 3600, violations=violations[r], windows=number * len(members)) for r, t in tenants.items()
    }
    return Outcome(
        totals=totals, periods=sum(u.periods for u in used), throttled=sum(u.throttled for u in used), oom_kills=sum(u.oom_kills for u in used),
        codes=codes, windows=number,
    )  # fmt: skip
