"""How long a paced stage's forward and the two halves of its backward last, from the plan's problem."""

from __future__ import annotations

from ...decide.pipeline.orders import action_s
from ...decide.pipeline.problem import Action, PipelineProblem, Schedule
from ...plan.plan import Plan

__all__ = ["fill_seconds", "paced_times", "with_pairs"]


def paced_times(problem: PipelineProblem, schedule: Schedule, copy: int, stage: int) -> tuple[float, float, float]:
    """(forward, gradient of the input, gradient of the weights) in seconds of one micro-batch of the schedule.

    An unsplit backward lasts its own time: what the weights do not take of it is the input's.
    """

    def seconds(kind: str) -> float:
        return action_s(problem, schedule, Action(kind, stage, 0, copy))  # type: ignore[arg-type]

    if schedule.split:
        return seconds("F"), seconds("I"), seconds("W")
    whole, weights = seconds("B"), seconds("W")
    weights = min(weights, whole)
    return seconds("F"), whole - weights, weights


def fill_seconds(plan: Plan) -> dict[str, float]:
    """Price key (`fill:<item>|<kind>`) -> seconds of the work that a filled plan puts into idle time; {} of any other plan."""
    if "fill" not in plan.job:
        return {}
    table = plan.job["cost"]["table"]
    return {key: float(priced["time_s"]) for key, priced in table.items() if key.startswith("fill:")}


def with_pairs(schedule: Schedule, alone_s: dict[str, float]) -> dict[str, float]:
    """Measured seconds by price key, those of pairs added: a process runs the halves one after the other, and the forward stands for both."""
    found = dict(alone_s)
    for a in {a._replace(microbatch=0) for order in schedule.orders for a in order if a.beside >= 0}:
        copy = f":c{a.copy}" if schedule.copies > 1 else ""
        if (own := alone_s.get(f"stage{a.stage}{copy}|{a.kind}")) is None:  # of another rank
            continue
        if a.kind == "F":
            there = next(c for c, row in enumerate(schedule.placement) if row[a.beside] == schedule.device(a))
            other = f"stage{a.beside}" + (f":c{there}" if schedule.copies > 1 else "")
            own += sum(alone_s[f"{other}|{kind}"] for kind in ("IW" if schedule.split else "B"))
        found[f"stage{a.stage}{copy}&{a.beside}|{a.kind}"] = own if a.kind == "F" else 0.0
    return found
