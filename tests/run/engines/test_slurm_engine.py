"""Slurm as the engine. A sandbox with real daemons where Slurm is installed; what it is told, and what is refused, everywhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_fakes import SERVERS, gives_way

from meshwright.cluster import Given, Queue, QueuedJob
from meshwright.cluster.generate import UNPROFILED
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import given_of
from meshwright.drive.cluster_kept import Kept
from meshwright.errors import EngineAway, RunError, Unsupported, UsageError
from meshwright.io.fabric.name import load_fabric
from meshwright.run.engines import Driver, Session, Slurm, sandbox, sandbox_slurm
from meshwright.run.engines.audited import audit
from meshwright.run.engines.sandbox import PATH, PROGRAMS, Sandbox

missing = [p for p in PROGRAMS if not shutil.which(p, path=PATH)]
installed = pytest.mark.skipif(bool(missing) or os.geteuid() != 0, reason=f"needs root and Slurm (missing: {', '.join(missing) or 'root'})")
pytestmark = pytest.mark.real


def part(job, server, *gpus, cores=1, memory_bytes=1 << 30):
    return Given(job=job, server=server, gpus=tuple(f"{server}g{k}" for k in gpus), cores=cores, memory_bytes=memory_bytes)


# ---- everywhere --------------------------------------------------------------------------------------------------------
def fake(folder, **programs):
    """Programs of Slurm that print what they are told to, and end with a code."""
    for name in ("sinfo", "sbatch", "scontrol", "scancel"):
        text, code = programs.get(name, ("", 0))
        (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n[ {code} = 0 ] || echo '{text}' >&2\nexit {code}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_an_absent_and_an_old_slurm_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no Slurm here"):
        Slurm()
    monkeypatch.setenv("PATH", fake(tmp_path, sinfo=("sinfo: fatal: Could not establish a configuration source", 1)))
    with pytest.raises(RunError, match="configuration source") as caught:
        Slurm()
    assert "--conf" in caught.value.hint and "sandbox up slurm" in caught.value.hint
    monkeypatch.setenv("PATH", fake(tmp_path, sinfo=("slurm 17.11.2", 0)))
    with pytest.raises(Unsupported, match=r"17\.11 is older than 22\.05"):
        Slurm()
    monkeypatch.setenv("PATH", fake(tmp_path, sinfo=("slurm 22.05.8", 0), scontrol=("slurm_load_node error: Unable to contact slurm controller", 1)))
    with pytest.raises(EngineAway, match="Unable to contact"):
        Slurm().discover()
    (tmp_path / "scontrol").write_text("#!/bin/sh\nkill -SEGV $$\n")
    with pytest.raises(EngineAway, match="signal 11"):
        Slurm().discover()
    monkeypatch.setenv("PATH", fake(tmp_path, sinfo=("slurm 22.05.8", 0), scontrol=("NodeName=n1 CPUTot=8 RealMemory=10 State=IDLE", 0)))
    with pytest.raises(UsageError, match="no node of this Slurm has GPUs"):
        Slurm().discover()
    with pytest.raises(Unsupported, match="does not change"):
        Slurm().resize(type("W", (), {"placed": type("P", (), {"job": "a"})})(), ())


def test_a_number_that_was_used_is_not_used_again(tmp_path, monkeypatch):
    """A controller that counts from an old number: its jobs are cancelled until a new one comes."""
    path = fake(tmp_path, sinfo=("slurm 22.05.8", 0))
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\nn=$(cat {tmp_path}/n); echo $((n+1)) > {tmp_path}/n; echo "$n;cluster"\n')
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\n')
    (tmp_path / "n").write_text("3")
    monkeypatch.setenv("PATH", path)
    engine = Slurm()
    engine.remember(("5", "JOBID-x"))
    assert engine._submitted("j", ["sbatch"]) == "6" and (tmp_path / "cancelled").read_text().split() == ["3", "4", "5"]
    engine.remember(("5000",))
    with pytest.raises(RunError, match="in a row"):
        monkeypatch.setattr("meshwright.run.engines.slurm.MAX_SKIPPED", 2)
        engine._submitted("j", ["sbatch"])


def test_what_slurm_would_be_told(tmp_path):
    """A gang with unlike parts is a job of Slurm for each kind; released in order, priorities after the releases."""
    engine = Slurm(dry=True)
    with Session(engine, tmp_path / "run", dry=True, servers=SERVERS) as s:
        for n, name in enumerate(("a", "b")):
            s.submit(name, ["x"], number=n)
        s.place("a", [part("a", "s0", 0, 1, cores=4), part("a", "s1", 1, cores=2)])
        s.place("b", [part("b", "s1", 0)])
        s.start(["b", "a"])
    first, second, third, start = engine.said
    assert "--hold --no-requeue --job-name=mw-dry-0-1-0" in first
    assert "--nodelist=s0" in first and "--gres=gpu:2" in first and "--cpus-per-task=4" in first
    assert "--nodelist=s1" in second and "--job-name=mw-dry-0-1-1" in second and "--mem=1024M" in third
    told = [x for x in start.splitlines() if x.startswith(("release", "update"))]
    assert [x.split()[0] for x in told] == ["release", "update"] * 3 and "mw-dry-1-1-0" in told[0] and "Priority=3999999999" in told[1]
    assert not (tmp_path / "run").exists()


def test_a_sandbox_that_cannot_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_SANDBOX_DIR", str(tmp_path / "boxes"))
    for wrong in ({"name": "No!"}, {"nodes": 0}, {"gpus": 65}, {"cores": 0}, {"nodes": 65}):
        with pytest.raises(UsageError, match="sandbox"):
            Sandbox.up(**wrong)
    with pytest.raises(UsageError, match="no sandbox is called"):
        Sandbox.open("none")
    (tmp_path / "boxes" / "dead").mkdir()
    (tmp_path / "boxes" / "dead" / "sandbox.json").write_text(
        '{"name": "dead", "holder": 1, "holder_start": "x", "nodes": ["n"], "gpus": 1, "cores": 1, "memory_bytes": 1, "ports": []}'
    )
    assert sandbox.listed() == [] and not (tmp_path / "boxes" / "dead").exists()
    monkeypatch.setattr(sandbox_slurm, "PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no Slurm here"):
        Sandbox.up()


# ---- where Slurm is installed ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def box():
    with Sandbox.up(fabric=load_fabric("dgx1-v100:2"), gpus=4, lua=True) as made:
        yield made


def queue_of(*sizes, command=("sh", "-c", "sleep 1; echo $RANK of $WORLD_SIZE at $SLURMD_NODENAME with $CUDA_VISIBLE_DEVICES")):
    return Queue(profiles=(UNPROFILED,), jobs=tuple(
        QueuedJob(name=f"j{i}", gpus=g, profile="unprofiled", arrival_s=0.1 * i, duration_s=1.0, command=command) for i, g in enumerate(sizes)
    ))  # fmt: skip


def carried(box, queue, folder, **options):
    with Session(Slurm(conf=box.conf), folder) as s:
        servers = s.discover()
        policy = Kept(servers=servers, queue=queue, order=order("fifo")(), allocation=allocation("proportional")())
        d = Driver(session=s, servers=servers, queue=queue, policy=policy, per="server", limit_s=200.0,
                   given=lambda n, parts: tuple(given_of(servers, queue, n, parts)), **options)  # fmt: skip
        d.run()
    return d


@installed
def test_jobs_run_as_decided_and_the_audit_is_clean(box, tmp_path):
    """Eight GPUs on two nodes; j2 wants more than what is left of one node, so its parts are unlike."""
    d = carried(box, queue_of(1, 4, 3, 8, 2), tmp_path)
    assert all(r.code == 0 and r.attempts == 1 for r in d.ran)
    found = audit(tmp_path)
    assert found.verdict.facts["differences"] == 0 and found.verdict.facts["attempts"] == 5 and len(found.waits_s) == 5
    for n, job in enumerate(d.queue.jobs):
        made = d.session.jobs[job.name].work.placed
        for rank, where in enumerate(made.ranks):
            said = (tmp_path / "jobs" / f"{n:06d}" / f"out-1-{rank}.txt").read_text().split()
            assert said[:5] == [str(rank), "of", str(len(made.ranks)), "at", where.server] and len(said[-1].split(",")) == len(where.gpus)


@installed
def test_topology_and_the_plug_in_are_slurms(box, tmp_path):
    shown = subprocess.run(["scontrol", "show", "topology"], env=box.environment(), capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in box.state.nodes) or "box[0-1]" in shown
    done = subprocess.run(["sbatch", "--parsable", "--mem=1M", f"--output={tmp_path}/o", "--wrap", "true"], env=box.environment(),
        capture_output=True,
                          text=True, check=True)  # fmt: skip
    state = subprocess.run(["scontrol", "show", "job", done.stdout.strip()], env=box.environment(), capture_output=True, text=True, check=True).stdout
    subprocess.run(["scancel", done.stdout.strip()], env=box.environment(), check=True)
    assert "JobState=PENDING Reason=JobHeldUser" in state and "held until it is decided" in done.stderr


@installed
def test_rounds_preempt_and_move_jobs_that_keep_their_state(box, tmp_path):
    with Session(Slurm(conf=box.conf), tmp_path / "run") as s:
        gives_way(s, s.discover(), tmp_path)


@installed
def test_suspend_resume_cancel(box, tmp_path):
    with Session(Slurm(conf=box.conf), tmp_path) as s:
        s.discover()
        s.submit("a", ["sleep", "100"], number=0)
        s.place("a", [part("a", "box0", 0)])
        s.start(["a"])
        deadline = time.monotonic() + 60
        while s.jobs["a"].now != "running" and time.monotonic() < deadline:
            s.watch()
        assert [g.server for g in s.audit("a")] == ["box0"]

        def state():
            return s.engine._jobs()[f"{s.jobs['a'].work.key}-0"].state

        s.suspend("a")
        assert state() == "SUSPENDED"
        s.resume("a")
        assert state() == "RUNNING"
        s.cancel("a")
        assert s.jobs["a"].now == "cancelled" and s.watch() == []


@installed
def test_a_killed_controller_loses_nothing_and_does_nothing_twice(box, tmp_path):
    told = tmp_path / "told"
    queue = queue_of(1, 2, 4, 1, 4, command=("sh", "-c", f"sleep 2; echo $MESHWRIGHT_JOB $RANK >> {told}"))
    shot = []

    def say(text):
        if "released" in text and not shot:
            shot.append(text)
            for pid in box.pids("slurmctld"):
                os.kill(pid, signal.SIGKILL)

    d = carried(box, queue, tmp_path / "run", say=say)
    lines = told.read_text().splitlines()
    assert shot and sorted(lines) == sorted(f"j{i} {r}" for i in range(5) for r in range(len(d.session.jobs[f"j{i}"].work.placed.ranks)))
    assert audit(tmp_path / "run").verdict.facts["differences"] == 0


@installed
def test_two_sandboxes_side_by_side_and_kill_9_of_an_owner_leaves_no_process(box):
    script = "import time\nfrom meshwright.run.engines.sandbox import Sandbox\n"
    script += "s = Sandbox.up(nodes=1, gpus=0, name='owned')\nprint(s.folder, flush=True)\n"
    owner = subprocess.Popen([sys.executable, "-c", script + "time.sleep(1000)"], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    second = Sandbox.open("owned")
    assert second.pids("slurmd") and box.pids("slurmd") and {"owned", box.state.name} <= {s.name for s in sandbox.listed()}
    with pytest.raises(UsageError, match="already"):
        Sandbox.up(name="owned")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 60
    while (second.pids("slurmd") or second.pids("munged") or second.pids("slurmctld")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not second.pids("slurmd") and not second.pids("munged") and not second.pids("slurmctld")
    assert "owned" not in {s.name for s in sandbox.listed()} and not folder.exists() and box.pids("slurmd")
