"""Measured messages on links: between the ends that were recorded, on every link of the way, whatever the order of the spans."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from meshwright.io.fabric.name import load_fabric
from meshwright.program.builder import ProgramBuilder
from meshwright.run.recording.link_times import with_link_times
from meshwright.simulate import simulate_program

SIZE = 200_000
PAIRS = ((0, 2), (1, 3), (2, 1))


@pytest.fixture
def measured():
    """Three channels over two islands, two messages each in each of three iterations; a "measurement" is the simulation without its links."""
    fabric = load_fabric("two-islands")
    b = ProgramBuilder(ranks=4, name="exchange")
    for src, dst in PAIRS:
        out, into = (b.buffer(r, chunks=2, chunk_bytes=SIZE, role="activation") for r in (src, dst))
        channel = b.channel(src, dst)
        sending, receiving = b.lane(src, repeat=3), b.lane(dst, repeat=3)
        for chunk in (0, 1):
            sending.send(channel, out, chunk)
            receiving.recv(channel, into, chunk)
    program, devices = b.build(), [d.name for d in fabric.devices]
    simulated = simulate_program(program, fabric, devices, transfers=True)
    spans = simulated.spans
    shuffled = np.random.default_rng(0).permutation(len(spans))
    columns = {k: getattr(spans, k)[shuffled] for k in ("rank", "lane", "step", "iteration", "start_s", "end_s")}
    bare = replace(simulated, origin="measured", spans=replace(spans, **columns, name=(), phase=()), transfers=None, link_busy_s={})
    return program, fabric, devices, simulated, bare


def expected(program, fabric, timeline):
    """(link, sending step, iteration) -> (start, end), message by message; steps of a lane send and receive in order."""
    columns = (getattr(timeline.spans, k).tolist() for k in ("step", "iteration", "start_s", "end_s"))
    at = {(s, i): (a, b) for s, i, a, b in zip(*columns, strict=True)}
    found = {}
    for number, (src, dst) in enumerate(PAIRS):
        sends, receives = ([s for s, lane in enumerate(program.lane_of_step().tolist()) if lane == 2 * number + side] for side in (0, 1))
        for a, b in zip(sends, receives, strict=True):
            for i in range(3):
                for k in fabric.route(src, dst):
                    found[f"{fabric.links[k].src}->{fabric.links[k].dst}", a, i] = at[a, i][0], at[b, i][1]
    return found


def test_a_message_is_on_its_route_from_its_sending_to_its_arrival(measured):
    program, fabric, devices, _, bare = measured
    t = with_link_times(bare, program, fabric, devices).transfers
    rows = zip(t.link.tolist(), t.step.tolist(), t.iteration.tolist(), t.start_s.tolist(), t.end_s.tolist(), strict=True)
    assert {(t.links[k], s, i): (a, b) for k, s, i, a, b in rows} == expected(program, fabric, bare)
    assert set(t.size_bytes.tolist()) == {SIZE} and (np.diff(t.link) >= 0).all()


def test_links_are_busy_for_at_least_what_the_simulator_says(measured):
    program, fabric, devices, simulated, bare = measured
    found = with_link_times(bare, program, fabric, devices)
    assert set(found.link_busy_s) == {k for k, v in simulated.link_busy_s.items() if v > 0}
    for link, busy_s in found.link_busy_s.items():
        assert simulated.link_busy_s[link] * (1 - 1e-6) <= busy_s <= bare.makespan_s * (1 + 1e-6)
    by_link = defaultdict(list)
    for k, a, b in zip(found.transfers.link.tolist(), found.transfers.start_s.tolist(), found.transfers.end_s.tolist(), strict=True):
        by_link[found.transfers.links[k]].append((a, b))
    for link, intervals in by_link.items():  # the union, by sampling
        at = np.linspace(0, bare.makespan_s, 20_001)
        covered = np.any([(at >= a) & (at < b) for a, b in intervals], axis=0).mean() * bare.makespan_s
        assert found.link_busy_s[link] == pytest.approx(covered, abs=2e-3 * bare.makespan_s)


def test_a_message_with_one_end_recorded_is_left_out(measured):
    program, fabric, devices, _, bare = measured
    spans = bare.spans
    keep = ~((spans.step == spans.step[0]) & (spans.iteration == spans.iteration[0]))
    fewer = replace(bare, spans=replace(spans, **{k: getattr(spans, k)[keep] for k in ("rank", "lane", "step", "iteration", "start_s", "end_s")}))
    every, less = (with_link_times(x, program, fabric, devices).transfers for x in (bare, fewer))
    hops = {len(fabric.route(src, dst)) for src, dst in PAIRS}
    assert len(every) - len(less) in hops


def test_nothing_recorded_is_nothing_moved(measured):
    program, fabric, devices, _, bare = measured
    none = np.zeros(0, np.int32)
    empty = replace(bare.spans, rank=none, lane=none, step=none, iteration=none, start_s=np.zeros(0), end_s=np.zeros(0))
    found = with_link_times(replace(bare, spans=empty), program, fabric, devices)
    assert len(found.transfers) == 0 and found.link_busy_s == {}
