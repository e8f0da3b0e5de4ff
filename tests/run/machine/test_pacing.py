"""Pacing on the real kernel where it lets us, and its arithmetic on fake clocks everywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import RunError, UsageError
from meshwright.run.machine import cpu_quota
from meshwright.run.machine.cpu_quota import CgroupPlace, CpuQuota, cgroup_cpu_limit, gc, quota_place, quota_times
from meshwright.run.machine.pacing import MAX_LOAD, PacedClock, Pacing, choose_pacing, machine_facts

needs_quota = pytest.mark.skipif(quota_place() is None, reason="no control group with the cpu controller can be written here")


def ours() -> list[str]:
    place = quota_place()
    return [] if place is None else [f.name for f in place.folder.glob(f"{cpu_quota.PREFIX}{os.getpid()}-*")]


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["/bin/sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_devices_under_quotas_share_the_machine_s_cores():
    """A device with a core of its own, or a share of none, has no quota."""
    found = quota_times([0.0, 0.4, 1.0, 0.25], 2.0)
    assert found[0] == found[2] == {}
    assert found[1] == found[3] and (found[1]["cpu_cores"], found[1]["cpu_period_s"]) == (2.0, 0.01)
    assert 0 < found[1]["cpu_overrun_s"] < 0.01


def test_a_machine_is_named_for_its_first_core(monkeypatch):
    """Fast cores come first where cores are unlike."""
    read = Path.read_text
    told = "processor\t: 0\nmodel name\t: Fast 9\n\nprocessor\t: 1\nmodel name\t: Slow 1\n"
    monkeypatch.setattr(Path, "read_text", lambda path, *a, **k: told if str(path) == "/proc/cpuinfo" else read(path, *a, **k))
    assert machine_facts.__wrapped__().cpu_model == "Fast 9"


def test_machine_facts_agree_with_the_kernel():
    facts = machine_facts()
    assert facts.affinity == tuple(sorted(os.sched_getaffinity(0)))
    assert 0 < facts.cores <= len(facts.affinity)
    assert facts.memory_bytes > 2**27 and facts.cpu_model


@given(ranks=st.integers(1, 64), cores=st.floats(0.5, 64))
def test_choice(ranks, cores):
    pacing = choose_pacing(ranks, cores, mode="paced" if ranks > cores else "auto")
    assert pacing.mode == ("none" if ranks <= cores else "paced")
    if pacing.mode == "paced":
        assert 0 < pacing.share <= 1 and pacing.share * ranks <= MAX_LOAD * cores * (1 + 1e-12)
    assert pacing.wall_s(0.3) == pytest.approx(0.3 / pacing.share)


def test_choice_prefers_quota_then_paced(monkeypatch):
    monkeypatch.setattr("meshwright.run.machine.pacing.quota_place", lambda: CgroupPlace(1, Path("/nowhere")))
    assert choose_pacing(4, 2).mode == "quota" and choose_pacing(4, 2).share == pytest.approx(0.4)
    assert choose_pacing(1, 2, mode="quota").share == 1.0
    monkeypatch.setattr("meshwright.run.machine.pacing.quota_place", lambda: None)
    assert choose_pacing(4, 2).mode == "paced"
    assert choose_pacing(4, 2, mode="none").mode == "none"
    with pytest.raises(RunError, match="quotas cannot be set"):
        choose_pacing(4, 2, mode="quota")


@pytest.mark.parametrize(("ranks", "cores", "mode"), [(0, 2, "auto"), (1, 0, "auto"), (1, 1, "fast")])
def test_choice_refuses(ranks, cores, mode):
    with pytest.raises(UsageError):
        choose_pacing(ranks, cores, mode=mode)


@pytest.mark.parametrize("share", [0, -1, float("nan"), float("inf")])
def test_quota_refuses_bad_shares(share):
    with pytest.raises(UsageError, match="share"):
        CpuQuota(share)


class FakeTime:
    def __init__(self, slack):
        self.wall, self.cpu, self.slack = 0.0, 0.0, slack

    def work(self, cpu, stolen=0.0):
        self.cpu += cpu
        self.wall += cpu + stolen

    def sleep(self, seconds):
        assert seconds > 0
        self.wall += seconds + self.slack


@given(st.lists(st.floats(1e-4, 0.1), min_size=1, max_size=20), st.floats(0.05, 1.0), st.floats(0, 0.002))
def test_paced_clock_keeps_the_share(works, share, slack):
    fake = FakeTime(slack)
    clock = PacedClock(share, wall=lambda: fake.wall, cpu=lambda: fake.cpu, sleep=fake.sleep)
    for cpu in works:
        before = fake.wall
        with clock.step():
            fake.work(cpu)
        assert fake.wall - before >= cpu - 1e-9
    target = sum(works) / share
    assert target - 1e-9 <= fake.wall <= target + slack + 1e-9  # slack does not add up: it is paid back


def test_paced_clock_does_not_sleep_off_other_peoples_time():
    fake = FakeTime(0.0)
    clock = PacedClock(0.5, wall=lambda: fake.wall, cpu=lambda: fake.cpu, sleep=fake.sleep)
    with clock.step():
        fake.work(0.01, stolen=0.05)
    assert fake.wall == pytest.approx(0.06)
    with clock.step():
        fake.work(0.01)
    assert fake.wall == pytest.approx(0.08)


@pytest.mark.parametrize("share", [0, 1.5, -0.1])
def test_paced_clock_refuses(share):
    with pytest.raises(UsageError):
        PacedClock(share)


@needs_quota
@pytest.mark.real
@pytest.mark.timeout(250)
def test_quota_really_limits_cpu_time():
    code = (
        "import time\nt = time.monotonic(); c = time.process_time()\nwhile time.monotonic() - t < 0.6: pass\n"
        "print((time.process_time() - c) / (time.monotonic() - t))"
    )
    with CpuQuota(0.25) as quota:
        child = subprocess.Popen([sys.executable, "-c", "input()\n" + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        quota.attach(child.pid)
        assert quota.pids() == [child.pid]
        out, _ = child.communicate("go\n")
    assert float(out) <= 0.25 * 1.3  # an upper limit holds however busy the machine is
    assert ours() == []


@needs_quota
@pytest.mark.real
def test_close_frees_members_that_still_run(sleeper):
    quota = CpuQuota(0.5)
    quota.attach(sleeper.pid)
    assert len(ours()) == 1
    quota.close()
    quota.close()
    assert ours() == [] and sleeper.poll() is None and quota.pids() == []


@needs_quota
@pytest.mark.real
def test_attach_of_a_process_that_is_gone(sleeper):
    sleeper.kill()
    sleeper.wait()
    with CpuQuota(0.5) as quota, pytest.raises(RunError, match=f"process {sleeper.pid}"):
        quota.attach(sleeper.pid)
    assert ours() == []


@needs_quota
@pytest.mark.real
def test_pacing_limit_leaves_nothing_behind_on_failure(sleeper):
    with pytest.raises(ZeroDivisionError), Pacing(mode="quota", share=0.5).limit([sleeper.pid]) as quotas:
        assert quotas[0].pids() == [sleeper.pid]
        raise ZeroDivisionError
    assert ours() == []
    with Pacing(mode="none").limit([sleeper.pid]) as quotas:
        assert quotas == []


@needs_quota
@pytest.mark.real
@pytest.mark.timeout(250)
def test_groups_of_a_killed_owner_are_collected(sleeper):
    code = (
        "import sys, time\nfrom meshwright.run.machine.cpu_quota import CpuQuota\nq = CpuQuota(0.5)\nq.attach(int(sys.argv[1]))\n"
        "print(q._folder, flush=True)\ntime.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(sleeper.pid)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert folder.name not in gc() and folder.is_dir()  # its owner lives
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    late = time.monotonic() + 60
    while folder.exists() and time.monotonic() < late:  # another process's `gc` may be at it
        gc()
    assert not folder.exists() and sleeper.poll() is None


@needs_quota
@pytest.mark.real
@pytest.mark.timeout(250)
@pytest.mark.interpreter
def test_interpreter_exit_removes_groups():
    code = "from meshwright.run.machine.cpu_quota import CpuQuota\nq = CpuQuota(0.5).open()\nprint(q._folder)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() and not Path(done.stdout.strip()).exists()


def fake_root(tmp_path: Path, cgroup: str, mounts: list[str]) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "proc/self/mountinfo").write_text("".join(f"{m}\n" for m in mounts))
    return tmp_path


def test_limits_of_own_groups_v2(tmp_path):
    root = fake_root(tmp_path, "0::/a/b\n", ["31 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"])
    deep = root / "sys/fs/cgroup/a/b"
    deep.mkdir(parents=True)
    assert cgroup_cpu_limit(root) is None
    (deep / "cpu.max").write_text("max 100000\n")
    assert cgroup_cpu_limit(root) is None
    (deep.parent / "cpu.max").write_text("150000 100000\n")
    assert cgroup_cpu_limit(root) == 1.5


def test_a_rank_under_a_quota_knows_the_cores_of_all_ranks(tmp_path):
    """Its own group is 0.25 of a core; the group above, of the whole run, 1.5."""
    root = fake_root(tmp_path, "0::/run/meshwright-12-34-0\n", ["31 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"])
    own = root / "sys/fs/cgroup/run/meshwright-12-34-0"
    own.mkdir(parents=True)
    (own / "cpu.max").write_text("2500 10000\n")
    (own.parent / "cpu.max").write_text("150000 100000\n")
    assert (cgroup_cpu_limit(root), cgroup_cpu_limit(root, rank=True)) == (0.25, 1.5)


def test_limits_of_own_groups_v1_on_a_hybrid_machine(tmp_path):
    mounts = ["1 1 0:1 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct", "2 1 0:2 / /cg/unified rw - cgroup2 cgroup2 rw"]
    root = fake_root(tmp_path, "3:cpu,cpuacct:/job\n0::/\n", mounts)
    (root / "cg/cpu/job").mkdir(parents=True)
    (root / "cg/unified").mkdir()
    (root / "cg/cpu/job/cpu.cfs_quota_us").write_text("50000\n")
    (root / "cg/cpu/job/cpu.cfs_period_us").write_text("100000\n")
    (root / "cg/cpu/cpu.cfs_quota_us").write_text("-1\n")
    (root / "cg/cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cpu_limit(root) == 0.5
    assert [(p.version, p.folder.name) for p in cpu_quota.places_of(root)] == [(2, "unified"), (1, "job"), (1, "cpu")]


def test_no_control_groups_at_all(tmp_path):
    root = fake_root(tmp_path, "", [])
    assert cgroup_cpu_limit(root) is None and cpu_quota.find_place(root) is None and gc(root) == []


def test_open_without_a_place(monkeypatch):
    monkeypatch.setattr(cpu_quota, "quota_place", lambda: None)
    with pytest.raises(RunError, match="no control group"):
        CpuQuota(0.5).open()


def test_open_where_groups_cannot_be_made(tmp_path):
    with pytest.raises(RunError, match="cannot make a control group"):
        CpuQuota(0.5, place=CgroupPlace(1, tmp_path / "absent")).open()


@pytest.mark.interpreter
def test_importing_pacing_loads_nothing_heavy():
    modules = "meshwright.run.machine.pacing, meshwright.run.machine.cpu_use"
    code = f"import sys, {modules}; sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.real
def test_paced_clock_on_the_real_clock():
    clock = PacedClock(0.5)
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(5):
        with clock.step():
            sum(range(100_000))
    assert time.perf_counter() - wall >= (time.thread_time() - cpu) / 0.5 * 0.8  # a lower limit: it did hold back
