"""Reading Chrome traces: every complete event of a damaged file, nesting and arrows against brute force, and no exception for any bytes."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.io.trace import rows as trace_rows
from meshwright.io.trace import scan as trace_scan
from meshwright.io.trace.read import read_trace
from meshwright.kernels.nesting import exclusive_segments


def event(name, ts, dur, tid=1, **more):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, **more}


def read(tmp_path, text, name="trace.json"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path)


def document(events, **more):
    return json.dumps({**more, "traceEvents": events}, indent=1)


def kinds(trace):
    return {w.kind: w.count for w in trace.warnings}


def names(trace):
    return sorted(trace.name_of(i) for i in range(len(trace)))


def test_what_kineto_says_becomes_columns(tmp_path):
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 7, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 1, "args": {"name": "main"}},
        event("outer", 1000.5, 100, args={"External id": 4, "Sequence number": 9, "Fwd thread id": 0}),
        event("inner", 1010.25, 10.125, args={"external id": 5, "correlation": 77, "device": 0, "stream": 7}),
        event("gloo:all_reduce", 1030, 5, args={"Collective name": "allreduce", "Process Group Name": "0", "Seq": 3, "In msg nelems": 12,
              "dtype": "Float", "Group size": 2, "Rank": 1, "Process Group Ranks": "[0, 1]"}),
        event("back", 1200, 10, tid=2),
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 7, "tid": 1, "ts": 1010.25},
        {"ph": "f", "bp": "e", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 7, "tid": 2, "ts": 1200},
        {"ph": "i", "name": "mark", "pid": 7, "tid": 1, "ts": 1},
    ]  # fmt: skip
    t = read(tmp_path, document(events, distributedInfo={"backend": "gloo", "rank": 1, "world_size": 2}, baseTimeNanoseconds=5))
    assert [t.name_of(i) for i in range(4)] == ["outer", "inner", "gloo:all_reduce", "back"]
    assert t.start_ns.tolist() == [0, 9750, 29500, 199500] and t.duration_ns.tolist() == [100_000, 10_125, 5_000, 10_000]
    assert t.parent.tolist() == [-1, 0, 0, -1] and t.track_start.tolist() == [0, 3, 4]
    assert (t.tracks[0].process, t.tracks[0].thread, t.tracks[0].labels) == ("python", "main", "CPU")
    assert t.external_id.tolist() == [4, 5, -1, -1] and t.sequence[0] == 9 and (t.correlation[1], t.device[1], t.stream[1]) == (77, 0, 7)
    c = t.collectives
    assert (c.slice.tolist(), c.operation, c.group, c.ranks, c.dtype) == ([2], ("allreduce",), ("0",), ("[0, 1]",), ("Float",))
    assert (c.sequence[0], c.in_elements[0], c.out_elements[0], c.group_size[0], c.rank[0]) == (3, 12, -1, 2, 1)
    leaves, enters = t.flows["fwdbwd"]
    assert (leaves.tolist(), enters.tolist()) == ([1], [3])
    assert (t.rank, t.world_size, t.base_time_ns, t.origin_ns, t.ignored, t.warnings) == (1, 2, 5, 1_000_500, {"i": 1}, ())


@pytest.mark.parametrize("form", ["list", "gzip", "open list", "bom"])
def test_other_forms_of_the_file(tmp_path, form):
    text = json.dumps([event("a", 1, 2), event("b", 5, 2)])
    plain = text.encode()
    data = {"list": plain, "gzip": gzip.compress(plain), "open list": plain.rstrip(b"]"), "bom": b"\xef\xbb\xbf" + plain}
    t = read(tmp_path, data[form])
    assert names(t) == ["a", "b"] and kinds(t) == ({"the file ends early": 1} if form == "open list" else {})


DAMAGE = {
    "control characters": ('"odd"', '"o\x01d\nd\x1f"', "o d d ", "not JSON, repaired"),
    "quotes": ('"odd"', '"an "odd" name"', 'an "odd" name', "not JSON, repaired"),
    "backslash": ('"odd"', '"C:\\user\\x.py"', "C:\\user\\x.py", "not JSON, repaired"),
    "nan": ('"dur": 1,', '"dur": 1, "q": nan,', "odd", "not JSON, repaired"),
    "args a list": ('"dur": 1,', '"dur": 1, "args": [1],', "odd", "arguments that are no object, ignored"),
    "name a number": ('"odd"', "17", "17", None),
    "name an object": ('"odd"', '{"x": [1]}', "{'x': [1]}", None),
    "html": ('"odd"', '"<script>alert(1)</script>"', "<script>alert(1)</script>", None),
    "negative tid": ('"tid": 1,', '"tid": -5,', "odd", None),
    "text tid": ('"tid": 1,', '"tid": "stream 7 ",', "odd", None),
    "negative ids": ('"dur": 1,', '"dur": 1, "args": {"External id": -7, "correlation": -1, "stream": -1},', "odd", None),
    "huge id": ('"dur": 1,', '"dur": 1, "args": {"External id": 99999999999999999999999},', "odd", None),
    "id a list": ('"dur": 1,', '"dur": 1, "args": {"External id": [1, 2], "Rank": {"a": 1}},', "odd", None),
    "text times": ('"ts": 20,', '"ts": "20",', "odd", None),
    "no duration": ('"dur": 1,', "", "odd", "slice without a duration, taken as 0"),
    "negative duration": ('"dur": 1,', '"dur": -4,', "odd", "negative duration, taken as 0"),
    "overlap": ('"dur": 1,', '"dur": 39,', "odd", "slices that overlap without nesting"),
    "half a pair": ('"odd"', '"\\ud83d\\ude00 \\ud800x"', "\U0001f600 \ufffdx", "not JSON, repaired"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_keeps_every_complete_event(tmp_path, what):
    old, new, shown, warned = DAMAGE[what]
    odd = {"ph": "X", "name": "odd", "cat": "cpu_op", "pid": 7, "tid": 1, "ts": 20, "dur": 1, "id": 3}
    text = document([event("first", 1, 50), odd, event("later", 60, 100), event("last", 200, 1)])
    start, end = text.index('"odd"') - 40, text.index('"odd"') + 120
    assert old in text[start:end]
    t = read(tmp_path, text[:start] + text[start:end].replace(old, new, 1) + text[end:])
    assert names(t) == sorted(["first", "last", "later", shown])
    assert kinds(t) == ({warned: 1} if warned else {})


def test_a_file_cut_anywhere_keeps_what_is_whole(tmp_path):
    text = document([event(f"e{i}", i * 10, 5, args={"External id": i}) for i in range(6)])
    begins = [text.index(f'"e{i}"') for i in range(6)]
    ends = [text.index("\n  }", text.index("External id", b)) + 4 for b in begins]
    for cut in range(text.index("[") + 1, len(text), 7):
        t = read(tmp_path, text[:cut])
        assert len(t) >= sum(cut >= end for end in ends)
        assert {"the file ends early"} <= set(kinds(t)) or cut > ends[-1]
    packed = gzip.compress(document([event(f"e{i}", i, 1) for i in range(4000)]).encode())
    t = read(tmp_path, packed[: len(packed) // 2])
    assert 1000 < len(t) < 4000 and kinds(t)["the file ends early"] == 1


def test_the_list_is_the_documents_own(tmp_path):
    inner = '{"a": {"traceEvents": [{"ph": "X", "name": "no", "ts": 1, "dur": 1}]}, "b": "traceEvents: [", "traceEvents": [%s]}'
    assert names(read(tmp_path, inner % json.dumps(event("e", 1, 1)))) == ["e"]
    quote_too_many = '{"a": "x" y", "traceEvents": [%s]}'
    assert names(read(tmp_path, quote_too_many % json.dumps(event("e", 1, 1)))) == ["e"]


def test_an_odd_quote_costs_nothing(tmp_path):
    t = read(tmp_path, document([event("first", 1, 5), event("odd", 20, 1), event("later", 60, 1), event("last", 200, 1)]).replace('"odd"', '"o"d"'))
    assert names(t) == ["first", "last", "later", 'o"d'] and kinds(t) == {"not JSON, repaired": 1, "the file ends early": 1}


def test_what_is_no_event_costs_none(tmp_path):
    """Lists between events, also nested ones with objects in them, do not end the events."""
    text = json.dumps([event("first", 1, 5), None, 17, "x", [], [[1, "x"], {"a": [2]}], event("odd", 20, 1), {}, event("last", 200, 1)])
    for size in (8 << 20, 5):
        monkey = pytest.MonkeyPatch()
        monkey.setattr(trace_scan, "CHUNK_BYTES", max(size, 16))
        t = read(tmp_path, text)
        monkey.undo()
        assert names(t) == ["first", "last", "odd"]


def test_a_time_that_cannot_be_one_does_not_move_the_others(tmp_path):
    times = [1e300, 1e18, -1e18, 5e9, 5e9 + 1, True]
    t = read(tmp_path, json.dumps([event(f"e{i}", at, 0.5) for i, at in enumerate(times)]))
    assert kinds(t) == {"time that no clock says, lost": 3, "slice without a time, lost": 1} and len(t) == 2
    at = {t.name_of(i): int(t.start_ns[i]) for i in range(len(t))}
    assert at["e4"] - at["e3"] == 1000 and t.origin_ns == 5_000_000_000_000


def test_a_string_left_open_costs_one_event(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_scan, "MAX_OBJECT_BYTES", 4096)
    monkeypatch.setattr(trace_scan, "CHUNK_BYTES", 1024)
    text = document([event(f"e{i}", i, 1) for i in range(300)]).replace('"e40"', '"e40')
    t = read(tmp_path, text)
    assert len(t) >= 299 and {f"e{i}" for i in range(300) if i != 40} <= set(names(t))


def test_pieces_of_any_size_give_the_same(tmp_path, monkeypatch):
    text = document([event(f"e{i % 7} é \" {{[", i, 1, args={"External id": i, "x": {"y": ["}"]}}) for i in range(200)])
    whole = read(tmp_path, text)
    for size in (16, 61, 999):
        monkeypatch.setattr(trace_scan, "CHUNK_BYTES", size)
        t = read(tmp_path, text)
        assert np.array_equal(t.start_ns, whole.start_ns) and np.array_equal(t.external_id, whole.external_id) and t.names == whole.names


def test_begin_and_end(tmp_path):
    rows = [("B", "a", 0), ("B", "b", 10), ("E", "b", 15), ("E", "a", 30), ("E", "stray", 40), ("B", "open", 50)]
    t = read(tmp_path, document([{"ph": ph, "name": n, "pid": 1, "tid": 1, "ts": ts} for ph, n, ts in rows]))
    assert [t.name_of(0), t.name_of(1)] == ["a", "b"] and t.parent.tolist() == [-1, 0]
    assert t.start_ns.tolist() == [0, 10000] and t.duration_ns.tolist() == [30000, 5000]
    assert kinds(t) == {"beginning without an end": 1, "end without a beginning": 1}


def test_ns_survive_large_times(tmp_path):
    t = read(tmp_path, '[{"ph":"X","name":"a","ts":4490932537781.263,"dur":52.379},{"ph":"X","name":"b","ts":4490932537781.264,"dur":52.378}]')
    assert t.start_ns.tolist() == [0, 1] and t.duration_ns.tolist() == [52379, 52378] and t.parent.tolist() == [-1, 0]


def test_not_a_trace(tmp_path):
    for text in ("", "hello", '{"a": 1}', "   ", "17", '"traceEvents": ['):
        with pytest.raises(FormatError, match="not a Chrome trace"):
            read(tmp_path, text)
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "missing.json")
    assert len(read(tmp_path, "[]")) == 0 and len(read(tmp_path, '{"traceEvents": []}')) == 0


def test_caps(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_rows, "MAX_EVENTS", 5)
    with pytest.raises(FormatError, match="more than 5 events"):
        read(tmp_path, json.dumps([event("a", i, 1) for i in range(6)]))
    monkeypatch.setattr(trace_rows, "MAX_EVENTS", 50)
    assert len(read(tmp_path, json.dumps([event("x" * 9000, i, 1) for i in range(6)])).names[0]) == trace_rows.MAX_NAME_CHARACTERS + 1
    monkeypatch.setattr(trace_rows, "MAX_NAMES_CHARACTERS", 100)
    with pytest.raises(FormatError, match="more than 100 characters"):
        read(tmp_path, json.dumps([event(f"a name that is long {i}", i, 1) for i in range(20)]))
    monkeypatch.setattr(trace_scan, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(FormatError, match="unpacks to more"):
        read(tmp_path, gzip.compress(json.dumps([event("a", i, 1) for i in range(20)]).encode()))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 25)), max_size=12))
def test_nesting_and_own_times_against_brute_force(tmp_path_factory, slices):
    path = tmp_path_factory.mktemp("nest") / "t.json"
    path.write_text(json.dumps([event(f"s{i}", start + 0.5, dur) for i, (start, dur) in enumerate(slices)]))
    t = read_trace(path)
    start, end = t.start_ns, t.end_ns
    for i in range(len(t)):
        around = [j for j in range(i) if end[j] > start[i] and end[j] + 1 >= end[i]]
        assert int(t.parent[i]) == (max(around) if around else -1)
    own = np.zeros(len(t), np.int64)
    row, since, until = (np.zeros(3 * len(t), np.int64) for _ in range(3))
    count = exclusive_segments(start, end, np.zeros(len(t), np.int64), row, since, until)
    assert since[1:count].tolist() == until[: max(count - 1, 0)].tolist() and (until[:count] > since[:count]).all()
    for k in range(count):
        if row[k] >= 0:
            own[row[k]] += until[k] - since[k]
    expected = np.zeros(len(t), np.int64)
    for clock in range(0, 70_000, 500):
        under_way = [i for i in range(len(t)) if start[i] <= clock < end[i]]
        if under_way:
            expected[max(under_way)] += 500
    assert own.tolist() == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_bytes_raise_anything_else(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "t.json"
    events = [event("a", 1, 2, args={"External id": 1}), {"ph": "B", "name": "b", "ts": 1}, {"ph": "s", "id": 1, "ts": 2, "cat": "x"}]
    base = document(events).encode()
    pieces = st.sampled_from([b'"', b"}", b"[", b"null", b"-1e400", b"{}"])
    out = bytearray(base)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(out)))
        out[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=5) | pieces)
    path.write_bytes(bytes(out))
    try:
        t = read_trace(path)
    except FormatError:
        return
    assert (t.duration_ns >= 0).all() and (t.start_ns >= 0).all() and (t.parent < np.arange(len(t))).all()
