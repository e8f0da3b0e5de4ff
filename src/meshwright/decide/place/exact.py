"""Exact: the shortest schedule of a small graph by CP-SAT, in a process of its own, with the solver's bound.

Cite: Perron, Didier, "CP-SAT", Google OR-Tools.
Left open by the paper: how times become whole numbers. Our answer: 10^6 parts of HEFT's makespan; what it finds is timed again in floats.
Deviations: none.
Invariant: never longer than HEFT, which it starts from. A bound of the solver is not handed out as proved: it has no certificate.
Cost: exponential; graphs of some 30 tasks on 5 devices take seconds. The search is cut by its deterministic time, equal on every machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...cite import Cite
from ...errors import MissingExtra, RunError, Unsupported
from .problem import Placement, PlaceProblem
from .search import Search

__all__ = ["Exact"]

CITE = Cite(key="cpsat", title="CP-SAT", year=2023, venue="Google OR-Tools", authors="Laurent Perron, Frédéric Didier")
MAX_PAIRS = 4_000  # tasks x devices beyond which the model is not tried
PARTS = 1_000_000  # of the start's makespan: the solver's unit of time
GRACE_S = 600  # of real time for the child, whatever its deterministic limit: a net


@dataclass(frozen=True, kw_only=True)
class Exact:
    """effort: the solver's deterministic time, about seconds of one core."""

    name: ClassVar[str] = "exact"
    cite: ClassVar[Cite] = CITE
    aliases: ClassVar[tuple[str, ...]] = ()

    effort: float = 20.0

    def plan(self, problem: PlaceProblem, *, rng: np.random.Generator) -> Placement:
        """Raises: MissingExtra without OR-Tools; Unsupported for a graph that is too large; RunError where the solver's process fails."""
        if problem.objective != "makespan":
            raise Unsupported(f"it seeks the shortest schedule, not the least {problem.objective}", where="exact", hint="use --strategy search")
        if find_spec("ortools") is None:
            raise MissingExtra("ortools", extra="exact", needed_for="exact placement")
        a = problem.arrays
        if a.dur.size > MAX_PAIRS:
            raise Unsupported(f"{a.dur.shape[0]} tasks on {a.dur.shape[1]} devices are too many to solve exactly", hint="use --strategy search")
        start = Search().plan(problem, rng=rng)
        found = self._solved(_model(problem, start))
        notes = {
            "solver": found["status"], "solver_bound_s": found["bound"] * start.makespan_s / PARTS, "start_s": start.makespan_s
        }  # fmt: skip
        looked = start.evaluations + 1
        if not found["on"]:
            return problem.placement(self, start.sequence, start.on, evaluations=looked, notes=notes)
        placement = problem.placement(self, problem.by_start(np.array(found["start"], float)), found["on"], evaluations=looked, notes=notes)
        if placement.makespan_s <= start.makespan_s:
            return placement
        return problem.placement(self, start.sequence, start.on, evaluations=looked, notes=notes)

    def _solved(self, model: dict[str, Any]) -> dict[str, Any]:
        """OR-Tools and HiGHS cannot share a process: each brings its own copy of the same libraries."""
        line, asked = [sys.executable, str(Path(__file__).with_name("cp_sat.py"))], json.dumps(model | {"effort": self.effort})
        try:
            done = subprocess.run(line, input=asked, capture_output=True, text=True, check=True, timeout=GRACE_S)
            return dict(json.loads(done.stdout))
        except (subprocess.SubprocessError, ValueError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise RunError(f"the exact solver's process failed: {said[-300:]}", where="place exact", hint="use --strategy search") from error


def _model(problem: PlaceProblem, start: Placement) -> dict[str, Any]:
    a, unit = problem.arrays, (start.makespan_s or 1.0) / PARTS
    tasks, devices = a.dur.shape
    dur = [[round(x / unit) if np.isfinite(x) else -1 for x in row] for row in a.dur.tolist()]
    edges = []
    for j in range(tasks):
        for e in range(a.ptr[j], a.ptr[j + 1]):
            lag = [[0 if k == m else round((a.delay[k, m] + a.size[e] * a.per_byte[k, m]) / unit) for m in range(devices)] for k in range(devices)]
            edges.append([int(a.parent[e]), j, lag])
    horizon = PARTS + tasks + len(edges)  # rounding may lengthen what is tight
    return {"dur": dur, "edges": edges, "horizon": horizon, "on": list(start.on), "start": [round(s / unit) for s in start.start_s]}
