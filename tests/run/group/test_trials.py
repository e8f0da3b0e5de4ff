"""Trials: the fastest wins though any one call of each option is disturbed; the predicted choice stays unless clearly beaten; budgets end them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.run.group.trials import MIN_GAIN_SHARE, Trials, most_calls


def run(trials: Trials, true_s: list[float], disturbed: dict[int, int], factor: float) -> list[int]:
    """The turns. `disturbed`: which call of an option is slowed down, if any."""
    turns: list[int] = []
    seen: Counter[int] = Counter()
    while not trials.over:
        option = trials.turn
        turns.append(option)
        trials.took(true_s[option] * (factor if disturbed.get(option) == seen[option] else 1.0))
        seen[option] += 1
    return turns


TIMES = st.lists(st.integers(50, 200).map(lambda t: t / 100), min_size=2, max_size=9)


@settings(max_examples=200, deadline=None)
@given(TIMES, st.data())
def test_one_disturbed_call_of_each_decides_nothing(true_s: list[float], data: st.DataObject) -> None:
    disturbed = {o: data.draw(st.integers(-1, 8)) for o in range(len(true_s))}
    trials = Trials(len(true_s), 1e9)
    turns = run(trials, true_s, disturbed, data.draw(st.sampled_from([1.5, 30.0])))
    best = min(true_s)
    if best < (1 - MIN_GAIN_SHARE) * true_s[0]:
        assert true_s[trials.winner] == best
    else:
        assert trials.winner == 0
    assert len(turns) == most_calls(len(true_s))


@given(TIMES)
def test_slower_options_leave_and_the_predicted_choice_stays(true_s: list[float]) -> None:
    trials = Trials(len(true_s), 1e9)
    turns = Counter(run(trials, true_s, {}, 1.0))
    assert turns[0] == max(turns.values())
    assert min(turns.values()) >= 3, "one to warm up, two that count"
    if len(true_s) > 3:
        assert min(turns.values()) < turns[0]


def test_turns_are_taken_in_turn() -> None:
    turns = run(Trials(4, 1e9), [1.0, 2.0, 3.0, 4.0], {}, 1.0)
    assert turns[:12] == [0, 1, 2, 3] * 3
    assert set(turns[12:]) == {0, 1}


def test_a_budget_ends_trials_and_what_is_known_decides() -> None:
    trials = Trials(3, 5.0)
    turns = run(trials, [1.0, 0.1, 0.5], {}, 1.0)
    assert trials.spent_s >= 5.0 and len(turns) < most_calls(3)
    assert trials.winner == 1
    early = Trials(3, 2.5)  # nobody has had two calls that count
    run(early, [1.0, 0.1, 0.5], {}, 1.0)
    assert early.winner == 0


def test_as_fast_is_not_faster() -> None:
    trials = Trials(2, 1e9)
    run(trials, [1.0, 1.0 - MIN_GAIN_SHARE / 2], {}, 1.0)
    assert trials.winner == 0


def test_small_collectives_are_measured_longer() -> None:
    """Of the last two of many disturbed calls, the lower median decides; option 0 is the built-in backend, which stays unless beaten."""
    turns = Counter(run(Trials(2, 1e9, small=True), [1.0, 0.5], {}, 1.0))
    assert turns[0] == turns[1] == 12
    noisy, calls = Trials(2, 1e9, small=True), 0
    while not noisy.over:
        calls += 1
        noisy.took((1.0, 0.99)[noisy.turn] * (9.0 if calls % 3 == 0 else 1.0))
    assert noisy.winner == 0
