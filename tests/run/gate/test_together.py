"""Ranks of one process: messages in order, one rank at a time, failures and deadlocks told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.errors import Deadlock
from meshwright.run.gate.together import ranks_together


def test_messages_of_a_tag_arrive_in_order_and_are_copies() -> None:
    def body(rank: int, transport: Any) -> list[float]:
        x = torch.zeros(1)
        if rank == 0:
            for i in range(3):
                x.fill_(i)
                transport.wait(transport.send(x, 1, tag=i % 2))
            return []
        got = [torch.empty(1) for _ in range(3)]
        works = [transport.receive(got[i], 0, i % 2) for i in range(3)]
        for i in (1, 2, 0):
            transport.wait(works[i])
        return [float(g) for g in got]

    assert ranks_together(2, body) == [[], [0.0, 1.0, 2.0]]


def test_one_rank_at_a_time_until_it_waits() -> None:
    """The order does not depend on threads: a rank runs to its next receive that has nothing to take."""
    trail: list[tuple[int, int]] = []

    def body(rank: int, transport: Any) -> None:
        x = torch.empty(1)
        for i in range(3):
            trail.append((rank, i))
            if rank == 0:
                transport.wait(transport.receive(x, 2, i))
                transport.send(x, 1, i)
            else:
                transport.send(x, (rank + 1) % 3, i)
                transport.wait(transport.receive(x, rank - 1, i))

    ranks_together(3, body)
    first = list(trail)
    trail.clear()
    ranks_together(3, body)
    assert trail == first and sorted(trail) == [(r, i) for r in range(3) for i in range(3)]


def test_a_failure_is_the_first_ranks_and_ends_the_others() -> None:
    def body(rank: int, transport: Any) -> None:
        if rank == 1:
            raise ValueError("broken")
        transport.wait(transport.receive(torch.empty(1), 1, 0))

    with pytest.raises(ValueError, match="broken"):
        ranks_together(3, body)


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    def body(rank: int, transport: Any) -> None:
        transport.wait(transport.receive(torch.empty(1), 1 - rank, 0))

    with pytest.raises(Deadlock, match="wait for each other"):
        ranks_together(2, body)
