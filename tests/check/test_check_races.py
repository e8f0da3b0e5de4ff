"""Races against an exploration of every order, and uses after death."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from check_programs import windowed_reduce
from check_random_programs import random_program

from effort import few
from meshwright.check import check_program
from meshwright.check.program.deadlock import find_cycle
from meshwright.check.program.order import Order
from meshwright.check.program.races import check_races, turns_needed
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Part, Program


def explored_races(p: Program, turns: int) -> set[tuple[int, int]]:
    """Pairs of steps that touch common bytes, one writing, and that can complete in either order. Every reachable state is visited; channels
    have no depth (credits protect nothing)."""
    lane_of = p.lane_of_step().tolist()
    nodes = [(s, i) for i in range(turns) for s in range(len(p.steps)) if i < p.lanes.repeat[lane_of[s]]]
    number = {x: k for k, x in enumerate(nodes)}
    sends: dict[int, list[int]] = {}
    for s in p.iter_steps():
        if Part.SEND in s.parts:
            sends.setdefault(s.chan_out, []).append(s.index)
    need = [0] * len(nodes)
    seen_receives: dict[int, int] = {}
    for st in p.iter_steps():
        partner = -1
        if Part.RECV in st.parts:
            k = seen_receives.get(st.chan_in, 0)
            seen_receives[st.chan_in] = k + 1
            partner = sends[st.chan_in][k]
        lane = lane_of[st.index]
        for i in range(turns):
            if (st.index, i) not in number:
                continue
            me = number[st.index, i]
            if st.index > p.lanes.start[lane]:
                need[me] |= 1 << number[st.index - 1, i]
            elif i:
                need[me] |= 1 << number[int(p.lanes.end[lane]) - 1, i - 1]
            if partner >= 0:
                need[me] |= 1 << number[partner, i]
            for d, lag in st.after:
                once = p.lanes.repeat[lane_of[d]] == 1 and p.lanes.repeat[lane] > 1
                if once or i >= lag:
                    need[me] |= 1 << number[d, 0 if once else i - lag]
    first = [0] * len(nodes)  # bit b of first[a]: some state holds a without b
    states, todo = {0}, [0]
    while todo:
        state = todo.pop()
        for k in range(len(nodes)):
            if not state >> k & 1 and need[k] & ~state == 0:
                after = state | 1 << k
                if after not in states:
                    states.add(after)
                    todo.append(after)
    everything = (1 << len(nodes)) - 1
    for state in states:
        for k in range(len(nodes)):
            if state >> k & 1:
                first[k] |= everything & ~state
    found = set()
    for a, (s, i) in enumerate(nodes):
        for b, (t, j) in enumerate(nodes):
            if a < b and first[a] >> b & 1 and first[b] >> a & 1 and clash(p, s, i, t, j):
                found.add((min(s, t), max(s, t)))
    return found


def clash(p: Program, s: int, i: int, t: int, j: int) -> bool:
    def touched(step: int, turn: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        st = p.step(step)
        read, write = set(), set()
        for part, (buffer, chunk), into in ((Part.READ, st.src, read), (Part.STORE, st.dst, write)):
            if part in st.parts:
                w = int(p.buffers.window[buffer])
                slot = turn % w if w else turn
                into |= {(buffer, slot * 100 + chunk + k) for k in range(st.count)}
        return read, write

    (r1, w1), (r2, w2) = touched(s, i), touched(t, j)
    return bool(w1 & (r2 | w2) or w2 & r1)


def test_races_are_exactly_the_pairs_that_occur_in_both_orders() -> None:
    racy = clean = 0
    for seed in range(few(260)):
        p = random_program(seed, max_repeat=3, max_messages=4, windows=True)
        turns = turns_needed(p)
        if find_cycle(p) or sum(min(int(r), turns) * int(b - a) for r, a, b in zip(p.lanes.repeat, p.lanes.start, p.lanes.end, strict=True)) > 15:
            continue
        want = explored_races(p, turns)
        found = check_races(p)
        got = {tuple(sorted((f.witness["step"], f.witness["other_step"]))) for f in found}
        assert bool(got) == bool(want), seed
        assert got <= want, seed  # each one named is real; neighbours in the order stand for the rest
        racy += bool(want)
        clean += not want
    assert racy > few(15) and clean > few(15)


def test_more_turns_find_nothing_new() -> None:
    """Window + 1 turns decide: checking all of them gives the same answer."""
    for seed in range(few(400)):
        p = random_program(seed, max_repeat=4, max_messages=5, windows=True)
        if not find_cycle(p):
            assert bool(check_races(p)) == bool(check_races(p, Order(p, iterations=8))), seed


def two_lanes(*, ordered: bool, write: bool) -> Program:
    b = ProgramBuilder(ranks=1, name="two lanes")
    x, y = b.buffer(0, chunks=4, chunk_bytes=4, name="x"), b.buffer(0, chunks=4, chunk_bytes=4, name="y")
    one, two = b.lane(0), b.lane(0)
    first = one.copy((x, 1), (y, 1), 2)
    two.copy((x, 0), (y, 2), 2, after=[first] if ordered else []) if write else two.copy((x, 0), (y, 3), 1, after=[first] if ordered else [])
    return b.build()


def test_a_race_names_both_steps_and_the_chunk() -> None:
    verdict = check_program(two_lanes(ordered=False, write=True))
    assert verdict.status == "wrong"
    w = verdict.findings[0].witness
    assert (w["step"], w["other_step"], w["chunk"], w["rank"]) == (0, 1, 2, 0)
    message = verdict.findings[0].message
    assert "lane 0 step 0" in message and "lane 1 step 1" in message and "chunk 2 of y" in message
    assert check_program(two_lanes(ordered=True, write=True)).ok
    assert check_program(two_lanes(ordered=False, write=False)).ok  # different chunks


def test_credits_are_no_protection() -> None:
    """With depth 1 the second send cannot overtake the first receive; still only an edge orders the reuse of the buffer."""
    b = ProgramBuilder(ranks=2, name="credit only")
    x, y = b.buffer(0, chunks=1, chunk_bytes=4, name="x"), b.buffer(1, chunks=1, chunk_bytes=4, window=1, name="y")
    out = b.buffer(1, chunks=1, chunk_bytes=4, name="out")
    c = b.channel(0, 1)
    b.lane(0, repeat=3).send(c, x, 0)
    got = b.lane(1, repeat=3)
    ref = got.recv(c, y, 0)
    b.lane(1, repeat=3).copy((y, 0), (out, 0), after=[ref])
    p = b.build()
    found = check_races(p)
    assert {found[0].witness["iteration"], found[0].witness["other_iteration"]} == {0, 1}


def test_iterations_that_share_a_slot_race_without_an_edge_of_that_lag() -> None:
    right = windowed_reduce(2, repeat=5, window=2)
    assert check_program(right).ok
    late = replace(right, steps=replace(right.steps, after_lag=np.where(right.steps.after_lag == 2, 3, right.steps.after_lag).astype(np.int32)))
    assert check_program(late).findings[0].check == "races"


def test_aliases_are_seen() -> None:
    b = ProgramBuilder(ranks=1)
    x = b.buffer(0, chunks=4, chunk_bytes=4, name="x")
    view = b.buffer(0, chunks=1, chunk_bytes=8, alias_of=x, alias_offset_bytes=8, name="view")
    y = b.buffer(0, chunks=1, chunk_bytes=8, name="y")
    z = b.buffer(0, chunks=4, chunk_bytes=4, name="z")
    b.lane(0).copy((y, 0), (view, 0))
    b.lane(0).copy((x, 3), (z, 0))
    found = check_races(b.build())
    assert len(found) == 1 and found[0].witness["chunk"] == 3


def test_use_after_the_last_step_is_found_also_through_an_alias() -> None:
    for through_alias in (False, True):
        b = ProgramBuilder(ranks=1)
        x = b.buffer(0, chunks=2, chunk_bytes=4, name="x")
        view = b.buffer(0, chunks=1, chunk_bytes=4, alias_of=x, alias_offset_bytes=4, name="view")
        out = b.buffer(0, chunks=2, chunk_bytes=4, name="out")
        lane = b.lane(0)
        b.dies_after(x, lane.copy((x, 0), (out, 0)))
        lane.copy((view, 0) if through_alias else (x, 1), (out, 1))
        found = check_races(b.build())
        assert len(found) == 1 and "after the last step of its life" in found[0].message and found[0].witness["step"] == 1


def test_users_that_are_last_steps_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer whose parts go to many ranks dies when all have been sent: n users and n last steps are not n * n questions."""
    count = 40
    b = ProgramBuilder(ranks=1)
    x = b.buffer(0, chunks=count, chunk_bytes=4, name="x")
    out = b.buffer(0, chunks=count, chunk_bytes=4, name="out")
    first = b.lane(0).copy((out, 0), (x, 0), count)
    for k in range(count):
        b.dies_after(x, b.lane(0).copy((x, k), (out, k), after=[first]))
    p = b.build()
    asked: list[int] = []
    own = Order.before
    monkeypatch.setattr(Order, "before", lambda self, a, b: asked.append(len(a)) or own(self, a, b))  # type: ignore[func-returns-value]
    assert check_races(p) == [] and sum(asked) < 6 * count


@pytest.mark.parametrize("steps", [0, 1])
def test_tiny_programs(steps: int) -> None:
    b = ProgramBuilder(ranks=1)
    x = b.buffer(0, chunks=1, chunk_bytes=4)
    lane = b.lane(0)
    for _ in range(steps):
        lane.copy((x, 0), (x, 0))
    assert check_program(b.build()).ok
