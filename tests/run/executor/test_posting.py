"""When receives are posted: at their credit, and not before what they are `after`, unless the sender may wait for the posting earlier."""

from __future__ import annotations

import pytest

from meshwright.program.builder import ProgramBuilder, StepRef
from meshwright.program.program import Program
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.schedule import compile_schedule


def three_messages(*, overwritten: bool) -> tuple[Program, StepRef, StepRef]:
    """Depth 2; the second receive is after a compute step. `overwritten`: the sender stores into the second message's source afterwards."""
    b = ProgramBuilder(ranks=2)
    c = b.channel(0, 1, depth=2)
    x, other = b.buffer(0, chunks=3, chunk_bytes=8), b.buffer(0, chunks=1, chunk_bytes=8)
    places = [b.buffer(1, chunks=1, chunk_bytes=8) for _ in range(3)]
    send, recv, work = b.lane(0), b.lane(1), b.lane(1, unit=0)
    used = work.compute(b.op("F", graph="g", reads=[(places[0], 0, 1)]), after=[StepRef(recv.number, 0)])
    received = []
    for k, place in enumerate(places):
        send.send(c, x, k)
        received.append(recv.recv(c, place, 0, after=[used] if k == 1 else []))
    if overwritten:
        send.copy((other, 0), (x, 1), 1)
    return b.build(), received[1], used


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_receive_is_posted_when_what_it_is_after_is_done(overwritten: bool) -> None:
    p, _, _ = three_messages(overwritten=overwritten)
    schedule = compile_schedule(p, fuse_lanes(p), 1)
    receives = [s.index for s in p.iter_steps() if s.chan_in >= 0]
    compute = schedule.order.tolist().index(next(s.index for s in p.iter_steps() if s.kind == 0))
    posted = {r.step: at for at, rs in schedule.posts.items() for r in rs}
    first = schedule.order.tolist().index(receives[0])
    assert posted[receives[0]] == 0
    assert posted[receives[1]] == (0 if overwritten else compute + 1)
    assert posted[receives[2]] == first + 1  # its credit: the first message was consumed
    assert all(posted[r] <= schedule.order.tolist().index(r) for r in receives)
    assert all(r.direct for rs in schedule.posts.values() for r in rs)


def test_a_value_that_dies_is_waited_for_when_an_answer_has_come() -> None:
    """Depth 4: without the answers, sends would be waited for four messages later, and their values would lie there so long."""
    b = ProgramBuilder(ranks=2)
    out, back = b.channel(0, 1, depth=4), b.channel(1, 0, depth=4)
    compute, sends, receives, peer = b.lane(0, unit=0), b.lane(0), b.lane(0), b.lane(1)
    sent, got, kept = list[StepRef](), list[StepRef](), b.buffer(0, chunks=1, chunk_bytes=8)
    for _ in range(4):
        x, theirs = b.buffer(0, chunks=1, chunk_bytes=8), b.buffer(1, chunks=1, chunk_bytes=8)
        y = b.buffer(0, chunks=1, chunk_bytes=8)
        made = compute.compute(b.op("F", graph="g", writes=[(x, 0, 1)]), after=got[-1:])
        sent.append(sends.send(out, x, 0, after=[made]))
        b.dies_after(x, sent[-1])
        peer.recv(out, theirs, 0)
        peer.send(back, theirs, 0)
        got.append(receives.recv(back, y, 0))
    sends.send(out, kept, 0)
    peer.recv(out, b.buffer(1, chunks=1, chunk_bytes=8), 0)
    program = b.build()
    schedule = compile_schedule(program, fuse_lanes(program), 0)
    order = schedule.order.tolist()
    waited = {step: at for at, steps in schedule.waits.items() for step in steps}
    found = [s.index for s in program.iter_steps() if s.chan_out == 0]
    answers = [s.index for s in program.iter_steps() if s.chan_in == 1]
    assert [waited[s] for s in found[:4]] == [order.index(r) + 1 for r in answers]
    assert waited[found[4]] == len(order)  # nobody answers the last, which lives on anyway


def test_what_is_added_may_come_before_its_turn() -> None:
    """Two ranks' rows are added to a third's in a fixed order. Their receives land in staging, so both are posted at once where that is asked for."""
    b = ProgramBuilder(ranks=3)
    rows = [b.buffer(r, chunks=1, chunk_bytes=4, role="input") for r in range(3)]
    ways = [b.channel(r, 2) for r in range(2)]
    for r in range(2):
        b.lane(r).send(ways[r], rows[r], 0)
    first = b.lane(2).recv_add(ways[0], rows[2], 0)
    b.lane(2).recv_add(ways[1], rows[2], 0, after=[first])
    program = b.build()
    posted = []
    for early in (False, True):
        schedule = compile_schedule(program, fuse_lanes(program), 2, staged_ahead=early)
        posted.append({at: len(found) for at, found in schedule.posts.items() if found})
        assert not any(r.direct for r in schedule.receives.values())
    assert posted == [{0: 1, 1: 1}, {0: 2}]
