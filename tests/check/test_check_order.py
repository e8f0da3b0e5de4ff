"""Happens-before by clocks, by search and by a graph library; messages and addresses."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from check_random_programs import random_program

from meshwright.check.program import order as order_module
from meshwright.check.program.deadlock import find_cycle
from meshwright.check.program.order import Addresses, Order, messages
from meshwright.errors import TimeLimit
from meshwright.program.builder import ProgramBuilder


def pairs_and_truth(order: Order) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(order.n))
    graph.add_edges_from((v - 1, v) for v in range(order.n) if order.position[v] > 0)
    graph.add_edges_from(zip(order.cross_src.tolist(), order.cross_dst.tolist(), strict=True))
    below = {v: networkx.descendants(graph, v) for v in graph}
    a, b = (x.ravel() for x in np.meshgrid(np.arange(order.n), np.arange(order.n)))
    return a, b, np.array([y in below[x] for x, y in zip(a.tolist(), b.tolist(), strict=True)], dtype=bool)


def test_before_is_reachability_by_clocks_and_by_search(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(120):
        p = random_program(seed, max_messages=12)
        if find_cycle(p):
            continue
        order = Order(p, iterations=3)
        a, b, truth = pairs_and_truth(order)
        np.testing.assert_array_equal(order.before(a, b), truth)
        for limit in ("MAX_CLOCK_ENTRIES", "MAX_TABLE_ENTRIES", "MAX_KEPT_CLOCK_ENTRIES"):  # by search, by search, one table at a time
            monkeypatch.setattr(order_module, limit, -1)
            np.testing.assert_array_equal(Order(p, iterations=3).before(a, b), truth)
            monkeypatch.undo()
        monkeypatch.setattr(order_module, "BLOCK_LANES", 1)  # every lane a block of its own
        monkeypatch.setattr(order_module, "MAX_KEPT_CLOCK_ENTRIES", seed % 2 - 1)  # of some programs all tables are kept
        np.testing.assert_array_equal(Order(p, iterations=3).before(a, b), truth)
        monkeypatch.undo()
        for lane in range(len(p.lanes)):
            nodes = np.arange(order.n)
            inside = truth & (order.lane[a] == lane)
            want = np.full(order.n, -1)
            np.maximum.at(want, b[inside], order.position[a[inside]])
            np.testing.assert_array_equal(order.last_ancestor(nodes, lane), want)


def test_what_takes_too_long_is_a_time_limit_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    p = next(q for q in map(random_program, range(99)) if not find_cycle(q) and len(messages(q).send) > 3)
    monkeypatch.setattr(order_module, "MAX_CLOCK_ENTRIES", -1)
    monkeypatch.setattr(order_module, "MAX_SEARCHED_JOINS", -1)
    order = Order(p)
    assert order.before(order.cross_src, order.cross_dst).all()  # ends of one edge take no search
    every = np.arange(order.n)
    with pytest.raises(TimeLimit, match="too large to decide"):
        order.before(np.repeat(every, order.n), np.tile(every, order.n))
    with pytest.raises(TimeLimit, match="too large for exact clocks"):
        order.last_ancestor(np.arange(1), 0)


def test_channel_sets_match_one_message_of_each_channel() -> None:
    b = ProgramBuilder(ranks=3, switches=1)
    x = [b.buffer(r, chunks=1, chunk_bytes=4) for r in range(3)]
    hub = b.buffer(3, chunks=1, chunk_bytes=4)
    up, down = [b.channel(r, 3) for r in range(3)], [b.channel(3, r) for r in range(3)]
    gather, scatter = b.channel_set(up), b.channel_set(down)
    for r in range(3):
        lane = b.lane(r)
        lane.send(up[r], x[r], 0)
        lane.recv(down[r], x[r], 0)
    lane = b.lane(3)
    lane.transfer(recv=gather, in_set=True, add=True, store=True, dst=(hub, 0))
    lane.transfer(send=scatter, out_set=True, src=(hub, 0))
    m = messages(b.build())
    assert m.channel.tolist() == [0, 1, 2, 3, 4, 5]
    assert m.send.tolist() == [0, 2, 4, 7, 7, 7] and m.recv.tolist() == [6, 6, 6, 1, 3, 5]


def test_addresses_follow_aliases_and_slots() -> None:
    b = ProgramBuilder(ranks=1)
    root = b.buffer(0, chunks=4, chunk_bytes=8, window=2)
    half = b.buffer(0, chunks=2, chunk_bytes=8, alias_of=root, alias_offset_bytes=16, window=2)
    tail = b.buffer(0, chunks=1, chunk_bytes=4, alias_of=half, alias_offset_bytes=8, window=2)
    where = Addresses(b.build())
    buffers = np.array([root, half, tail])
    zero = np.zeros(3, np.int64)
    at, lo, hi = where.span(buffers, zero, zero + 1, zero + 3)  # turn 3 lies in slot 1
    assert at.tolist() == [root] * 3
    assert lo.tolist() == [32, 48, 56] and hi.tolist() == [40, 56, 60]
    assert where.chunk_at(half, 56) == 1
