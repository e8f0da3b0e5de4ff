"""What goes on, as whoever waits sees it; and what an interrupt ends."""

from __future__ import annotations

import pytest

from meshwright.errors import TimeLimit
from meshwright.kernels.effort import Budget, Cut, Deadline, look
from meshwright.kernels.interrupts import interrupt
from meshwright.kernels.stages import counted, innermost, now, stage


def test_stages_stand_inside_each_other_and_are_gone_after_an_error() -> None:
    with stage("planning"), pytest.raises(ValueError, match="no"), stage("layouts", of=3) as here:
        here.begin()
        here.best = "dp=2, 1.3 s"
        assert innermost() is here and now() == ("planning: layouts 1 of 3", "dp=2, 1.3 s")
        raise ValueError("no")
    assert now() == ("", "")


def test_the_best_is_of_the_outermost_stage_that_has_one() -> None:
    with stage("planning") as outer, stage("collective") as inner:
        inner.best = "ring, 2 ms"
        assert now()[1] == "ring, 2 ms"
        outer.best = "dp=2, 1.3 s"
        assert now() == ("planning: collective", "dp=2, 1.3 s")


def test_items_and_budgets_count_in_the_innermost_stage() -> None:
    seen = [now()[0] for _ in counted([1, 2], "files")]
    assert seen == ["files 1 of 2", "files 2 of 2"]
    budget = Budget(4)
    with stage("schedules"):
        budget.spend()
        budget.spend()
        assert now()[0] == "schedules 2 of 4"


def test_an_interrupt_ends_what_runs_and_not_what_begins_later() -> None:
    assert not interrupt()  # nothing runs that could end
    budget = Budget(5)
    assert budget.spend() and budget.spend()
    with pytest.raises(TimeLimit), budget.net():
        look()
        assert interrupt() and not interrupt()  # the second time it has been told
        assert Deadline.after(1e9).past
        look()
    assert not budget.spend() and budget.cut == Cut(1, 5, interrupted=True) and str(budget.cut) == "interrupted: looked at 1 of 5"
    assert budget.cut.to_json() == {"looked": 1, "of": 5, "interrupted": True} and not budget.cut.error("nothing").hint
    later = Budget(2)
    with later.net():
        look()
    assert later.spend() and later.cut is None
