"""Structure of pipeline schedules: Chimera at all even depths 2-16, all f, N in 1..4D; the V placement against its proven optima.

Run: `python benchmarks/pipeline_structure.py [--most-depth 16]` (prints and writes benchmarks/results/pipeline_structure.json). Every program is
checked (form, deadlock, races) and simulated; equal slots with F = B. `--most-depth 16` takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import machine

from meshwright.check import check_program
from meshwright.decide.pipeline import ZB1P, ZB2P, ZBV, Chimera, OneFOneB, PipelineProblem, VHalf, VMin
from meshwright.decide.pipeline.judge import judge
from meshwright.decide.pipeline.orders import in_flight_peaks, times

# (devices, micro-batches) -> cap in half-stage activations -> optimal slots, proved by constraint programming for F = I = W = 1 per half stage
OPTIMA = {(4, 8): {8: 51, 6: 53, 5: 56, 4: 59, 3: 86}, (3, 6): {6: 38, 4: 41, 3: 52}, (4, 4): {8: 27, 5: 32, 4: 35}, (2, 4): {4: 25, 3: 27, 2: 33}}


def closed_form(devices: int, microbatches: int, pipes: int) -> int | None:
    """Slots with F = B where the publication (or the card) has a formula; else None."""
    if microbatches % devices == 0:
        return 2 * microbatches + devices // pipes - 2
    return 2 * devices + 2 * (-(-microbatches // (2 * pipes)) - 1) if microbatches < devices and pipes == 1 else None


def chimera_row(devices: int, pipes: int, mode: str, split: bool) -> dict[str, Any]:
    """All N of one shape: how many equal the formula, the largest gap to the bound, activations, checks."""
    equal = with_formula = checked = within = 0
    gap = 0.0
    for n in range(1, 4 * devices + 1):
        problem = PipelineProblem.of(devices, n, forward_s=1, backward_s=1, input_grad_s=0.5, weight_grad_s=0.5)
        j = judge(problem, Chimera(pipes=pipes, mode=mode, split=split).plan(problem))
        checked += check_program(j.program).ok
        gap = max(gap, j.time_s / float(j.bound) - 1)
        limit = devices * (2 if mode != "concatenate" else 1)
        within += max(j.in_flight) <= limit
        expected = closed_form(devices, n, pipes) if mode == "concatenate" and not split else None
        if expected is not None:
            with_formula += 1
            equal += j.time_s == expected
    return {
        "what": f"chimera D={devices} f={pipes} {mode}{' split' if split else ''}", "value": checked,
        "unit": f"of {4 * devices} accepted by the checker", "with_formula": with_formula,
        "equal_formula": equal, "activations_within": within, "largest_gap_to_bound": round(gap, 4),
    }  # fmt: skip


def v_rows() -> list[dict[str, Any]]:
    rows = []
    for (p, n), caps in OPTIMA.items():
        problem = PipelineProblem.of(p, n, forward_s=2)
        for cap, best in caps.items():
            slots = times(problem, ZBV(cap=cap).plan(problem)).makespan_s
            rows.append({"what": f"V placement p={p} N={n} cap={cap}", "value": slots, "unit": "slots", "peer": best})
        for strategy in (VHalf(), VMin(), ZB1P(), ZB2P(), OneFOneB()):
            schedule = strategy.plan(problem)
            what = f"{schedule.name} p={p} N={n}"
            rows.append({"what": what, "value": times(problem, schedule).makespan_s, "unit": "slots", "kept": max(in_flight_peaks(schedule))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-depth", type=int, default=8)
    most = parser.parse_args().most_depth
    rows = v_rows()
    for devices in range(2, most + 1, 2):
        for pipes in [f for f in range(1, devices // 2 + 1) if devices // 2 % f == 0]:
            rows.append(chimera_row(devices, pipes, "concatenate", False))
            if devices <= 8:
                rows += [chimera_row(devices, pipes, "concatenate", True), chimera_row(devices, pipes, "double", False)]
                rows.append(chimera_row(devices, pipes, "halve", False))
    command = f"python benchmarks/pipeline_structure.py --most-depth {most}"
    print(json.dumps(machine.record("pipeline_structure", rows, command=command), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
