"""Orders that stand late messages: hardly slower by the clock, and never slower when messages are late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.decide.pipeline import PipelineProblem, Schedule
from meshwright.decide.pipeline.late_messages import LATENESS_SHARES, MAX_SLOWDOWN, sturdiest, with_late_messages
from meshwright.decide.pipeline.orders import looped, times
from meshwright.decide.pipeline.zerobubble import InterleavedZB, fastest_listing, split_base


def plain(problem: PipelineProblem, cap: int) -> Schedule:
    """The listing before annealing: what the sturdiest is chosen against."""
    return fastest_listing(problem, split_base(problem, "x", looped(problem.devices, 2), {}), [cap] * problem.devices)


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 6), (4, 8), (4, 16)])
def test_hardly_slower_and_sturdier(devices: int, microbatches: int) -> None:
    problem = PipelineProblem.of(devices, microbatches, forward_s=0.02, input_grad_s=0.02, weight_grad_s=0.02, p2p_latency_s=0.0003)
    cap = 2 * (devices - 1) + devices + 1
    listed, chosen = plain(problem, cap), InterleavedZB().plan(problem)
    assert times(problem, chosen).makespan_s <= MAX_SLOWDOWN * times(problem, listed).makespan_s
    late = with_late_messages(problem, 2, LATENESS_SHARES[-1])
    assert times(late, chosen).makespan_s <= times(late, listed).makespan_s


def test_takes_the_slower_by_a_hair_that_stands_lateness() -> None:
    problem = PipelineProblem.of(4, 16, forward_s=0.02, input_grad_s=0.02, weight_grad_s=0.02)
    fragile = plain(problem, 11)
    sturdy = InterleavedZB().plan(with_late_messages(problem, 2, 0.3))
    assert sturdiest(problem, fragile, lambda _, given: given) is fragile
    assert times(problem, sturdy).makespan_s <= MAX_SLOWDOWN * times(problem, fragile).makespan_s, "else the case shows nothing"
    assert sturdiest(problem, fragile, lambda _, given: sturdy) is sturdy


def test_lateness_follows_the_devices_speed() -> None:
    problem = PipelineProblem.of(2, 2, forward_s=3, input_grad_s=6, weight_grad_s=9, p2p_latency_s=1)
    assert with_late_messages(problem, 2, 0.5).p2p_latency_s == (1 + 0.5 * 3,) * 2
    assert with_late_messages(replace(problem, speeds=(2.0, 2.0)), 2, 0.5).p2p_latency_s == (1 + 0.5 * 1.5,) * 2


def test_one_device_has_no_messages() -> None:
    problem = PipelineProblem.of(1, 2)
    schedule = fastest_listing(problem, split_base(problem, "x", (0,), {}), [1])

    def never(asked: PipelineProblem, given: Schedule) -> Schedule:
        raise AssertionError("asked to improve a schedule without messages")

    assert sturdiest(problem, schedule, never) is schedule
