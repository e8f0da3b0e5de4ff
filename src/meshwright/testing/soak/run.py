"""`python -m meshwright.testing soak --what plans`: mutants of plans of every kind against the checkers, until the minutes or the count are used up.

A mutant is refused, or an independent rule says that it does the same (`same`); every other one that a checker accepts is a mistake of ours, and so
is a checker that crashes. One that it does not decide (`unknown`, which is never a pass) is counted apart. Prints one JSON object. Equal seeds and
counts give equal mutants.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["SOAKS", "soak"]

MAX_TOLD = 50  # of the mutants that were accepted, or not decided, so many are described


def soak(what: str, *, minutes: float, seed: int = 0, count: int | None = None) -> dict[str, Any]:
    """Counts by kind of plan and in all. `count`: end after so many mutants. Raises: KeyError for a soak that does not exist."""
    started, began = time.monotonic(), time.process_time()
    kinds: dict[str, Counter[str]] = {}
    operators: dict[str, Counter[str]] = {}
    told: list[dict[str, Any]] = []
    total = 0
    for case in SOAKS[what](np.random.default_rng(seed)):
        outcome, detail = judged(case)
        total += 1
        kinds.setdefault(case["kind"], Counter())[outcome] += 1
        operators.setdefault(f"{case['kind']}: {case['operator']}", Counter())[outcome] += 1
        if outcome in ("accepted", "undecided", "crashed") and len(told) < MAX_TOLD:
            told.append({k: v for k, v in case.items() if isinstance(v, str)} | {"outcome": outcome, "detail": detail})
        if total == count or time.monotonic() - started >= 60 * minutes:
            break
    every = sum(kinds.values(), Counter())
    return {
        "what": what, "seed": seed, "mutants": total, "processor_s": round(time.process_time() - began, 1), "outcomes": dict(sorted(every.items())),
        "kinds": {k: dict(sorted(v.items())) for k, v in sorted(kinds.items())},
        "operators": {k: dict(sorted(v.items())) for k, v in sorted(operators.items())}, "told": told,
        "ok": not every["accepted"] and not every["crashed"],
    }  # fmt: skip


def judged(case: Mapping[str, Any]) -> tuple[str, str]:
    """`refused`, `same` (accepted, and it does the same), or a mistake: `accepted`, `undecided`, `crashed`."""
    try:
        status, said = case["verdict"]()
    except Exception as error:  # a crash is what a soak looks for
        return "crashed", f"{type(error).__name__}: {str(error)[:300]}"
    if status == "wrong":
        return "refused", ""
    if status != "ok":
        return "undecided", said
    return ("same", "") if case["same"]() else ("accepted", "")


def _plans(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    from .plans import mutants_of_plans

    return mutants_of_plans(rng)


SOAKS: dict[str, Callable[[np.random.Generator], Iterator[dict[str, Any]]]] = {"plans": _plans}
