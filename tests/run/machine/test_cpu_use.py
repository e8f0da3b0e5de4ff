from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.run.machine.cpu_use import MachineUse, MachineUseRecorder, _machine_s, _root_cpuacct, tree_cpu_s

TICKS = os.sysconf("SC_CLK_TCK")
BURN = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.4: pass"


def write_proc(proc: Path, busy: int, stolen: int, processes: dict[int, tuple[int, int]]) -> None:
    """`processes`: pid -> (parent, ticks); names hold spaces and brackets, as real ones may."""
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 99 7 0 0 {stolen} 0 0\ncpu0 1 2 3\n")
    for pid, (parent, ticks) in processes.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        rest = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0", *["0"] * 10]
        (proc / str(pid) / "stat").write_text(f"{pid} (a) b (c) {' '.join(rest)}\n")


def test_tree_is_exactly_the_descendants(tmp_path):
    write_proc(tmp_path / "proc", 0, 0, {1: (0, 1000), 10: (1, 3), 11: (10, 5), 12: (11, 7), 13: (1, 100)})
    assert tree_cpu_s(10, proc=tmp_path / "proc") == 15 / TICKS
    assert tree_cpu_s(999, proc=tmp_path / "proc") == 0


def test_others_is_busy_minus_own_plus_stolen(tmp_path):
    proc = tmp_path / "proc"
    write_proc(proc, 1000, 0, {10: (1, 50)})
    recorder = MachineUseRecorder(10, proc=proc).start()
    write_proc(proc, 1300, 20, {10: (1, 150)})
    use = recorder.stop()
    assert use.source == "proc-stat"
    assert (use.busy_s, use.own_s, use.stolen_s) == pytest.approx((300 / TICKS, 100 / TICKS, 20 / TICKS))


def test_fraction_and_mark():
    use = MachineUse(wall_s=10, cores=2, busy_s=9, own_s=6, stolen_s=1, source="cpuacct")
    assert use.others == pytest.approx(0.2) and use.disturbed and use.to_json()["others"] == use.others
    assert MachineUse(wall_s=10, cores=2, busy_s=5, own_s=6, stolen_s=0, source="cpuacct").others == 0  # tick rounding is not negative use
    assert MachineUse(wall_s=0, cores=2, busy_s=5, own_s=0, stolen_s=0, source="cpuacct").others == 0


def test_idle_and_waiting_are_not_busy():
    busy, stolen = _machine_s("cpu  1 2 4 1000 2000 8 16 32 64 128\n")
    assert (busy, stolen) == (31 / TICKS, 32 / TICKS)


def test_cpuacct_only_when_the_mount_is_the_whole_machine(tmp_path):
    for folder in ("proc/1", "proc/self", "cg"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "cg/cpuacct.usage").write_text("0")
    (tmp_path / "proc/self/mountinfo").write_text(f"1 1 0:1 / {tmp_path}/cg rw - cgroup cgroup rw,cpu,cpuacct\n")
    (tmp_path / "proc/1/cgroup").write_text("4:cpu,cpuacct:/\n")
    assert _root_cpuacct(tmp_path / "proc") == tmp_path / "cg/cpuacct.usage"
    (tmp_path / "proc/1/cgroup").write_text("4:cpu,cpuacct:/docker/abc\n")
    assert _root_cpuacct(tmp_path / "proc") is None


@pytest.mark.real
@pytest.mark.timeout(250)
def test_own_children_are_ours_and_others_are_not():
    with MachineUseRecorder() as recorder:
        subprocess.run([sys.executable, "-c", BURN], check=True)
    use = recorder.result
    assert use.own_s >= 0.4 - 2 / TICKS and use.busy_s >= 0.4 - 4 / TICKS
    stranger = subprocess.Popen([sys.executable, "-c", "input()\n" + BURN], stdin=subprocess.PIPE)
    sleeper = subprocess.Popen(["/bin/sleep", "600"])
    try:
        recorder = MachineUseRecorder(sleeper.pid).start()  # from the sleeper's point of view the burner is somebody else
        stranger.communicate(b"\n")
        use = recorder.stop()
    finally:
        sleeper.kill()
        sleeper.wait()
        stranger.wait()
    assert use.own_s == 0 and use.busy_s >= 0.4 - 4 / TICKS and use.others > 0


def test_stop_before_start():
    with pytest.raises(RuntimeError, match="before start"):
        MachineUseRecorder().stop()
