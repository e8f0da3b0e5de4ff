"""Worst-order memory against every interleaving of small programs, and peaks of given orders."""

from __future__ import annotations

import random

import numpy as np
import pytest
from check_programs import Training, training_layout

from effort import few
from meshwright.check import worst_order_memory
from meshwright.check.program import memory as worst
from meshwright.check.program import order
from meshwright.check.program.flow_kernel import maximum_flow
from meshwright.check.program.memory import check_memory, worst_order_peaks
from meshwright.check.program.sweep import swept_peaks
from meshwright.fabric.fabric import Device, Fabric
from meshwright.program.builder import ProgramBuilder, StepRef
from meshwright.program.calls import inline
from meshwright.program.program import Program
from meshwright.testing.interpreter import Machine
from order_peak import order_peak


def random_lives(seed: int) -> Program:
    """One or two ranks, 1-3 lanes of compute steps each; every buffer has one first writer and one last reader."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 2)
    b = ProgramBuilder(ranks=ranks, name=f"lives {seed}")
    refs: dict[int, list[tuple[StepRef, int]]] = {r: [] for r in range(ranks)}
    plan: list[tuple[int, int, StepRef, list[int]]] = []
    for r in range(ranks):
        for _ in range(rng.randint(1, 3)):
            lane = b.lane(r, unit=0)
            for _ in range(rng.randint(1, 3)):
                after = [ref for ref, _ in refs[r] if ref.lane != lane.number and rng.random() < 0.3]
                made = b.buffer(r, chunks=1, chunk_bytes=rng.randint(1, 9))
                reads = [x for ref, x in refs[r] if x >= 0 and (ref.lane == lane.number or ref in after) and rng.random() < 0.6]
                op = b.op("F", reads=[(x, 0, 1) for x in reads], writes=[(made, 0, 1)], workspace_bytes=rng.choice([0, 0, 5]))
                ref = lane.compute(op, after=after)
                refs[r].append((ref, made))
                plan.append((r, made, ref, reads))
    if ranks == 2:  # some messages through buffers of their own
        for k in range(rng.randint(0, 2)):
            src, dst = rng.choice(refs[0]), rng.choice(refs[1])
            x = b.buffer(0, chunks=1, chunk_bytes=2)
            y = b.buffer(1, chunks=1, chunk_bytes=rng.randint(2, 2))
            c = b.channel(0, 1, depth=rng.randint(1, 2))
            b.dies_after(x, b.lane(0).send(c, x, 0, after=[src[0]]))
            got = b.lane(1).recv(c, y, 0)
            b.dies_after(y, got if k else b.lane(1).copy((y, 0), (b.buffer(1, chunks=1, chunk_bytes=2), 0), after=[got]))
            del dst
    for r, made, ref, _ in plan:
        users = [u for rr, _, u, reads in plan if rr == r and made in reads]
        if rng.random() < 0.8:
            b.dies_after(made, rng.choice(users) if len(users) == 1 else ref if not users else users[-1])
    return b.build()


def peak_over_all_orders(p: Program) -> list[int]:
    """Explore every set of (started, finished) steps; a receive takes its buffer when it is posted."""
    lane_of = p.lane_of_step().tolist()
    n = len(p.steps)
    sends: dict[int, list[int]] = {}
    for s in p.iter_steps():
        if s.chan_out >= 0:
            sends.setdefault(s.chan_out, []).append(s.index)
    count: dict[int, int] = {}
    local, match = [], []
    for s in p.iter_steps():
        before = [s.index - 1] if s.index > p.lanes.start[lane_of[s.index]] else []
        local.append(before + [d for d, _ in s.after])
        match.append([])
        if s.chan_in >= 0:
            k = count.get(s.chan_in, 0)
            count[s.chan_in] = k + 1
            match[s.index] = [sends[s.chan_in][k]]
    writers: dict[int, set[int]] = {}
    for s in p.iter_steps():
        rows = p.ops.writes[s.op][::3].tolist() if s.kind == 0 else [s.dst[0]] if s.dst[0] >= 0 else []
        for x in rows:
            writers.setdefault(x, set()).add(s.index)
    b = p.buffers

    def held(started: int, finished: int) -> list[int]:
        out = [0] * p.ranks
        for x in range(len(b)):
            born = x not in writers or any(started >> w & 1 for w in writers[x])
            gone = len(b.last[x]) and all(finished >> e & 1 for e in b.last[x].tolist())
            if born and not gone:
                out[int(b.actor[x])] += int(b.chunks[x] * b.chunk_bytes[x])
        for s in range(n):
            if p.steps.kind[s] == 0 and started >> s & 1 and not finished >> s & 1:
                out[int(p.lanes.actor[lane_of[s]])] += int(p.ops.workspace_bytes[p.steps.op[s]])
        return out

    peak, seen, todo = [0] * p.ranks, {(0, 0)}, [(0, 0)]
    while todo:
        started, finished = todo.pop()
        peak = [max(x, y) for x, y in zip(peak, held(started, finished), strict=True)]
        for s in range(n):
            if not started >> s & 1 and all(finished >> d & 1 for d in local[s]):
                new = (started | 1 << s, finished)
            elif started >> s & 1 and not finished >> s & 1 and all(finished >> d & 1 for d in match[s]):
                new = (started, finished | 1 << s)
            else:
                continue
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return peak


def test_worst_order_memory_is_the_peak_over_every_interleaving() -> None:
    exact = 0
    for seed in range(few(400)):
        p = random_lives(seed)
        if len(p.steps) > 11:
            continue
        worst = worst_order_memory(p)
        want = peak_over_all_orders(p)
        for rank in range(p.ranks):
            if worst.exact[rank]:
                exact += 1
                assert worst.peak_bytes[rank] == want[rank], seed
                held = sum(int(p.buffers.chunk_bytes[b] * p.buffers.chunks[b]) for b in worst.alive[rank])
                held += sum(int(p.ops.workspace_bytes[p.steps.op[s]]) for s in worst.steps[rank])
                assert held == want[rank], seed  # the certificate adds up to the peak
            else:
                assert worst.peak_bytes[rank] >= want[rank], seed
    assert exact > few(200)


def test_a_buffer_whose_end_is_open_is_bounded_from_above() -> None:
    """Two readers in two lanes end its life: whichever comes last."""
    b = ProgramBuilder(ranks=1)
    x = b.buffer(0, chunks=1, chunk_bytes=8)
    first = b.lane(0).compute(b.op("F", writes=[(x, 0, 1)]))
    for _ in range(2):
        b.dies_after(x, b.lane(0).compute(b.op("F", reads=[(x, 0, 1)], workspace_bytes=4), after=[first]))
    worst = worst_order_memory(b.build())
    assert not worst.exact[0] and worst.peak_bytes[0] == 16


def test_receives_that_run_ahead_are_counted() -> None:
    """Five received and unused: without an edge back, all five may be there before the first is used."""
    for free in (False, True):
        b = ProgramBuilder(ranks=2)
        c = b.channel(0, 1)
        send, recv, work = b.lane(0), b.lane(1), b.lane(1, unit=0)
        x = b.buffer(0, chunks=5, chunk_bytes=10)
        used: list[StepRef] = []
        for k in range(5):
            send.send(c, x, k)
            y = b.buffer(1, chunks=1, chunk_bytes=10)
            got = recv.recv(c, y, 0, after=[used[k - 2]] if free and k >= 2 else [])
            used.append(work.compute(b.op("F", reads=[(y, 0, 1)]), after=[got]))
            b.dies_after(y, used[-1])
        worst = worst_order_memory(b.build())
        assert worst.peak_bytes == (50, 20 if free else 50) and all(worst.exact)


def test_receives_posted_ahead_of_a_deep_channel_take_their_buffers_early() -> None:
    """Depth 2 lets the second receive be posted before the first message is there; what is posted later needs the first one's arrival."""
    peaks = []
    for depth in (1, 2):
        b = ProgramBuilder(ranks=2)
        c = b.channel(0, 1, depth=depth)
        lane = b.lane(0)
        x = b.buffer(0, chunks=2, chunk_bytes=10)
        lane.send(c, x, 0)
        lane.send(c, x, 1)
        recv = b.lane(1)
        y, z = b.buffer(1, chunks=1, chunk_bytes=10), b.buffer(1, chunks=1, chunk_bytes=10)
        b.dies_after(y, recv.recv(c, y, 0))
        recv.recv(c, z, 0)
        peaks.append(worst_order_memory(b.build()).peak_bytes[1])
    assert peaks == [10, 20]


def test_staging_is_counted_where_data_cannot_go_straight_into_place() -> None:
    b = ProgramBuilder(ranks=2)
    c, d = b.channel(0, 1, depth=3), b.channel(0, 1, depth=3)
    x, y = b.buffer(0, chunks=1, chunk_bytes=10), b.buffer(1, chunks=1, chunk_bytes=10)
    b.lane(0).send(c, x, 0)
    first = b.lane(1).recv_add(c, y, 0)
    b.lane(0).send(d, x, 0)
    z = b.buffer(1, chunks=1, chunk_bytes=10)
    b.lane(1).recv(d, z, 0, after=[first])
    worst = worst_order_memory(b.build())
    assert worst.staging_bytes == (0, 30)
    assert worst_order_peaks(b.build()) == [10, 50]


def test_a_place_still_in_use_when_its_receive_is_posted_needs_staging() -> None:
    """Depth 2: the first two receives are posted at the beginning, the third when the first message was consumed."""
    for busy, expected in ((-1, 0), (0, 20), (1, 20), (2, 0)):
        b = ProgramBuilder(ranks=2)
        c = b.channel(0, 1, depth=2)
        x, y = b.buffer(0, chunks=3, chunk_bytes=10), b.buffer(1, chunks=3, chunk_bytes=10)
        send, recv = b.lane(0), b.lane(1)
        used = b.lane(1).compute(b.op("F", reads=[(y, busy, 1)])) if busy >= 0 else None
        for k in range(3):
            send.send(c, x, k)
            recv.recv(c, y, k, after=[used] if used is not None and k == 0 else [])
        assert worst_order_memory(b.build()).staging_bytes == (0, expected), busy


def test_a_given_order_never_needs_more_than_the_worst() -> None:
    t = Training(training_layout(data=2, microbatches=4))
    p = inline(t.program, t.programs).program
    worst = worst_order_memory(p)
    assert all(worst.exact)
    best = None
    for seed in range(6):
        m = Machine(p, seed=seed).run()
        start = np.zeros(len(p.steps))
        for k, (step, _) in enumerate(m.order):
            start[step] = k
        peak = order_peak(p, start, start + 1)
        assert all(a <= b for a, b in zip(peak, worst.peak_bytes, strict=True))
        best = peak
    assert best is not None and max(best) > 0


def test_flow_agrees_with_networkx() -> None:
    networkx = pytest.importorskip("networkx")
    rng = random.Random(5)
    for _ in range(60):
        n = rng.randint(2, 9)
        arcs, graph = list[tuple[int, int, int]](), networkx.DiGraph()
        graph.add_nodes_from(range(n))
        for _ in range(rng.randint(0, 24)):
            u, v, c = rng.randrange(n), rng.randrange(n), rng.randint(0, 9)
            if u != v:
                arcs.append((u, v, c))
                have = graph.get_edge_data(u, v, {"capacity": 0})["capacity"]
                graph.add_edge(u, v, capacity=have + c)
        tail, head, room = np.array(arcs, dtype=np.int64).reshape(-1, 3).T
        value, level = maximum_flow(n, tail, head, room, 0, n - 1)
        side = {v for v in range(n) if level[v] >= 0}
        assert value == networkx.maximum_flow_value(graph, 0, n - 1)
        assert 0 in side and n - 1 not in side and value == sum(c for u, v, c in arcs if u in side and v not in side)


def test_too_little_memory_names_rank_device_and_what_is_largest() -> None:
    b = ProgramBuilder(ranks=2)
    for r, size in ((0, 60), (1, 200)):
        b.buffer(r, chunks=1, chunk_bytes=size, role="weight", persistent=True, name=f"weights{r}")
    p = b.build()
    devices = tuple(Device(name=f"d{k}", memory_bytes=m) for k, m in enumerate((50, 100)))
    fabric = Fabric(name="small", devices=devices)
    found = check_memory(p, worst_order_memory(p), fabric, ("d0", "d1"))
    assert [(f.witness["rank"], f.witness["limit_bytes"], f.witness["need_bytes"]) for f in found] == [(0, 50, 60), (1, 100, 200)]
    assert found[1].witness["largest"] == ["weights1"] and found[0].status == "wrong"
    assert check_memory(p, worst_order_memory(p), fabric, ("d0", "d1", "a device without a rank")) == found
    roomy = Fabric(name="unknown", devices=tuple(Device(name=f"d{k}") for k in range(2)))
    assert check_memory(p, worst_order_memory(p), roomy, ("d0", "d1")) == []


def test_a_program_too_large_for_clocks_gets_a_bound_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    t = Training(training_layout(data=2))
    p = inline(t.program, t.programs).program
    exact = worst_order_memory(p)
    monkeypatch.setattr("meshwright.check.program.order.MAX_CLOCK_ENTRIES", 0)
    bound = worst_order_memory(p)
    assert not any(bound.exact)
    assert all(x <= y for x, y in zip(exact.needed_bytes, bound.needed_bytes, strict=True)) and exact.needed_bytes != bound.needed_bytes
    tight = Fabric(name="tight", devices=tuple(Device(name=f"d{k}", memory_bytes=max(exact.needed_bytes)) for k in range(p.ranks)))
    assert {f.status for f in check_memory(p, bound, tight, [d.name for d in tight.devices])} == {"unknown"}


def test_questions_of_one_lane_against_others_compute_each_table_of_clocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_KEPT_CLOCK_ENTRIES", 0), ("BLOCK_LANES", 2)):
        monkeypatch.setattr(order, name, value)
    made: list[int] = []
    monkeypatch.setattr(order, "merge_clocks", lambda *a, merge=order.merge_clocks: (made.append(1), merge(*a)))
    t = Training(training_layout(data=2))
    o = order.Order(inline(t.program, t.programs).program)
    main, *others = np.flatnonzero(o.length).tolist()
    for other in others:
        for of, lane in ((main, other), (other, main)):
            o.last_ancestor(o.base[of] + np.arange(o.length[of]), lane)
    assert 2 < len(made) <= len(o.lanes_of_block)


def lanes_in_turns(ranks: int, lanes: int) -> Program:
    """Numbered as calls number them: one lane of every rank, then the next of every rank. First lanes send round a ring and wait for the others."""
    b = ProgramBuilder(ranks=ranks)
    of = [[b.lane(r) for r in range(ranks)] for _ in range(lanes)]
    rings = [b.channel(r, (r + 1) % ranks) for r in range(ranks)]
    for r in range(ranks):
        x, y = b.buffer(r, chunks=1, chunk_bytes=8), b.buffer(r, chunks=1, chunk_bytes=8)
        first = of[0][r].compute(b.op("F", writes=[(x, 0, 1)]))
        of[0][r].send(rings[r], x, 0)
        came = of[0][r].recv(rings[r - 1], y, 0)
        done = []
        for k in range(1, lanes):
            z = b.buffer(r, chunks=1, chunk_bytes=k)
            done.append(of[k][r].compute(b.op("F", reads=[(x, 0, 1)], writes=[(z, 0, 1)]), after=[first]))
            done.append(of[k][r].compute(b.op("F", reads=[(y, 0, 1), (z, 0, 1)]), after=[came]))
        b.dies_after(x, of[0][r].compute(b.op("F"), after=done))
    return b.build()


def test_a_sweep_over_all_ranks_computes_each_table_of_clocks_at_most_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    p = lanes_in_turns(4, 4)
    swept = swept_peaks(p, order.Order(p))
    for name, value in (("MAX_KEPT_CLOCK_ENTRIES", 0), ("BLOCK_LANES", 4)):
        monkeypatch.setattr(order, name, value)
    made: list[int] = []
    monkeypatch.setattr(order, "merge_clocks", lambda *a, merge=order.merge_clocks: (made.append(1), merge(*a)))
    o = order.Order(p)
    assert swept_peaks(p, o) == swept and min(swept) > 16
    assert len(o.lanes_of_block) == 4 and 2 < len(made) <= 2 * len(o.lanes_of_block)


def test_first_and_last_nodes_of_all_buffers_against_every_pair() -> None:
    t = Training(training_layout(data=2))
    o = order.Order(inline(t.program, t.programs).program)
    rng = np.random.default_rng(0)
    owner, node = rng.integers(0, 150, 300), rng.integers(0, o.n, 300)  # of the last owners some have no node
    for first in (True, False):
        found = worst._extremes(o, owner, node, 160, first=first)
        for k in range(160):
            mine = np.unique(node[owner == k])
            i, j = np.repeat(mine, len(mine)), np.tile(mine, len(mine))
            before = o.before(i, j).reshape(len(mine), len(mine))
            plain = mine[~before.any(axis=0 if first else 1)].tolist()
            assert found[k] == plain if len(plain) < 2 else len(found[k]) == 2 and set(found[k]) <= set(mine.tolist())
        assert {len(x) for x in found} == {0, 1, 2}


def test_orders_asked_for_a_buffer_grow_with_its_writers_not_with_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather's root has one buffer that a lane of every rank writes: 8,191 writers have 34 million pairs."""
    n, asked = 400, []
    b = ProgramBuilder(ranks=n, name="all to one")
    into = b.buffer(0, chunks=n, chunk_bytes=1)
    for r in range(1, n):
        mine = b.buffer(r, chunks=1, chunk_bytes=1)
        channel = b.channel(r, 0)
        b.lane(r).send(channel, mine, 0, 1)
        b.lane(0).recv(channel, into, r, 1)
    real = order.Order.before

    def before(self: order.Order, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        asked.append(len(x))
        return real(self, x, y)

    monkeypatch.setattr(order.Order, "before", before)
    assert worst_order_memory(b.build()).peak_bytes == (n, *[1] * (n - 1))
    assert sum(asked) <= 10 * n


def test_what_two_lanes_read_last_is_dead_when_both_are_done() -> None:
    """A closure lets it live on, since neither reading follows the other. Of five buffers, each made after the readings of the one before, one is
    alive at a time; the sweep, which looks at the steps of the main lane only, says two at most."""
    b = ProgramBuilder(ranks=1, name="turns")
    main, readers = b.lane(0, unit=0), [b.lane(0), b.lane(0)]
    kept = [b.buffer(0, chunks=1, chunk_bytes=1, persistent=True, role="state") for _ in readers]
    done: list[StepRef] = []
    for _ in range(5):
        made = b.buffer(0, chunks=1, chunk_bytes=100)
        ref = main.compute(b.op("F", reads=[], writes=[(made, 0, 1)]), after=done)
        done = [lane.copy((made, 0), (to, 0), 1, after=[ref]) for lane, to in zip(readers, kept, strict=True)]
        for step in done:
            b.dies_after(made, step)
    found = worst_order_memory(b.build())
    assert found.peak_bytes == (202,) and found.exact == (False,)
