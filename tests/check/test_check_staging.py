"""Staging in any order against the definition, receive by receive and step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check.program import staging
from meshwright.check.program.order import Order
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Program


def by_definition(p: Program, order: Order) -> list[int]:
    s, out = p.steps, [0] * (p.ranks + p.switches)
    touched = [(i, int(s.src_buffer[i]), int(s.src_chunk[i]), int(s.count[i])) for i in range(len(s)) if s.src_buffer[i] >= 0]
    touched += [(i, int(s.dst_buffer[i]), int(s.dst_chunk[i]), int(s.count[i])) for i in range(len(s)) if s.dst_buffer[i] >= 0]

    def before(a: int, b: int) -> bool:
        return bool(order.before(order.node(np.array([a]), 0), order.node(np.array([b]), 0))[0])

    for channel in range(len(p.channels)):
        receives = [i for i in range(len(s)) if s.chan_in[i] == channel]
        depth, largest = int(p.channels.depth[channel]), 0
        for k, v in enumerate(receives):
            credit = receives[k - depth] if k >= depth else -1
            low = int(s.dst_chunk[v])
            users = {i for i, b, c, n in touched if b == s.dst_buffer[v] and c < low + s.count[v] and low < c + n} - {v, credit}
            if any(before(u, v) and not (credit >= 0 and before(u, credit)) for u in users):
                largest = max(largest, int(p.message_bytes()[v]))
        out[int(p.channels.dst[channel])] += largest * depth
    return out


message = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 6), st.integers(0, 6), st.integers(1, 3))


@pytest.mark.parametrize("pairs", [staging.CHUNK_PAIRS, 3])
@settings(max_examples=120, deadline=None)
@given(messages=st.lists(message, min_size=1, max_size=24), depth=st.integers(1, 3), lanes=st.integers(1, 2))
def test_staged_messages_are_those_of_the_definition(pairs, messages, depth, lanes):
    b = ProgramBuilder(3, name="messages")
    held = [b.buffer(r, chunks=9, chunk_bytes=8) for r in range(3)]
    own = [[b.lane(r) for _ in range(lanes)] for r in range(3)]
    channels: dict[tuple[int, int], int] = {}
    for src, hop, first, to, count in messages:
        dst = (src + hop) % 3
        if (src, dst) not in channels:
            channels[src, dst] = b.channel(src, dst, depth=depth)
        own[src][0].send(channels[src, dst], held[src], first, count)
        own[dst][-1].recv(channels[src, dst], held[dst], to, count)
    p = b.build(validate=False)
    order = Order(p)
    before, staging.CHUNK_PAIRS = staging.CHUNK_PAIRS, pairs
    try:
        found = staging.staging_bytes(p, order).tolist()
    finally:
        staging.CHUNK_PAIRS = before
    assert found == by_definition(p, order)
