"""The flight recorder: what is written survives, what is read is trusted in nothing."""

from __future__ import annotations

import os
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

import histories
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, MeshwrightError, RunError, UsageError
from meshwright.run.group import record_file as layout
from meshwright.run.group import recorder as module
from meshwright.run.group.record_file import call_text, pack_call, read_record
from meshwright.run.group.recorder import FlightFile, Recorder, private_folder, process_started

SUM = histories.SUM


def fresh(tmp_path: Path, rank: int = 1, world: int = 4) -> tuple[FlightFile, Recorder]:
    file = FlightFile(str(tmp_path), "feed", rank, world)
    file.users = 1
    return file, Recorder(file, range(world), rank, "default")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file, recorder = fresh(tmp_path)
    for _ in range(3):
        number = recorder.asked(SUM, 1 << 20, 77)
        recorder.begin(number)
        recorder.waiting(4, 2, 1)
        recorder.moving()
        recorder.end()
    recorder.asked(pack_call("broadcast", 3, "", "bfloat16"), 0, 0)
    recorder.begin(recorder.asked(SUM, 1 << 20, 78))
    recorder.waiting(9, 3, 0)
    record = read_record(file.path)
    assert (record.header.rank, record.header.world, record.header.run, record.header.pid) == (1, 4, "feed", os.getpid())
    assert record.header.started == process_started(os.getpid()) > 0
    (group,) = record.groups
    assert (group.ranks, group.rank, group.asked, group.name) == ((0, 1, 2, 3), 1, 5, "default")
    assert (group.waiting, group.step, group.peer, group.receives, group.torn) == (True, 9, 3, False, False)
    assert [c.state for c in group.history] == ["done", "done", "done", "builtin", "running"]
    assert [c.number for c in group.history] == [1, 2, 3, 4, 5]
    assert group.receive_ns[2] > 0 and sum(group.receive_ns) == group.receive_ns[2]
    assert recorder.position()[:4] == (9, 3, False, True)
    recorder.close()
    assert file.path.exists(), "a folder that the user named keeps its records"


def test_the_ring_keeps_the_last(tmp_path: Path) -> None:
    file, recorder = fresh(tmp_path)
    for _ in range(3 * layout.RING_RECORDS):
        recorder.begin(recorder.asked(SUM, 8, 5))
        recorder.end()
    (group,) = read_record(file.path).groups
    numbers = [c.number for c in group.history]
    assert len(numbers) == layout.RING_RECORDS and numbers == list(range(2 * layout.RING_RECORDS + 1, 3 * layout.RING_RECORDS + 1))
    assert file.path.stat().st_size == layout.FILE_BYTES
    recorder.close()


def test_a_row_that_is_used_again_forgets_its_earlier_group(tmp_path: Path) -> None:
    file, first = fresh(tmp_path)
    file.users = 50
    rows = [first, *(Recorder(file, [0, 1], 1) for _ in range(layout.MAX_GROUPS + 3))]
    assert len({r.id for r in rows[: layout.MAX_GROUPS]}) == layout.MAX_GROUPS, "one row each while there are rows"
    assert rows[-1].number == 0 and rows[-1].asked(SUM, 8, 1) == 1, "a group without a row works all the same"
    rows[3].begin(rows[3].asked(SUM, 8, 9))
    rows[3].close()
    again = Recorder(file, [1, 3], 0)
    assert again.id == rows[3].id
    group = next(g for g in read_record(file.path).groups if g.id == again.id)
    assert group.history == () and group.ranks == (1, 3) and not group.waiting


def test_a_killed_process_leaves_its_last_words(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom meshwright.run.group.recorder import FlightFile, Recorder\n"
        "f = FlightFile(sys.argv[1], 'dead', 2, 3); r = Recorder(f, range(3), 2)\n"
        "r.begin(r.asked(1, 4096, 7)); r.waiting(11, 1, 1)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    (path,) = tmp_path.iterdir()
    (group,) = read_record(path).groups
    assert (group.step, group.peer, group.receives, group.waiting) == (11, 1, True, True)
    assert process_started(read_record(path).header.pid) in (0,) or not group.torn


def test_the_private_folder_is_private_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    old = folder / f"gone-rank00000-999999999{layout.SUFFIX}"
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    file = module.flight_file("", "clean", 0, 1)
    recorder = Recorder(file, [0], 0)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600 and file.path.parent == folder
    assert not old.exists(), "records of dead processes of other days are swept"
    assert module.flight_file("", "other", 0, 1) is file, "one file per process"
    module._release(file)
    recorder.close()
    assert list(folder.iterdir()) == [], "a clean end leaves nothing"
    file = module.flight_file("", "failed", 0, 1)
    recorder = Recorder(file, [0], 0)
    recorder.verdict("rank 1 died")
    recorder.close()
    (kept,) = folder.iterdir()
    assert read_record(kept).groups[0].verdict == "rank 1 died"


def test_a_private_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"meshwright-{os.getuid()}").mkdir(mode=0o755)
    (tmp_path / f"meshwright-{os.getuid()}").chmod(0o755)
    with pytest.raises(RunError, match="private"):
        private_folder()
    (tmp_path / f"meshwright-{os.getuid()}").rmdir()
    (tmp_path / f"meshwright-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(RunError, match="private"):
        private_folder()


def test_ranks_of_a_group_are_spelled_in_runs() -> None:
    for ranks in ([0, 1, 2, 3], [1, 3, 5, 9], [7], [3, 1, 2], list(range(0, 64, 8)), [5, 4, 3]):
        assert layout._expand(module._runs(ranks), len(ranks)) == tuple(ranks)
    assert layout._expand([(0, 10**9, 1)], 4) == (0, 1, 2, 3)


def test_calls_in_words() -> None:
    assert call_text(SUM, 4 << 20) == "all-reduce sum float32 4 MiB"
    assert call_text(pack_call("broadcast", 3, "", "int64"), 100) == "broadcast int64 root 3 100 bytes"
    assert call_text(1 << 60 | 255) .startswith("?")


# ---- hostile files -----------------------------------------------------------------------------------------------------
def sample(tmp_path: Path) -> bytes:
    file, recorder = fresh(tmp_path)
    recorder.begin(recorder.asked(SUM, 1 << 20, 77))
    recorder.waiting(9, 3, 0)
    data = file.path.read_bytes()
    recorder.close()
    file.path.unlink()
    return data


def test_damage_is_named(tmp_path: Path) -> None:
    good = sample(tmp_path)
    group = layout.HEADER_BYTES
    for what, at, value, told in (
        ("magic", 0, b"NOTHING!", "not a flight record"),
        ("version", 8, struct.pack("<q", 9), "version 9"),
        ("header length", 16, struct.pack("<q", 1 << 40), "at most"),
        ("header", 24, b"[[[[", "header"),
        ("group size", group + 8, struct.pack("<q", 99), "rank 1 of 99"),
        ("group rank", group + 16, struct.pack("<q", -1), "rank -1"),
        ("text length", group + 8 * layout.G_TEXT, struct.pack("<q", -5), "at most"),
    ):
        path = tmp_path / what.replace(" ", "-")
        path.write_bytes(good[:at] + value + good[at + len(value) :])
        with pytest.raises(FormatError, match=told):
            read_record(path)
    short = tmp_path / "short"
    short.write_bytes(good[:-1])
    with pytest.raises(FormatError, match="bytes"):
        read_record(short)
    with pytest.raises(UsageError, match="cannot read"):
        read_record(tmp_path / "nowhere")


def test_a_torn_position_and_a_torn_record_say_so(tmp_path: Path) -> None:
    good = bytearray(sample(tmp_path))
    at = layout.HEADER_BYTES + 8 * layout.G_POSITION
    struct.pack_into("<q", good, at, 12345)
    for row in range(layout.RING_RECORDS):
        place = layout.RING_AT + row * layout.RECORD_BYTES
        if struct.unpack_from("<q", good, place)[0]:
            struct.pack_into("<q", good, place, 999)
    path = tmp_path / "torn"
    path.write_bytes(bytes(good))
    record = read_record(path)
    assert record.groups[0].torn and not record.groups[0].waiting
    assert record.torn == 1 and record.groups[0].history == ()


@settings(max_examples=300)
@given(st.data())
def test_any_damage_gives_a_record_or_a_format_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    global _GOOD
    if not _GOOD:
        _GOOD = sample(tmp_path_factory.mktemp("sample"))
    damaged = bytearray(_GOOD)
    interesting = st.one_of(
        st.integers(0, 400), st.integers(layout.HEADER_BYTES, layout.HEADER_BYTES + 200),
        st.integers(layout.HEADER_BYTES + layout.TEXT_AT, layout.HEADER_BYTES + layout.TEXT_AT + 80),
        st.integers(layout.RING_AT, layout.RING_AT + 400),
    )  # fmt: skip
    for at, value in data.draw(st.lists(st.tuples(interesting, st.integers(0, 255)), min_size=1, max_size=12)):
        damaged[at] = value
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(bytes(damaged))
    try:
        record = read_record(path)
    except MeshwrightError as error:
        assert isinstance(error, FormatError)
        return
    for group in record.groups:
        assert 0 <= group.rank < group.size and (not group.waiting or 0 <= group.peer < group.size)


_GOOD = b""
