"""This machine as the engine: limits and namespaces are real, ranks are where they were decided, and nothing stays behind, not even after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_fakes import gives_way

from meshwright.check.carried import check_carried
from meshwright.cluster import Given, Server, Servers
from meshwright.errors import RunError
from meshwright.run.engines import Local, Session
from meshwright.run.engines.audited import audit
from meshwright.run.machine.cpu_quota import PREFIX, places_of
from meshwright.run.machine.limits import Limits

SERVERS = Servers(servers=tuple(Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(4)), cores=8, memory_bytes=1 << 36) for n in range(2)))
SAYS = ("sh", "-c", "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $CUDA_VISIBLE_DEVICES $MASTER_ADDR $MASTER_PORT; hostname")
OWNER = """
import sys, time
from pathlib import Path
from meshwright.cluster import Given, Server, Servers
from meshwright.run.engines import Local, Session
server = Server(name="s0", gpus=("s0g0", "s0g1"), cores=8, memory_bytes=1 << 36)
with Session(Local(servers=Servers(servers=(server,))), Path(sys.argv[1])) as s:
    for n, (name, command) in enumerate((("quick", ["true"]), ("long", ["sleep", "1000"]))):
        s.submit(name, command, number=n)
        s.place(name, [Given(job=name, server="s0", gpus=(f"s0g{n}",), cores=2, memory_bytes=1 << 30)])
        s.start([name])
    while s.jobs["quick"].now != "ended" or s.jobs["long"].now != "running":
        s.watch()
        time.sleep(0.05)
    print("there", flush=True)
    time.sleep(1000)
"""


def allowed() -> bool:
    try:
        with Limits(cores=0.5, memory_bytes=64 << 20):
            return True
    except RunError:
        return False


pytestmark = pytest.mark.real
limited = pytest.mark.skipif(not allowed(), reason="no control groups with cpu and memory can be made here")


def part(job, server="s0", gpus=(0,), cores=2, memory_bytes=1 << 30):
    return [Given(job=job, server=server, gpus=tuple(f"{server}g{k}" for k in gpus), cores=cores, memory_bytes=memory_bytes)]


def groups(pid) -> list[Path]:
    return [g for c in ("cpu", "memory") for p in places_of(controller=c) for g in p.folder.glob(f"{PREFIX}{pid}-*")]


def until(true, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(true())


def command(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"


def over(session, name):
    found = []

    def ended():
        found.extend(session.watch())
        return any(e.what != "running" and e.job == name for e in found)

    assert until(ended)
    return next(e for e in found if e.what != "running" and e.job == name)


def words(folder, job, rank, attempt=1):
    return (folder / "jobs" / f"{job:06d}" / f"out-{attempt}-{rank}.txt").read_text().split()


@limited
def test_a_gang_has_its_ranks_gpus_limits_and_names(tmp_path):
    """Ranks lie as the parts say: s1 before s0. The audit is clean, then finds what is changed by hand."""
    given = (*part("g", "s1", (2, 3), cores=3), *part("g", "s0", (1,), cores=1, memory_bytes=1 << 29))
    with Session(Local(servers=SERVERS), tmp_path) as s:
        s.submit("g", [*SAYS[:2], f"{SAYS[2]}; until [ -e {tmp_path}/go ]; do sleep 0.05; done"], number=0)
        s.place("g", given)
        assert s.watch() == [] and s.jobs["g"].now == "held"
        s.start(["g"])
        assert until(lambda: s.watch() or s.jobs["g"].now == "running")
        here = groups(os.getpid())
        assert {"".join((g / f).read_text().strip() for f in ("cpu.cfs_quota_us", "cpu.max", "memory.limit_in_bytes",
            "memory.max") if (g / f).exists())
                for g in here} in ({"30000", str(1 << 30), "10000", str(1 << 29)}, {f"30000 10000{1 << 30}", f"10000 10000{1 << 29}"})  # fmt: skip
        (tmp_path / "go").touch()
        assert over(s, "g").code == 0 and s.audit("g") == given and not groups(os.getpid())
        named = not s.engine.notes
    out = [words(tmp_path, 0, r) for r in range(3)]
    assert [x[:5] for x in out] == [["0", "0", "2", "3", "2,3"], ["1", "1", "2", "3", "2,3"], ["2", "0", "1", "3", "1"]]
    assert len({(x[5], x[6]) for x in out}) == 1 and (not named or [x[7] for x in out] == ["s1", "s1", "s0"])
    found = audit(tmp_path)
    assert found.verdict.ok and found.verdict.facts["differences"] == 0 and len(found.waits_s) == 1
    path = tmp_path / "jobs" / "000000" / "started-1-s0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ranks": [1], "cuda_visible_devices": ""}))
    assert set(audit(tmp_path).verdict.facts["kinds"]) == {"ranks", "GPUs seen"}
    assert not check_carried(found.attempts, picks_gpus=True).findings


@limited
def test_kill_9_of_the_driver_leaves_nothing_and_the_run_is_taken_up(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "there\n"
    assert groups(owner.pid)
    sleeping = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _cgroup_of(p, owner.pid)]
    assert sleeping
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert until(lambda: not groups(owner.pid)) and until(lambda: not any(Path(f"/proc/{p}").exists() for p in sleeping))
    with Session(Local(servers=SERVERS), tmp_path) as s:
        for n, name in enumerate(("quick", "long")):
            s.submit(name, ["true"], number=n)
        assert s.resumed and s.jobs["quick"].now == "ended" and s.jobs["long"].now == "running"
        assert over(s, "long").what == "lost"
        s.place("long", part("long"))
        s.start(["long"])
        assert over(s, "long").code == 0 and s.jobs["long"].attempt == 2 and s.jobs["quick"].attempt == 1
    assert audit(tmp_path).verdict.ok


def _cgroup_of(process, owner):
    try:
        return f"{PREFIX}{owner}-" in (process / "cgroup").read_text()
    except OSError:
        return False


@limited
def test_suspend_resume_resize_cancel(tmp_path):
    with Session(Local(servers=SERVERS), tmp_path) as s:
        s.submit("a", ["sleep", "1000"], number=0)
        s.place("a", part("a"))
        s.start(["a"])
        assert until(lambda: s.watch() or s.jobs["a"].now == "running")

        def members():
            return [int(x) for g in groups(os.getpid()) for x in (g / "cgroup.procs").read_text().split()]

        # Stopped before it has become the program, a child keeps what forked it waiting, in state D.
        assert until(lambda: "sleep" in {command(p) for p in members()})
        pids = members()

        def states():
            return {Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] for p in pids}

        s.suspend("a")
        assert until(lambda: states() == {"T"})
        s.resume("a")
        assert until(lambda: "T" not in states())
        s.resize("a", part("a", cores=4, memory_bytes=1 << 31))
        assert s.audit("a")[0].cores == 4
        assert any("40000" in (g / f).read_text() for g in groups(os.getpid()) for f in ("cpu.cfs_quota_us", "cpu.max") if (g / f).exists())
        with pytest.raises(RunError, match=r"in use|cannot be"):
            s.resize("a", part("a", cores=4, memory_bytes=4 << 20))
        s.cancel("a")
        assert s.jobs["a"].now == "cancelled" and s.watch() == []
    assert not groups(os.getpid()) and not any(Path(f"/proc/{p}").exists() for p in pids)


def test_without_control_groups_it_runs_and_says_so(tmp_path):
    """A root without /proc stands for a machine without controllers."""
    engine = Local(servers=SERVERS, root=tmp_path / "none")
    with Session(engine, tmp_path / "run") as s:
        s.submit("a", ["sh", "-c", "exit 3"], number=0)
        s.place("a", part("a"))
        s.start(["a"])
        assert over(s, "a").code == 3
    assert any("no limit of cores" in n for n in engine.notes) and any("no limit of memory" in n for n in engine.notes)
    found = audit(tmp_path / "run")
    assert set(found.verdict.facts["kinds"]) == {"cores", "memory"} and found.failed == ("a",) and any("no limit" in n for n in found.notes)


def test_a_program_that_is_missing_fails_its_job_only(tmp_path):
    with Session(Local(servers=SERVERS, root=tmp_path), tmp_path / "run") as s:
        s.submit("a", ["no-such-program"], number=0)
        s.place("a", part("a"))
        s.start(["a"])
        assert over(s, "a").code == 127
    assert "cannot start no-such-program" in (tmp_path / "run/jobs/000000/launcher-1-s0.txt").read_text()


def test_this_machine_itself_is_one_server():
    here = Local().discover()
    assert len(here) == 1 and here.servers[0].cores == len(os.sched_getaffinity(0))


@limited
def test_rounds_preempt_move_and_resize_real_jobs(tmp_path):
    """All is audited, and no group stays behind."""
    with Session(Local(servers=SERVERS), tmp_path / "run", servers=SERVERS) as session:
        gives_way(session, SERVERS, tmp_path)
    assert not groups(os.getpid())
