"""Schedules against the closed forms and tables of their publications; shapes that do not exist are refused with what does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.check import check_program
from meshwright.decide.pipeline import (
    ZB1P,
    ZB2P,
    ZBV,
    Action,
    BreadthFirst,
    Chimera,
    DualPipeV,
    GPipe,
    Interleaved,
    InterleavedZB,
    OneFOneB,
    PipelineProblem,
    PipelineStrategy,
    Schedule,
    VHalf,
    VMin,
)  # fmt: skip
from meshwright.decide.pipeline.interleaved import group_sizes
from meshwright.decide.pipeline.judge import judge
from meshwright.decide.pipeline.listing import Rule, list_orders
from meshwright.decide.pipeline.lower import fabric_of, lower_schedule, price_table
from meshwright.decide.pipeline.orders import check_orders, in_flight_peaks, times
from meshwright.decide.pipeline.sync import synchronisation
from meshwright.errors import CheckFailed, Deadlock, Infeasible, Unsupported, UsageError
from meshwright.simulate import simulate_program

of = PipelineProblem.of


def simulated(problem: PipelineProblem, strategy: PipelineStrategy) -> float:
    """Makespan of the checked program, and the planners' clock must agree: no link is shared in these."""
    schedule = strategy.plan(problem)
    check_orders(schedule)
    program, callees = lower_schedule(problem, schedule)
    assert not callees and check_program(program).ok
    several = {f"{a.microbatch}-{a.microbatch + a.count - 1}" for order in schedule.orders for a in order if a.count > 1}
    assert {*program.ops.module} - {""} == several, "only what does several micro-batches at once says which"
    fabric = fabric_of(problem)
    timeline = simulate_program(program, fabric, [d.name for d in fabric.devices], price_table(problem, schedule), record=False)
    assert timeline.makespan_s == pytest.approx(times(problem, schedule).makespan_s, rel=1e-9)
    return timeline.makespan_s


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (2, 2), (4, 8), (5, 3)])
def test_gpipe_and_1f1b(devices: int, microbatches: int) -> None:
    p = of(devices, microbatches, forward_s=1, backward_s=2)
    for strategy in (GPipe(), GPipe(reverse=True), OneFOneB()):
        assert simulated(p, strategy) == pytest.approx((microbatches + devices - 1) * 3)
    assert in_flight_peaks(GPipe().plan(p)) == [microbatches] * devices


@pytest.mark.parametrize(("devices", "chunks", "microbatches"), [(4, 2, 4), (4, 2, 8), (4, 4, 8), (8, 4, 16)])
def test_interleaved_and_breadth_first(devices: int, chunks: int, microbatches: int) -> None:
    p = of(devices, microbatches, forward_s=1, backward_s=2)
    expected = (microbatches + (devices - 1) / chunks) * 3
    for strategy in (Interleaved(chunks=chunks), Interleaved(chunks=chunks, group=microbatches), BreadthFirst(chunks=chunks)):
        assert simulated(p, strategy) == pytest.approx(expected)
    kept = [min(microbatches * chunks, devices * (chunks - 1) + 2 * (devices - 1 - d) + 1) for d in range(devices)]
    assert in_flight_peaks(Interleaved(chunks=chunks).plan(p)) == kept
    assert in_flight_peaks(BreadthFirst(chunks=chunks).plan(p)) == [microbatches * chunks] * devices
    assert BreadthFirst() == BreadthFirst(chunks=2), "two stages per device, the fewest that are more than GPipe's"


@pytest.mark.parametrize(("devices", "chunks", "microbatches"), [(8, 2, 4), (8, 2, 6), (8, 4, 4), (4, 2, 3)])
def test_breadth_first_with_few_microbatches(devices: int, chunks: int, microbatches: int) -> None:
    p = of(devices, microbatches, forward_s=1, backward_s=2)
    expected = (microbatches + (devices - 1) / chunks) * 3 + (chunks - 1) * (devices - microbatches) * 3 / chunks
    assert simulated(p, BreadthFirst(chunks=chunks)) == pytest.approx(expected)


def test_groups_are_even_and_whole() -> None:
    assert group_sizes(11, 4, 4) == [6, 5] and group_sizes(8, 4, 4) == [4, 4] and group_sizes(8, 8, 4) == [8]


@pytest.mark.parametrize(
    ("devices", "pipes", "microbatches", "backward", "expected"),
    [(4, 1, 4, 1, 10), (8, 1, 8, 1, 22), (8, 2, 8, 1, 18), (8, 4, 8, 1, 16), (4, 1, 4, 2, 16), (4, 1, 8, 2, 30), (4, 1, 16, 2, 58), (6, 1, 6, 2, 26),
     (8, 1, 32, 2, 126), (8, 1, 3, 2, 28), (4, 1, 3, 1, 10)],
)  # fmt: skip
def test_chimera_times(devices: int, pipes: int, microbatches: int, backward: int, expected: int) -> None:
    p = of(devices, microbatches, forward_s=1, backward_s=backward)
    assert simulated(p, Chimera(pipes=pipes)) == expected


def test_chimera_activations_and_split() -> None:
    assert in_flight_peaks(Chimera().plan(of(4, 16))) == [3, 4, 4, 3]
    assert in_flight_peaks(Chimera().plan(of(8, 8))) == [5, 6, 7, 8, 8, 7, 6, 5]
    split = Chimera(split=True).plan(of(4, 4))
    assert times(of(4, 4), split).makespan_s <= 14 and max(in_flight_peaks(split)) <= 4
    assert simulated(of(4, 8, backward_s=2), Chimera(mode="halve")) < 30 and simulated(of(4, 8, backward_s=2), Chimera(mode="double")) < 30


@pytest.mark.parametrize(("devices", "microbatches", "cap", "optimum"), [(4, 8, 8, 51), (3, 6, 6, 38), (4, 4, 8, 27), (2, 4, 4, 25)])
def test_zbv_at_the_cap_of_1f1b(devices: int, microbatches: int, cap: int, optimum: int) -> None:
    p = of(devices, microbatches, forward_s=2)  # one slot per half stage and kind
    assert simulated(p, ZBV(cap=cap)) <= optimum + 1
    assert max(in_flight_peaks(ZBV(cap=cap).plan(p))) <= cap


def test_v_schedules_trade_memory_for_time() -> None:
    p = of(4, 8, forward_s=2)
    kept = [max(in_flight_peaks(s.plan(p))) for s in (VMin(), VHalf(), ZBV())]
    took = [simulated(p, s) for s in (VMin(), VHalf(), ZBV())]
    assert kept == [4, 6, 8] and took == sorted(took, reverse=True) and took[0] == 59
    assert simulated(p, DualPipeV()) == 51
    assert simulated(of(4, 8), ZB2P()) <= simulated(of(4, 8), ZB1P()) < simulated(of(4, 8), OneFOneB())
    assert max(in_flight_peaks(ZB1P().plan(of(4, 8)))) <= 4 and max(in_flight_peaks(ZB2P().plan(of(4, 8)))) <= 7


def test_interleaved_zero_bubble_fills_in_half_the_time() -> None:
    p = of(4, 8, forward_s=2)  # one slot per half stage and kind
    found = InterleavedZB().plan(p)
    assert max(in_flight_peaks(found)) <= 11 and found.placement == ((0, 1, 2, 3, 0, 1, 2, 3),)
    assert simulated(p, InterleavedZB()) <= 51 < simulated(p, ZB1P()) and simulated(p, InterleavedZB()) < simulated(p, Interleaved())
    assert max(in_flight_peaks(InterleavedZB(cap=8).plan(p))) <= 8 and max(in_flight_peaks(InterleavedZB(chunks=3).plan(p))) <= 15
    with pytest.raises(UsageError, match="must be >= 2"):
        InterleavedZB(chunks=1).plan(p)


def test_the_first_stage_has_no_input_gradient() -> None:
    p = of(2, 4, forward_s=1, input_grad_s=1, weight_grad_s=1)
    assert simulated(replace(p, first_input_grad=False), OneFOneB()) < simulated(p, OneFOneB())


def test_received_but_unused_activations_count() -> None:
    slow_last = of(4, 8, forward_s=[1, 1, 1, 3], activation_bytes=10)
    j = judge(slow_last, OneFOneB().plan(slow_last))
    assert j.in_flight == (4, 3, 2, 1) and j.memory_bytes[3] > 10 and max(j.memory_bytes) <= 60
    assert 0 <= j.span_bubble <= j.bubble < 1


def test_synchronisation_of_copies() -> None:
    schedule = Chimera().plan(of(4, 4))
    last = [len(o) - 1 for o in schedule.orders]
    for sync in ("eager", "eager-opt", "lazy"):
        rows = synchronisation(schedule, sync)
        assert [[c.stage for c in row] for row in rows] == [[3, 0], [2, 1], [2, 1], [3, 0]]
        assert all(c.after == end for row, end in zip(rows, last, strict=True) for c in row) == (sync == "lazy")


def test_collectives_of_one_device_have_to_be_planned_too() -> None:
    p = of(2, 4, data=2, gradient_bytes=1000, weight_bytes=4000)
    schedule = BreadthFirst(sharded=True).plan(p)
    assert all(schedule.collectives)
    for rows in (schedule.collectives, (schedule.collectives[0], ())):
        with pytest.raises(UsageError, match="nothing plans the collectives"):
            lower_schedule(p, replace(schedule, collectives=rows))
    lower_schedule(p, replace(schedule, collectives=((), ())))


def test_breadth_first_sharded() -> None:
    p = of(2, 4, data=2, gradient_bytes=1000, weight_bytes=4000)
    row = BreadthFirst(chunks=3, sharded=True).plan(p).collectives[0]
    assert [c.kind for c in row].count("gather") == 5 and [c.kind for c in row].count("reduce") == 3  # the last stage stays between the passes
    with pytest.raises(UsageError, match="one"):
        BreadthFirst(sharded=True).plan(of(2, 4))
    with pytest.raises(Unsupported, match="once per step"):
        BreadthFirst(sharded=True, group=2).plan(p)


@pytest.mark.parametrize(
    ("strategy", "problem", "says"),
    [
        (Chimera(), of(5, 4), "even number of stages"), (Chimera(pipes=3), of(8, 8), "do not divide"), (Interleaved(), of(4, 3), "at least as many"),
        (DualPipeV(), of(4, 7), "twice as many"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_exist(strategy: PipelineStrategy, problem: PipelineProblem, says: str) -> None:
    with pytest.raises(Unsupported, match=says) as error:
        strategy.plan(problem)
    assert error.value.hint


@pytest.mark.parametrize("strategy", [Interleaved(chunks=1), Interleaved(group=2), BreadthFirst(chunks=0), Chimera(mode="x"), Chimera(sync="x")])
def test_options_that_make_no_sense(strategy: PipelineStrategy) -> None:
    with pytest.raises(UsageError):
        strategy.plan(of(4, 8))


@pytest.mark.parametrize(
    "wrong",
    [{"devices": 0}, {"microbatches": 0}, {"data": 0}, {"forward_s": [1, 2]}, {"forward_s": -1.0}, {"forward_s": float("nan")}, {"speeds": 0.0},
     {"p2p_rate_Bps": 0}, {"backward_s": 1.0, "weight_grad_s": 2.0}],
)  # fmt: skip
def test_problems_that_make_no_sense(wrong: dict[str, object]) -> None:
    given = {"devices": 4, "microbatches": 8, **wrong}
    with pytest.raises(UsageError):
        of(given.pop("devices"), given.pop("microbatches"), **given)  # type: ignore[arg-type]


def test_backward_and_its_parts() -> None:
    assert of(1, 1, backward_s=4).input_grad_s == (2,) and of(1, 1, backward_s=4, weight_grad_s=1).input_grad_s == (3,)
    assert of(1, 1, input_grad_s=1, weight_grad_s=2).backward_s == (3,) and of(1, 1, backward_s=4, input_grad_s=1).weight_grad_s == (3,)
    assert of(1, 1, forward_s=5).backward_s == (10,)


def test_a_cap_below_one_microbatch() -> None:
    with pytest.raises(Infeasible, match="stage activations"):
        ZBV(cap=1).plan(of(4, 8))


def test_collectives_need_a_planner() -> None:
    p = of(4, 4, gradient_bytes=100)
    with pytest.raises(UsageError, match="nothing plans"):
        lower_schedule(p, Chimera().plan(p))


def mutated(schedule: Schedule, device: int, order: list[Action]) -> Schedule:
    return replace(schedule, orders=tuple(tuple(order) if d == device else o for d, o in enumerate(schedule.orders)))


def test_wrong_orders_are_found() -> None:
    good = OneFOneB().plan(of(2, 2))
    order = list(good.orders[0])
    for bad, says in (
        (order[1:], "before|lacks"), (order[:-1], "lacks"), ([*order, order[0]], "twice"), ([order[-1], *order[:-1]], "before"),
        ([*order, Action("F", 1, 0)], "should not run"),
    ):  # fmt: skip
        with pytest.raises(CheckFailed, match=says):
            check_orders(mutated(good, 0, bad))
    waiting = [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 1), Action("B", 1, 0)]
    crossed = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    with pytest.raises(Deadlock, match="wait for each other"):
        check_orders(mutated(mutated(good, 0, crossed), 1, waiting))
    with pytest.raises(Deadlock):
        times(of(2, 2), mutated(mutated(good, 0, crossed), 1, waiting))


def test_list_scheduling_that_gets_stuck_says_so() -> None:
    """W before everything else in a fixed order that the cap forbids."""
    p = of(2, 4)
    base = ZB1P().plan(p)
    fixed = tuple(tuple(sorted((a for a in order if a.kind != "W"), key=lambda a: (a.kind != "F", a.microbatch))) for order in base.orders)
    with pytest.raises(Infeasible, match="no order"):
        list_orders(p, base, Rule("IFW", True, 1.0, fixed), [[2], [2]])
