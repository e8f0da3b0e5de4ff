"""Parts of the lab that need no privileges: names and state on disk, messages, places of ranks, the relay's queue."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_fabrics import preset

from meshwright.cli.lab_run import _numbers, _variables
from meshwright.cli.lab_up import _losses
from meshwright.errors import FormatError, RunError, UnknownName, Unsupported, UsageError
from meshwright.lab import build, calibrate_worker, state, wire_format
from meshwright.lab.calibrate import ceiling_Bps
from meshwright.lab.control import Control
from meshwright.lab.ranks import RunResult, places, require_success
from meshwright.lab.relay import Direction
from meshwright.lab.state import LabState, claim, folder_of, known_labs, read_state, remove, write_state
from meshwright.run.machine.cpu_quota import process_start_ticks
from meshwright.run.machine.pacing import declared_pacing


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_LAB_DIR", str(tmp_path / "labs"))
    return tmp_path / "labs"


def a_state(name: str = "one", **changes: object) -> LabState:
    pid = os.getpid()
    given = {"owner": pid, "owner_start": process_start_ticks(pid) or "", **changes}
    return LabState(name=name, fabric="f", scale="1", style="bridged", interface="eth0", mtu=1500, **given)  # type: ignore[arg-type]


# ---- names and state ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "../x", "a/b", "x" * 25, "ä", "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageError, match="not a name for a lab"):
        folder_of(name)


def test_a_name_is_taken_once() -> None:
    folder = claim("one")
    write_state(folder, a_state())
    with pytest.raises(UsageError, match="'one' already") as caught:
        claim("one")
    assert caught.value.data == {"name": "one"}
    assert read_state(folder).name == "one"


def test_of_many_who_want_a_name_one_gets_it() -> None:
    got: list[bool] = []

    def want() -> None:
        try:
            claim("one")
            got.append(True)
        except UsageError:
            got.append(False)

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


@pytest.mark.parametrize(
    "dead",
    [
        {"holder": 1, "holder_start": "not its start"},  # the number was given to another process
        {"holder": 2**22 + 5, "holder_start": "1"},
        {"owner": 2**22 + 5, "owner_start": "1"},  # died while building
    ],
)
def test_the_name_of_a_dead_lab_is_free(dead: dict[str, object]) -> None:
    write_state(claim("one"), a_state(**dead))
    assert not list(claim("one").iterdir())


def test_gc_removes_dead_labs_only() -> None:
    write_state(claim("dead"), a_state("dead", holder=2**22 + 5, holder_start="1"))
    pid = os.getpid()
    write_state(claim("alive"), a_state("alive", holder=pid, holder_start=process_start_ticks(pid)))
    write_state(claim("building"), a_state("building"))
    claim("unwritten")  # somebody has just begun
    old = claim("abandoned")
    os.utime(old, (time.time() - 3600,) * 2)
    assert build.collect() == ["abandoned", "dead"]
    assert [x.name for x in known_labs()] == ["alive", "building", "unwritten"]


def test_gc_finishes_half_removed_folders(own_folder: Path) -> None:
    claim("one")
    (own_folder / ".two.abcd1234").mkdir()
    build.collect()
    assert sorted(x.name for x in own_folder.iterdir()) == ["one"]


def test_state_survives_its_file() -> None:
    folder = claim("one")
    before = a_state(shares=[0.5, 0.0], links=[state.LinkState(src="a", dst="b", rate_Bps=5, burst_bytes=6, segment_bytes=7)])
    write_state(folder, before)
    assert read_state(folder) == before
    remove(folder)
    assert not known_labs()
    remove(folder)  # again: nothing to do


def test_no_such_lab() -> None:
    write_state(claim("one"), a_state())
    with pytest.raises(UnknownName, match="no lab is called 'two'") as caught:
        read_state(folder_of("two"))
    assert "one" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "meshwright.lab"}', "[" * 200_000, '{"nonsense": 1}'])
def test_broken_state_is_named(text: str) -> None:
    folder = claim("one")
    (folder / "state.json").write_text(text)
    with pytest.raises(FormatError, match=r"state\.json"):
        read_state(folder)


def test_state_of_another_version() -> None:
    folder = claim("one")
    write_state(folder, a_state())
    document = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(document | {"version": 99}))
    with pytest.raises(FormatError, match="version 99"):
        read_state(folder)


def test_a_folder_of_somebody_else_is_not_used(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: own_folder.stat().st_uid + 1)
    with pytest.raises(RunError, match="somebody else"):
        state.runtime_folder()


def test_a_folder_that_cannot_be_made(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folder.write_text("a file")
    with pytest.raises(RunError, match="cannot make the folder of labs") as caught:
        state.runtime_folder()
    assert "MESHWRIGHT_LAB_DIR" in caught.value.hint


def test_runtime_folders_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_LAB_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert state.runtime_folder() == tmp_path / "meshwright" / "labs"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert state.runtime_folder() == tmp_path / f"meshwright-{os.geteuid()}" / "labs"
    assert (tmp_path / f"meshwright-{os.geteuid()}" / "labs").stat().st_mode & 0o77 == 0


def test_a_lab_without_a_holder_is_gone() -> None:
    with pytest.raises(RunError, match="the lab 'one' is gone") as caught:
        Control(claim("one"))
    assert "gc" in caught.value.hint


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_SYSTEM_PATHS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="'ip' and 'tc'") as caught:
        build.tool_path()
    assert "iproute2" in caught.value.hint
    (tmp_path / "ip").touch(0o755)
    with pytest.raises(Unsupported, match="needs 'tc'"):
        build.tool_path()


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    own_folder.mkdir()
    monkeypatch.setattr(state, "runtime_folder", lambda: own_folder)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(RunError, match="cannot make the lab's folder: No space left"):
        claim("one")


def test_holders_that_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this very process in the place of the holder, and no signal sent."""
    pid = os.getpid()
    alive = a_state(holder=pid, holder_start=process_start_ticks(pid))
    monkeypatch.setattr(build, "MAX_STOP_S", 0.01)
    monkeypatch.setattr("signal.pidfd_send_signal", lambda *_: None)
    with pytest.raises(RunError, match="would not end"):
        build.stop_holder(alive)

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("signal.pidfd_send_signal", refused)
    with pytest.raises(RunError, match="belongs to somebody else"):
        build.stop_holder(alive)
    build.stop_holder(a_state(holder=2**22 + 5, holder_start="1"))  # long gone


def test_a_holder_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.lab.planning import Options, plan_lab

    plan = plan_lab(preset("star:2", None), "one", Options(force=True))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RunError, match="could not start"):
        build.start_holder(claim("one"), plan.wiring, plan.commands, owner=os.getpid())


def test_processes_that_would_not_end_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control.__new__(Control)
    control.name = "one"
    monkeypatch.setattr(control, "ask", lambda request: ({"left": 2}, []))
    with pytest.raises(RunError, match="2 processes of the run would not end"):
        control.end("run")


# ---- messages ----------------------------------------------------------------------------------------------------------
def test_messages_carry_descriptors(tmp_path: Path) -> None:
    a, b = socket.socketpair()
    with a, b, (tmp_path / "x").open("w+") as file:
        message = {"text": "ä" * 100_000, "n": [1, None]}
        sender = threading.Thread(target=wire_format.send, args=(a, message, [file.fileno()]))
        sender.start()
        heard = wire_format.receive(b)
        sender.join()
        assert heard is not None
        got, fds = heard
        assert got == message
        assert os.fstat(fds[0]).st_ino == os.fstat(file.fileno()).st_ino
        assert not os.get_inheritable(fds[0])
        os.close(fds[0])
        a.close()
        assert wire_format.receive(b) is None


def test_broken_messages() -> None:
    for data in (b"\x00\x00\x00\x05abc", b"\xff\xff\xff\xff", b"\x00\x00\x00\x01{", b"\x00"):
        a, b = socket.socketpair()
        with b:
            a.sendall(data)
            a.close()
            with pytest.raises(ValueError):
                wire_format.receive(b)


# ---- places of ranks ---------------------------------------------------------------------------------------------------
@given(st.integers(1, 9), st.integers(1, 3), st.randoms())
def test_every_rank_has_a_place(devices: int, per_device: int, shuffle: random.Random) -> None:
    order = list(range(devices))
    shuffle.shuffle(order)
    taken = places(devices, order=order, per_device=per_device)
    assert [p.rank for p in taken] == list(range(devices * per_device))
    assert [p.device for p in taken[::per_device]] == order
    assert sorted((p.device, p.local_rank) for p in taken) == [(d, k) for d in range(devices) for k in range(per_device)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": [4]}, "no device 4"),
        ({"ranks": [0, 0]}, "named twice"),
        ({"order": [0, 1]}, "each device that takes part once"),
        ({"ranks": [0, 1], "order": [1, 2]}, "each device that takes part once"),
        ({"order": [0, 1, 2, -1]}, "no device -1"),
        ({"ranks": []}, "no device takes part"),
        ({"per_device": 0}, "at least 1"),
    ],
)
def test_places_that_do_not_exist(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        places(4, **arguments)  # type: ignore[arg-type]


def test_ranks_without_a_place_of_their_own() -> None:
    assert [p.device for p in places(4, ranks=[1, 3])] == [1, 3]
    assert [p.device for p in places(4, ranks=[1, 3], order=[3, 1])] == [3, 1]


def test_exit_codes() -> None:
    assert RunResult(returncodes=[0, 0], first_failure=None, wall_s=1.0).exit_code == 0
    assert RunResult(returncodes=[-15, 7], first_failure=1, wall_s=1.0).exit_code == 7
    killed = RunResult(returncodes=[-9, -15], first_failure=0, wall_s=1.0, outputs=[b"a\nlast\n", b""])
    assert killed.exit_code == 137
    from meshwright.errors import RankFailed

    with pytest.raises(RankFailed, match="rank 0 ended with -9") as caught:
        require_success(killed)
    assert caught.value.hint == "its last line of output: last"


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1,,2", "9999999", "1" * 20])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        _numbers(text, "--ranks")


def test_lists_and_pairs() -> None:
    assert _numbers("0-2,7", "--ranks") == [0, 1, 2, 7]
    assert _numbers(None, "--ranks") is None
    assert _variables(["A=b=c", "D="]) == {"A": "b=c", "D": ""}
    assert _losses(["d0->hub=0.5"]) == {"d0->hub": 0.5}
    for bad in ("A", "=b"):
        with pytest.raises(UsageError, match="--env"):
            _variables([bad])
    for bad in ("A", "=0.1", "a->b=x"):
        with pytest.raises(UsageError, match="--loss"):
            _losses([bad])


# ---- device speed ------------------------------------------------------------------------------------------------------
def test_declared_pacing() -> None:
    assert declared_pacing({}) is None
    found = declared_pacing({"MESHWRIGHT_CPU_SHARE": "0.25", "MESHWRIGHT_CPU_PACING": "paced"})
    assert found is not None and (found.mode, found.share) == ("paced", 0.25)
    for share, mode in (("0", "paced"), ("2", "quota"), ("x", "quota"), ("nan", "quota"), ("0.5", "none")):
        with pytest.raises(UsageError, match="MESHWRIGHT_CPU_SHARE"):
            declared_pacing({"MESHWRIGHT_CPU_SHARE": share, "MESHWRIGHT_CPU_PACING": mode})


# ---- relay and ceilings ------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 0.5))
def test_a_relay_keeps_order_and_time(gaps: list[float], delay: float) -> None:
    way, now, sent = Direction(delay, 0.0, 0), 0.0, []
    for number, gap in enumerate(gaps):
        now += gap
        frame = number.to_bytes(4, "big")
        sent.append((now, frame))
        way.put(frame, now)
    got: list[tuple[float, bytes]] = []
    while way.next_s is not None:
        at = way.next_s
        got += [(at, frame) for frame in way.due(at)]
    assert [f for _, f in got] == [f for _, f in sent]
    assert all(out == pytest.approx(start + delay) or out >= start + delay for (out, _), (start, _) in zip(got, sent, strict=True))
    assert not way.due(1e9)


def test_a_relay_loses_by_its_seed() -> None:
    def survivors(seed: int) -> list[int]:
        way = Direction(0.0, 0.25, seed)
        for number in range(4000):
            way.put(number.to_bytes(4, "big"), 0.0)
        return [int.from_bytes(f, "big") for f in way.due(0.0)]

    assert survivors(1) == survivors(1) != survivors(2)
    assert 2850 < len(survivors(1)) < 3150  # 5.5 standard deviations


def test_ceilings_are_what_the_headers_leave() -> None:
    assert ceiling_Bps(1_514_000, 1500) == 1_448_000
    assert ceiling_Bps(1_514_000, 1500, datagrams=True) == 1_472_000


@pytest.mark.parametrize(
    ("took_ms", "least_ms", "made"), [([41, 41, 42], 41, 3), ([48, 49, 48, 48, 43, 41], 43, 5), ([48] * 39 + [47] * 9, 47, 40), ([1500] * 9, 1500, 3)]
)  # fmt: skip
def test_a_round_trip_is_the_least_of_as_many_as_it_takes(took_ms: list[int], least_ms: int, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, left = 0.0, [x / 1e3 for x in took_ms]

    class Clocked(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            nonlocal now_s
            if self is a:
                now_s += left.pop(0)
            return super().recv(size, flags)

    monkeypatch.setattr(calibrate_worker, "time", SimpleNamespace(perf_counter=lambda: now_s))
    fds = [x.detach() for x in socket.socketpair()]
    with Clocked(fileno=fds[0]) as a, Clocked(fileno=fds[1]) as b:
        assert calibrate_worker._round_trip_s(a, b, 0.046) == pytest.approx(least_ms / 1e3)
    assert len(took_ms) - len(left) == made


def test_what_stands_for_hardware_runs_when_it_wakes() -> None:
    """A relay that waits for others' time slices makes longer delays than were asked for."""
    with Popen([sys.executable, "-c", PROMPT], stdout=PIPE) as process:
        assert process.communicate(timeout=60)[0].split() == [str(os.SCHED_BATCH).encode(), str(os.SCHED_OTHER).encode(), b"True"]


PROMPT = """
import os
from meshwright.run.machine.process import batch_scheduling, prompt_scheduling
batch_scheduling()
before, nice = os.sched_getscheduler(0), os.nice(0)
prompt_scheduling()
print(before, os.sched_getscheduler(0), os.nice(0) == max(nice - 10, -20) or os.geteuid() != 0)
"""


def test_state_documents_name_every_link() -> None:
    from meshwright.lab.planning import Options, first_state, plan_lab

    plan = plan_lab(preset("two-islands:2"), "one", Options())
    made = first_state("one", plan, Options())
    assert [(x.src, x.dst, x.rate_Bps) for x in made.links] == [(x.src, x.dst, x.rate_Bps) for x in plan.fabric.links]
    assert msgspec.json.decode(msgspec.json.encode(made), type=LabState) == made
