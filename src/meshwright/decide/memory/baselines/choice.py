"""What the chain strategies share: schedules tried, the fastest that fits, and what to say when none does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import Infeasible
from ....graph.step_graph import StepPlan
from ..lifetimes import Lifetimes
from ..step import size_text
from .chain import Chain

__all__ = ["Schedule", "chosen", "measured"]

I32 = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When storages are held, and what that takes. `options`: what made it, for the plan."""

    hold_from: I32
    hold_to: I32
    ahead: I32
    options: dict[str, Any]
    peak_bytes: int
    time_s: float


def measured(chain: Chain, tried: Iterable[tuple[I32, I32, dict[str, Any]]]) -> tuple[Schedule, ...]:
    """The possible ones among the schedules tried; one of several with equal peak and time."""
    found: dict[tuple[int, float], Schedule] = {}
    for held, ahead, options in tried:
        hold_from, hold_to = chain.with_last_input(held)
        peak, seconds = chain.lives.measure(hold_from, hold_to, ahead)
        if np.isfinite(seconds):
            schedule = Schedule(hold_from=hold_from, hold_to=hold_to, ahead=ahead, options=options, peak_bytes=peak, time_s=seconds)
            found.setdefault((peak, seconds), schedule)
    return tuple(found.values())


def chosen(lives: Lifetimes, schedules: Sequence[Schedule], budget_bytes: int | None, *, strategy: str, **fields: Any) -> StepPlan:
    """The plan of the fastest schedule within the budget (without one: of the least peak); of equals the one with the lower peak.

    Raises: Infeasible with the least peak of all that were tried.
    """
    least = min(s.peak_bytes for s in schedules)
    if budget_bytes is not None and least > budget_bytes:
        raise Infeasible(
            f"{strategy} needs {size_text(least)} at least, the budget is {size_text(budget_bytes)}", where=lives.graph.name,
            hint="raise the budget, or plan with another strategy", data={"least_bytes": least, "budget_bytes": budget_bytes},
        )  # fmt: skip
    limit = least if budget_bytes is None else budget_bytes
    best = min((s for s in schedules if s.peak_bytes <= limit), key=lambda s: (s.time_s, s.peak_bytes))
    plan = lives.plan(best.hold_from, best.hold_to, best.ahead, strategy=strategy, options=best.options, budget_bytes=budget_bytes, **fields)
    assert plan is not None  # it was measured
    return plan
