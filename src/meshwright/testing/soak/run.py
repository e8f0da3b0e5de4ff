"""`python -m meshwright.testing soak --what plans|backend|readers|traces`: generated cases against what must refuse or do them rightly, until the
minutes or the count are used up.

Of plans: a mutant is refused, or an independent rule says that it does the same (`same`); every other one that a checker accepts is a mistake of
ours. What a case of the others is, their modules say (`backend`, `readers`, `traces`); each judges itself. `MISTAKES` are the outcomes that must not
be. What a checker does not decide (`unknown`, which is never a pass) is counted apart. Equal seeds and counts give equal cases.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np

__all__ = ["MISTAKES", "SOAKS", "soak"]

Rng = np.random.Generator
MISTAKES = ("accepted", "crashed", "hung", "wrong", "misnamed", "late", "large")
MAX_TOLD = 50  # of the mistakes, and of what was not decided, so many are described


def soak(what: str, *, minutes: float, seed: int = 0, count: int | None = None) -> dict[str, Any]:
    """Counts by kind of case and in all; `most`: the largest figures of all cases; `sums`: theirs together. `count`: end after so many cases.

    Raises: KeyError for a soak that does not exist.
    """
    started, began = time.monotonic(), time.process_time()
    kinds: dict[str, Counter[str]] = {}
    operators: dict[str, Counter[str]] = {}
    sums: Counter[str] = Counter()
    most: dict[str, float] = {}
    told: list[dict[str, Any]] = []
    total = 0
    with contextlib.closing(SOAKS[what](np.random.default_rng(seed))) as cases:
        for case in cases:
            outcome, detail = judged(case)
            total += 1
            kinds.setdefault(case["kind"], Counter())[outcome] += 1
            operators.setdefault(f"{case['kind']}: {case['operator']}", Counter())[outcome] += 1
            sums.update(case.get("sums", {}))
            for name, value in case.get("most", {}).items():
                most[name] = max(value, most.get(name, value))
            if outcome in (*MISTAKES, "undecided") and len(told) < MAX_TOLD:
                told.append({k: v for k, v in case.items() if isinstance(v, str)} | {"outcome": outcome, "detail": detail})
            if total == count or time.monotonic() - started >= 60 * minutes:
                break
    every = sum(kinds.values(), Counter())
    return {
        "what": what, "seed": seed, "cases": total, "processor_s": round(time.process_time() - began, 1), "outcomes": dict(sorted(every.items())),
        "kinds": {k: dict(sorted(v.items())) for k, v in sorted(kinds.items())},
        "operators": {k: dict(sorted(v.items())) for k, v in sorted(operators.items())}, "sums": dict(sorted(sums.items())),
        "most": dict(sorted(most.items())), "told": told, "ok": not any(every[x] for x in MISTAKES),
    }  # fmt: skip


def judged(case: Mapping[str, Any]) -> tuple[str, str]:
    """The outcome in a word, and what there is to say of it. A case that does not `judge` itself is `refused`, or `same` (accepted, and it does
    the same), or a mistake."""
    try:
        if "judge" in case:
            return case["judge"]()  # type: ignore[no-any-return]
        status, said = case["verdict"]()
    except Exception as error:  # a crash is what a soak looks for
        return "crashed", f"{type(error).__name__}: {str(error)[:300]}"
    if status == "wrong":
        return "refused", ""
    if status != "ok":
        return "undecided", said
    return ("same", "") if case["same"]() else ("accepted", "")


# Each is loaded when it is asked for: only some need torch.
def _plans(rng: Rng) -> Generator[dict[str, Any], None, None]:
    from .plans import mutants_of_plans

    return mutants_of_plans(rng)


def _backend(rng: Rng) -> Generator[dict[str, Any], None, None]:
    from .backend import sequences

    return sequences(rng)


def _readers(rng: Rng) -> Generator[dict[str, Any], None, None]:
    from .readers import damaged_files

    return damaged_files(rng)


def _traces(rng: Rng) -> Generator[dict[str, Any], None, None]:
    from .traces import generated_traces

    return generated_traces(rng)


SOAKS: dict[str, Callable[[Rng], Generator[dict[str, Any], None, None]]] = {
    "plans": _plans, "backend": _backend, "readers": _readers, "traces": _traces,
}  # fmt: skip
