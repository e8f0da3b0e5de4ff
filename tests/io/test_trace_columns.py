"""Events read straight into columns give what every event decoded by itself gives; and the kernels run without numba."""

import gzip
import json
import platform
import random
import subprocess
import sys

import numpy as np
import pytest

from meshwright.io.trace import plain as trace_plain
from meshwright.io.trace import scan as trace_scan
from meshwright.io.trace.plain import PlainEvents
from meshwright.io.trace.read import _in_order, read_events
from meshwright.kernels import json_bytes, object_code
from meshwright.kernels.flat_code import flat
from meshwright.kernels.object_code import Native, native
from meshwright.testing.same_traces import differences


def event(name, ts, dur, tid=1, **more):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, **more}


def document(count, seed=0):
    """All that Kineto writes, in several spellings."""
    rng = random.Random(seed)
    events = [{"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}}]
    for i in range(count):
        at = 1000 * i + rng.randrange(1000) / 1000
        args = {"External id": i, "Sequence number": i // 2, "Fwd thread id": 0, "Input Dims": [[2, 3], []], "q": 1.5e-05, "s": None, "t": True}
        args |= {"stream": str(rng.randrange(9))} if i % 5 == 0 else {"external id": i + 1} if i % 7 == 0 else {}
        if i % 11 == 0:
            args |= {"Collective name": "allreduce", "Process Group Name": "0", "Seq": i, "dtype": "Float", "In msg nelems": 3}
        events.append(event(f"name \\ {rng.randrange(40)}", at, rng.randrange(4000) / 8, tid=rng.choice([1, "2", "stream 7"]), args=args))
        if i % 3 == 0:
            events.append({"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": i, "pid": 7, "tid": 1, "ts": at})
            events.append({"ph": "f", "bp": "e", "cat": "fwdbwd", "name": "fwdbwd", "id": i if i % 2 else str(i), "pid": 7, "tid": 1, "ts": at + 2})
        if i % 4 == 0:
            events += [{"ph": "i", "name": "mark", "pid": 7, "tid": 1, "ts": at}, {"ph": "t", "id": 1}, {"ph": "C", "name": "c", "args": {"v": -1}}]
        if i % 13 == 0:
            events += [{"ph": "B", "name": "é", "pid": 7, "tid": 3, "ts": at}, {"ph": "E", "name": "é", "pid": 7, "tid": 3, "ts": at + 1}]
    return json.dumps({"traceEvents": events, "distributedInfo": {"rank": 1, "world_size": 2}}, indent=1)


def both(path):
    return read_events(path, PlainEvents), read_events(path, None)


@pytest.mark.parametrize("chunk", [8 << 20, 999, 64])
def test_columns_are_those_of_events_decoded_one_by_one(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(trace_scan, "CHUNK_BYTES", chunk)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(document(60).encode(), 1))
    assert differences(*both(path)) == []


def test_tables_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_plain, "_ROWS", 16)
    many = [event(f"{i:x}" * (1 + i % 90), i, 1, tid=i, cat=f"c{i}") for i in range(9000)]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(many))
    new, old = both(path)
    assert differences(new, old) == [] and len(new.names) == 9000 and len(new.tracks) == 9000


WRONG = [
    ('"dur": 1', '"dur": 01'), ('"dur": 1', '"dur": 1.'), ('"dur": 1', '"dur": -1'), ('"dur": 1', '"dur": 1e0'), ('"dur": 1', '"dur": "1"'),
    ('"dur": 1', '"x": [1, {"a": []}, -0.5e+3], "dur": 1'), ('"dur": 1', '"x": [1,], "dur": 1'), ('"dur": 1', '"x": {"a" 1}, "dur": 1'),
    ('"dur": 1', '"x": tru, "dur": 1'), ('"dur": 1', '"x": {]}, "dur": 1'),
    ('"dur": 1', '"x": nul, "dur": 1'), ('"dur": 1', '"args": null, "dur": 1'),
    ('"dur": 1', '"args": {"stream": 1.5}, "dur": 1'), ('"dur": 1', '"args": {"stream": 12345678901234567890}, "dur": 1'),
    ('"dur": 1', '"args": {"stream": "x"}, "dur": 1'), ('"dur": 1', '"dur": 1, "dur": 2'), ('"ts": 20', '"ts": 20.0004'), ('"odd"', '"a\\u00e9"'),
    ('"odd"', '"a\\x"'), ('"odd"', '"a\x7f\tb"'), ('"odd"', '"' + "n" * 5000 + '"'), ('"pid": 7', '"pid": "7"'), ('"pid": 7', '"pid": 7.5'),
    ('"ph": "X"', '"ph": "XX"'), ('"ph": "X"', '"PH": "X"'), ('"cat": "cpu_op"', '"cat": null'),
    ('"name"', '"na\\u006de"'), ('"ts": 20', '"ts": null'),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_what_is_not_plain_is_read_as_before(tmp_path, old, new):
    text = json.dumps([event("first", 1, 50), event("odd", 20, 1), event("last", 200, 1)])
    at = text.index('"odd"') - 30
    assert old in text[at:]
    path = tmp_path / "t.json"
    path.write_bytes((text[:at] + text[at:].replace(old, new, 1)).encode())
    assert differences(*both(path)) == []


def test_damaged_bytes_give_the_same(tmp_path):
    """Gaps between events are counted one by one here and once per piece there."""
    base, rng = document(6).encode(), random.Random(3)
    path = tmp_path / "t.json"
    for _ in range(150):
        out = bytearray(base)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(120, len(out))
            out[at : at + rng.randint(0, 6)] = rng.choice([b'"', b"}", b"[", b"]", b",", b"null", b"\\", b"-1e400", b"{}", b"\xc3\xa9", b"7", b" "])
        path.write_bytes(bytes(out))
        new, old = both(path)
        assert [d for d in differences(new, old) if d != "warnings"] == [], bytes(out)


def test_times_since_the_epoch_keep_their_ns(tmp_path):
    """A float of µs since the epoch resolves a quarter of one: what joins seems to overlap."""
    path = tmp_path / "t.json"
    path.write_text('[{"ph":"X","name":"a","pid":1,"tid":1,"ts":1743724298119112.297,"dur":0.003},{"ph":"X","name":"b","pid":1,"tid":1,'
                    '"ts":1743724298119112.300,"dur":0.001}]')  # fmt: skip
    trace = read_events(path, PlainEvents)
    assert np.diff(trace.start_ns).tolist() == [3] and trace.duration_ns.tolist() == [3, 1] and trace.parent.tolist() == [-1, -1]
    assert trace.origin_ns == 1743724298119112297


@pytest.mark.interpreter
def test_a_trace_is_read_without_numba(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(document(20))
    code = ("import sys; from meshwright.cli import main; main(['trace', 'breakdown', sys.argv[1]]);"
            "heavy = ('numba', 'torch', 'scipy', 'yaml', 'networkx', 'multiprocessing', *sys.argv[2:]);"
            "print([m for m in heavy if m in sys.modules], file=sys.stderr)")  # fmt: skip
    linked = ["llvmlite"] if platform.machine() == "x86_64" and sys.platform == "linux" else []  # elsewhere LLVM links the kept code
    for _ in range(2):  # the first keeps what nobody has compiled yet
        done = subprocess.run([sys.executable, "-c", code, str(path), *linked], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "[]" and "per step" in done.stdout


@native("i8[] i8 -> 1")
def total(values, times):
    found = 0
    for i in range(len(values)):
        found += values[i]
    return found * times


@native("i8[,] -> 1")
def raises(table):
    if table[0, 0] == 1:
        raise ValueError("no")
    return 0


def test_object_code_is_kept_checked_and_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    again = [Native(total.function, total.signature, ()) for _ in range(3)]
    assert again[0](np.arange(5), 3) == 30
    (kept,) = (tmp_path / "object-code").glob("*.o")
    monkeypatch.setattr(Native, "_compiled", lambda self: pytest.fail("it was kept"))
    assert again[1](np.arange(5), 3) == 30
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kept.write_bytes(kept.read_bytes()[:-1])
    assert again[2](np.arange(5), 3) == 30 and object_code._read(kept)


@pytest.mark.parametrize("without", ["flat", "loaded"])
def test_code_that_does_not_run_where_it_lies_is_loaded_by_llvm_or_run_by_numba(tmp_path, monkeypatch, without):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first, second = (Native(total.function, total.signature, ()) for _ in range(2))
    if without == "loaded":  # kept as an image; then the system gives no memory that may be run
        assert first(np.arange(5), 2) == 20
    monkeypatch.setattr(object_code, without, lambda *_: None)
    assert second(np.arange(5), 3) == 30
    (kept,) = (tmp_path / "object-code").glob("*.o")
    if platform.machine() == "x86_64" and sys.platform == "linux":
        assert object_code._read(kept)[:4] == (object_code._OBJECT if without == "flat" else object_code._FLAT)
        assert (second.entry is second.plain) == (without == "loaded")


def test_code_that_refers_to_something_else_is_not_flat():
    """Assembled by LLVM: a call of a function outside, and an address that is not relative."""
    from llvmlite import binding

    machine = object_code._machine(binding, reloc="pic", codemodel="small")
    bodies = {
        "call": 'declare i64 @elsewhere(i64)\ndefine i64 @entry(i64 %x) { %y = call i64 @elsewhere(i64 %x)\n ret i64 %y }',
        "data": "@table = external global i64\ndefine i64 @entry(i64 %x) { %y = load i64, ptr @table\n ret i64 %y }",
        "fine": "define i64 @entry(i64 %x) { ret i64 %x }",
    }
    found = {name: flat(machine.emit_object(binding.parse_assembly(text)), "entry") for name, text in bodies.items()}
    assert found["call"] is None and found["data"] is None and flat(b"MZ" + bytes(64), "entry") is None
    assert found["fine"] is not None or platform.machine() != "x86_64"


def test_the_end_of_a_text_is_found_as_byte_for_byte():
    kernel = Native(json_bytes.ending, "u1[] i8 -> 1", (json_bytes.word, json_bytes.first_top))
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = np.where(rng.random(30) < 0.9, 126, rng.choice([34, 92, 31, 32, 127, 128, 255, 0, 35, 33, 91, 93], 30)).astype(np.uint8)
        special = (data == 34) | (data == 92) | (data < 32) | (data >= 127)
        special[3] = False
        data[3] = 65
        for i in (0, 3, int(rng.integers(30))):
            after = np.flatnonzero(special[i:])
            assert kernel(data, i) == (i + int(after[0]) if len(after) else 30)


def test_what_a_kernel_does_not_take_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for wrong in (np.arange(5.0), np.arange(10)[::2], np.zeros((2, 2), np.int64)):
        with pytest.raises(TypeError, match="in C order"):
            total(wrong, 1)
    with pytest.raises((RuntimeError, ValueError), match=r"raised|no"):
        Native(raises.function, raises.signature, ())(np.ones((1, 1), np.int64))


@pytest.mark.parametrize("latest", [50, 1 << 45])
def test_slices_are_sorted_by_track_then_start_then_length(latest: int) -> None:
    rng = np.random.default_rng(latest)
    track, start, duration = rng.integers(0, 3, 500).astype(np.int32), rng.integers(0, latest, 500), rng.integers(0, 9, 500)
    assert (_in_order(track, start, duration) == np.lexsort((-duration, start, track))).all()
    assert not len(_in_order(track[:0], start[:0], duration[:0]))
