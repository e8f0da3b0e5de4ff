"""Objectives that add up: energy, and GiPH's cost; the cheapest mapping by moves, and a bound by messages between tasks.

Cite: Hu et al., "GiPH", MLSys 2023 (total cost: seconds of all tasks and of all messages); Kolmogorov, "Convergent Tree-Reweighted Message Passing
for Energy Minimization", TPAMI 28(10) 2006, in the sequential form of his "A New Look at Reweighted Message Passing", TPAMI 37(5) 2015.
Left open by the paper: what energy is. Our answer: watts of a device while it computes, and joules per byte of every link that a message takes. What
devices draw when idle is spent either way and is left out.
Deviations: the order of tasks does not matter for a sum; of equally cheap mappings the one that is shorter in simulation is taken.
Invariant: never dearer than HEFT, CPOP or the given placement. A bound holds for any messages; `check.placement_sums` works it out again from them.
Cost: O(passes · edges · devices²); moves O(degree · devices) each.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...bound import Bound, Certificate
from ...errors import UsageError
from .problem import PlaceProblem

__all__ = ["Sums", "Reweighted", "cheapest", "reweighted", "sum_bound", "sums_of"]

PASSES = 60  # over all tasks, forwards and backwards; of 40 random problems none had a better bound after more
MAX_NUMBERS = 200_000  # of a certificate; larger problems have the bound of tasks alone
ROUNDING = 1e-9  # what a bound gives away for sums of floats; the checker allows for as much
SHAKES = 40  # restarts of moves from the best mapping with some tasks at random, unless evaluations are given

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Sums(NamedTuple):
    """`task[i, k]`: of task i on device k, infinite where it cannot run; `fixed[k, l] + size · per_byte[k, l]`: of a message. `edges`: (parent,
    child, bytes); `at[i]`: edges of task i, (number, whether it is the parent)."""

    task: F64
    fixed: F64
    per_byte: F64
    edges: list[tuple[int, int, float]]
    at: list[list[tuple[int, bool]]]

    def edge(self, e: int) -> F64:
        """[parent's device, child's device]."""
        return np.asarray(self.fixed + self.edges[e][2] * self.per_byte)

    def other(self, e: int, parent: bool) -> int:
        """The task at the other end of an edge."""
        return self.edges[e][1] if parent else self.edges[e][0]

    def total(self, on: I64) -> float:
        tasks = self.task[np.arange(len(on)), on].sum()
        return float(tasks + sum(self.fixed[on[i], on[j]] + size * self.per_byte[on[i], on[j]] for i, j, size in self.edges))

    def choices(self, i: int, on: I64) -> F64:
        """What task i adds on every device, the others being where they are."""
        found: F64 = self.task[i].copy()
        for e, parent in self.at[i]:
            a, b, size = self.edges[e]
            found += (self.fixed[:, on[b]] + size * self.per_byte[:, on[b]]) if parent else (self.fixed[on[a]] + size * self.per_byte[on[a]])
        return found


def sums_of(problem: PlaceProblem) -> Sums:
    """Raises: UsageError for energy on devices that state no watts."""
    devices, a = problem.fabric.devices, problem.arrays
    if problem.objective == "cost":
        task, fixed, per_byte = a.dur, a.delay, a.per_byte
    elif problem.objective == "energy":
        lacking = [d.name for d in devices if not d.watts]
        if lacking:
            hint = "give every device `watts`, and links `joules_per_byte` (docs/formats.md)"
            raise UsageError(f"device {lacking[0]} does not say what it draws", where=f"{problem.fabric.name}: watts", hint=hint)
        routes = [[problem.fabric.route(k, m) for m in range(len(devices))] for k in range(len(devices))]
        per_byte = np.array([[sum(problem.fabric.links[x].joules_per_byte for x in r) for r in row] for row in routes], np.float64)
        task, fixed = a.dur * np.array([d.watts for d in devices]), np.zeros_like(per_byte)
    else:
        raise UsageError(f"{problem.objective} is no sum", where="objective", hint="energy or cost")
    edges = [(i, j, float(e.size_bytes)) for (i, j), e in zip(problem.graph.pairs, problem.graph.edges, strict=True)]
    at: list[list[tuple[int, bool]]] = [[] for _ in problem.graph.tasks]
    for n, (i, j, _) in enumerate(edges):
        at[i].append((n, True))
        at[j].append((n, False))
    return Sums(task, fixed, per_byte, edges, at)


# ---- bound -------------------------------------------------------------------------------------------------------
class Reweighted(NamedTuple):
    """`value`: of the bound; `moved` [edges, 2, devices]: what of each edge's sum is counted at its parent and at its child; `on`: a mapping."""

    value: float
    moved: F64
    on: I64


def reweighted(sums: Sums, order: tuple[int, ...]) -> Reweighted:
    """Least sums, each of a task or an edge alone, after parts of edges' sums were moved to tasks and back until the bound no longer grows."""
    dearest = float(np.where(np.isfinite(sums.task), sums.task, 0).max(1).sum()) + sum(float(sums.edge(e).max()) for e in range(len(sums.edges)))
    task = np.where(np.isfinite(sums.task), sums.task, dearest + 1.0)
    moved = np.zeros((len(sums.edges), 2, task.shape[1]))
    place = {i: n for n, i in enumerate(order)}
    on = np.zeros(len(task), np.int64)
    if moved.size > MAX_NUMBERS:
        return Reweighted(_value(sums, moved[:0]), moved[:0], task.argmin(1))
    best, kept, cheapest_on = _value(sums, moved), moved.copy(), task.argmin(1)
    least = sums.total(cheapest_on)
    for number in range(PASSES):
        path = order if number % 2 == 0 else order[::-1]
        chosen = np.zeros(len(task), bool)
        for i in path:
            pulled = [_pulled(sums, moved, e, parent) for e, parent in sums.at[i]]
            sum_here = task[i] + sum(pulled) if pulled else task[i]
            later = [(place[sums.other(e, parent)] > place[i]) == (number % 2 == 0) for e, parent in sums.at[i]]
            share = 1 / max(sum(later), len(later) - sum(later), 1)
            choice = task[i].copy()
            for (e, parent), pull, goes in zip(sums.at[i], pulled, later, strict=True):
                moved[e, 0 if parent else 1] = pull - share * sum_here if goes else pull
                other = sums.other(e, parent)
                choice += (sums.edge(e)[:, on[other]] if parent else sums.edge(e)[on[other]]) if chosen[other] else pull
            on[i] = int(np.where(np.isfinite(sums.task[i]), choice, np.inf).argmin())
            chosen[i] = True
        if (total := sums.total(on)) < least:
            least, cheapest_on = total, on.copy()
        if (value := _value(sums, moved)) > best:
            best, kept = value, moved.copy()
    return Reweighted(best, kept, cheapest_on)


def _pulled(sums: Sums, moved: F64, e: int, parent: bool) -> F64:
    """What the edge adds at least for every device of one end, the other end's part taken away."""
    left: F64 = sums.edge(e) - (moved[e, 1][None, :] if parent else moved[e, 0][:, None])
    return np.asarray(left.min(1 if parent else 0))


def _value(sums: Sums, moved: F64) -> float:
    can = np.isfinite(sums.task)
    task = np.where(can, sums.task, np.inf)
    total = 0.0
    for e, (i, j, _) in enumerate(sums.edges):
        left = sums.edge(e)
        if len(moved):
            left = left - moved[e, 0][:, None] - moved[e, 1][None, :]
            task[i] += np.where(can[i], moved[e, 0], 0)
            task[j] += np.where(can[j], moved[e, 1], 0)
        total += float(left[np.ix_(can[i], can[j])].min())
    return total + float(task.min(1).sum())


def sum_bound(problem: PlaceProblem, found: Reweighted) -> Bound:
    value = Fraction(max(0.0, found.value)) * (1 - Fraction(ROUNDING))
    data: dict[str, Any] = {"form": "messages", "objective": problem.objective, "moved": found.moved.tolist()}
    certificate = Certificate(kind="placement", data=data)
    unit: Literal["s", "J"] = "J" if problem.objective == "energy" else "s"
    return Bound(quantity=f"placement {problem.objective}", value=f"{value.numerator}/{value.denominator}", unit=unit, certificate=certificate)


# ---- search ------------------------------------------------------------------------------------------------------
def cheapest(sums: Sums, starts: list[I64], budget: int, rng: np.random.Generator) -> tuple[I64, int]:
    """The cheapest mapping that moves of single tasks lead to, from every start and then from the best with some tasks anywhere; how many it saw."""
    tasks, devices = sums.task.shape
    budget = budget or (len(starts) + SHAKES) * tasks * devices
    best, least, looked = starts[0], np.inf, 0
    pending = [s.copy() for s in starts]
    while pending or looked < budget:
        if pending:
            on = pending.pop(0)
        else:
            on = best.copy()
            for i in rng.choice(tasks, size=min(tasks, int(rng.integers(1, 5))), replace=False).tolist():
                on[i] = int(rng.choice(np.flatnonzero(np.isfinite(sums.task[i]))))
        looked += _settled(sums, on)
        if (total := sums.total(on)) < least:
            best, least = on.copy(), total
    return best, looked


def _settled(sums: Sums, on: I64) -> int:
    """Moves tasks of `on`, one by one, to where they add least, until none moves; mappings looked at."""
    looked, moving = 1, True
    while moving:
        moving = False
        for i in range(len(on)):
            choices = sums.choices(i, on)
            looked += len(choices) - 1
            k = int(choices.argmin())
            if choices[k] < choices[on[i]] * (1 - 1e-12):
                on[i], moving = k, True
    return looked
