"""Direct collectives: proved by their contracts, and what is sent, for pieces of any sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.lower.direct import direct
from meshwright.program.program import Part, Program

OPS = ("all-gather", "all-to-all", "reduce-scatter", "all-reduce")


def sent(program: Program, rank: int) -> int:
    """Chunks sent by a rank."""
    s = program.steps
    mine = (program.lanes.actor[program.lane_of_step()] == rank) & ((s.parts & Part.SEND) != 0)
    return int(s.count[mine].sum())


@given(st.data())
def test_direct_collectives_keep_their_contracts_and_send_each_piece_once(data: st.DataObject) -> None:
    op, ranks = data.draw(st.sampled_from(OPS)), data.draw(st.integers(1, 5))
    sizes = st.lists(st.integers(1, 4), min_size=ranks, max_size=ranks)
    if op == "all-to-all":
        counts = tuple(tuple(data.draw(sizes)) for _ in range(ranks))
    elif op == "all-gather":
        counts = tuple((n,) * ranks for n in data.draw(sizes))
    else:
        counts = (tuple(data.draw(sizes)),) * ranks
    name, program = direct(op, counts)
    assert direct(op, counts) == (name, program)
    verdict = check_program(program)
    assert verdict.ok, verdict.findings
    for r in range(ranks):
        to_others = sum(counts[r]) - counts[r][r]
        assert sent(program, r) == to_others + (counts[r][r] * (ranks - 1) if op == "all-reduce" else 0)


def test_empty_parts_are_not_sent() -> None:
    _, program = direct("all-reduce", ((1, 0, 0),) * 3)
    assert check_program(program).ok
    assert [sent(program, r) for r in range(3)] == [2, 1, 1]


@pytest.mark.parametrize("op", OPS)
def test_in_every_turn_ranks_send_to_different_ones(op: str) -> None:
    _, program = direct(op, ((1, 1, 1, 1),) * 4)
    s, lane = program.steps, program.lane_of_step()
    sends = [program.channels.dst[s.chan_out[(lane == r) & ((s.parts & Part.SEND) != 0)]] for r in range(4)]
    assert all(len(set(turn)) == 4 for turn in np.stack(sends).T.tolist())
