"""The driver for expert layers: choices ranked by simulation per capacity, a `select` table of checked programs, bounds beside each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...cost import assumed_cost
from ...decide.experts import Choice, ExpertProblem, ExpertShape, strategy
from ...decide.experts.bound import ExpertBound, expert_bound
from ...decide.experts.problem import ExpertStrategy
from ...decide.experts.search import bucket_of
from ...errors import PlanMismatch, Unsupported
from ...graph.graph import Work
from ...io.quantity import show_time
from ...kernels.effort import Budget
from ...kernels.stages import stage
from ...plan.plan import Alternative, Plan
from ...program.hash import program_hash
from ...program.program import Program
from ...simulate import simulate_program
from ..plans import check_plan, make_plan
from .programs import LayerPrograms

__all__ = ["RankedChoice", "plan_experts", "rank_choices", "table_of"]


@dataclass(frozen=True, kw_only=True)
class RankedChoice:
    """A choice at a capacity. Seconds of the passes, None where it does not apply (`why`); `bound`: the least of its degree."""

    choice: Choice
    capacity: int
    forward_s: float | None
    backward_s: float | None
    tokens_bytes: int
    weights_bytes: int
    bound: ExpertBound
    why: str = ""

    @property
    def time_s(self) -> float | None:
        return None if self.forward_s is None else self.forward_s + (self.backward_s or 0.0)


def rank_choices(problem: ExpertProblem, programs: LayerPrograms, candidates: Sequence[Choice], capacity: int, budget: Budget | None = None
) -> list[RankedChoice]:
    """All candidates at one capacity, by simulated time of a step; those that do not apply last, with the reason. What ends the `budget` leaves the
    candidates so far, one at least."""
    bounds = {r: expert_bound(problem, capacity, r) for r in dict.fromkeys(c.degree for c in candidates)}
    rows: list[RankedChoice] = []
    with stage("choices of an expert layer", of=len(candidates)) as here:
        for choice in candidates:
            if rows and budget is not None and budget.late:
                break
            here.begin()
            tokens, weights = problem.shape.received_bytes(choice, capacity)
            times: list[float | None]
            try:
                times = [_time_s(problem, programs, choice, capacity, backward=b) for b in (False, True)[: 2 if problem.passes == "training" else 1]]
                why = ""
            except Unsupported as error:
                times, why = [None], error.message
            rows.append(RankedChoice(
                choice=choice, capacity=capacity, forward_s=times[0], backward_s=times[1] if len(times) > 1 else None, tokens_bytes=tokens,
                weights_bytes=weights, bound=bounds[choice.degree], why=why,
            ))  # fmt: skip
            best = min(rows, key=lambda x: (x.time_s is None, x.time_s or 0.0))
            here.best = f"{best.choice.text}, {show_time(best.time_s)}" if best.time_s is not None else ""
    return sorted(rows, key=lambda x: (x.time_s is None, x.time_s or 0.0))


def _time_s(problem: ExpertProblem, programs: LayerPrograms, choice: Choice, capacity: int, *, backward: bool) -> float:
    program, works = programs.step(choice, capacity, backward=backward)
    cost = problem.cost or assumed_cost(problem.fabric)
    done = simulate_program(program, problem.fabric, problem.ranks, cost, works=works, programs=programs.callees, record=False, memory=False)
    return done.makespan_s


def plan_experts(problem: ExpertProblem, chosen: ExpertStrategy | None = None, budget: Budget | None = None) -> tuple[Plan, list[list[RankedChoice]]]:
    """The plan, whose table names a program per pass and range of capacities, and the ranking of every capacity, best first.

    `budget`: as in `rank_choices`.

    Raises: Unsupported where no choice applies, CheckFailed when a planner is wrong (please report it), UsageError.
    """
    chosen = chosen or strategy("tutel")()
    made = chosen.plan(problem)
    programs = LayerPrograms(problem.fabric, problem.ranks, problem.shape)
    ranked = [rank_choices(problem, programs, made.candidates, c, budget) for c in problem.capacities]
    for rows in ranked:
        if rows[0].time_s is None:
            raise Unsupported(f"no choice applies: {rows[0].why}", where="experts", hint="try other degrees or algorithms")
    passes = (("forward", False), ("backward", True))[: 2 if problem.passes == "training" else 1]
    table: dict[str, str] = {}
    used: dict[str, Program] = {}
    works: dict[str, Work] = {}
    for rows in ranked:
        best = rows[0]
        for name, backward in passes:
            program, more = programs.step(best.choice, best.capacity, backward=backward)
            label = program_hash(program)
            used[label], works = program, works | more
            table[f"{name}:{bucket_of(best.capacity, made.window) * made.window}"] = label
    last = ranked[-1][0]
    main = used[table[f"forward:{bucket_of(last.capacity, made.window) * made.window}"]]
    called = {name for p in used.values() for name in p.calls.names}
    others = [p for p in used.values() if p is not main] + [programs.callees[name] for name in sorted(called)]
    cost = problem.cost or assumed_cost(problem.fabric)
    plan = make_plan(
        "experts", problem.fabric, problem.ranks, main, job={"experts": _job(problem)}, cost=cost, works=works, others=others, table=table,
        decisions={"experts": _decision(chosen, made.options, ranked)}, prediction=last.forward_s,
        alternatives=(Alternative(what=x.choice.text, time_s=x.time_s, why=x.why or f"at capacity {x.capacity}") for x in ranked[-1][1:]),
    )  # fmt: skip
    check_plan(plan)
    return plan, ranked


def table_of(plan: Plan, shape: ExpertShape) -> tuple[dict[int, Choice], int]:
    """(choice by number of its range of capacities, window) of a plan for a layer of that shape.

    Raises: PlanMismatch for a plan of another kind or layer, naming what differs.
    """
    job = plan.job.get("experts")
    if plan.kind != "experts" or not isinstance(job, Mapping):
        raise PlanMismatch(f"this is a {plan.kind} plan, not one of an expert layer", where="plan", hint="make one with `meshwright experts plan`")
    for name in ("ranks", "experts", "model", "inner", "output", "matrices"):
        if job.get(name) != getattr(shape, name):
            text = f"the plan is for {name} = {job.get(name)}, the layer has {getattr(shape, name)}"
            raise PlanMismatch(text, where="plan", hint="plan for this layer", data={"field": name})
    decision = plan.decisions["experts"]
    window = int(decision["options"]["window"])
    rows = decision["notes"]["choices"]
    return {bucket_of(int(row["capacity"]), window): Choice(*row["choice"]) for row in rows}, window


def _job(problem: ExpertProblem) -> dict[str, Any]:
    shape = {f: getattr(problem.shape, f) for f in problem.shape.__dataclass_fields__}
    return {**shape, "capacities": list(problem.capacities), "passes": problem.passes}


def _decision(chosen: ExpertStrategy, options: Any, ranked: list[list[RankedChoice]]) -> dict[str, Any]:
    rows = [
        {
            "capacity": best.capacity, "choice": list(best.choice), "time_s": best.time_s, "bound_s": float(best.bound.time_s),
            "bound": {"time_s": str(best.bound.time_s), "follows_from": list(best.bound.why)},
        }
        for best, *_ in ranked
    ]  # fmt: skip
    return {
        "strategy": chosen.name, "options": msgspec.to_builtins(options), "notes": {"choices": rows}, "why": "least simulated time of a step",
        "cite": [chosen.cite.key],
    }  # fmt: skip
