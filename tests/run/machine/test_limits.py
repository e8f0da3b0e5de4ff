"""Limits of a command: they hold, what is refused says why, and nothing is left behind, not even after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.errors import RunError, UsageError
from meshwright.run.machine.cpu_quota import PREFIX, places_of, process_start_ticks
from meshwright.run.machine.limits import MAX_LOOKS, Limits

OWNER = """
import sys, time
from meshwright.run.machine.limits import Limits
with Limits(cores=0.5, memory_bytes=64 << 20) as limits:
    child = limits.start(["sleep", "1000"])
    print(child.pid, flush=True)
    time.sleep(1000)
"""


def allowed() -> bool:
    try:
        with Limits(cores=0.5, memory_bytes=64 << 20):
            return True
    except RunError:
        return False


pytestmark = [pytest.mark.real, pytest.mark.skipif(not allowed(), reason="no control groups with cpu and memory can be made here")]


def groups_of(pid: int) -> list[Path]:
    return [g for c in ("cpu", "memory", "blkio") for p in places_of(controller=c) for g in p.folder.glob(f"{PREFIX}{pid}-*")]


def until(true, limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(true())


def test_members_are_inside_and_gone_afterwards():
    with Limits(cores=0.5, memory_bytes=64 << 20) as limits:
        child = limits.start(["sleep", "1000"])
        assert until(lambda: str(child.pid) in "".join((g / "cgroup.procs").read_text() for g in groups_of(os.getpid())))
        assert 1 <= len(groups_of(os.getpid())) <= 2
    assert child.wait() == -signal.SIGKILL and groups_of(os.getpid()) == []
    with Limits(cores=0.5, first=True):
        said = [(g / f).read_text().strip() for g in groups_of(os.getpid()) for f in ("cpu.weight", "cpu.shares") if (g / f).exists()]
        assert said in (["10000"], ["262144"])


def test_kill_9_of_the_owner_leaves_nothing():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    ticks = process_start_ticks(child)
    assert ticks is not None and until(lambda: groups_of(owner.pid))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert until(lambda: process_start_ticks(child) != ticks) and until(lambda: not groups_of(owner.pid))


def test_too_little_memory_is_told_from_other_ends():
    eat = [sys.executable, "-S", "-c", "x = bytearray(200 << 20); print(len(x))"]
    with Limits(memory_bytes=32 << 20) as limits:
        assert limits.start(eat, stdout=subprocess.DEVNULL).wait() != 0 and limits.ran_out_of_memory()
    with Limits(memory_bytes=400 << 20) as limits:
        assert limits.start(eat, stdout=subprocess.DEVNULL).wait() == 0 and not limits.ran_out_of_memory()


def test_refusals(tmp_path):
    for wrong in ({"memory_bytes": 1}, {"read_Bps": 5}, {"read_Bps": 0, "disk": tmp_path}, {"cores": 0}):
        with pytest.raises(UsageError):
            Limits(**wrong)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("")
    (tmp_path / "proc/self/cgroup").write_text("")
    with pytest.raises(RunError, match="memory cannot be set: no hierarchy has it") as refused, Limits(memory_bytes=1 << 30, root=tmp_path):
        pass
    assert refused.value.data == {"controller": "memory"} and refused.value.hint
    with Limits(memory_bytes=64 << 20) as limits:
        assert limits.start(["/no/such/command"], stderr=subprocess.DEVNULL).wait() == 127


def test_a_signal_reaches_what_is_forked_meanwhile_and_ends(monkeypatch, tmp_path):
    said, told = iter([["7"], ["7", "8"], ["8"]]), list[int]()
    limits = Limits(cores=1)
    monkeypatch.setattr(limits, "_folders", [tmp_path])
    monkeypatch.setattr("meshwright.run.machine.limits.os.kill", lambda pid, number: told.append(pid))
    monkeypatch.setattr("meshwright.run.machine.limits._words", lambda path: next(said))
    assert limits.signal(signal.SIGSTOP) and told == [7, 8]  # each once
    numbers = iter(range(10, 10_000))
    monkeypatch.setattr("meshwright.run.machine.limits._words", lambda path: [str(next(numbers))])
    assert limits.signal(signal.SIGCONT) and len(told) == 2 + MAX_LOOKS  # a job that forks without end
