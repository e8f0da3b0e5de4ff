"""The cycle test against a machine that really runs the program, and the smallest depths by trying."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from check_programs import chain_broadcast, ring_all_reduce
from check_random_programs import random_program
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import few
from meshwright.check import check_program, smallest_depth
from meshwright.check.program.deadlock import find_cycle
from meshwright.check.program.order import topological
from meshwright.check.program.wellformed import check_wellformed
from meshwright.errors import Deadlock
from meshwright.program.builder import ProgramBuilder, StepRef
from meshwright.program.program import Program
from meshwright.testing.interpreter import Deadlocked, Machine


def finishes(p: Program, seed: int) -> bool:
    try:
        Machine(p, seed=seed).run()
    except Deadlocked:
        return False
    return True


def test_the_cycle_test_agrees_with_running_on_thousands_of_random_programs() -> None:
    stuck = 0
    for seed in range(few(2000)):
        p = random_program(seed, max_messages=12)
        assert check_wellformed(p) == []
        live = finishes(p, seed)
        stuck += not live
        assert live == (not find_cycle(p)), seed
    assert few(200) < stuck < few(1800)  # both answers occur often


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(10_000, 10**9))
def test_the_cycle_test_agrees_with_running(seed: int) -> None:
    p = random_program(seed, max_messages=12)
    assert finishes(p, seed + 1) == (not find_cycle(p))


def test_every_edge_of_a_cycle_is_a_real_wait() -> None:
    for seed in range(few(300)):
        p = random_program(seed)
        cycle = find_cycle(p)
        lane = p.lane_of_step()
        for k, (step, why) in enumerate(cycle):
            before = cycle[k - 1][0]
            s, t = p.step(before), p.step(step)
            if why == "follows in its lane":
                assert lane[before] == lane[step] and step == before + 1
            elif why == "waits for":
                assert any(d == before for d, _ in t.after)
            elif why == "waits for the message of":
                assert s.chan_out == t.chan_in >= 0
            elif why == "waits for the credit of":
                assert s.chan_in == t.chan_out >= 0
            else:
                assert why == "sends after it receives" and before == step


def with_depth(p: Program, depth: object) -> Program:
    return replace(p, channels=replace(p.channels, depth=np.asarray(depth, np.int32)))


def test_smallest_depths_are_live_and_needed() -> None:
    raised = 0
    for seed in range(400):
        p = random_program(seed, max_messages=30)
        depth = smallest_depth(p)
        unbounded = with_depth(p, np.full(len(p.channels), 99))
        if not finishes(unbounded, 0):
            assert (depth == -1).all()
            continue
        assert finishes(with_depth(p, depth), 0), seed
        for c in np.flatnonzero(depth > 1).tolist():
            less = depth.copy()
            less[c] -= 1
            everyone_else_deep = np.full(len(depth), 99)
            everyone_else_deep[c] = depth[c] - 1
            if not finishes(with_depth(p, everyone_else_deep), 0):
                raised += 1
            else:  # only needed together with the others' depths
                assert not finishes(with_depth(p, less), 0), seed
    assert raised >= 5


def test_crossing_sends_in_their_own_order_need_no_depth() -> None:
    b = ProgramBuilder(ranks=2)
    x, y = b.buffer(0, chunks=2, chunk_bytes=4), b.buffer(1, chunks=2, chunk_bytes=4)
    there, back = b.channel(0, 1), b.channel(1, 0)
    one, two = b.lane(0), b.lane(1)
    one.send(there, x, 0)
    one.send(there, x, 1)
    one.recv(back, x, 0)
    two.send(back, y, 0)
    two.recv(there, y, 0)
    two.recv(there, y, 1)
    assert smallest_depth(b.build()).tolist() == [1, 1]


def test_a_receive_after_the_reply_needs_a_deeper_channel() -> None:
    """Rank 0 sends twice, then waits for a reply that rank 1 gives before it receives anything."""
    b = ProgramBuilder(ranks=2)
    x, y = b.buffer(0, chunks=2, chunk_bytes=4), b.buffer(1, chunks=2, chunk_bytes=4)
    there, signal = b.channel(0, 1), b.channel(0, 1)
    one, two = b.lane(0), b.lane(1)
    one.send(there, x, 0)
    one.send(there, x, 1)
    one.send(signal, x, 0)
    two.recv(signal, y, 0)
    two.recv(there, y, 0)
    two.recv(there, y, 1)
    p = b.build()
    assert not finishes(p, 0)
    assert smallest_depth(p).tolist() == [2, 1]
    assert finishes(with_depth(p, [2, 1]), 0)


def test_a_deadlock_is_raised_with_its_cycle() -> None:
    b = ProgramBuilder(ranks=1)
    one, two = b.lane(0), b.lane(0)
    one.nop(after=[StepRef(two.number, 0)])
    two.nop(after=[StepRef(one.number, 0)])
    verdict = check_program(b.build())
    assert verdict.status == "wrong" and verdict.findings[0].check == "deadlock"
    with pytest.raises(Deadlock, match="wait for each other in a circle") as caught:
        verdict.raise_if_wrong()
    assert [c["step"] for c in caught.value.data["witness"]["cycle"]] in ([0, 1], [1, 0])
    assert smallest_depth(b.build()).tolist() == []


def test_topological_stops_before_a_cycle() -> None:
    src, dst = np.array([0, 1, 2, 3]), np.array([1, 2, 1, 1])
    assert topological(4, src, dst).tolist() == [0, 3]
    assert len(topological(0, src[:0], dst[:0])) == 0


@pytest.mark.parametrize("n", [2, 3, 6])
def test_depth_one_suffices_for_rings_and_chains(n: int) -> None:
    assert set(smallest_depth(ring_all_reduce(n)).tolist()) == {1}
    assert set(smallest_depth(chain_broadcast(n)).tolist()) == {1}


def test_a_million_steps_are_decided_without_unrolling() -> None:
    """A thousand lanes of a thousand messages, repeated a million times: the size of `repeat` does not matter."""
    b = ProgramBuilder(ranks=2)
    x, y = b.buffer(0, chunks=1, chunk_bytes=4), b.buffer(1, chunks=1, chunk_bytes=4)
    for _ in range(50):
        c = b.channel(0, 1)
        send, recv = b.lane(0, repeat=1_000_000), b.lane(1, repeat=1_000_000)
        for _ in range(100):
            send.send(c, x, 0)
            recv.recv(c, y, 0)
    assert find_cycle(b.build()) == []
