"""OPT: demands by an integer programme over one big server, places by a second one; what does not fit whole is placed by TUNE.

Cite: Mohan et al., "Looking Beyond GPUs for DNN Scheduling on Multi-Tenant Clusters", OSDI 2022 (section 4.4 and appendix).
Left open by the paper: what becomes of jobs whose place is fractional. Our answer: they are placed by TUNE's rules after the others, at their share.
Deviations: alike jobs (profile, GPUs) are one variable that counts them, so both programmes are small; one kind of server only.
Invariant: every job is at its share at least.
Cost: programmes of classes x options columns, and of servers x chosen demands columns; both stop after so many looks of the solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...cite import Cite
from ...errors import Unsupported
from ...kernels.highs import solve, solver, values
from .layout import Layout
from .problem import AllocationProblem, AllocationStrategy, Divided
from .shares import CITE, KNEE, tuned

__all__ = ["Opt"]

LOOKS = 200  # of the first programme: it is solved to the end in a few; a net
WHOLE = 1e-6  # how near to a whole number a count is one
Demand = tuple[int, int, int, int]  # class, GPUs, cores, steps


@dataclass(frozen=True, kw_only=True)
class Opt(AllocationStrategy):
    """whole: places by an integer programme, of so many looks; 0: by the linear programme, rounded down."""

    name: ClassVar[str] = "opt"
    cite: ClassVar[Cite] = CITE

    whole: int = 0

    def plan(self, problem: AllocationProblem, *, rng: np.random.Generator) -> Divided:
        """Raises: Unsupported for servers of several kinds."""
        if len(problem.book.kinds) > 1:
            raise Unsupported(f"{len(problem.book.kinds)} kinds of servers are no one big server", where="opt", hint="use --allocation priced")
        kind = problem.book.kinds[0]
        members: dict[int, list[int]] = {}
        for j in problem.running:
            if problem.queue.jobs[j].gpus <= kind.gpus:
                members.setdefault(problem.book.class_of(int(problem.queue.profile[j]), problem.queue.jobs[j].gpus, 0), []).append(j)
        layout = Layout(problem)
        demands = self._demands(problem, members, sum(problem.queue.jobs[j].gpus for j in problem.running))
        left = {k: list(jobs) for k, jobs in members.items()}
        for (k, gpus, cores, steps), server, count in self._places(problem, demands):
            for _ in range(count):
                layout.put(left[k].pop(), [(server, gpus, cores, steps)])
        rest = [j for j in problem.running if j not in layout.pieces]
        tuned(layout, rest, KNEE)
        return Divided(parts=layout.parts(), notes={"fractional": len(rest)})

    def _demands(self, problem: AllocationProblem, members: dict[int, list[int]], gpus: int) -> dict[Demand, int]:
        """How many jobs of each class ask for what: the first programme. Gangs larger than a server have their share set aside."""
        servers, kind = problem.servers, problem.book.kinds[0]
        inside = sum(problem.queue.jobs[j].gpus for jobs in members.values() for j in jobs)
        cores, steps = kind.share(gpus - inside)
        model = solver()
        infinity = model.getInfinity()
        model.addRow(-infinity, float(servers.cores.sum() - cores), 0, [], [])
        model.addRow(-infinity, float(servers.steps.sum() - steps), 0, [], [])
        for jobs in members.values():
            model.addRow(float(len(jobs)), float(len(jobs)), 0, [], [])
        columns: list[Demand] = []
        for row, (k, jobs) in enumerate(members.items(), start=2):
            o = problem.book.options(k)
            for c, u, gain in zip(o.cores.tolist(), o.steps.tolist(), o.gain.tolist(), strict=True):
                model.addCol(gain, 0.0, float(len(jobs)), 3, [0, 1, row], [float(c), float(u), 1.0])
                columns.append((k, problem.queue.jobs[jobs[0]].gpus, c, u))
        counts = self._solved(model, len(columns), "the demands of an allocation", LOOKS)
        return {d: round(n) for d, n in zip(columns, counts, strict=True) if n > 0.5}

    def _places(self, problem: AllocationProblem, demands: dict[Demand, int]) -> list[tuple[Demand, int, int]]:
        """How many jobs of each demand a server takes whole: the second programme."""
        listed, kind, n = list(demands), problem.book.kinds[0], len(problem.servers)
        model = solver()
        infinity = model.getInfinity()
        for cap in (kind.gpus, kind.cores, kind.steps):
            for _ in range(n):
                model.addRow(-infinity, float(cap), 0, [], [])
        for d in listed:
            model.addRow(-infinity, float(demands[d]), 0, [], [])
        for i, d in enumerate(listed):
            for s in range(n):
                most = float(min(demands[d], kind.gpus // d[1]))
                model.addCol(float(d[1]), 0.0, most, 4, [s, n + s, 2 * n + s, 3 * n + i], [float(d[1]), float(d[2]), float(d[3]), 1.0])
        if not listed:
            return []
        counts = self._solved(model, len(listed) * n, "the places of an allocation", self.whole)
        return [(listed[i // n], i % n, whole) for i, x in enumerate(counts) if (whole := int(np.floor(x + WHOLE)))]

    def _solved(self, model: Any, columns: int, what: str, looks: int) -> list[float]:
        import highspy

        model.changeObjectiveSense(highspy.ObjSense.kMaximize)
        if columns and looks:
            model.changeColsIntegrality(columns, np.arange(columns, dtype=np.int32), np.array([highspy.HighsVarType.kInteger] * columns))
        if not columns:
            return []
        solve(model, what=what, looks=looks or None)
        return values(model)
