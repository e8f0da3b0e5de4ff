"""Counted work: what a limit means does not depend on the clock, on other threads or on what was counted before."""

from __future__ import annotations

import threading

import pytest

from meshwright.errors import TimeLimit
from meshwright.kernels import effort
from meshwright.kernels.effort import NEVER, Budget, Cut, Deadline, count_work, cut_of, cuts, look, remembered, worked_s


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
    assert deadline.clock_left_s == 2.0
    now[0] = 101.0
    assert not deadline.past
    now[0] = 102.5
    assert deadline.past and deadline.clock_left_s == -0.5



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


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(effort, "monotonic", lambda: self.now_s)


def test_a_budget_counts_evaluations_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, budget = Hand(monkeypatch), Budget(3)
    begun = 0
    while budget.spend():
        begun, hand.now_s = begun + 1, hand.now_s * 1000
        with budget.net():
            look()
    assert begun == budget.looked == 3 and budget.cut is None


def test_the_net_ends_a_budget_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, budget = Hand(monkeypatch), Budget(5, time_limit_s=10.0)
    before = cuts()
    while budget.spend():
        with budget.net():
            look()
        hand.now_s += 4.0
    assert budget.looked == 3 and budget.cut == Cut(3, 5) and str(budget.cut) == "time limit: looked at 3 of 5"
    assert str(Cut(0, 1)) == "time limit: the search was cut short" and str(Cut(0, 1, interrupted=True)) == "interrupted: the search was cut short"
    assert cuts() > before and budget.cut.to_json() == {"looked": 3, "of": 5}
    assert cut_of({"a": {"why": ""}, "b": {"cut": budget.cut.to_json()}}) == budget.cut and cut_of({"a": {}}) is None
    error = budget.cut.error("no layout fits so far")
    assert error.exit_code == 5 and error.data == {"looked": 3, "of": 5}


def test_an_evaluation_that_is_cut_short_is_not_looked_at_and_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, budget = Hand(monkeypatch), Budget(5, time_limit_s=10.0)
    assert budget.spend()
    with pytest.raises(TimeLimit, match="the time limit was reached"), budget.net():
        hand.now_s += 11.0
        look()
    assert budget.cut == Cut(0, 5) and not budget.spend() and budget.late
    look()  # the net is gone with its block


def test_nets_lie_in_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, outer = Hand(monkeypatch), Budget(2, time_limit_s=10.0)
    assert outer.spend()
    with outer.net():
        inner = Budget(2, time_limit_s=100.0)
        assert inner.spend() and not NEVER.past and NEVER.clock_left_s == 10.0
        with inner.net():
            hand.now_s += 11.0
            assert Deadline.after(1.0).past and NEVER.past  # returns the best it has: cut as well
        assert not inner.spend() and inner.cut == Cut(0, 2)
    assert outer.cut == Cut(0, 2) and not NEVER.past


def test_a_last_evaluation_that_is_late_but_whole_is_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, budget = Hand(monkeypatch), Budget(1, time_limit_s=10.0)
    while budget.spend():
        with budget.net():
            hand.now_s += 11.0
    assert budget.cut is None


def test_what_the_clock_cut_short_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)

    @remembered
    def far(steps: int) -> int:
        deadline = Deadline.after()
        return next((i for i in range(steps) if deadline.past), steps)

    budget = Budget(1, time_limit_s=10.0)
    with budget.net():
        hand.now_s += 11.0
        assert far(7) == 0
    assert far(7) == 7
