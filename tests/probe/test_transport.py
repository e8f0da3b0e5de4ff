"""Calibration with real processes: structure and cleanliness exactly; times only for plausibility."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.cost import Priced
from meshwright.errors import MissingExtra, RankDied, RunTimeout, UsageError
from meshwright.fabric import Device, Fabric, Link
from meshwright.probe import transport
from meshwright.probe.run_cost import run_cost
from meshwright.probe.transport import calibrate_laptop, calibration_of, laptop_shape
from meshwright.run.pacing import Pacing, choose_pacing

NONE = Pacing(mode="none")
QUICK = {"sizes": (4, 1024, 65536, 1 << 20), "budget_s": 0.01, "batches": 1}


def part(alpha, beta, cpu=0.5, sizes=transport.SIZES):
    """What a rank reports when messages take alpha + beta * size and half of that is CPU time."""
    rows = [{"wall_s": alpha + beta * s, "cpu_s": cpu * (alpha + beta * s), "rounds": 10} for s in sizes]
    return {"sizes": list(sizes), "ring": rows, "pingpong": rows[::2], "reference_s": 1.1e-3, "add_s_per_byte": 4e-11}


def descendants() -> set[int]:
    me, found = os.getpid(), set()
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
    todo = [me]
    while todo:
        pid = todo.pop()
        children = {p for p, above in parents.items() if above == pid}
        found |= children
        todo.extend(children)
    return found


def test_fit_is_exact_on_exact_times():
    found = calibration_of([part(2e-4, 1e-9)] * 4, NONE, reference_alone_s=1e-3, seconds=2.0)
    assert found.ring.line.alpha_s == pytest.approx(2e-4) and found.ring.line.beta_s_per_byte == pytest.approx(1e-9)
    assert found.ring.errors.line_median < 1e-6 and found.ring.errors.points == 5
    assert found.slowdown == pytest.approx(1.1) and found.seconds == 2.0
    assert found.transport.evidence == "measured" and found.transport.per_message_s == pytest.approx(0.5e-4)
    assert found.transport.per_byte_s == pytest.approx(1e-11)
    assert (found.transport.cpu_per_message_s, found.transport.cpu_per_byte_s) == pytest.approx((0.5e-4, 0.25e-9))
    assert {x.rate_Bps for x in found.fabric.links} == {10**9} and found.fabric.devices[0].cpu_share == 0
    assert len(found.to_json()["ring"]["wall_s"]) == 12 and "measured here" in found.fabric.provenance[-1].source


@pytest.mark.parametrize("mode", ["none", "quota"])
def test_a_message_between_two_ranks_takes_what_was_measured(mode):
    """Ends' overheads, latencies and the narrowest link of the route add up to alpha + beta * size again."""
    pacing = Pacing(mode=mode, share=0.4 if mode == "quota" else 1.0)
    found = calibration_of([part(3e-4, 2e-9, cpu=0.3)] * 3, pacing)
    links = [found.fabric.links[i] for i in found.fabric.route(0, 2)]
    for size in (4, 10**6):
        total = 2 * found.transport.per_message_s + sum(x.latency_s for x in links) + size / min(x.rate_Bps for x in links)
        assert total == pytest.approx(3e-4 + 2e-9 * size, rel=1e-4)
    assert found.slowdown == 1.0  # nobody measured alone
    assert found.fabric.devices[0].cpu_share == (0.4 if mode == "quota" else 0.0)
    assert found.add_s_per_byte == pytest.approx(4e-11 / pacing.share)


def test_another_shape_keeps_its_names():
    devices = tuple(Device(name=n, kind="cpu") for n in "ab")
    shape = Fabric(name="pair", devices=devices, links=(Link(src="a", dst="b", rate_Bps=1), Link(src="b", dst="a", rate_Bps=1)))
    found = calibration_of([part(1e-4, 1e-9)] * 2, NONE, shape=shape)
    assert found.fabric.name == "pair" and [x.rate_Bps for x in found.fabric.links] == [10**9, 10**9]


def test_cost_of_a_run():
    found = calibration_of([part(2e-4, 1e-9)] * 4, Pacing(mode="quota", share=0.4), reference_alone_s=1e-3)
    cost = run_cost(found, {"s0|F": Priced(0.1, "measured", 0.1)})
    assert cost.table["s0|F"].time_s == pytest.approx(0.1 * 1.1 / 0.4) and cost.transport == found.transport and "quota" in cost.source
    assert run_cost(found, {"s0|F": Priced(0.1, "measured", 0.1)}, measured_together=True).table["s0|F"].time_s == pytest.approx(0.25)


@pytest.mark.real
@pytest.mark.timeout(120)
def test_real_processes_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = descendants()
    pacing = choose_pacing(3, 2)
    found = calibrate_laptop(3, pacing, limit_s=90, **QUICK)
    assert found.fabric.name == "laptop:3" and found.pacing == pacing and len(found.ring.sizes) == 4 and len(found.pingpong.sizes) == 2
    wall, cpu = np.array(found.ring.wall_s), np.array(found.ring.cpu_s)
    assert np.all(wall > 0) and np.all(cpu > 0) and found.ring.sizes[-1] > found.ring.sizes[0]
    assert 0 < found.transport.per_message_s < 0.1 and found.fabric.links[0].rate_Bps > 10**6
    assert descendants() <= before and list(tmp_path.iterdir()) == []


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_killed_rank_is_named_and_the_rest_is_ended(monkeypatch):
    before = descendants()
    original = transport._Workers.tell

    def tell(self, line):
        if line == "go":
            pids = next(entry["pids"] for entry in self.lines if "pids" in entry)
            os.kill(pids[1], signal.SIGKILL)
        else:
            original(self, line)

    monkeypatch.setattr(transport._Workers, "tell", tell)
    with pytest.raises(RankDied, match="rank 1 ended while calibrating") as caught:
        calibrate_laptop(2, NONE, limit_s=90, **QUICK)
    assert caught.value.data == {"rank": 1, "exit": -signal.SIGKILL}
    assert descendants() <= before


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_frozen_rank_runs_into_the_limit(monkeypatch):
    before = descendants()
    original = transport._Workers.tell

    def tell(self, line):
        if line == "go":
            os.kill(next(entry["pids"] for entry in self.lines if "pids" in entry)[0], signal.SIGSTOP)
            self.deadline = time.monotonic() + 0.5
        original(self, line)

    monkeypatch.setattr(transport._Workers, "tell", tell)
    with pytest.raises(RunTimeout, match="did not answer"):
        calibrate_laptop(2, NONE, limit_s=90, **QUICK)
    assert descendants() <= before


@pytest.mark.real
@pytest.mark.timeout(120)
def test_ranks_die_with_a_killed_caller(tmp_path, monkeypatch):
    code = (
        "from meshwright.probe import transport\nfrom meshwright.run.pacing import Pacing\nimport time\n"
        "def tell(self, line, original=transport._Workers.tell):\n"
        "    if line == 'go':\n        print(self.process.pid, *self.lines[0]['pids'], flush=True)\n        time.sleep(60)\n"
        "    original(self, line)\n"
        "transport._Workers.tell = tell\ntransport.calibrate_laptop(2, Pacing(mode='none'))"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    killer = threading.Timer(90, caller.kill)
    killer.start()
    try:
        assert caller.stdout is not None
        pids = [int(x) for x in caller.stdout.readline().split()]
    finally:
        killer.cancel()
        caller.kill()
        caller.wait()
        caller.stdout.close()
    assert len(pids) == 3
    deadline = time.monotonic() + 20
    while any(running(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(running(p) for p in pids)
    left, foreign = list(tmp_path.iterdir()), tmp_path / f"{transport.PREFIX}mine"
    foreign.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    transport._collect_stale()  # a killed process cannot tidy up; the next calibration does
    assert len(left) == 1 and list(tmp_path.iterdir()) == [foreign]


def running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.real
@pytest.mark.timeout(60)
def test_a_start_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankDied, match="the process that starts the ranks"):
        calibrate_laptop(2, NONE, **QUICK)


@pytest.mark.real
@pytest.mark.timeout(60)
def test_a_start_that_ends_before_it_is_told_anything_is_waited_for(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    tell = transport._Workers.tell

    def late(self, line):
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # the pipe is broken for certain, the process still to be reaped
        tell(self, line)

    monkeypatch.setattr(transport._Workers, "tell", late)
    with pytest.raises(RankDied, match="the process that starts the ranks"):
        calibrate_laptop(2, NONE, **QUICK)


def test_refusals(monkeypatch):
    with pytest.raises(UsageError, match="at least 2 ranks"):
        calibrate_laptop(1, NONE)
    with pytest.raises(UsageError, match="has 3 devices, not 2"):
        calibrate_laptop(2, NONE, shape=laptop_shape(3))
    with pytest.raises(UsageError, match="must be positive"):
        calibrate_laptop(2, NONE, sizes=(0, 4))
    monkeypatch.setattr(transport, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="torch"):
        calibrate_laptop(2, NONE)
