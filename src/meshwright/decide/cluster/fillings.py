"""The configuration programme: whole servers filled with whole jobs, columns made as prices ask for them; a tighter bound than one big server.

A column is a filling of one server by jobs of some classes, divided at its best. The dual prices of jobs are the certificate: for any prices,

    speed <= sum of the jobs' prices + sum over servers of the best filling's gain beyond the prices of its jobs (0 for an empty one)

for every allocation that has every job on one server. Pricing is a knapsack over GPUs, cores and steps of memory, solved exactly.
Cost: a programme of kinds + classes rows, and one knapsack per kind and round of prices; `rounds` at most, any round's prices prove a bound.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ...bound import Bound, Certificate
from ...errors import Unsupported
from ...kernels.highs import require_optimal, row_duals, solver
from .bound import ROUNDING
from .problem import AllocationProblem

__all__ = ["fillings_bound"]

Class = tuple[int, int, tuple[str, ...]]  # profile, GPUs, types
SMOOTH = 0.5  # share of the best prices so far in those that are tried: plain prices jump to and fro
GAP = 1e-4  # relative, between programme and bound, at which it is enough


def fillings_bound(problem: AllocationProblem, *, rounds: int = 60) -> Bound:
    """Raises: Unsupported where a gang is larger than every server that it may use."""
    count: dict[Class, int] = {}
    for j in problem.running:
        key = (int(problem.queue.profile[j]), problem.queue.jobs[j].gpus, problem.queue.jobs[j].types)
        count[key] = count.get(key, 0) + 1
    pricing = [_Pricing(problem, t, list(count)) for t in range(len(problem.book.kinds))]
    for n, key in enumerate(count):
        if not any(n in p.classes for p in pricing):
            raise Unsupported(f"gangs of {key[1]} GPUs lie on several servers", where="fillings", hint="use the bound of prices")
    servers = np.bincount(problem.servers.kind, minlength=len(pricing)).tolist()
    model, alone = solver(), np.array(list(count.values()), np.float64)
    infinity = model.getInfinity()
    for n in servers:
        model.addRow(-infinity, float(n), 0, [], [])
    for n in alone:
        model.addRow(float(n), float(n), 0, [], [])
    # Every job may be left out at a loss that no job is worth: the programme always has a solution.
    loss = -4.0 * max(float(problem.book.options(k).gain.max()) for p in pricing for k in p.classes.values())
    for n in range(len(count)):
        model.addCol(loss, 0.0, infinity, 1, [len(servers) + n], [1.0])
    import highspy

    model.changeObjectiveSense(highspy.ObjSense.kMaximize)
    best, kept = np.inf, np.zeros(len(count))
    for _ in range(rounds):
        require_optimal(model, what="the configuration programme")
        value, dual = float(model.getInfo().objective_function_value), row_duals(model)
        price, room = np.array(dual[len(servers) :]), dual[: len(servers)]
        added = False
        for tried in ([price] if best == np.inf else [SMOOTH * kept + (1 - SMOOTH) * price, price]):
            proves = float(alone @ tried)
            for t, p in enumerate(pricing):
                gain, filling, worth = p.best(tried)
                proves += servers[t] * max(0.0, gain)
                if sum(price[n] * k for n, k in filling.items()) + room[t] < worth - 1e-9:
                    index = [t, *(len(servers) + n for n in filling)]
                    model.addCol(worth, 0.0, infinity, len(index), index, [1.0, *map(float, filling.values())])
                    added = True
            if proves < best:
                best, kept = proves, tried
            if added:
                break
        if not added or best - value <= GAP * abs(best):
            break
    value_ = Fraction(best) * (1 + Fraction(ROUNDING))
    data = {"jobs": [[problem.book.profiles[p].name, g, list(types), float(x)] for (p, g, types), x in zip(count, kept, strict=True)]}
    certificate = Certificate(kind="fillings", data=data)
    return Bound(quantity="speed, every job on one server", value=f"{value_.numerator}/{value_.denominator}", unit="GPUs", certificate=certificate)


class _Pricing:
    """The best filling of one kind of server at prices of jobs. `classes`: number of a class -> of its options."""

    def __init__(self, problem: AllocationProblem, kind: int, listed: list[Class]) -> None:
        k = problem.book.kinds[kind]
        self.shape, self.gpus = (k.cores + 1, k.steps + 1), k.gpus
        fits = [n for n, (_, g, types) in enumerate(listed) if g <= k.gpus and (not types or k.type in types)]
        self.classes = {n: problem.book.class_of(listed[n][0], listed[n][1], kind) for n in fits}
        self.items = [(n, listed[n][1], problem.book.options(c)) for n, c in self.classes.items()]

    def best(self, price: NDArray[np.float64]) -> tuple[float, dict[int, int], float]:
        """Gain beyond prices, jobs of each class, and what they gain."""
        best, took = [np.zeros(self.shape)], [np.full(self.shape, -1, np.int64)]
        flat: list[tuple[int, int, int, int, float]] = [
            (n, g, c, u, w) for n, g, o in self.items for c, u, w in zip(o.cores.tolist(), o.steps.tolist(), o.gain.tolist(), strict=True)
        ]
        for g in range(1, self.gpus + 1):
            here, which = best[-1].copy(), np.full(self.shape, -1, np.int64)
            for at, (n, size, c, u, w) in enumerate(flat):
                if size <= g:
                    value = best[g - size][: self.shape[0] - c, : self.shape[1] - u] + (w - price[n])
                    better = value > here[c:, u:]
                    if better.any():
                        here[c:, u:][better] = value[better]
                        which[c:, u:][better] = at
            best.append(here)
            took.append(which)
        filling: dict[int, int] = {}
        worth, at_g, c_, u_ = 0.0, self.gpus, self.shape[0] - 1, self.shape[1] - 1
        while at_g:
            at = int(took[at_g][c_, u_])
            if at < 0:
                at_g -= 1
                continue
            n, size, c, u, w = flat[at]
            filling[n] = filling.get(n, 0) + 1
            worth, at_g, c_, u_ = worth + w, at_g - size, c_ - c, u_ - u
        return float(best[-1][-1, -1]), filling, worth
