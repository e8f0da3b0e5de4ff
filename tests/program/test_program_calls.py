"""Inlining against a plain interpreter: a program with calls ends with the values its inlined form ends with."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.check.whole import check_program
from meshwright.errors import FormatError, Unsupported
from meshwright.program.builder import ProgramBuilder
from meshwright.program.calls import inline
from meshwright.program.phases import PHASES, phases
from meshwright.program.program import Kind, Part, Program
from meshwright.program.validate import validate


def ring_all_reduce(n: int, *, repeat: int = 1, depth: int = 1) -> Program:
    """In place, n chunks per iteration: n-1 receive-adds, then n-1 receives; one send and one receive lane per rank."""
    b = ProgramBuilder(ranks=n, name=f"ring{n}x{repeat}")
    data = [b.buffer(r, chunks=n, chunk_bytes=4, role="input") for r in range(n)]
    right = [b.channel(r, (r + 1) % n, depth=depth) for r in range(n)]
    for r in range(n):
        send, recv = b.lane(r, repeat=repeat), b.lane(r, repeat=repeat)
        received = []
        for k in range(2 * (n - 1)):
            chunk = (r - 1 - k) % n
            op = recv.recv_add if k < n - 1 else recv.recv
            received.append(op(right[(r - 1) % n], data[r], chunk))
        for k in range(2 * (n - 1)):
            send.send(right[r], data[r], (r - k) % n, after=[received[k - 1]] if k else [])
    return b.build()


def caller(n: int, callee: Program, *, calls: int = 2) -> Program:
    b = ProgramBuilder(ranks=n, name="caller")
    comm = b.comm("dp0", list(reversed(range(n))))
    for r in range(n):
        buffers = [b.buffer(r, chunks=n * int(callee.lanes.repeat[0]), chunk_bytes=8, role="gradient", name=f"g{r}.{k}") for k in range(calls)]
        lane = b.lane(r, unit=0)
        for k in range(calls):
            whole = (buffers[k], 0, n * int(callee.lanes.repeat[0]))
            work = lane.compute(b.op("B", graph="s", writes=[whole]))
            lane.call(b.call(comm, "ring", [(0, buffers[k], 0)]), after=[work])
            lane.compute(b.op("optimizer", reads=[whole]))
    return b.build()


def interpret(p: Program, values: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Runs a call-free program in any order that works; compute steps do nothing. Fails on deadlock."""
    done = np.zeros(len(p.steps), bool)
    at = p.lanes.start.copy()
    fifo: dict[int, list[np.ndarray]] = {c: [] for c in range(len(p.channels))}
    moved = True
    while moved:
        moved = False
        for lane in range(len(p.lanes)):
            while at[lane] < p.lanes.end[lane]:
                st = p.step(int(at[lane]))
                if not all(done[d] for d, _ in st.after) or (Part.RECV in st.parts and not fifo[st.chan_in]):
                    break
                if Part.SEND in st.parts and len(fifo[st.chan_out]) >= p.channels.depth[st.chan_out]:
                    break
                if st.kind is Kind.TRANSFER:
                    got = fifo[st.chan_in].pop(0) if Part.RECV in st.parts else 0
                    here = values[st.src[0]][st.src[1] : st.src[1] + st.count] if Part.READ in st.parts else 0
                    value = got + here
                    if Part.STORE in st.parts:
                        values[st.dst[0]][st.dst[1] : st.dst[1] + st.count] = value
                    if Part.SEND in st.parts:
                        fifo[st.chan_out].append(np.array(value, copy=True))
                done[st.index] = True
                at[lane] += 1
                moved = True
    assert done.all(), "deadlock"
    return values


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("repeat", [1, 3])
def test_inlined_calls_all_reduce_every_buffer(n: int, repeat: int) -> None:
    callee = ring_all_reduce(n, repeat=repeat, depth=2 if repeat > 1 else 1)
    program = caller(n, callee)
    result = inline(program, {"ring": callee})
    validate(result.program)
    assert not len(result.program.calls)
    rng = np.random.default_rng(0)
    values = {i: rng.integers(1, 1000, int(c)).astype(np.int64) for i, c in enumerate(result.program.buffers.chunks)}
    before = {i: v.copy() for i, v in values.items()}
    interpret(result.program, values)
    for k in range(2):
        total = sum(before[r * 2 + k] for r in range(n))
        for r in range(n):
            np.testing.assert_array_equal(values[r * 2 + k], total)


def test_a_buffer_cut_finer_than_the_callee_is_reduced_whole() -> None:
    callee = ring_all_reduce(2)
    b = ProgramBuilder(ranks=2)
    comm = b.comm("dp", [0, 1])
    for r in range(2):
        mine = b.buffer(r, chunks=6, chunk_bytes=4, role="gradient")
        b.lane(r).call(b.call(comm, "ring", [(0, mine, 0)]))
    program = inline(b.build(), {"ring": callee}).program
    values = {0: np.arange(6), 1: np.arange(6) * 100}
    interpret(program, values)
    np.testing.assert_array_equal(values[0], np.arange(6) * 101)
    np.testing.assert_array_equal(values[1], np.arange(6) * 101)


def test_one_lane_per_member_and_callee_lane_whatever_the_number_of_calls() -> None:
    callee = ring_all_reduce(3)
    few, many = inline(caller(3, callee, calls=1), {"ring": callee}), inline(caller(3, callee, calls=4), {"ring": callee})
    assert len(few.program.lanes) == len(many.program.lanes) == 3 + 3 * 2
    assert len(few.program.channels) == len(many.program.channels) == 3


def test_phases_follow_op_and_communicator_names() -> None:
    callee = ring_all_reduce(2)
    result = inline(caller(2, callee, calls=1), {"ring": callee})
    names = {PHASES[i] for i in phases(result)}
    assert names == {"", "backward", "gradient", "optimizer"}
    transfers = result.program.steps.kind == Kind.TRANSFER
    assert {PHASES[i] for i in phases(result)[transfers]} == {"gradient"}


def through_scratch() -> Program:
    b = ProgramBuilder(ranks=2, name="via-scratch")
    data = [b.buffer(r, chunks=1, chunk_bytes=4, role="input") for r in range(2)]
    temp = [b.buffer(r, chunks=1, chunk_bytes=4, role="scratch") for r in range(2)]
    ch = [b.channel(0, 1), b.channel(1, 0)]
    for r in range(2):
        send, recv = b.lane(r), b.lane(r)
        sent = send.send(ch[r], data[r], 0)
        got = recv.recv(ch[1 - r], temp[r], 0)
        recv.copy((temp[r], 0), (data[r], 0), add=True, after=[sent, got])
    return b.build()


def test_scratch_of_a_callee_is_made_once_per_member_and_scaled() -> None:
    c = ProgramBuilder(ranks=2)
    comm = c.comm("tp0", [0, 1])
    for r in range(2):
        mine = c.buffer(r, chunks=1, chunk_bytes=12, role="activation")
        lane = c.lane(r)
        for _ in range(3):
            lane.call(c.call(comm, "x", [(0, mine, 0)]))
    program = inline(c.build(), {"x": through_scratch()}).program
    assert len(program.buffers) == 4
    assert program.buffers.chunk_bytes.tolist() == [12, 12, 12, 12]


def test_calls_of_several_sizes_have_scratch_of_their_own_sizes() -> None:
    c = ProgramBuilder(ranks=2)
    comm = c.comm("tp0", [0, 1])
    for r in range(2):
        lane = c.lane(r)
        for size in (12, 40, 12):
            lane.call(c.call(comm, "x", [(0, c.buffer(r, chunks=1, chunk_bytes=size, role="activation"), 0)]))
    program = inline(c.build(), {"x": through_scratch()}).program
    assert check_program(program).ok
    assert sorted(program.buffers.chunk_bytes.tolist()) == [12] * 6 + [40] * 4


def test_errors_name_what_is_wrong() -> None:
    callee = ring_all_reduce(2)
    program = caller(2, callee)
    with pytest.raises(FormatError, match="is called but not in the plan"):
        inline(program, {})
    with pytest.raises(FormatError, match="comm of 2 ranks calls a program of 3"):
        inline(program, {"ring": ring_all_reduce(3)})
    with pytest.raises(FormatError, match="has 2 chunks from 0 on, the callee needs 4"):
        inline(program, {"ring": ring_all_reduce(2, repeat=2)})
    with pytest.raises(Unsupported, match="calls of its own"):
        inline(program, {"ring": program})
    b = ProgramBuilder(ranks=2)
    whole = b.buffer(0, chunks=2, chunk_bytes=4)
    b.buffer(0, chunks=1, chunk_bytes=4, alias_of=whole)
    with pytest.raises(Unsupported, match="alias others"):
        inline(program, {"ring": b.build()})
    b = ProgramBuilder(ranks=2)
    comm = b.comm("dp", [0])
    b.lane(1).call(b.call(comm, "ring", []))
    with pytest.raises(FormatError, match="not a member"):
        inline(b.build(), {"ring": callee})
    b = ProgramBuilder(ranks=2)
    comm = b.comm("dp", [0, 1])
    b.lane(0, repeat=2).call(b.call(comm, "ring", []))
    with pytest.raises(Unsupported, match="repeated lane"):
        inline(b.build(), {"ring": callee})
    b = ProgramBuilder(ranks=2)
    comm = b.comm("dp", [0, 1])
    b.lane(0).call(b.call(comm, "ring", [(7, 0, 0)]))
    with pytest.raises(FormatError, match="names no buffer"):
        inline(b.build(), {"ring": callee})
