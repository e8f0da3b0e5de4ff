"""Structure of pipeline schedules: Chimera in all modes at all even depths 2-16, all f, N in 1..4D; the V placement against its proven optima.

Run: `python benchmarks/pipeline_structure.py [--most-depth 16]` (prints and writes benchmarks/results/pipeline_structure.json). Every program is
checked (form, deadlock, races) and simulated; equal slots with F = B. `--most-depth 16` takes some ten minutes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import machine

from meshwright.check import check_program
from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.pipeline import Chimera, OneFOneB, PipelineProblem
from meshwright.decide.pipeline.bound import schedule_bound
from meshwright.decide.pipeline.exact import counts_bound, exact_search
from meshwright.decide.pipeline.judge import judge
from meshwright.decide.pipeline.lower import fabric_of
from meshwright.decide.pipeline.orders import in_flight_peaks, times
from meshwright.decide.pipeline.search import Search
from meshwright.decide.pipeline.vschedules import ZBV, VHalf, VMin
from meshwright.decide.pipeline.zerobubble import ZB1P, ZB2P

# (devices, micro-batches) -> cap in half-stage activations -> optimal slots, proved by constraint programming for F = I = W = 1 per half stage
OPTIMA = {(4, 8): {8: 51, 6: 53, 5: 56, 4: 59, 3: 86}, (3, 6): {6: 38, 4: 41, 3: 52}, (4, 4): {8: 27, 5: 32, 4: 35}, (2, 4): {4: 25, 3: 27, 2: 33}}


def closed_form(devices: int, microbatches: int, pipes: int) -> int | None:
    """Slots with F = B where the publication (or the card) has a formula; else None."""
    if microbatches % devices == 0:
        return 2 * microbatches + devices // pipes - 2
    return 2 * devices + 2 * (-(-microbatches // (2 * pipes)) - 1) if microbatches < devices and pipes == 1 else None


def chimera_row(devices: int, pipes: int, mode: str, split: bool) -> dict[str, Any]:
    """All N of one shape: how many equal the formula, the largest gap to the bound, activations, checks."""
    equal = with_formula = checked = within = at_bound = 0
    gap = 0.0
    for n in range(1, 4 * devices + 1):
        problem = PipelineProblem.of(devices, n, forward_s=1, backward_s=1, input_grad_s=0.5, weight_grad_s=0.5)
        j = judge(problem, Chimera(pipes=pipes, mode=mode, split=split).plan(problem))
        checked += check_program(j.program).ok
        gap = max(gap, j.time_s / float(j.bound) - 1)
        limit = devices * (2 if mode != "concatenate" else 1)
        at_bound += j.time_s <= float(j.bound) * (1 + 1e-9)
        within += max(j.in_flight) <= limit
        expected = closed_form(devices, n, pipes) if mode == "concatenate" and not split else None
        if expected is not None:
            with_formula += 1
            equal += j.time_s == expected
    return {
        "what": f"chimera D={devices} f={pipes} {mode}{' split' if split else ''}", "value": checked,
        "unit": f"of {4 * devices} accepted by the checker", "with_formula": with_formula,
        "equal_formula": equal, "activations_within": within, "proved_optimal_by_bound": at_bound, "largest_gap_to_bound": round(gap, 4),
    }  # fmt: skip


def v_rows(effort: int) -> list[dict[str, Any]]:
    """Every cap of the card's table: `zbv` with it, searched orders, the bound that is checked again, and what exact search proves."""
    rows = []
    for (p, n), caps in OPTIMA.items():
        problem = PipelineProblem.of(p, n, forward_s=2, activation_bytes=2, message_bytes=0)
        for cap, best in caps.items():
            listed = ZBV(cap=cap).plan(problem)
            found = Search(placement="vee", cap=cap, effort=effort).plan(problem)
            bound = counts_bound(problem, found, cap_bytes=(cap,) * p) or schedule_bound(problem, found, cap_bytes=(cap,) * p)
            assert not check_bound(bound, fabric_of(problem)) and max(in_flight_peaks(found)) <= cap
            rows.append({
                "what": f"V placement p={p} N={n} cap={cap}", "value": times(problem, found).makespan_s, "unit": "slots", "peer": best,
                "zbv": times(problem, listed).makespan_s, "bound_with_certificate": float(bound), "proved": found.notes[0],
            })  # fmt: skip
        for strategy in (VHalf(tries=0), VHalf(), VMin(tries=0), VMin(), ZB1P(), ZB2P(), OneFOneB()):
            schedule = strategy.plan(problem)
            what = f"{schedule.name} p={p} N={n}" + (" as published" if schedule.options.get("tries") == 0 else "")
            rows.append({"what": what, "value": times(problem, schedule).makespan_s, "unit": "slots", "kept": max(in_flight_peaks(schedule))})
    return rows


def proofs(effort: int) -> list[dict[str, Any]]:
    """Exact search on placements of Chimera and 1F1B: (devices, micro-batches, backward, cap in activations)."""
    rows = []
    for strategy, d, n, backward, cap in (
        (Chimera(), 4, 4, 1, 4), (Chimera(), 4, 4, 2, 4), (Chimera(), 6, 6, 2, 6), (Chimera(), 4, 8, 2, 4), (Chimera(), 4, 8, 2, 8),
        (OneFOneB(), 4, 4, 2, 4),
    ):  # fmt: skip
        problem = PipelineProblem.of(d, n, forward_s=1, backward_s=backward, activation_bytes=1, message_bytes=0)
        published = strategy.plan(problem)
        proof = exact_search(problem, published, cap_bytes=(cap,) * d, effort=effort)
        rows.append({
            "what": f"{published.name} D={d} N={n} B={backward}F cap={cap}", "value": times(problem, proof.schedule).makespan_s, "unit": "slots",
            "published": times(problem, published).makespan_s, "least": float(proof.least_s), "proved_optimal": proof.optimal,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-depth", type=int, default=8)
    parser.add_argument("--effort", type=int, default=300, help="of exact search per row, some 0.1 s each")
    args = parser.parse_args()
    most = args.most_depth
    rows = v_rows(args.effort) + proofs(args.effort)
    for devices in range(2, most + 1, 2):
        for pipes in [f for f in range(1, devices // 2 + 1) if devices // 2 % f == 0]:
            for mode, split in (("concatenate", False), ("concatenate", True), ("double", False), ("halve", False)):
                rows.append(chimera_row(devices, pipes, mode, split))
    command = f"python benchmarks/pipeline_structure.py --most-depth {most} --effort {args.effort}"
    print(json.dumps(machine.record("pipeline_structure", rows, command=command), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
