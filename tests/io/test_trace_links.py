"""Tracks of links: the simulated transfers, by link, in both formats; how much of a rate they use."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest

from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.io.trace.write import trace_bytes
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Program
from meshwright.simulate import simulate_program
from meshwright.timeline import Timeline


def crossing() -> tuple[Program, Fabric, Timeline]:
    """Both devices of an island send 1 MB to the other island at once: they share the trunk."""
    fabric = load_fabric("two-islands")
    b = ProgramBuilder(ranks=4, name="crossing")
    for src, dst in ((0, 2), (1, 3)):
        out, into = (b.buffer(r, chunks=1, chunk_bytes=1_000_000, role="activation") for r in (src, dst))
        channel = b.channel(src, dst)
        b.lane(src).send(channel, out, 0)
        b.lane(dst).recv(channel, into, 0)
    program = b.build()
    devices = [d.name for d in fabric.devices]
    return program, fabric, simulate_program(program, fabric, devices, transfers=True)


def test_a_shared_trunk_shows_both_messages_beside_each_other_and_full_use() -> None:
    program, _, timeline = crossing()
    events = defaultdict(list)
    for event in json.loads(trace_bytes("x.json", program, [timeline]))["traceEvents"]:
        events[event["ph"]].append(event)
    threads = {e["tid"]: e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"}
    assert {e["args"]["name"] for e in events["M"] if e["name"] == "process_name"} >= {"links · predicted"}
    trunk = [e for e in events["X"] if threads[e["tid"]].startswith("island0/switch->island1/switch")]
    assert {threads[e["tid"]].rpartition(" (")[2] for e in trunk} == {threads[trunk[0]["tid"]], "also under way, 1)"}
    assert [e["name"] for e in trunk] == ["message, 1 MB"] * 2
    assert {e["args"]["step"] for e in trunk} == {0, 2}
    use = [(e["ts"], e["args"]["percent"]) for e in events["C"] if e["name"] == "use of island0/switch->island1/switch"]
    assert [value for _, value in use] == [pytest.approx(100, rel=1e-3), 0]
    first_hop = [e["args"]["percent"] for e in events["C"] if e["name"] == "use of island0/cpu0->island0/switch"]
    assert first_hop == [pytest.approx(10, rel=1e-3), 0]  # half of 25 MB/s on a link of 125
    assert len(events["s"]) == 2


def test_use_integrates_to_the_bytes() -> None:
    program, fabric, timeline = crossing()
    t = timeline.transfers
    assert t is not None
    events = [e for e in json.loads(trace_bytes("x.json", program, [timeline]))["traceEvents"] if e["ph"] == "C" and e["name"].startswith("use of ")]
    by_link = defaultdict(list)
    for e in events:
        by_link[e["name"].removeprefix("use of ")].append((e["ts"] * 1e-6, e["args"]["percent"] / 100))
    sent = np.bincount(t.link, weights=t.size_bytes, minlength=len(t.links))
    for link, samples in by_link.items():
        area = sum((b - a) * share for (a, share), (b, _) in pairwise(samples))
        number = t.links.index(link)
        assert area * fabric.links[number].rate_Bps == pytest.approx(sent[number], rel=1e-4)


@pytest.mark.skipif(find_spec("perfetto") is None, reason="the package perfetto is not installed")
def test_perfetto_reads_link_tracks_and_counters_of_use() -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    program, _, timeline = crossing()
    trace = Trace()
    trace.ParseFromString(trace_bytes("x.pftrace", program, [timeline]))
    counters = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.track_descriptor.HasField("counter")}
    assert {c.counter.unit_name for c in counters.values() if c.name.startswith("use of")} == {"percent"}
    values = defaultdict(list)
    for p in trace.packet:
        if p.HasField("track_event") and p.track_event.HasField("double_counter_value"):
            values[counters[p.track_event.track_uuid].name].append(p.track_event.double_counter_value)
    assert values["use of island0/switch->island1/switch"] == [pytest.approx(100, rel=1e-3), 0]
    threads = {p.track_descriptor.thread.thread_name for p in trace.packet if p.track_descriptor.HasField("thread")}
    assert any(name.startswith("island0/switch->island1/switch · ") for name in threads)


def test_equal_simulations_give_equal_bytes() -> None:
    for name in ("x.json", "x.pftrace"):
        program, _, timeline = crossing()
        again = crossing()
        assert trace_bytes(name, program, [timeline]) == trace_bytes(name, again[0], [again[2]])
