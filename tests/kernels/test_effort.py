"""Counted work: what a limit means does not depend on the clock, on other threads or on what was counted before."""

from __future__ import annotations

import threading

import pytest

from meshwright.kernels import effort
from meshwright.kernels.effort import NEVER, Deadline, count_work, remembered, worked_s


def test_a_deadline_is_past_when_the_work_is_done_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline.after(1.0)
    monkeypatch.setattr(effort, "monotonic", lambda: 1e12)
    count_work(0.5)
    assert not deadline.past and deadline.work_left_s == pytest.approx(0.5, abs=1e-6)
    count_work(0.5)
    assert deadline.past and not NEVER.past


def test_it_is_past_by_the_clock_too_if_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(effort, "monotonic", lambda: now[0])
    deadline = Deadline.after(5.0, 2.0)
    assert deadline.clock_left_s == 2.0 and deadline.solver_s == 102.0
    now[0] = 101.0
    assert not deadline.past
    now[0] = 102.5
    assert deadline.past and deadline.clock_left_s == -0.5


def test_a_solver_gets_what_is_left_of_the_work_as_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "monotonic", lambda: 10.0)
    deadline = Deadline.after(3.0)
    count_work(1.0)
    assert deadline.solver_s == pytest.approx(12.0, abs=1e-6) and NEVER.solver_s == float("inf")


def test_equal_work_ends_at_the_same_step_whatever_was_counted_before() -> None:
    def steps() -> int:
        deadline, done = Deadline.after(0.3), 0
        while not deadline.past:
            count_work(0.1 / 3)
            done += 1
        return done

    first = steps()
    for before in (1e-9, 0.1, 12345.678):
        count_work(before)
        assert steps() == first


def test_what_is_remembered_counts_again() -> None:
    made = []

    @remembered
    def twice(x: int, *, more: int = 0) -> int:
        made.append(x)
        count_work(0.25)
        return 2 * x + more

    spent = []
    for _ in range(2):
        before = worked_s()
        assert (twice(3), twice(3, more=1)) == (6, 7)
        spent.append(worked_s() - before)
    assert made == [3, 3] and spent == [0.5, 0.5]


def test_threads_count_for_themselves() -> None:
    before, found = worked_s(), []
    thread = threading.Thread(target=lambda: (count_work(7.0), found.append(worked_s())))
    thread.start()
    thread.join()
    assert found[0] == pytest.approx(7.0, abs=1e-6) and worked_s() == before
