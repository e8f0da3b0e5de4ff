"""Which of several programs is fastest, found by running them: successive halving over calls that the job makes anyway.

No clocks, no ranks: whoever drives this says how long each call took at its slowest rank. All ranks say the same, so all take the same turns and
end with the same choice.

Everybody has a turn to warm up. Then all that are left have some turns, one after the other, so that what disturbs the machine for a while hits them
alike, and the slower half leaves; the last two have more. An option is judged by the lower median of all its calls, so one disturbed call decides
nothing. Option 0, predicted to be the fastest, stays to the end and is kept unless the other beats it clearly. When the calls on trial have taken
`budget_s`, what is known by then decides.

Source: successive halving after Jamieson and Talwalkar (AISTATS 2016), with a favourite.
"""

from __future__ import annotations

from collections import deque

__all__ = ["MIN_GAIN_SHARE", "Trials", "most_calls"]

TURNS_PER_ROUND = 2  # calls of every option that is left, before the slower half leaves
TURNS_OF_LAST_ROUND = 3  # calls of each of the last two
TURNS_OF_SMALL = 11  # the same for small collectives, of which a call says little
MIN_TURNS = 2  # calls of an option before its time counts: one alone may be disturbed
MIN_GAIN_SHARE = 0.03  # of its time by which the predicted choice must be beaten: a smaller lead may be a disturbed call


class Trials:
    """Run `turn`, tell `took` how long it took, until `over`; then `winner`."""

    def __init__(self, options: int, budget_s: float, *, small: bool = False) -> None:
        self.times_s: list[list[float]] = [[] for _ in range(options)]  # without the first
        self.budget_s, self.spent_s = budget_s, 0.0
        self._left, self.last_turns = list(range(options)), TURNS_OF_SMALL if small else TURNS_OF_LAST_ROUND
        self._warm = self._last = False
        self._turns = deque(self._left)

    @property
    def over(self) -> bool:
        return not self._turns

    @property
    def turn(self) -> int:
        return self._turns[0]

    def took(self, time_s: float) -> None:
        option = self._turns.popleft()
        self.spent_s += time_s
        if self._warm:
            self.times_s[option].append(time_s)
        if self.spent_s >= self.budget_s:
            self._turns.clear()
        elif not self._turns and not self._last:
            self._next_round()

    def _next_round(self) -> None:
        if self._warm:
            rest = sorted((o for o in self._left if o), key=self.typical_s)
            self._left = [0, *rest[: _kept(len(self._left)) - 1]]
        self._warm = True
        self._last = len(self._left) <= 2
        self._turns.extend(self._left * (self.last_turns if self._last else TURNS_PER_ROUND))

    def typical_s(self, option: int) -> float:
        """The lower median of its calls; infinite where there are too few."""
        times = sorted(self.times_s[option])
        return times[(len(times) - 1) // 2] if len(times) >= MIN_TURNS else float("inf")

    @property
    def winner(self) -> int:
        best = min(range(len(self.times_s)), key=self.typical_s)
        return best if self.typical_s(best) < (1 - MIN_GAIN_SHARE) * self.typical_s(0) < float("inf") else 0


def _kept(options: int) -> int:
    return max(2, -(-options // 2))


def most_calls(options: int) -> int:
    """Calls until the choice is made, if the budget lasts."""
    calls = options
    while options > 2:
        calls += TURNS_PER_ROUND * options
        options = _kept(options)
    return calls + TURNS_OF_LAST_ROUND * options
