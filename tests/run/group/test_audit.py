"""Ranks that call the same never differ, whatever their speed; ranks that do not are found, by what they plan, call or have called."""

from __future__ import annotations

import random

import pytest

from meshwright.run.group.audit import AUDIT_PERIOD_S, Audit, Told
from meshwright.run.group.record_file import pack_call
from meshwright.run.group.recorder import MAX_DIGESTS, Recorder

CALLS = [pack_call(op, root, red, "float32") for op, root, red in (("all-reduce", -1, "sum"), ("all-reduce", -1, "max"), ("broadcast", 0, ""))]


class Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.recorder, self.asking, self.agreements = Recorder(None, range(size), rank), None, 0

        def call(number: int) -> tuple[int, int] | None:
            found = self.recorder.calls.get(number)
            return found[:2] if found is not None else None

        self.audit = Audit(lambda: self.recorder.number, self.recorder.digest, call, lambda: self.asking, lambda: self.agreements)


def walked(sequences: list[list[tuple[int, int, int]]], seed: int) -> tuple[int, int, int] | None:
    """Ranks that call, tell and hear in random turns: (who found it, whose calls differ, up to which number), None if nobody found anything."""
    rng, n = random.Random(seed), len(sequences)
    ranks = [Rank(r, n) for r in range(n)]
    at, now = [0] * n, 0.0
    for turn in range(40 * max(map(len, sequences))):
        r = rng.randrange(n)
        if at[r] < len(sequences[r]) and rng.random() < 0.7:
            ranks[r].recorder.asked(*sequences[r][at[r]])
            at[r] += 1
        now += AUDIT_PERIOD_S / 2
        told = ranks[r].audit.due(now)
        if told is not None:
            ranks[(r + 1) % n].audit.hear(r, told)
        if turn % 3 == 0 or at[r] == len(sequences[r]):
            found = ranks[r].audit.differs()
            if found is not None:
                return r, *found
    return None


def sequence(rng: random.Random, length: int) -> list[tuple[int, int, int]]:
    return [(rng.choice(CALLS), rng.choice((16, 64)), rng.choice((0, 7))) for _ in range(length)]


@pytest.mark.parametrize("seed", range(40))
def test_only_ranks_that_differ_are_found(seed: int) -> None:
    rng = random.Random(seed)
    n, length = rng.choice((2, 3, 5)), rng.randrange(2, 40)
    same = sequence(rng, length)
    assert walked([same] * n, seed) is None
    odd, place = rng.randrange(n), rng.randrange(length)
    other = list(same)
    call, size_bytes, program = other[place]
    other[place] = rng.choice([(call + 1, size_bytes, program), (call, size_bytes + 4, program), (call, size_bytes, program + 1)])
    found = walked([other if r == odd else same for r in range(n)], seed)
    assert found is not None and odd in found[:2] and found[2] > place
    left_out = [c for i, c in enumerate(same) if i != place]
    if left_out != same[: length - 1]:  # one call fewer at the end is no difference yet
        assert walked([left_out if r == odd else same for r in range(n)], seed) is not None


def test_what_is_planned_differs_before_it_is_called() -> None:
    one, two = Rank(0, 2), Rank(1, 2)
    one.asking, two.asking = (1, CALLS[0], 64, 0), (1, CALLS[2], 64, 0)
    told = one.audit.due(1.0)
    assert told == Told(number=0, digest=0, planning=(CALLS[0], 64)) and one.audit.due(1.0 + AUDIT_PERIOD_S) is None, "no news"
    two.audit.hear(0, told)
    assert two.audit.differs() == (0, 1)
    two.asking = one.asking
    two.audit.hear(0, told)
    assert two.audit.differs() is None
    one.asking = (2, CALLS[0], 64, 0)  # the thread that tells has read the number before the call that came meanwhile
    assert one.audit.due(9.0) is None
    two.recorder.asked(CALLS[2], 64, 3)  # planned here already, and called
    two.audit.hear(0, told)
    assert two.audit.differs() == (0, 1)


def test_what_all_agreed_on_and_the_backend_refused_is_no_difference() -> None:
    """It is told while it is asked about. When the next rank hears of that, or has not heard of the agreement yet, another call has its number."""
    refused, made, other = (1, CALLS[0], 64), (1, CALLS[1], 64), (1, CALLS[2], 64)
    one, two = Rank(0, 2), Rank(1, 2)
    one.asking = (*refused, 0)
    late = one.audit.due(1.0)
    one.agreements, one.asking = 1, (*made, 1)
    early = one.audit.due(2.0)
    two.asking = (*refused, 0)  # it still waits for the others
    two.audit.hear(0, early)
    assert two.audit.differs() is None
    two.agreements, two.asking = 1, (*made, 1)
    two.audit.hear(0, late)
    assert two.audit.differs() is None
    two.agreements, two.asking = 2, None
    two.recorder.asked(CALLS[1], 64, 0)
    two.audit.hear(0, late)
    assert two.audit.differs() is None
    three = Rank(1, 2)  # it was told what the others agreed on, and then does something else
    three.asking = (*refused, 0)
    three.audit.hear(0, early)
    assert three.audit.differs() is None
    three.agreements, three.asking = 1, (*other, 1)
    assert three.audit.differs() == (0, 1)


def test_what_is_forgotten_is_told_by_a_claim() -> None:
    one, two = Rank(0, 2), Rank(1, 2)
    for rank, first in ((one, CALLS[0]), (two, CALLS[1])):
        rank.recorder.asked(first, 64, 0)
        for _ in range(100):
            rank.recorder.asked(CALLS[0], 64, 0)
    told = one.audit.due(1.0)
    assert told is not None
    two.audit.hear(0, told)
    assert two.audit.differs() == (0, 101)
    claim = two.audit.claim(1, 0, 101, lambda r: f"rank {r}")
    assert claim.code == "rank-diverged"
    assert claim.message == "rank 0 and rank 1 have called different collectives, up to collective 101; this one's is all-reduce sum float32 64 bytes"
    for _ in range(MAX_DIGESTS):
        two.recorder.asked(CALLS[0], 64, 0)
    two.audit.hear(0, told)
    assert two.audit.differs() is None and two.recorder.digest(101) is None, "too long ago to be compared"
