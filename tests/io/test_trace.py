"""Traces: what Perfetto would show is what the timelines say, in both formats."""

from __future__ import annotations

import gzip
import itertools
import json
import struct
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.io.trace.read import read_trace
from meshwright.io.trace.write import trace_bytes, write_trace
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Program, Role, Unit
from meshwright.timeline import Spans, Timeline


def exchange(messages: int = 3, repeat: int = 1) -> Program:
    """Rank 0 computes and sends, rank 1 receives and computes; one more channel in the other direction."""
    b = ProgramBuilder(ranks=2, name="exchange")
    x = [b.buffer(rank, chunks=messages, chunk_bytes=8, role="activation", name=f"act:x:{rank}") for rank in range(2)]
    there, back = b.channel(0, 1, depth=2), b.channel(1, 0)
    compute = [b.lane(rank, unit=Unit.COMPUTE, role=Role.COMPUTE, repeat=repeat) for rank in range(2)]
    comm = [b.lane(rank, repeat=repeat) for rank in range(2)]
    for m in range(messages):
        done = compute[0].compute(b.op("F", graph="s0", microbatch=m, writes=[(x[0], m, 1)]))
        comm[0].send(there, x[0], m, after=[done])
        got = comm[1].recv(there, x[1], m)
        compute[1].compute(b.op("F", graph="s1", microbatch=m, reads=[(x[1], m, 1)]), after=[got])
    comm[1].send(back, x[1], 0)
    comm[0].recv(back, x[0], 0)
    return b.build()


def timeline(program: Program, origin: Any, *, repeat: int = 1, offset_s: float = 0.0, seed: int = 0, overlap: bool = False) -> Timeline:
    """Every step once per iteration, one after the other in its lane, with durations from `seed`."""
    rng = np.random.default_rng(seed)
    rows = []
    for lane in range(len(program.lanes)):
        at = offset_s
        for iteration in range(repeat):
            for step in range(int(program.lanes.start[lane]), int(program.lanes.end[lane])):
                length = float(rng.integers(0, 5)) * 1e-3
                rows.append((int(program.lanes.actor[lane]), lane, step, iteration, at, at + length * (3 if overlap else 1)))
                at += length
    columns = list(zip(*rows, strict=True))
    spans = Spans(
        rank=np.array(columns[0], np.int32), lane=np.array(columns[1], np.int32), step=np.array(columns[2], np.int32),
        iteration=np.array(columns[3], np.int32), start_s=np.array(columns[4]), end_s=np.array(columns[5]), phase=["forward"] * len(rows),
    )  # fmt: skip
    return Timeline(
        origin=origin, run_fabric="laptop:2", spans=spans, makespan_s=float(spans.end_s.max() - offset_s),
        link_busy_s={"a->b": 0.002, "b->a": 0.001}, critical_path=[(0, 0), (1, 0)],
        counters={"memory of rank 1": (np.array([0.0, 0.001]), np.array([0.0, 64.0])), "queue": (np.array([0.0]), np.array([2.0]))},
    )  # fmt: skip


def chrome(program: Program, timelines: list[Timeline]) -> dict[str, list[dict[str, Any]]]:
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(trace_bytes("t.json", program, timelines, title="é"))["traceEvents"]:
        events[event["ph"]].append(event)
    return events


def named(events: dict[str, list[dict[str, Any]]], what: str) -> dict[int, str]:
    return {e["pid" if what == "process_name" else "tid"]: e["args"]["name"] for e in events["M"] if e["name"] == what}


def test_chrome_shows_every_span_once_where_it_belongs() -> None:
    program = exchange()
    both = [timeline(program, "simulated"), timeline(program, "measured", offset_s=100.0, seed=1)]
    events = chrome(program, both)
    processes, threads = named(events, "process_name"), named(events, "thread_name")
    assert [p for p in processes.values() if p.startswith("rank")] == [
        "rank 0 · predicted", "rank 0 · measured", "rank 1 · predicted", "rank 1 · measured",
    ]  # fmt: skip
    shown = {
        (processes[e["pid"]], threads[e["tid"]].split()[1], e["args"]["step"], round(e["ts"]), round(e["dur"]))
        for e in events["X"] if processes[e["pid"]].startswith("rank")
    }  # fmt: skip
    expected = set()
    for label, t in zip(("predicted", "measured"), both, strict=True):
        s = t.spans
        for i in range(len(s)):
            start, length = s.start_s[i] - s.start_s.min(), s.end_s[i] - s.start_s[i]
            expected.add((f"rank {s.rank[i]} · {label}", str(s.lane[i]), int(s.step[i]), round(start * 1e6), round(length * 1e6)))
    assert shown == expected
    assert {e["name"] for e in events["X"]} >= {"F s0 micro-batch 0", "F s1 micro-batch 2"}
    assert {e["cat"] for e in events["X"]} == {"forward", "critical path", "link"}
    assert "lane 2 comm from rank 1 to rank 1" in threads.values()
    assert sum(processes[e["pid"]].startswith("links") for e in events["X"]) == 4


def test_memory_counters_stand_with_their_rank() -> None:
    program = exchange()
    events = chrome(program, [timeline(program, "simulated")])
    processes = named(events, "process_name")
    memory = [(processes[e["pid"]], e["name"], e["ts"], e["args"]) for e in events["C"]]
    assert memory == [
        ("rank 1 · predicted", "memory", 0.0, {"bytes": 0}), ("rank 1 · predicted", "memory", 1000.0, {"bytes": 64}),
        ("counters · predicted", "queue", 0.0, {"value": 2}),
    ]  # fmt: skip


@pytest.mark.parametrize("repeat", [1, 3])
def test_flows_join_matching_messages(repeat: int) -> None:
    """Oracle: replay both ends of every channel as queues."""
    program = exchange(repeat=repeat)
    t = timeline(program, "simulated", repeat=repeat)
    expected = set()
    for channel in range(len(program.channels)):
        sends = [(i, s.index) for i in range(repeat) for s in program.iter_steps() if s.chan_out == channel]
        receives = [(i, s.index) for i in range(repeat) for s in program.iter_steps() if s.chan_in == channel]
        expected |= set(zip(sends, receives, strict=True))
    events = chrome(program, [t])
    slices = [e for e in events["X"] if "args" in e and e["cat"] != "critical path"]

    def enclosing(event: dict[str, Any]) -> tuple[int, int]:
        found = [x for x in slices if x["tid"] == event["tid"] and x["ts"] <= event["ts"] <= x["ts"] + x["dur"]]
        exact = [x for x in found if x["ts"] < event["ts"] < x["ts"] + x["dur"]] or found
        return exact[0]["args"]["iteration"], exact[0]["args"]["step"]

    start, finish = {e["id"]: e for e in events["s"]}, {e["id"]: e for e in events["f"]}
    assert start.keys() == finish.keys()
    assert len(start) == len(expected)
    joined = {(enclosing(start[i]), enclosing(finish[i])) for i in start}
    lengths = {(x["args"]["iteration"], x["args"]["step"]): x["dur"] for x in slices}
    clear = {pair for pair in expected if lengths[pair[0]] > 0 and lengths[pair[1]] > 0}  # an instant has no inside
    assert clear <= joined


def test_slices_of_a_track_never_overlap() -> None:
    program = exchange(messages=6)
    events = chrome(program, [timeline(program, "measured", overlap=True)])
    tracks = defaultdict(list)
    for e in events["X"]:
        tracks[e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for intervals in tracks.values():
        intervals.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(intervals))
    assert any("also under way" in name for name in named(events, "thread_name").values())


# ---- Perfetto's own format: decoded here from the wire, field by field -----------------------------------------------------
def fields(data: bytes) -> dict[int, list[Any]]:
    """One protobuf message: field number -> values (int, or bytes for blocks)."""
    out: dict[int, list[Any]] = defaultdict(list)
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            out[key >> 3].append(varint())
        elif kind == 1:
            out[key >> 3].append(int.from_bytes(data[at : at + 8], "little"))
            at += 8
        else:
            assert kind == 2
            length = varint()
            assert at + length <= len(data)
            out[key >> 3].append(data[at : at + length])
            at += length
    return out


def perfetto_slices(data: bytes) -> tuple[set[tuple[str, str, str, int, int]], set[tuple[Any, Any]], list[tuple[str, int, float]]]:
    """(process, track, slice name, start ns, end ns), flow pairs of (track, start), and counter samples."""
    names: dict[int, str] = {}
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    counters: dict[int, str] = {}
    opened: dict[int, tuple[str, int]] = {}
    slices: set[tuple[str, str, str, int, int]] = set()
    leaving: dict[int, Any] = {}
    arriving: dict[int, Any] = {}
    samples: list[tuple[str, int, float]] = []
    for raw in fields(data)[1]:
        packet = fields(raw)
        assert packet[10] == [1]
        for interned in packet[12]:
            for entry in fields(interned)[2]:
                event_name = fields(entry)
                names[event_name[1][0]] = event_name[2][0].decode()
        for descriptor in packet[60]:
            d = fields(descriptor)
            if d[3]:
                processes[d[1][0]] = fields(d[3][0])[6][0].decode()
            elif d[4]:
                tracks[d[1][0]] = (processes[d[5][0]], fields(d[4][0])[5][0].decode())
            else:
                counters[d[1][0]] = processes[d[5][0]] + "/" + d[2][0].decode()
        for event in packet[11]:
            e, time_ns = fields(event), packet[8][0]
            uuid = e[11][0]
            if e[9] == [1]:
                assert uuid not in opened, "nested"
                opened[uuid] = (names[e[10][0]], time_ns)
                leaving.update(dict.fromkeys(e[47], (tracks[uuid], time_ns)))
                arriving.update(dict.fromkeys(e[48], (tracks[uuid], time_ns)))
            elif e[9] == [2]:
                name, start = opened.pop(uuid)
                slices.add((*tracks[uuid], name, start, time_ns))
            else:
                samples.append((counters[uuid], time_ns, e[30][0] if e[30] else struct.unpack("<d", e[44][0].to_bytes(8, "little"))[0]))
    assert not opened
    assert leaving.keys() == arriving.keys()
    return slices, {(leaving[f], arriving[f]) for f in leaving}, samples


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 2))
def test_both_formats_say_the_same(seed: int, overlap: bool, repeat: int) -> None:
    program = exchange(repeat=repeat)
    timelines = [
        timeline(program, "simulated", seed=seed, repeat=repeat), timeline(program, "measured", seed=seed + 1, overlap=overlap, repeat=repeat),
    ]  # fmt: skip
    events = chrome(program, timelines)
    processes, threads = named(events, "process_name"), named(events, "thread_name")
    slices, flows, samples = perfetto_slices(trace_bytes("t.pftrace", program, timelines))
    assert slices == {
        (processes[e["pid"]], threads[e["tid"]], e["name"], round(e["ts"] * 1e3), round(e["ts"] * 1e3 + e["dur"] * 1e3)) for e in events["X"]
    }
    assert len(flows) <= len(events["s"])  # two instants at one place look alike
    assert len(samples) == len(events["C"])


@pytest.mark.skipif(find_spec("perfetto") is None, reason="the package perfetto is not installed")
def test_perfetto_reads_its_own_format() -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    program = exchange()
    t = timeline(program, "simulated")
    trace = Trace()
    trace.ParseFromString(trace_bytes("t.pftrace", program, [t]))
    begins = [p.track_event for p in trace.packet if p.HasField("track_event") and p.track_event.type == 1]
    assert len(begins) == len(t.spans) + 2 + 2  # the critical path's two, and one per link
    assert sum(len(e.flow_ids) for e in begins) == 4
    assert [p.track_descriptor.counter.unit for p in trace.packet if p.track_descriptor.HasField("counter")] == [3, 0]
    assert {a.name: a.int_value for a in begins[0].debug_annotations} == {"step": int(t.spans.step[0]), "iteration": 0}


def test_files(tmp_path: Path) -> None:
    program = exchange()
    t = timeline(program, "simulated")
    for name in ("a.json", "a.json.gz", "a.pftrace", "a.perfetto-trace.gz"):
        write_trace(tmp_path / name, program, [t], title="x")
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()
    assert (tmp_path / "a.pftrace").read_bytes()[:1] == b"\x0a"
    with pytest.raises(UsageError, match=r"a trace ends in \.json, \.pftrace"):
        write_trace(tmp_path / "a.txt", program, [t])
    assert not (tmp_path / "a.txt").exists()


def test_a_timeline_of_another_program_is_refused() -> None:
    with pytest.raises(UsageError, match=r"predicted: a timeline has step 13, the program has 6"):
        trace_bytes("t.json", exchange(messages=1), [timeline(exchange(messages=3), "simulated")])


def test_names_outside_the_program_and_odd_text() -> None:
    program = exchange()
    spans = Spans(
        rank=np.array([0, 0], np.int32), lane=np.array([-1, -1], np.int32), step=np.array([-1, -1], np.int32), iteration=np.zeros(2, np.int32),
        start_s=np.array([0.0, 1.0]), end_s=np.array([1.0, 2.0]), name=['load "data"\n', ""],
    )  # fmt: skip
    events = chrome(program, [Timeline(origin="measured", run_fabric="x", spans=spans, makespan_s=2.0)])
    assert [e["name"] for e in events["X"]] == ['load "data"\n', "outside the program"]


def test_the_critical_path_is_one_track_without_gaps_in_order() -> None:
    program = exchange()
    t = replace(timeline(program, "simulated", seed=3), critical_path=[(0, 0), (3, 0), (4, 0), (99, 0)])
    events = chrome(program, [t])
    shown = [e for e in events["X"] if e["cat"] == "critical path"]
    assert [e["args"]["step"] for e in shown] == [0, 3, 4]
    assert len({e["tid"] for e in shown}) == 1
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(shown))


def test_a_recording_takes_its_phases_from_the_prediction() -> None:
    program = exchange()
    measured = timeline(program, "measured")
    measured = replace(measured, spans=replace(measured.spans, phase=()), link_busy_s={}, critical_path=[])
    assert {e["cat"] for e in chrome(program, [measured])["X"]} == {"step"}
    both = chrome(program, [timeline(program, "simulated"), measured])
    processes = named(both, "process_name")
    assert {e["cat"] for e in both["X"] if "measured" in processes[e["pid"]]} == {"forward"}


def test_no_spans_at_all() -> None:
    none = np.zeros(0, np.int32)
    spans = Spans(rank=none, lane=none, step=none, iteration=none, start_s=none.astype(float), end_s=none.astype(float))
    empty = Timeline(origin="simulated", run_fabric="x", spans=spans, makespan_s=0.0)
    assert chrome(exchange(), [empty])["X"] == []
    assert perfetto_slices(trace_bytes("t.pftrace", exchange(), [empty]))[0] == set()


@pytest.mark.parametrize("ending", [".json", ".json.gz", ".pftrace", ".perfetto-trace.gz"])
@pytest.mark.parametrize("overlap", [False, True])
def test_our_own_traces_are_read_back(tmp_path, ending, overlap):
    program = exchange(repeat=2)
    timelines = [timeline(program, "simulated", repeat=2, overlap=overlap), timeline(program, "measured", repeat=2, seed=1)]
    write_trace(tmp_path / f"t{ending}", program, timelines)
    found = read_trace(tmp_path / f"t{ending}")
    shown = chrome(program, timelines)
    said = sorted(
        (round(e["ts"] * 1000), round(e["dur"] * 1000), e["name"], e["cat"], e.get("args", {}).get("step", -1)) for e in shown["X"]
    )  # fmt: skip
    columns = (found.start_ns, found.duration_ns, found.name, found.category, found.step)
    assert said == sorted((s, d, found.names[n], found.categories[c], k) for s, d, n, c, k in zip(*(x.tolist() for x in columns), strict=True))
    (kind,) = found.flows
    leaves, enters = found.flows[kind]
    assert len(leaves) == len(shown["s"]) and not found.warnings
    assert {t.process for t in found.tracks if t.process} >= {"rank 0 · predicted", "rank 1 · measured"}
    assert all(found.track[a] != found.track[b] for a, b in zip(leaves, enters, strict=True))


def test_a_perfetto_trace_cut_anywhere_gives_what_stands_before(tmp_path):
    program = exchange()
    data = trace_bytes("t.pftrace", program, [timeline(program, "measured")])
    path, whole = tmp_path / "t.pftrace", 0
    for cut in range(len(data), 0, -37):
        path.write_bytes(data[:cut])
        try:
            found = read_trace(path)
        except FormatError:
            assert cut < len(data) / 2, "before the first slice"
            continue
        whole = whole or len(found)
        assert len(found) <= whole
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(FormatError):
        read_trace(path)
