"""Activations in the host's memory: the cap holds by order and in simulation, nothing is used while it is away, wrong plans are refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from effort import few
from meshwright.check import check_plan as checked
from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.judge import judge
from meshwright.decide.pipeline.offload import fitting
from meshwright.decide.pipeline.orders import check_orders, kept_peak_bytes, saved_bytes
from meshwright.decide.pipeline.problem import Offload, Schedule
from meshwright.drive.pipeline.pipelines import compare_pipelines, make_strategy, plan_pipeline, plan_schedule, problem_of_plan, schedule_of_plan
from meshwright.errors import CheckFailed, Infeasible, UsageError
from meshwright.plan.plan import Plan
from meshwright.program.program import Space, Unit

MB = 1_000_000


def of(devices: int = 4, microbatches: int = 8, cap: float = 2.5 * MB, rate: float = 1e9, **more: Any) -> PipelineProblem:
    given = {"forward_s": 0.004, "backward_s": 0.008, "activation_bytes": MB, "message_bytes": 1000, **more}
    return PipelineProblem.of(devices, microbatches, memory_cap_bytes=cap, host_out_Bps=rate, host_in_Bps=rate, **given)


def held_by_order(problem: PipelineProblem, schedule: Schedule, device: int) -> int:
    """Most bytes kept at any action: there from F to the end of the backward, but for the places between."""
    order, away = schedule.orders[device], {x[:2]: x for x in schedule.offloads[device]}
    most = 0
    for place in range(len(order)):
        held = 0
        for (copy, s), m in ((key, m) for key in schedule.hosted(device) for m, on in enumerate(schedule.copy_of) if on == key[0]):
            mine = [i for i, a in enumerate(order) if a.stage == s and a.microbatch <= m < a.microbatch + a.count]
            if not mine[0] <= place <= mine[-1]:
                continue
            whole = -(-problem.activation_bytes[s // schedule.chunks] // (schedule.chunks * schedule.parts))
            gone = away.get((s, m))
            held += whole - (saved_bytes(problem, schedule, copy, s) if gone and gone.free <= place <= gone.fetch else 0)
        most = max(most, held)
    return most


@pytest.mark.parametrize("seed", range(few(10)))
def test_the_cap_holds_by_order_and_in_simulation(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(("1f1b", "gpipe", "zb1p", "interleaved", "chimera", "zbv"))
    devices = rng.choice((2, 4))
    problem = of(devices, rng.choice((4, 6)), cap=rng.uniform(0.4, 3.5) * MB, rate=10 ** rng.uniform(8, 11), data=1 + (seed % 3 == 0))
    schedule = make_strategy(name, {}).plan(problem, rng=np.random.default_rng(0))
    before = kept_peak_bytes(problem, schedule)
    found = fitting(problem, schedule)
    if found is None:
        assert max(before) > problem.memory_cap_bytes[0] or not any(fitting_is_needed(problem, schedule))
        return
    made = found.schedule
    check_orders(made)
    assert made.orders == schedule.orders and max(found.memory_bytes) <= problem.memory_cap_bytes[0] < max(before)
    assert all(held_by_order(problem, made, d) <= problem.memory_cap_bytes[d] for d in range(devices))
    plan = plan_schedule(problem, made, name)
    assert plan.prediction is not None and plan.prediction.time_s == pytest.approx(found.time_s)
    assert schedule_of_plan(plan).offloads == made.offloads and problem_of_plan(plan) == problem
    main = plan.main
    assert any(int(u) == Unit.COPY for u in main.lanes.unit) and any(int(s) == Space.HOST for s in main.buffers.space)


def fitting_is_needed(problem: PipelineProblem, schedule: Schedule) -> list[bool]:
    return [k > c for k, c in zip(kept_peak_bytes(problem, schedule), problem.memory_cap_bytes, strict=True)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_with_copies_for_nothing_one_activation_is_enough(name: str) -> None:
    """Every activation can be away but for its own F and backward."""
    problem = of(cap=MB + 30_000, rate=1e18)
    plan = plan_pipeline(problem, name)
    assert max(held_by_order(problem, schedule_of_plan(plan), d) for d in range(4)) <= MB + 30_000
    free = plan_pipeline(replace(problem, memory_cap_bytes=()), name)
    assert plan.prediction is not None and free.prediction is not None and plan.prediction.time_s == pytest.approx(free.prediction.time_s)


def test_slow_copies_cost_time_and_none_are_made_where_it_fits() -> None:
    quick, slow = (plan_pipeline(of(rate=rate), "1f1b") for rate in (1e12, 1.2e8))
    assert quick.prediction is not None and slow.prediction is not None and slow.prediction.time_s > 1.1 * quick.prediction.time_s
    assert "offloads" not in plan_pipeline(of(cap=5 * MB), "1f1b").job["schedule"]
    with pytest.raises(Infeasible, match="gpipe needs 2000000 bytes"):
        plan_pipeline(replace(of(2, 2, cap=1.5 * MB), host_out_Bps=0.0, host_in_Bps=0.0), "gpipe")
    rows = {r.name: r for r in compare_pipelines(of(2, 4, cap=1.5 * MB), [("1f1b", {}), ("gpipe", {})]).rows}
    assert rows["1f1b offload"].fits and rows["gpipe offload"].fits and not rows["1f1b"].fits and not rows["gpipe"].fits
    with pytest.raises(UsageError, match="two rates above 0"):
        PipelineProblem.of(2, 2, host_out_Bps=1.0)


def test_orders_that_use_what_is_away_are_refused() -> None:
    problem = of()
    made = schedule_of_plan(plan_pipeline(problem, "1f1b"))
    first = made.offloads[0][0]
    for wrong in (first._replace(free=0), first._replace(fetch=99), first._replace(free=first.fetch + 1), Offload(3, 0, 1, 2)):
        with pytest.raises(CheckFailed, match="wait in the host's memory"):
            check_orders(replace(made, offloads=((wrong,), (), (), ())))
    with pytest.raises(CheckFailed, match="moves one activation twice"):
        check_orders(replace(made, offloads=((first, first), (), (), ())))


def test_plans_whose_program_does_otherwise_are_refused() -> None:
    plan = plan_pipeline(of(), "1f1b")
    assert checked(plan).ok

    def said(job: dict[str, Any] | None = None, **columns: Any) -> str:
        main = plan.main
        for column, change in columns.items():
            values = list(getattr(main.ops, column)) if column == "name" else getattr(main.buffers, column).copy()
            change(values)
            part = {"ops": replace(main.ops, **{column: tuple(values)})} if column == "name" else {"buffers": replace(main.buffers, space=values)}
            main = replace(main, **part)
        key = plan.cycle[0].program
        verdict = checked(replace(plan, programs={**plan.programs, key: main}, **({"job": job} if job else {})))
        assert not verdict.ok
        return " ".join(f.message for f in verdict.findings)

    def other(name: str, text: str) -> Any:
        def change(values: list[str]) -> None:
            values[values.index(name)] = text

        return change

    assert "does not copy back" in said(name=other("R", "O")) and "does not copy out" in said(name=other("O", "R"))
    host = np.flatnonzero(plan.main.buffers.space == Space.HOST)

    def on_device(values: Any) -> None:
        values[host[0]] = Space.DEVICE

    assert "lies in space 0" in said(space=on_device)
    job = json.loads(json.dumps(plan.job))
    job["schedule"]["offloads"][0].pop()
    assert "which this step is not to do" in said(job) or "has no buffer" in said(job)
    job["schedule"]["offloads"][0] = [[3, 0, 1, 2]]
    assert "which it does not hold" in said(job)


def test_a_certificate_of_kept_memory_is_refused() -> None:
    """What waits elsewhere is not kept, so the bound from what devices keep does not hold."""
    from meshwright.decide.pipeline.bound import schedule_bound

    problem = of()
    plan: Plan = plan_pipeline(problem, "gpipe")
    assert judge(problem, schedule_of_plan(plan)).bound.certificate.data["form"] != "memory"
    tight = schedule_bound(problem, schedule_of_plan(plan), cap_bytes=[MB // 4] * 4)
    assert tight.certificate.data["form"] == "memory"
    verdict = checked(replace(plan, bound=tight))
    assert not verdict.ok and "wait in the host's memory" in " ".join(f.message for f in verdict.findings)
