"""The decision on collectives: for the winner, every strategy that may win, for each purpose, in place.

Collectives share links with the rest of the step, so a schedule that wins alone can lose there. Alone, all strategies that a step can call are
compared on the largest call of a purpose; those near the fastest, and those that layouts were judged with, are then tried in the step itself. Where
ranks are threads of processors, what they do there takes turns (`Evaluated.in_turns_s`): a schedule of many messages hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...cite import Cite
from ...decide.collective import STRATEGIES, auto, strategy
from ...decide.strategies import cite_of
from ...kernels.effort import Deadline
from .collectives import MAX_PLANNING_WORK_S, PURPOSES, SCOUTS, CollectivePlanner, called_variants
from .context import Context, Decision, Found
from .evaluated import Evaluated

__all__ = ["Collectives", "CollectivesWanted"]

# Strategies per purpose that are tried in the step beside the scouts, fastest alone first.
MAX_TRIED_IN_PLACE = 4
# Times the fastest alone that a strategy may take alone to be tried in the step.
MAX_TIMES_FASTEST = 1.25
# Of a large program, strategies are tried in place within this part of the layout search's counted work, and each alone within this part of what it
# else may take.
LARGE_PARTS = 8


@dataclass(frozen=True)
class CollectivesWanted:
    """`auto`, or the name of one collective strategy for every call. Raises: UnknownName."""

    strategy: str = "auto"

    def __post_init__(self) -> None:
        if self.strategy != "auto":
            strategy(self.strategy, where="--collective")


@dataclass(frozen=True)
class Collectives(Decision):
    name = "collectives"

    def refine(self, found: Found, context: Context) -> Found:
        """One purpose after the other; keeps what shortens the step."""
        best, planner = found.winner, context.evaluator.planner
        if planner.strategy != "auto" or planner.reproducible != "run" or (best.program is not None and best.program.fold is not None):
            return found
        told: dict[str, list[dict[str, Any]]] = {}
        large = context.is_large(best.candidate)
        deadline = Deadline.after(work_s=context.budget.work_s / LARGE_PARTS if large else float("inf"))
        each_s = MAX_PLANNING_WORK_S / LARGE_PARTS if large else MAX_PLANNING_WORK_S
        called = {planner.by_hash[name][0] for name in best.callees}
        for purpose in (p for p in PURPOSES if p in called):
            for name in _promising(planner, best, purpose, each_s):
                tried = planner.with_choice(purpose, name)
                if deadline.work_left_s <= 0:
                    told.setdefault(purpose, []).append({"strategy": name, "why": "not tried: the work for large steps is done"})
                    continue
                made = replace(context.evaluator, planner=tried).again(best)
                told.setdefault(purpose, []).append({"strategy": name, "step_s": made.time_s} if made.fits else {"strategy": name, "why": made.why})
                if made.fits and made.in_turns_s < best.in_turns_s * (1 - 1e-9):
                    best, planner = made, tried
        return replace(found, best=best).noted(self.name, told)

    def entries(self, found: Found, context: Context) -> dict[str, Any]:
        entries = context.evaluator.planner.decisions(found.winner.callees)
        for purpose, told in found.notes.get(self.name, {}).items():
            if (entry := entries.get(f"collective:{purpose}")) is not None:
                entry["tried_in_place"] = told
        return entries

    def cites(self, key: str, entry: Mapping[str, Any]) -> list[tuple[str, Cite]]:
        used = entry["strategy"].split("+") if key.startswith("collective:") else ()
        return [(key, cite) for name in used if (cite := cite_of("collective", STRATEGIES, name))]


def _promising(planner: CollectivePlanner, best: Evaluated, purpose: str, each_s: float) -> list[str]:
    """The scouts, then what is about as fast as the fastest of all strategies on the purpose's largest call, alone."""
    calls = (planner.by_hash[name] for name in best.callees)
    problem = max((planned.problem for mine, planned in calls if mine == purpose), key=lambda p: (p.size_bytes, len(p.ranks)))
    variants = {v.label: v for v in called_variants((k for k in STRATEGIES if not k.chooses), problem)}
    alone_s = {r.strategy: r.time_s for r in auto(problem, candidates=list(variants.values()), each_s=each_s) if r.time_s is not None}
    near = (variants[label].name for label, time_s in alone_s.items() if time_s <= MAX_TIMES_FASTEST * min(alone_s.values()))
    scouts = [k.name for k in SCOUTS]
    return scouts + [name for name in dict.fromkeys(near) if name not in scouts][:MAX_TRIED_IN_PLACE]
