"""Solving the joint programme: the fastest decisions within a limit, or those of the least peak, and what the solver has proved.

Equal inputs give equal answers: the solver has one thread, and is stopped by numbers of nodes and looks, not by the clock.
The solver's rows hold up to its tolerance; the caller counts the plan's peak in whole bytes and asks again with a lower limit when it is above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ....errors import Infeasible
from ....kernels.highs import solve, values
from .merging import Merged
from .model import Expression, JointModel, Limits
from .schedule import Decisions

__all__ = ["Answer", "fastest", "infeasible", "leanest", "least_bytes"]

# Looks of the solver at whether to go on, times squared rows, as which the work between them grows: half a minute or so.
MAX_LOOKS_TIMES_SQUARED_ROWS = 20_000_000_000
# Looks that a programme of any size gets, so that its heuristics find a first answer.
MIN_LOOKS = 100


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`floor`: no decisions are better (seconds, or bytes for `leanest`). `optimal`: the solver proved it."""

    decisions: Decisions
    value: float
    floor: float
    optimal: bool


def fastest(m: Merged, limits: Limits, *, nodes: int, seed: int = 0, start: Decisions | None = None) -> Answer:
    """Least seconds within `limits`. Raises: Infeasible; TimeLimit when `nodes` branch-and-bound nodes found no decisions."""
    return _solved(JointModel(m, limits), nodes, seed, start)


def leanest(m: Merged, *, nodes: int, seed: int = 0) -> Answer:
    """Least peak bytes. Raises: TimeLimit."""
    return _solved(JointModel(m, Limits(least="peak")), nodes, seed, None)


def _solved(model: JointModel, nodes: int, seed: int, start: Decisions | None) -> Answer:
    highs = model.highs(mip_rel_gap=0.0, mip_abs_gap=1e-5, mip_max_nodes=nodes, random_seed=seed)
    if start is not None:
        _warm(model, highs, start)
    status = solve(highs, what="joint memory programme", looks=max(MIN_LOOKS, MAX_LOOKS_TIMES_SQUARED_ROWS // max(1, highs.getNumRow()) ** 2))
    x = values(highs)
    info = highs.getInfo()
    unit = model.byte_unit if model.peak is not None else model.time_unit
    constant = 0.0 if model.peak is not None else model.constant_s()
    value, floor = info.objective_function_value * unit + constant, info.mip_dual_bound * unit + constant
    if not any(model.whole):  # a linear programme has no bound beside its value
        floor = value
    return Answer(decisions=_decisions(model, x), value=value, floor=min(value, floor), optimal=status == "optimal")


def least_bytes(m: Merged, lean: Answer, peak_bytes: int) -> int:
    """No decisions need fewer bytes than this, which is at most `peak_bytes`, the peak of the plan that `lean` became."""
    slack = 1e-9 * (sum(m.size.values()) + max((s.first.bytes_alive for s in m.stages), default=0))  # the solver's tolerance
    return min(peak_bytes, math.ceil(lean.floor - slack - 1e-6))


def _value(e: Expression, x: list[float]) -> bool:
    return e.constant + sum(f * x[v] for v, f in e.terms.items()) > 0.5


def _decisions(model: JointModel, x: list[float]) -> Decisions:
    chosen: list[tuple[tuple[int, int], ...]] = []
    for t in range(len(model.stages)):
        mine = []
        for i, o in enumerate(model.m.operators):
            if (t, i) in model.R and _value(model.R[t, i], x):
                mine.append((i, next(w for w in range(len(o.ways)) if _value(model.X[t, i, w], x))))
        chosen.append(tuple(mine))
    backward = {n: w for (n, w), e in model.M.items() if w and _value(e, x)}
    stays = frozenset(k for k, wants in model.stays.items() if any(_value(e, x) for e in wants))
    return Decisions(operators=tuple(chosen), backward=backward, stays=stays)


def _warm(model: JointModel, highs: object, start: Decisions) -> None:
    """Gives the solver decisions to begin with; HiGHS completes the other variables, or ignores them."""
    ran = {(t, i): w for t, mine in enumerate(start.operators) for i, w in mine}
    fixed: dict[int, float] = {}

    def put(table: Mapping[tuple[int, ...], Expression], key: tuple[int, ...], on: bool) -> None:
        e = table[key]
        if e.terms:
            fixed[next(iter(e.terms))] = float(on)

    for t, i in model.R:
        put(model.R, (t, i), (t, i) in ran)  # type: ignore[arg-type]
    for t, i, w in model.X:
        put(model.X, (t, i, w), ran.get((t, i)) == w)  # type: ignore[arg-type]
    for n, w in model.M:
        put(model.M, (n, w), start.backward.get(n, 0) == w)  # type: ignore[arg-type]
    import numpy as np

    keys = sorted(fixed)
    highs.setSolution(len(keys), np.array(keys, np.int32), np.array([fixed[k] for k in keys]))  # type: ignore[attr-defined]


def infeasible(m: Merged, budget_bytes: int, least_bytes: int, *, proved: bool, floor_s: float | None = None) -> Infeasible:
    # Proved of the programme's class only: a result that is made after backward began (a loss nobody waits for) can need less.
    searched = "no plan that makes its results before backward, operators in the graph's order, needs less"
    what = searched if proved else "none was found that needs less"
    return Infeasible(
        f"the step needs {least_bytes:,} B, the budget is {budget_bytes:,} B ({what})", where=m.graph.name,
        hint="a smaller batch, a narrower dtype, or lossy or offloaded saves need less",
        data={"least_bytes": least_bytes, "budget_bytes": budget_bytes, "proved": proved, "floor_s": floor_s},
    )  # fmt: skip
