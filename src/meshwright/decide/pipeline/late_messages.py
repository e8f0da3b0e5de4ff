"""Orders that stand late messages: of orders about equally fast by our clock, the one that loses least when every message is late.

An order planned for instant messages may put an action right behind the message that it waits for, on every device: in a real run, where a message
is late now and then, each such place costs the lateness. Planning for later messages than there are leaves room where it is free. What is kept
never takes more than `MAX_SLOWDOWN` longer by the given problem's clock than the fastest found.
Cost: `improve` once for each of LATENESS_SHARES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .orders import times
from .problem import PipelineProblem, Schedule

__all__ = ["LATENESS_SHARES", "MAX_SLOWDOWN", "sturdiest", "with_late_messages"]

# How much later messages are planned to arrive than they do, in mean actions of a device: a little, and about a third.
LATENESS_SHARES = (0.1, 0.3)
# Times the fastest schedule found, by the clock without lateness: what sturdiness may cost at most. It is to be had where it is nearly free.
MAX_SLOWDOWN = 1.002


def sturdiest(problem: PipelineProblem, schedule: Schedule, improve: Callable[[PipelineProblem, Schedule], Schedule]) -> Schedule:
    """`schedule`, or what `improve` makes of it for late messages, whichever stands them best."""
    if problem.devices == 1:
        return schedule
    found = [schedule, *(improve(with_late_messages(problem, schedule.chunks, share), schedule) for share in LATENESS_SHARES)]
    spans = [times(problem, s).makespan_s for s in found]
    near = [s for s, span in zip(found, spans, strict=True) if span <= MAX_SLOWDOWN * min(spans)]
    late = with_late_messages(problem, schedule.chunks, LATENESS_SHARES[-1])
    return min(near, key=lambda s: times(late, s).makespan_s)


def with_late_messages(problem: PipelineProblem, chunks: int, share: float) -> PipelineProblem:
    """Every message later by `share` of the mean time of F, I or W of one of a device's `chunks` stages."""
    each = zip(problem.forward_s, problem.input_grad_s, problem.weight_grad_s, problem.speeds, strict=True)
    mean_s = sum((f + i + w) / speed for f, i, w, speed in each) / (3 * problem.devices * chunks)
    return replace(problem, p2p_latency_s=tuple(x + share * mean_s for x in problem.p2p_latency_s))
