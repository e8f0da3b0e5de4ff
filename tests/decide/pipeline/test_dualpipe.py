"""DualPipe against its published table, pairs that run at once, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.check import check_plan
from meshwright.decide.pipeline.bound import any_bound, schedule_bound
from meshwright.decide.pipeline.dualpipe import DualPipe, DualPipeV
from meshwright.decide.pipeline.judge import judge
from meshwright.decide.pipeline.orders import action_s, check_orders, in_flight_peaks, times
from meshwright.decide.pipeline.problem import Action, PipelineProblem, Schedule
from meshwright.decide.pipeline.vschedules import ZBV
from meshwright.drive.pipeline.pipelines import compare_pipelines, plan_pipeline, schedule_of_plan
from meshwright.errors import CheckFailed, Unsupported, UsageError


def problem(stages: int, microbatches: int, *, hidden: float, share: int = 1) -> PipelineProblem:
    """F = I = W, a pair that takes 3 - `hidden` of one of them. `share`: stages of the table on a device."""
    pair_s = float(share) * (3 - hidden)
    return PipelineProblem.of(stages, microbatches, forward_s=share, input_grad_s=share, weight_grad_s=share, pair_s=pair_s)


def idle(p: PipelineProblem, schedule: Schedule) -> list[float]:
    clock = times(p, schedule)
    return [clock.makespan_s - sum(action_s(p, schedule, a) for a in order) for order in schedule.orders]


@pytest.mark.parametrize("hidden", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16), (8, 20)])
def test_bubble_and_memory_of_the_published_table(stages: int, microbatches: int, hidden: float) -> None:
    """Bubble (PP/2 - 1)(F&B + B - 3W), 2x the parameters, PP + 1 activations; of DualPipe-V on half of the devices."""
    formula = (stages / 2 - 1) * ((3 - hidden) + 2 - 3)
    p = problem(stages, microbatches, hidden=hidden)
    schedule = DualPipe().plan(p)
    check_orders(schedule)
    assert max(idle(p, schedule)) == formula
    assert max(in_flight_peaks(schedule)) == stages + 1
    assert all(len(schedule.hosted(d)) == 2 for d in range(stages))
    p = problem(stages // 2, microbatches, hidden=hidden, share=2)
    schedule = DualPipeV().plan(p)
    check_orders(schedule)
    assert max(idle(p, schedule)) == formula
    assert max(in_flight_peaks(schedule)) == stages + 1


def test_a_pair_begins_when_both_halves_can_and_ends_as_one() -> None:
    p = problem(4, 8, hidden=1.0)
    schedule = DualPipe().plan(p)
    clock = times(p, schedule)
    for d, order in enumerate(schedule.orders):
        for k, a in enumerate(order):
            if a.kind == "F" and a.beside >= 0:
                assert clock.end_s[d][k + 1 : k + 3] == [clock.end_s[d][k]] * 2 and clock.end_s[d][k] == clock.start_s[d][k] + 2
    judged = judge(p, schedule)
    assert judged.time_s == pytest.approx(clock.makespan_s) == 22.0
    assert float(any_bound(p)) <= float(judged.bound) <= judged.time_s


@pytest.mark.parametrize("given", [{"pair_overlap": 0.75}, {"pair_s": 2.5}, {"pair_s": 1.0}, {}])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_a_plan_is_lowered_and_proved(name: str, given: dict[str, float]) -> None:
    p = PipelineProblem.of(4, 8, forward_s=(1, 2, 1, 1), backward_s=3, message_bytes=4, p2p_latency_s=0.1, gradient_bytes=16, **given)
    plan = plan_pipeline(p, name)
    assert check_plan(plan).ok
    assert schedule_of_plan(plan).orders == schedule_of_plan(plan_pipeline(p, name, {"overlap": "true"})).orders
    assert any("&" in row for row in plan.job["schedule"]["orders"]) == bool(given)
    assert ("pair_s" in plan.job["problem"]) == ("pair_s" in given)


def test_it_stands_in_the_comparison() -> None:
    rows = {r.name: r for r in compare_pipelines(problem(4, 8, hidden=1.0), [("dualpipe", {}), ("1f1b", {})]).rows}
    dual, plain = rows["dualpipe"].judged, rows["1f1b"].judged
    assert dual is not None and plain is not None and dual.time_s < plain.time_s


def test_a_bound_without_the_gain_of_pairs_is_refused() -> None:
    plan = plan_pipeline(problem(4, 8, hidden=1.0), "dualpipe")
    assert plan.bound is not None
    slow = schedule_bound(problem(4, 8, hidden=0.0), DualPipe().plan(problem(4, 8, hidden=0.0)))
    assert float(slow) > float(plan.bound)
    assert not check_plan(replace(plan, bound=slow)).ok


def test_half_a_pair_is_refused() -> None:
    p = problem(2, 4, hidden=1.0)
    schedule = DualPipe().plan(p)
    order = list(schedule.orders[0])
    k = next(k for k, a in enumerate(order) if a.beside >= 0)
    alone = [*order[:k], order[k]._replace(beside=-1), *order[k + 1 :]]
    with pytest.raises(CheckFailed, match="without the other half"):
        check_orders(replace(schedule, orders=(tuple(alone), *schedule.orders[1:])))
    plan = plan_pipeline(p, "dualpipe")
    text = plan.job["schedule"]["orders"]
    first = str(order[k])
    job = {**plan.job, "schedule": {**plan.job["schedule"], "orders": [text[0].replace(first, first.partition("&")[0], 1), *text[1:]]}}
    assert "without the other half" in str(check_plan(replace(plan, job=job)).findings)


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="even number of stages"):
        DualPipe().plan(PipelineProblem.of(3, 8))
    with pytest.raises(Unsupported, match="even number of micro-batches"):
        DualPipe().plan(PipelineProblem.of(4, 6))
    with pytest.raises(UsageError, match="between 0 and 1"):
        PipelineProblem.of(4, 8, pair_overlap=1.5)
    assert str(Action("F", 3, 5, beside=4)) == "3F5&4"


@pytest.mark.parametrize(("exchange", "pair"), [(0.0, 3.0), (0.2, 2.6), (0.5, 2.0), (0.8, 2.0), (1.0, 2.0)])
def test_exchanges_pass_beside_the_other_half(exchange: float, pair: float) -> None:
    """F = 1, B = 2: computations 3 - 2x, exchanges 2x, and no half gets shorter."""
    assert PipelineProblem.of(4, 8, forward_s=1, backward_s=2, exchange_s=exchange).pair_s == (pytest.approx(pair),) * 4


def test_exchanges_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="longer than a forward of 1"):
        PipelineProblem.of(4, 8, forward_s=1, backward_s=2, exchange_s=1.5)
    with pytest.raises(UsageError, match="says what a pair takes"):
        PipelineProblem.of(4, 8, forward_s=1, backward_s=2, exchange_s=0.5, pair_s=2.0)


@pytest.mark.parametrize("share", [0.2, 0.35])
def test_dualpipe_v_beats_zbv_where_exchanges_are_a_fifth_of_a_stage(share: float) -> None:
    """Both on the V, under one cap of memory: a fifth of F and of I is exchanges."""
    compute, x = 1.0, share / (1 - share)
    free = PipelineProblem.of(4, 16, forward_s=compute + x, input_grad_s=compute + x, weight_grad_s=compute, exchange_s=x, activation_bytes=1000)
    dual = judge(free, DualPipeV().plan(free))
    capped = replace(free, memory_cap_bytes=(max(dual.memory_bytes),) * 4)
    zbv = judge(capped, ZBV().plan(capped))
    assert zbv.over_bytes <= 0 and dual.time_s < zbv.time_s
