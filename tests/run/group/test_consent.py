"""What call comes next, from those before; and ranks that begin a call only together."""

from __future__ import annotations

import random

import pytest

from meshwright.run.group import consent
from meshwright.run.group.agreement import Agreement, Asked
from meshwright.run.group.consent import Foreseen
from meshwright.run.group.verdict import View


def surprises(calls: list[tuple[int, int]]) -> int:
    """How many of the calls were not foreseen."""
    foreseen, count = Foreseen(), 0
    for call in calls:
        count += foreseen.next != call
        foreseen.called(call)
    return count


def test_a_loop_is_foreseen_from_its_second_turn_on() -> None:
    turn = [(1, 8)] * 5 + [(2, 8)] + [(1, 8)] * 3 + [(3, 4), (2, 8)]
    once = surprises(turn)
    assert surprises(turn * 2) <= once + 3, "where it begins again must be learnt, too"
    assert surprises(turn * 50) == surprises(turn * 3)


def test_what_never_comes_twice_is_never_foreseen() -> None:
    assert surprises([(1, k) for k in range(50)]) == 50


def test_what_is_foreseen_depends_on_the_calls_alone_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "MAX_KEPT_CALLS", 32)
    draw = random.Random(3)
    calls = [(draw.randrange(3), 0) for _ in range(500)]
    one, two = Foreseen(), Foreseen()
    for call in calls:
        one.called(call)
        two.called(call)
        assert one.next == two.next and len(one._calls) <= 32
    loop = [(k % 16, 0) for k in range(500)]
    assert surprises(loop) == 16 + 1, "where it begins again is learnt once; forgetting the oldest calls unlearns nothing"


def test_the_next_call_is_the_one_after_the_longest_equal_past() -> None:
    """Against a look at every earlier place, at every step."""
    draw = random.Random(7)
    turn = [(draw.randrange(3), 0) for _ in range(9)]
    calls = turn * 3 + [(draw.randrange(4), 0) for _ in range(60)] + turn * 3
    foreseen = Foreseen()
    for here, call in enumerate(calls):
        before = foreseen.next
        foreseen.called(call)
        if call == before:  # a past that still holds is not left for another one
            continue
        places = [k for k in range(here) if calls[k] == call][-consent.MAX_PLACES :]
        alike = [next((c for c in range(1, k + 1) if calls[k - c] != calls[here - c]), k + 1) for k in places]
        best = max(zip(alike, places, strict=True), default=None)
        assert foreseen.next == (calls[best[1] + 1] if best is not None else None)


class Ranks:
    """Agreements whose messages arrive at once."""

    def __init__(self, n: int) -> None:
        self.all = [Agreement(r, n, 1.0, lambda r=r: View(rank=r), lambda peer: "?") for r in range(n)]  # type: ignore[misc]
        self.began: list[int] = []

    def ask(self, rank: int, what: Asked) -> None:
        self.all[rank].ask(0.0, what, lambda: self.began.append(rank))
        self.deliver()

    def deliver(self) -> None:
        while any(one.out for one in self.all):
            for source, one in enumerate(self.all):
                out, one.out = one.out, []
                for peer, message in out:
                    self.all[peer].receive(0.0, source, message)


def test_a_call_begins_when_all_ranks_ask_for_it() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        ranks = Ranks(3)
        for rank in order[:2]:
            ranks.ask(rank, (7, 1, 64))
        assert not ranks.began and all(one.calm for one in ranks.all)
        ranks.ask(order[2], (7, 1, 64))
        assert sorted(ranks.began) == [0, 1, 2] and all(one.calm for one in ranks.all)


def test_unlike_calls_of_one_number_are_an_alarm_when_all_have_come_or_a_moment_later() -> None:
    """Of two that differ, nobody can say which is the odd one; a third is not waited for long."""
    two = Ranks(2)
    two.ask(1, (7, 1, 64))
    two.ask(0, (7, 1, 16))
    assert not two.began and not any(one.calm for one in two.all)
    for comes in (True, False):
        ranks = Ranks(3)
        ranks.ask(1, (7, 1, 64))
        ranks.ask(2, (7, 1, 16))
        assert not ranks.began and all(one.calm for one in ranks.all) and ranks.all[0].due_s == 0.5
        if comes:
            ranks.ask(0, (7, 1, 16))
        else:
            ranks.all[0].tick(0.5)
            ranks.deliver()
        assert not ranks.began and not any(one.calm for one in ranks.all)


def test_calls_of_which_not_all_ranks_come_are_forgotten_in_the_end() -> None:
    ranks = Ranks(2)
    for number in range(1000):
        ranks.ask(1, (number, 1, 64))
    assert len(ranks.all[0]._asked) <= 64
