"""The compiled clock of orders beside a slow one of few lines, and what is wrong with wrong orders, found action by action."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from effort import few
from meshwright.decide.pipeline import Schedule
from meshwright.decide.pipeline.orders import action_s, border_delays, check_orders, expected_actions, in_flight_peaks, kept_peak_bytes, times
from meshwright.decide.pipeline.problem import Action, PipelineProblem
from meshwright.drive.pipeline.pipelines import default_candidates, make_strategy
from meshwright.errors import CheckFailed, Deadlock, Infeasible, Unsupported


def slow_ends(problem: PipelineProblem, schedule: Schedule) -> dict[Action, float]:
    """Ends of all actions: whoever can go goes, until nobody can."""
    delay, end = border_delays(problem, schedule), dict[tuple[str, int, int], float]()
    at, free, found = [0] * schedule.devices, [0.0] * schedule.devices, dict[Action, float]()

    def needs(a: Action, m: int) -> list[tuple[tuple[str, int, int], float]]:
        if a.kind == "F":
            return [(("F", a.stage - 1, m), delay[a.copy][a.stage - 1][0])] if a.stage else []
        if a.kind == "W":
            return [(("B", a.stage, m), 0.0)]
        above = [(("B", a.stage + 1, m), delay[a.copy][a.stage][1])] if a.stage < schedule.stages - 1 else []
        return [(("F", a.stage, m), 0.0), *above]

    moved = True
    while moved:
        moved = False
        for d, order in enumerate(schedule.orders):
            while at[d] < len(order):
                a = order[at[d]]
                asked = [x for m in range(a.microbatch, a.microbatch + a.count) for x in needs(a, m)]
                if a.beside >= 0 and a.kind == "F" and a.beside < schedule.stages - 1:
                    asked += needs(order[at[d] + 1], order[at[d] + 1].microbatch)[1:]
                if any(k not in end for k, _ in asked):
                    break
                free[d] = max([free[d], *(end[k] + t for k, t in asked)]) + action_s(problem, schedule, a)
                found[a] = free[d]
                end |= {("B" if a.kind == "I" else a.kind, a.stage, m): free[d] for m in range(a.microbatch, a.microbatch + a.count)}
                at[d] += 1
                moved = True
    return found


def slow_fault(schedule: Schedule) -> str:
    """What `check_orders` says of the first thing wrong on a device; "" where nothing is."""
    for device, order in enumerate(schedule.orders):
        done = set()
        for a in order:
            for m in range(a.microbatch, a.microbatch + a.count):
                before = {"F": "", "B": "F", "I": "F", "W": "I"}[a.kind]
                if (a.kind, a.stage, m) in done:
                    return f"device {device}: runs {a} twice"
                if before and (before, a.stage, m) not in done:
                    return f"device {device}: runs {a} before {a.stage}{before}{m}"
                done.add((a.kind, a.stage, m))
        if odd := sorted(done ^ expected_actions(schedule, device)):
            kind, stage, m = odd[0]
            return f"device {device}: {'should not run' if odd[0] in done else 'lacks'} {stage}{kind}{m}"
    return ""


def some(seed: int) -> tuple[PipelineProblem, list[Schedule]]:
    rng = random.Random(seed)
    devices = rng.choice((1, 2, 3, 4))
    several = [[rng.uniform(1, 3) for _ in range(devices)] for _ in range(4)]
    problem = PipelineProblem.of(
        devices, rng.choice((devices, 2 * devices, 5)), forward_s=several[0], input_grad_s=several[1], weight_grad_s=several[2], speeds=several[3],
        activation_bytes=7, message_bytes=3, p2p_latency_s=rng.uniform(0, 0.5), p2p_rate_Bps=100,
    )  # fmt: skip
    found = []
    for name, options in default_candidates(problem):
        try:
            kind = make_strategy(name, options)
            found.append(replace(kind, tries=0).plan(problem) if hasattr(kind, "tries") else kind.plan(problem, rng=np.random.default_rng(0)))
        except (Infeasible, Unsupported):
            continue
    return problem, found


@pytest.mark.parametrize("seed", range(few(8)))
def test_the_clock_is_the_slow_one(seed: int) -> None:
    problem, schedules = some(seed)
    assert len(schedules) > 5
    for schedule in schedules:
        clock, slow = times(problem, schedule), slow_ends(problem, schedule)
        assert {a: clock.end_s[d][i] for d, order in enumerate(schedule.orders) for i, a in enumerate(order)} == slow
        assert clock.makespan_s == max(slow.values())
        sums = [np.cumsum([a.count * ((a.kind == "F") - (a.kind == ("W" if schedule.split else "B"))) for a in o]) for o in schedule.orders]
        assert in_flight_peaks(schedule) == [max(x) for x in sums]
        if schedule.chunks == schedule.parts == 1:
            assert kept_peak_bytes(problem, schedule) == [7 * max(x) for x in sums]


@pytest.mark.parametrize("seed", range(few(8)))
def test_wrong_orders_are_refused_for_the_first_wrong_action(seed: int) -> None:
    rng, faults = random.Random(seed), 0
    for schedule in some(seed)[1]:
        if any(a.beside >= 0 for order in schedule.orders for a in order):
            continue  # halves of pairs have a message of their own
        for _ in range(6):
            orders = [list(x) for x in schedule.orders]
            row = rng.choice(orders)
            i, j = rng.randrange(len(row)), rng.randrange(len(row))
            row[i], row[j] = row[j], row[i]
            change = rng.choice(({}, {"microbatch": rng.randrange(-1, 9)}, {"stage": rng.randrange(-1, 9)}, {"kind": rng.choice("FBIW")}))
            row[i] = row[i]._replace(**change)
            if rng.random() < 0.3:
                row.insert(i, row[j])
            wrong = replace(schedule, orders=tuple(map(tuple, orders)))
            if fault := slow_fault(wrong):
                faults += 1
                with pytest.raises(CheckFailed) as refused:
                    check_orders(wrong)
                assert f"{refused.value.where}: {refused.value.message}" == fault
                continue
            try:
                check_orders(wrong)
            except Deadlock:
                assert len(slow_ends(PipelineProblem.of(schedule.devices, schedule.microbatches), wrong)) < sum(map(len, orders))
    assert faults > 20
