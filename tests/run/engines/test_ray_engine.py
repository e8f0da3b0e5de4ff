"""Ray as the engine, where the package is installed: four nodes in one process; bundles lie where they were decided."""

from __future__ import annotations

import builtins
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from engine_fakes import gives_way

from meshwright.cluster import Given
from meshwright.errors import Infeasible, MissingExtra, Unsupported, UsageError
from meshwright.run.engines import Session, sandbox, sandbox_ray
from meshwright.run.engines.audited import audit
from meshwright.run.engines.ray import NAME, Ray
from meshwright.run.engines.sandbox import Sandbox

pytestmark = pytest.mark.real


def test_without_the_package_it_says_so(monkeypatch):
    real = builtins.__import__

    def none(name, *rest, **more):
        if name == "ray":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(MissingExtra, match="'ray'"):
        Ray()


def test_a_sandbox_without_the_package_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_SANDBOX_DIR", str(tmp_path))
    monkeypatch.setattr(sandbox_ray, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="a sandbox of Ray"):
        Sandbox.up(kind="ray")
    assert not list(tmp_path.iterdir())


def test_a_folder_too_long_for_sockets_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Ray's sockets leave 41"):
        sandbox_ray.daemons(tmp_path / ("a" * 42), ("n1",), (1, 2), gpus=1, cores=1, memory_bytes=1)


@pytest.fixture
def short():
    """A folder whose name is short enough for the sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="mw", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox needs root")
def test_a_sandbox_stands_beside_others_and_ends_whole_with_its_holder(monkeypatch, short):
    pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
    monkeypatch.setenv("MESHWRIGHT_SANDBOX_DIR", str(short))
    with Sandbox.up(kind="ray", nodes=2, gpus=2, cores=2, memory_bytes=1 << 30) as made:
        assert made.state.kind == "ray" and made.pids("raylet") and [s.name for s in sandbox.listed()] == [made.state.name]
        os.kill(made.state.holder, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(map(made.pids, sandbox_ray.DAEMONS)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(made.pids, sandbox_ray.DAEMONS))
    assert sandbox.listed() == [] and not list(short.iterdir())


@pytest.fixture(scope="module")
def nodes():
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    for name, value in sandbox_ray.NO_SPARE.items():
        patch.setenv(name, value)
    claims = {"num_cpus": 8, "num_gpus": 4, "memory": 64 << 30, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**claims, "labels": {NAME: "n1"}, "include_dashboard": False})
    for n in (2, 3):
        cluster.add_node(**claims, labels={NAME: f"n{n}"})
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    patch.undo()


def part(job, server, count, first=0):
    return Given(job=job, server=server, gpus=tuple(f"{server}g{k}" for k in range(first, first + count)), cores=count, memory_bytes=count << 30)


def test_gangs_run_where_they_were_decided_and_what_cannot_be_is_refused_at_once(nodes, tmp_path):
    with Session(Ray(), tmp_path) as s:
        assert sorted((x.name, len(x.gpus), x.cores) for x in s.discover().servers) == [(f"n{n}", 4, 8) for n in (1, 2, 3)]
        wanted = {"a": [part("a", "n3", 2), part("a", "n1", 1)], "b": [part("b", "n1", 3, 1)], "bad": [part("bad", "n2", 1)]}
        for n, (name, given) in enumerate(wanted.items()):
            s.submit(name, ["sh", "-c", "exit 3" if name == "bad" else "echo $RANK $CUDA_VISIBLE_DEVICES"], number=n, per="server")
            s.place(name, given)
        assert s.watch() == []
        s.start(["b", "a", "bad"])
        deadline = time.monotonic() + 60
        while any(s.jobs[x].now != "ended" for x in wanted) and time.monotonic() < deadline:
            s.watch()
        assert {x: s.jobs[x].code for x in wanted} == {"a": 0, "b": 0, "bad": 3}
        s.submit("big", ["true"], number=9)
        with pytest.raises(Infeasible, match="99 cores on n1"):
            s.place("big", [Given(job="big", server="n1", gpus=("n1g0",), cores=99, memory_bytes=1 << 30)])
        for act in (s.engine.suspend, s.engine.resume):
            with pytest.raises(Unsupported):
                act(s.jobs["a"].work)
        with pytest.raises(Unsupported):
            s.engine.resize(s.jobs["a"].work, ())
    found = audit(tmp_path)
    assert found.verdict.facts["differences"] == 0 and found.failed == ("bad",)
    words = (tmp_path / "jobs/000000/out-1-0.txt").read_text().split()
    assert words[0] == "0" and len(words[1].split(",")) == 2


def test_rounds_preempt_and_move_tasks_that_keep_their_state(nodes, tmp_path):
    with Session(Ray(), tmp_path / "run") as s:
        gives_way(s, s.discover(), tmp_path)
