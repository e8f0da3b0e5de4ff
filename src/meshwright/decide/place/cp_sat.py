"""The child process of `exact`: reads a model from standard input, writes the solver's answer. It imports OR-Tools and nothing of this package."""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["solved"]


def solved(model: dict[str, Any]) -> dict[str, Any]:
    """`dur[task][device]` (-1: not there), `edges` [parent, child, lag by device of either], `horizon`, all in whole units; `on`, `start`: a hint."""
    from ortools.sat.python import cp_model

    m = cp_model.CpModel()
    horizon, dur = model["horizon"], model["dur"]
    devices = len(dur[0])
    starts = [m.new_int_var(0, horizon, f"s{i}") for i in range(len(dur))]
    ends = [m.new_int_var(0, horizon, f"e{i}") for i in range(len(dur))]
    here = [[m.new_bool_var(f"x{i},{k}") if d >= 0 else None for k, d in enumerate(row)] for i, row in enumerate(dur)]
    for i, row in enumerate(here):
        m.add_exactly_one(x for x in row if x is not None)
        for k, x in enumerate(row):
            if x is not None:
                m.add(ends[i] == starts[i] + dur[i][k]).only_enforce_if(x)
                m.add_hint(x, int(model["on"][i] == k))
        m.add_hint(starts[i], model["start"][i])
    for k in range(devices):
        on_k = [m.new_optional_fixed_size_interval_var(starts[i], dur[i][k], here[i][k], "") for i in range(len(dur)) if here[i][k] is not None]
        m.add_no_overlap(on_k)
    for i, j, lag in model["edges"]:
        for k in range(devices):
            for n in range(devices):
                if here[i][k] is not None and here[j][n] is not None:
                    m.add(starts[j] >= ends[i] + lag[k][n]).only_enforce_if(here[i][k], here[j][n])
    makespan = m.new_int_var(0, horizon, "makespan")
    m.add_max_equality(makespan, ends)
    m.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = model["effort"]
    status = solver.solve(m)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {"status": solver.status_name(status).lower(), "bound": solver.best_objective_bound, "on": [], "start": []}
    on = [next(k for k, x in enumerate(row) if x is not None and solver.value(x)) for row in here]
    return {
        "status": solver.status_name(status).lower(), "bound": solver.best_objective_bound, "on": on, "start": [solver.value(s) for s in starts]
    }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(solved(json.loads(sys.stdin.read()))))
