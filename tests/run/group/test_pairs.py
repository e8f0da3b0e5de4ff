"""Messages of the user's own: both ends hear of the first one about which they differ, in whatever order they come, and of nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from meshwright.run.group.pairs import Note, Pairs, PairWork, mixed
from meshwright.run.group.verdict import Claim


class Rig:
    """Two ranks, whose notes wait until they are delivered."""

    def __init__(self) -> None:
        self.claims: list[tuple[int, Claim]] = []
        self.mail: list[tuple[int, int, Note]] = []
        self.ranks = [self.rank(r) for r in (0, 1)]

    def rank(self, r: int) -> Pairs:
        return Pairs(r, (10, 11), lambda peer, note: self.mail.append((r, peer, note)), lambda claim: self.claims.append((r, claim)))

    def deliver(self) -> None:
        while self.mail:
            source, target, note = self.mail.pop(0)
            self.ranks[target].hear(source, note)


def of(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


@pytest.mark.parametrize("seed", range(40))
def test_the_first_message_that_differs_is_found_whoever_is_ahead(seed: int) -> None:
    draw, rig = random.Random(seed), Rig()
    sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 8))]
    at, by = draw.randrange(len(sizes)), draw.choice([0, 1, 2])
    left = {0: [*sizes], 1: [s + by if i == at else s for i, s in enumerate(sizes)]}
    while left[0] or left[1]:
        r = draw.choice([r for r in (0, 1) if left[r]])
        rig.ranks[r].posts(of(left[r].pop(0)), 1 - r, 5, sends=r == 0)
        if draw.random() < 0.5:
            rig.deliver()
    rig.deliver()
    if not by:
        assert not rig.claims
        return
    assert rig.claims and all(c.code == "rank-diverged" and "rank 10 calls send" in c.message for _, c in rig.claims)
    assert f"message {at + 1} of tag 5" in rig.claims[0][1].message


def test_only_changes_are_told() -> None:
    rig = Rig()
    for _ in range(100):
        rig.ranks[0].posts(of(4), 1, 0, sends=True)
    assert len(rig.mail) == 1
    rig.ranks[0].posts(of(4, torch.int32), 1, 0, sends=True)
    rig.ranks[0].posts(of(4), 1, 1, sends=True)
    assert [note.number for _, _, note in rig.mail] == [0, 100, 0]
    rig.ranks[1].uncounted.add(0)
    rig.deliver()
    rig.ranks[1].posts(of(9), 0, 0, sends=False)
    rig.deliver()
    assert not [r for r, _ in rig.claims if r == 1], "messages from any source are not counted"


def test_unlike_messages_have_unlike_tags() -> None:
    tags = {mixed(0, of(n, dtype)) for n in range(200) for dtype in (torch.float32, torch.int64)}
    assert len(tags) == 400 and mixed(3, of(5)) == mixed(3, of(5)) != mixed(4, of(5)) and all(0 <= t < 1 << 31 for t in tags)


def test_a_lost_message_is_explained() -> None:
    class Work:
        def wait(self, *_: Any) -> bool:
            raise RuntimeError("Connection closed by peer")

    class Engine:
        def explain(self, error: RuntimeError) -> None:
            raise ValueError("explained") from error

    with pytest.raises(ValueError, match="explained"):
        PairWork(Work(), Engine(), 0).wait()  # type: ignore[arg-type]
