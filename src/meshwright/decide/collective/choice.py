"""Choice between strategies: plan with each, simulate all by the same rules, rank; and find how finely to pipeline.

`tuned` looks for the number of pieces in which the simulator finds the schedule fastest: from the strategy's own choice it doubles or halves
while that gains. `auto` ranks by simulated time, ties by fewer steps, so it is never worse than the best candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ...errors import Infeasible, MeshwrightError, TimeLimit, Unsupported, UsageError
from ...kernels.effort import NEVER, Budget, Deadline, cuts, worked_s
from ...kernels.stages import innermost, stage
from .bounds.collective import collective_bound
from .connected import require_connected
from .problem import ROOTED, CollectivePlan, CollectiveProblem, CollectiveStrategy, Ranked
from .program_time import MAX_SIMULATED_STEPS, busiest_link_s, simulated_steps, simulated_time_s
from .rates import whole_graph

__all__ = ["explained", "rank", "tuned"]

PIECES = ("pieces", "slices", "chunks")  # options that say into how many parts a message is cut; None = the strategy's choice
MAX_SEARCHED_PIECES = 1024  # parts of a message that the search tries
MAX_TIME_SHARE_WORTH_A_CUT = 0.998  # a finer or coarser cut must take no more than this share of the time before it
MAX_TIMES_FASTEST = 2.0  # no other cut is looked for where a candidate takes longer than the fastest, times this
ONE_MESSAGE_FACTOR = 7  # programs of operations with a root are simulated up to so many times as many steps: few messages share a link
MAX_RANKS_ALWAYS_SIMULATED = 256  # among so many ranks every program is simulated, however long it is
MAX_ABOVE_BOUND = 0.03  # among more ranks nothing else is tried once a plan is so near the bound: no other gains more. 64 servers, a NIC down: 2.7 %
MANY_RANKS = 512  # among more than so many a ring's program alone takes minutes to plan
MAX_ABOVE_BOUND_OF_MANY = 0.1  # as MAX_ABOVE_BOUND, among many ranks: nothing is tried for so little
MAX_PLAIN_RANKS = 2048  # among more than these only what folds: the steps of so many ranks, each to thousands of others, fit no program
MIN_LEFT_S = 1e-9  # seconds that a candidate gets even if none are left: limits must be above 0
MAX_SEARCH_STEPS = 200_000  # executed steps of a candidate's own plan up to which other cuts are tried


@dataclass(frozen=True)
class _Tried:
    plan: CollectivePlan
    time_s: float

    @property
    def steps(self) -> int:
        return self.plan.program.executed_steps


def tuned(
    candidate: CollectiveStrategy, problem: CollectiveProblem, *, search: bool = True, deadline: Deadline = NEVER
) -> tuple[CollectivePlan, float]:
    """The candidate's plan in the number of pieces that simulates fastest, and its time in seconds.

    With `search` off, or where the candidate says how many pieces it wants, its own plan. Raises: what the candidate's `plan` raises.
    """
    first = _try(candidate, problem)
    return _searched(candidate, problem, first, deadline) if search else (first.plan, first.time_s)


def _searched(candidate: CollectiveStrategy, problem: CollectiveProblem, first: _Tried, deadline: Deadline) -> tuple[CollectivePlan, float]:
    option = next((f.name for f in fields(candidate) if f.name in PIECES and getattr(candidate, f.name) is None), "")  # type: ignore[arg-type]
    chosen = first.plan.options.get(option)
    if not option or type(chosen) is not int or first.steps > MAX_SEARCH_STEPS:
        return first.plan, first.time_s
    best = first
    for double in (True, False):
        pieces, here = chosen, first
        while 1 <= (pieces := pieces * 2 if double else pieces // 2) <= MAX_SEARCHED_PIECES and not deadline.past:
            try:
                found = _try(replace(candidate, **{option: pieces}), problem)  # type: ignore[type-var]
            except (Unsupported, UsageError, TimeLimit):  # finer than elements, or than the strategy allows
                break
            if found.plan.options.get(option) != pieces or found.time_s > here.time_s * MAX_TIME_SHARE_WORTH_A_CUT:
                break
            here = found
        if here.time_s < best.time_s:
            best = here
            break  # what gains in one direction does not gain in the other
    return best.plan, best.time_s


def _try(candidate: CollectiveStrategy, problem: CollectiveProblem) -> _Tried:
    plan = candidate.plan(problem, rng=np.random.default_rng(problem.seed))
    if problem.reproducible == "exact" and plan.bound is not None:  # what bounds the sum bounds its integers, whose bytes are our choice
        plan = replace(plan, bound=collective_bound(problem))
    actors, steps = (*problem.ranks, *plan.switches), simulated_steps(plan.program)
    most = MAX_SIMULATED_STEPS * (ONE_MESSAGE_FACTOR if problem.op in ROOTED else 1)
    if steps > most and len(actors) > MAX_RANKS_ALWAYS_SIMULATED and plan.program.fold is None and not plan.switches:
        note = f"the busiest link's time: {steps} steps are too many to simulate here"
        return _Tried(replace(plan, notes={**plan.notes, "time": note}), busiest_link_s(plan.program, problem.fabric, actors))
    return _Tried(plan, simulated_time_s(plan.program, problem.fabric, actors, problem.transport))


@stage("collective")
def rank(
    problem: CollectiveProblem, candidates: Sequence[CollectiveStrategy], *, search: bool, each_s: float = float("inf")
) -> list[Ranked]:
    """Candidates with a plan by time and then by steps, the refused after them with the reason.

    Those that would start after the problem's limits are refused, the first is always tried; one gets at most `each_s` seconds of counted work
    (`kernels.effort`), and where the problem limits time the same share of that. Where the clock ended one, it is marked (`cut_among`). On a fabric
    that suffices for the operation (a broadcast down one-way links, say), a candidate that needs more of it is refused like any other. Among many
    ranks those that fold come first, and one near the bound ends the search: no other can gain more than it is above the bound.
    Raises: Disconnected; MeshwrightError of the first candidate when none has a plan.
    """
    require_connected(problem, whole_graph(problem.fabric, problem.ranks))
    many = len(problem.ranks) > MAX_RANKS_ALWAYS_SIMULATED
    candidates = sorted(candidates, key=lambda candidate: many and problem.op not in candidate.folds)
    deadline, budget = problem.deadline(), Budget(len(candidates), time_limit_s=problem.time_limit_s)
    found: list[Ranked] = []
    planned: list[tuple[int, CollectiveStrategy, _Tried, float]] = []  # place, candidate, its own plan, seconds it has left
    errors: list[MeshwrightError] = []
    for number, candidate in enumerate(candidates):
        needless = _needless(problem, candidate, found) if many and len(candidates) > 1 else ""
        if needless:
            errors.append(Unsupported(needless, where=problem.op, hint="plan for fewer devices, or ask for a strategy by its name"))
            found.append(Ranked(strategy=candidate.label, plan=None, time_s=None, why=needless))
            continue
        late, here = not budget.spend(), innermost()
        here.what = f"{problem.op} of {problem.size_bytes} bytes by {candidate.label}"
        if late or (number and deadline.work_left_s <= 0):
            why = f"not tried: {'interrupted' if budget.interrupted else 'time limit'}" if late else "not tried: the effort is spent"
            found.append(Ranked(strategy=candidate.label, plan=None, time_s=None, why=why, cut=late))
            continue
        own, begin_s, before = _own(problem, deadline, each_s), worked_s(), cuts()
        try:
            with budget.net():
                first = _try(candidate, own)
        except TimeLimit as error:
            errors.append(error)
            found.append(Ranked(strategy=candidate.label, plan=None, time_s=None, why=f"time limit: {error}", cut=cuts() > before))
        except (Infeasible, Unsupported) as error:
            errors.append(error)
            found.append(Ranked(strategy=candidate.label, plan=None, time_s=None, why=str(error)))
        else:
            if first.time_s < min((other.time_s for _, _, other, _ in planned), default=float("inf")):
                here.best = f"{candidate.label}, {first.time_s * 1e3:.4g} ms"
            planned.append((number, candidate, first, each_s - (worked_s() - begin_s)))
            found.append(Ranked(strategy=candidate.label, plan=first.plan, time_s=first.time_s, why="", cut=cuts() > before))
    best_s = min((first.time_s for _, _, first, _ in planned), default=0.0)
    for number, candidate, first, left_s in planned if search else []:
        if first.time_s > MAX_TIMES_FASTEST * best_s or left_s <= 0 or deadline.work_left_s <= 0:
            continue
        if budget.late:
            found[number] = replace(found[number], cut=True)
        else:
            own, before = _own(problem, deadline, left_s), cuts()
            with budget.net():
                plan, time_s = _searched(candidate, own, first, own.deadline())
            found[number] = replace(found[number], plan=plan, time_s=time_s, cut=found[number].cut or cuts() > before)
    if not any(r.plan for r in found):
        if budget.cut is not None:
            raise budget.cut.error(f"no candidate has a plan: {errors[0]}")
        raise next((e for e in errors if "strategy" not in e.data), errors[0])  # rather than that some strategy lacks the operation
    return explained([replace(r, interrupted=r.cut and budget.interrupted) for r in found])


def _needless(problem: CollectiveProblem, candidate: CollectiveStrategy, found: Sequence[Ranked]) -> str:
    """Why a candidate among many ranks is not tried, or nothing."""
    for entry in found:
        if entry.plan is not None and entry.plan.bound and entry.time_s is not None and not _is_estimate(entry):
            above = entry.time_s / float(entry.plan.bound) - 1
            if above <= (MAX_ABOVE_BOUND_OF_MANY if len(problem.ranks) > MANY_RANKS else MAX_ABOVE_BOUND):
                return f"not tried: {entry.strategy} is {100 * above:.1f} % above the bound, so nothing can gain more"
    ranks = len(problem.ranks)
    if ranks > MAX_PLAIN_RANKS and problem.op not in candidate.folds:
        return f"not tried: the steps of {ranks} ranks, each for itself, fit no program"
    return ""


def _own(problem: CollectiveProblem, deadline: Deadline, each_s: float) -> CollectiveProblem:
    """The problem for one candidate that begins now."""
    clock_s = min(deadline.clock_left_s, problem.time_limit_s * min(1.0, each_s / problem.budget_s))
    return replace(problem, time_limit_s=max(clock_s, MIN_LEFT_S), effort_s=max(min(deadline.work_left_s, each_s), MIN_LEFT_S))


def explained(entries: Sequence[Ranked]) -> list[Ranked]:
    """Best first (ties by fewer steps), those without a plan last, each with how far it is from the fastest and from the bound."""
    known = [e for e in entries if e.time_s is not None]
    planned = sorted(known, key=lambda e: (_is_estimate(e), e.time_s or 0.0))  # what was not simulated does not win over what was
    first = planned[0]
    at_most_s = (first.time_s or 0.0) * (1 + 1e-9)  # times within rounding are a tie, which fewer steps win
    tied = [e for e in planned if (e.time_s or 0.0) <= at_most_s and _is_estimate(e) == _is_estimate(first)]
    winner = min(tied, key=lambda e: e.plan.program.executed_steps if e.plan else 0)
    ranked = [winner, *(e for e in planned if e is not winner)]
    best = winner.time_s or 0.0
    out = []
    for place, entry in enumerate(ranked):
        assert entry.plan is not None and entry.time_s is not None
        bound = float(entry.plan.bound) if entry.plan.bound else 0.0
        above = f"{100 * (entry.time_s / bound - 1):.1f} % above the bound" if bound else "no bound"
        slower = "fastest of the candidates" if place == 0 else f"{100 * (entry.time_s / best - 1):.1f} % slower than the fastest" if best else "tied"
        why = "; ".join(filter(None, (slower, above, entry.plan.notes.get("time"))))
        out.append(replace(entry, why=why))
    return out + [e for e in entries if e.time_s is None]


def _is_estimate(entry: Ranked) -> bool:
    return entry.plan is not None and "time" in entry.plan.notes
