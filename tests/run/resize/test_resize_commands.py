"""Real commands in control groups, resized; orders for engines to the letter; nothing left behind, not even after kill -9."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from meshwright.check.resize import check_resize_log
from meshwright.cluster.resize import ResizeLog, Rules, Tenants
from meshwright.decide.cluster.resize import NAMES, Resizer
from meshwright.errors import RunError, UsageError
from meshwright.run.machine.cpu_quota import PREFIX, places_of, process_start_ticks
from meshwright.run.machine.limits import Limits
from meshwright.run.resize import LoaderWorkers, ResizeCommand, kubernetes_resize, resize_commands, slurm_update


def allowed() -> bool:
    try:
        with Limits(cores=0.5, memory_bytes=64 << 20):
            return True
    except RunError:
        return False


groups = pytest.mark.skipif(not allowed(), reason="no control groups with cpu and memory can be made here")
MIB = 1 << 20
IDLE = (sys.executable, "-S", "-c", "import time\nx = bytearray(40 << 20)\ntime.sleep(1000)")
GREEDY = (sys.executable, "-S", "-c", "while True: pass")


def tenants(resource: str, names: tuple[str, ...], unit: float, most: int) -> Tenants:
    return Tenants(resource=resource, unit=unit, names=names, least=(1,) * len(names), most=(most,) * len(names), window_s=0.2)


def before_neighbours() -> None:
    """What is greedy here gets what its quota allows: left with less by busy neighbours, it would seem to need less."""
    for group in (g for p in places_of(controller="cpu") for g in p.folder.glob(f"{PREFIX}{os.getpid()}-*")):
        for file, weight in (("cpu.weight", 10_000), ("cpu.shares", 262_144)):  # the most that v2 and v1 take
            if (group / file).exists():
                (group / file).write_text(str(weight))


@pytest.mark.real
@groups
def test_an_idle_command_shrinks_a_greedy_one_grows_and_the_log_is_right():
    names = ("idle", "greedy")
    both = {"cpu": tenants("cpu", names, 0.1, 4), "memory": tenants("memory", names, 32 * MIB, 6)}
    rules = {"cpu": Rules(), "memory": Rules(hold_windows=4)}
    strategy = NAMES["threshold"]()
    rows = {"cpu": [], "memory": []}

    def told(resource, window):
        if not rows["cpu"]:
            before_neighbours()
        rows[resource].append(window)

    found = resize_commands(
        [ResizeCommand(name="idle", command=IDLE), ResizeCommand(name="greedy", command=GREEDY, start={"cpu": 1})], both,
        {r: Resizer(both[r], rules[r], strategy.plan(both[r], rules[r])) for r in both}, most_windows=12, on_window=told,
    )  # fmt: skip
    last = {r: rows[r][-1].before for r in rows}
    assert last["cpu"][0] < 4 and last["cpu"][1] > 1 and last["memory"][0] < 6 and last["memory"][0] * 32 * MIB > 40 * MIB, last
    assert found.throttled > 0 and found.oom_kills == 0 and found.codes == {"idle": None, "greedy": None}
    for r in rows:
        log = ResizeLog(tenants=both[r], rules=rules[r], strategy="threshold", windows=tuple(rows[r]), total=found.totals[r])
        assert check_resize_log(log).ok, check_resize_log(log).findings
    assert not [g for c in ("cpu", "cpuacct", "memory") for p in places_of(controller=c) for g in p.folder.glob(f"{PREFIX}{os.getpid()}-*")]


@pytest.mark.real
@groups
def test_memory_that_is_held_is_not_taken_and_other_limits_are_changed():
    with Limits(cores=0.5, memory_bytes=256 * MIB, watch=True) as limits:
        child = limits.start([sys.executable, "-S", "-c", "x = b'1' * (100 << 20)\nprint(1, flush=True)\nimport time\ntime.sleep(1000)"],
            stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        assert limits.used().memory_bytes > 100 * MIB and limits.used().cpu_s > 0
        assert not limits.change(memory_bytes=90 * MIB) and limits.memory_bytes == 256 * MIB
        assert limits.change(memory_bytes=160 * MIB) and limits.change(memory_bytes=200 * MIB) and limits.change(cores=0.25)
        assert not limits.ran_out_of_memory() and child.poll() is None
        with pytest.raises(UsageError):
            limits.change(cores=0)
        with pytest.raises(UsageError):
            limits.change(memory_bytes=1)
        child.stdout.close()
    child.wait()
    with Limits(memory_bytes=64 * MIB) as limits, pytest.raises(UsageError, match="no limit of cores"):
        limits.change(cores=1)


def test_version_2_files_to_the_letter(tmp_path):
    """A tree as cgroup v2 shows it: what is written where, and how use is read."""
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (group / "cgroup.subtree_control").write_text("cpu memory\n")
    limits = Limits(memory_bytes=128 * MIB, root=tmp_path, watch=True)
    with limits:
        [made] = [p for p in group.iterdir() if p.name.startswith(PREFIX)]
        assert (made / "memory.max").read_text() == str(128 * MIB)
        (made / "memory.stat").write_text(f"anon {50 * MIB}\nfile {90 * MIB}\n")
        (made / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\n")
        assert (limits.used().memory_bytes, limits.used().oom_kills) == (50 * MIB, 1)
        assert not limits.change(memory_bytes=40 * MIB) and limits.change(memory_bytes=64 * MIB)
        assert (made / "memory.max").read_text() == str(64 * MIB)
        for file in list(made.iterdir()):  # rmdir of a group takes them along, that of a folder does not
            file.unlink()


OWNER = """
import sys, numpy as np
from meshwright.cluster.resize import Choice, ResizeLog, Rules, Tenants
from meshwright.io.cluster.resize import LogWriter
from meshwright.run.resize.loop import ResizeCommand, resize_commands
tenants = Tenants(resource="cpu", unit=0.1, names=("a",), least=(1,), most=(5,), window_s=0.1)
stay = Choice(allowed=np.array([[True, True, False, False]]), propensity=np.array([[0.0, 1.0, 0.0, 0.0]]), chosen=np.array([1]))
with LogWriter(sys.argv[1] + "/cpu.jsonl", ResizeLog(tenants=tenants, rules=Rules(), strategy="static")) as log:
    command = ResizeCommand(name="a", command=("sh", "-c", "echo $$ > $0; exec sleep 1000", sys.argv[2]), start={"cpu": 4})
    resize_commands([command], {"cpu": tenants}, {"cpu": lambda seen: stay}, on_window=lambda resource, window: log.add(window))
"""


@pytest.mark.real
@groups
def test_kill_9_leaves_no_command_and_no_group_but_the_log(tmp_path):
    file = tmp_path / "pid"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), str(file)])

    def until(true) -> bool:
        deadline = time.monotonic() + 300  # of a machine that is busy with other things
        while not true() and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(true())

    log = tmp_path / "cpu.jsonl"
    assert until(lambda: file.exists() and file.read_text().strip() and log.exists() and log.read_bytes().count(b"\n") >= 3)
    child = int(file.read_text())
    ticks = process_start_ticks(child)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert until(lambda: process_start_ticks(child) != ticks)
    assert until(lambda: not [g for c in ("cpu", "cpuacct") for p in places_of(controller=c) for g in p.folder.glob(f"{PREFIX}{owner.pid}-*")])
    from meshwright.io.cluster.resize import read_resize_log

    read = read_resize_log(log)
    assert read.total is None and len(read.windows) >= 2


def test_orders_for_kubernetes_and_slurm_to_the_letter():
    patch, command = kubernetes_resize("prod", "web-0", "app", cores=1.25, memory_bytes=300 * MIB + 1)
    size = {"cpu": "1250m", "memory": "301Mi"}
    assert json.loads(patch) == {"spec": {"containers": [{"name": "app", "resources": {"requests": size, "limits": size}}]}}
    assert command == f"kubectl patch pod web-0 --namespace prod --subresource resize --type strategic --patch '{patch}'"
    assert shlex.split(command)[-1] == patch
    assert kubernetes_resize("a", "b", "c", cores=0.3)[0].count('"cpu":"300m"') == 2
    assert slurm_update("42", cores=2.5, memory_bytes=1 << 30) == "scontrol update JobId=42 MinCPUsNode=3 MinMemoryNode=1024"
    assert slurm_update("42_7", cores=2) == "scontrol update JobId=42_7 MinCPUsNode=2"
    for wrong in (("A", "b", "c"), ("a", "b;rm", "c"), ("a", "b", "")):
        with pytest.raises(UsageError):
            kubernetes_resize(*wrong, cores=1)
    for job, size in (("x", {"cores": 1}), ("42", {}), ("42", {"cores": 0}), ("42", {"cores": float("nan")})):
        with pytest.raises(UsageError):
            slurm_update(job, **size)


def test_workers_of_a_loader_follow_its_cores():
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(list(range(8)), batch_size=2, num_workers=0)
    actuator = LoaderWorkers(loader, cores_per_worker=0.5, most=2)
    assert actuator.change(1.0) and loader.num_workers == 2 and not actuator.change(5.0)
    assert sorted(int(x) for batch in loader for x in batch) == list(range(8))
    assert actuator.change(0.1) and loader.num_workers == 1
    kept = SimpleNamespace(num_workers=2, persistent_workers=True, _iterator=object())
    assert not LoaderWorkers(kept).change(4) and kept.num_workers == 2
    with pytest.raises(UsageError):
        LoaderWorkers(loader, cores_per_worker=0)


def test_refusals_of_commands():
    with pytest.raises(UsageError, match="same names"):
        resize_commands([ResizeCommand(name="a", command=IDLE)], {"cpu": tenants("cpu", ("b",), 0.1, 4)}, {})
    if allowed():
        with pytest.raises(UsageError, match="begins with 9 steps"):
            resize_commands([ResizeCommand(name="a", command=IDLE, start={"cpu": 9})], {"cpu": tenants("cpu", ("a",), 0.1, 4)}, {})
