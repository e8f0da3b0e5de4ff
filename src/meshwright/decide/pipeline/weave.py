"""A forward beside a backward on one device: in which order the compute steps of both run, so that exchanges of one pass while the other computes.

Cite: see CITE.
Left open by the publication: which chunk of one half runs beside which exchange of the other (drawn for one layer, kernels rewritten for it). Our
answer: the order of both halves' steps of least time, by a dynamic programme over how far each half is; the gradients of weights, which nothing
waits for, come in between as a third row.
The clock: steps run one at a time. An exchange begins when the step before it ends and the exchanges begun earlier are over: both halves share the
device's network. A step that waits begins when the exchanges of its half are over.
Invariant: no order is faster by that clock in which at most MAX_WAITING gradients of weights wait; so no pair takes longer than its halves in a row.
Cost: O(steps of one half x steps of the other) states, each with the few of its beginnings that no other one beats. Halves of more than MAX_STATES
are cut into sections that are woven by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .dualpipe import CITE

__all__ = ["BACKWARD", "CITE", "FORWARD", "MAX_WAITING", "WEIGHTS", "Piece", "in_a_row", "weave", "woven_s"]

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
# Gradients of weights that are put off at a time: each holds what its step saved.
MAX_WAITING = 2
# Steps of one half times steps of the other that are woven as a whole, half a second of a core.
MAX_STATES = 4_000


class Piece(NamedTuple):
    """A compute step of a half. `waits`: for the exchanges that its half has begun. `exchange_s`: of one that begins when it ends.

    `after`: of gradients of weights, how many steps of the backward come before.
    """

    compute_s: float
    exchange_s: float = 0.0
    waits: bool = False
    after: int = 0


Chain = Sequence[Piece]


class _Beginning(NamedTuple):
    """A way to have run some steps of each half: when the last ends, when the exchanges of each half are over, how it came about."""

    end_s: float
    forward_s: float
    backward_s: float
    before: _Beginning | None = None
    turn: int = -1

    def then(self, piece: Piece, turn: int) -> _Beginning:
        over = [self.forward_s, self.backward_s]
        start = max(self.end_s, over[turn]) if piece.waits else self.end_s
        end = start + piece.compute_s
        if piece.exchange_s:
            over[turn] = max(end, *over) + piece.exchange_s
        return _Beginning(end, over[FORWARD], over[BACKWARD], self, turn)

    @property
    def last_s(self) -> float:
        return max(self[:3])

    def beats(self, other: _Beginning) -> bool:
        """It is nowhere later. An exchange that is over by the end of the last step was never waited for."""
        end = self.end_s
        return end <= other.end_s and max(end, self.forward_s) <= max(other.end_s, other.forward_s) and (
            max(end, self.backward_s) <= max(other.end_s, other.backward_s)
        )  # fmt: skip


def woven_s(forward: Chain, backward: Chain, weights: Chain, turns: Sequence[int]) -> float:
    """Seconds of the pair where `turns` says whose next step runs."""
    at, rows, done = _Beginning(0.0, 0.0, 0.0), (forward, backward, weights), [0, 0, 0]
    for turn in turns:
        at = at.then(rows[turn][done[turn]], turn)
        done[turn] += 1
    return at.last_s


def in_a_row(forward: Chain, backward: Chain, weights: Chain) -> tuple[int, ...]:
    """One half after the other."""
    return (FORWARD,) * len(forward) + (BACKWARD,) * len(backward) + (WEIGHTS,) * len(weights)


def weave(forward: Chain, backward: Chain, weights: Chain = ()) -> tuple[int, ...]:
    """Whose next step runs, in the order of least time: FORWARD, BACKWARD, WEIGHTS. `weights`: in the order of backward; none where it is whole."""
    return _weave(tuple(forward), tuple(backward), tuple(weights))


@lru_cache(maxsize=256)  # stages of equal layers have equal halves
def _weave(forward: tuple[Piece, ...], backward: tuple[Piece, ...], weights: tuple[Piece, ...]) -> tuple[int, ...]:
    if (len(forward) + 1) * (len(backward) + 1) <= MAX_STATES:
        found = _exact(forward, backward, weights)
    else:
        f, b = len(forward) // 2, len(backward) // 2
        w = sum(piece.after <= b for piece in weights)
        rest = tuple(piece._replace(after=piece.after - b) for piece in weights[w:])
        found = _weave(forward[:f], backward[:b], weights[:w]) + _weave(forward[f:], backward[b:], rest)
    plain = in_a_row(forward, backward, weights)
    return min(found, plain, key=lambda turns: woven_s(forward, backward, weights, turns))


def _exact(forward: Chain, backward: Chain, weights: Chain) -> tuple[int, ...]:
    made = [sum(piece.after <= j for piece in weights) for j in range(len(backward) + 1)]  # gradients of weights that may run by then
    states: dict[tuple[int, int, int], list[_Beginning]] = {(0, 0, 0): [_Beginning(0.0, 0.0, 0.0)]}
    for i in range(len(forward) + 1):
        for j in range(len(backward) + 1):
            for w in range(max(0, made[j] - MAX_WAITING - 1), made[j] + 1):
                for at in states.pop((i, j, w), ()) if (i, j, w) != (len(forward), len(backward), len(weights)) else ():
                    put_off = made[j] - w > MAX_WAITING
                    if w < made[j]:
                        _add(states, (i, j, w + 1), at.then(weights[w], WEIGHTS))
                    if j < len(backward) and not put_off:
                        _add(states, (i, j + 1, w), at.then(backward[j], BACKWARD))
                    if i < len(forward) and not put_off:
                        _add(states, (i + 1, j, w), at.then(forward[i], FORWARD))
    best = min(states[len(forward), len(backward), len(weights)], key=lambda x: x.last_s)
    turns = []
    while best.before is not None:
        turns.append(best.turn)
        best = best.before
    return tuple(turns[::-1])


def _add(states: dict[tuple[int, int, int], list[_Beginning]], key: tuple[int, int, int], new: _Beginning) -> None:
    there = states.setdefault(key, [])
    if not any(x.beats(new) for x in there):
        there[:] = [x for x in there if not new.beats(x)]
        there.append(new)
