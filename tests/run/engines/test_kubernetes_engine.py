"""Kubernetes through a `kubectl` that keeps its objects in a folder and can run them; the extender over real HTTP."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from engine_fakes import gives_way

from meshwright.cluster import Given
from meshwright.errors import EngineAway, PortInUse, RunError, Unsupported, UsageError
from meshwright.io.cluster.manifests import GATE, KEY, Pods
from meshwright.run.engines import Session
from meshwright.run.engines.audited import audit
from meshwright.run.engines.extender import Extender
from meshwright.run.engines.kubernetes import Kubernetes

FAKE = Path(__file__).with_name("fake_kubectl.py")


@pytest.fixture
def kubectl(tmp_path):
    path = tmp_path / "kubectl"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} {tmp_path} "$@"\n')
    path.chmod(0o755)
    return path


def end(tmp_path, code):
    path = tmp_path / "pods.json"
    pods = json.loads(path.read_text())
    for p in pods:
        state = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:09Z", "exitCode": code,
            "reason": "Error" if code else "Completed"}
        p["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": {"terminated": state}}]}
    path.write_text(json.dumps(pods))


def parts(*sizes):
    return [Given(job="t", server=f"n{n}", gpus=tuple(f"n{n}g{k}" for k in range(g)), cores=g, memory_bytes=g << 30) for n, g in enumerate(sizes, 1)]


@pytest.mark.real
@pytest.mark.parametrize("code", [0, 3])
def test_pods_are_held_then_start_on_their_nodes(tmp_path, kubectl, code):
    with Session(Kubernetes(Pods(image="i"), kubectl=str(kubectl)), tmp_path / "run") as s:
        assert [(x.name, len(x.gpus), x.cores) for x in s.discover().servers] == [("n1", 4, 8), ("n2", 4, 8)]
        s.submit("t", ["x"], number=0)
        s.place("t", parts(4, 2))
        assert s.watch() == [] and all(p["spec"]["schedulingGates"] == [{"name": GATE}] for p in json.loads((tmp_path / "pods.json").read_text()))
        (tmp_path / "away").touch()
        with pytest.raises(EngineAway):
            s.start(["t"])
        (tmp_path / "away").unlink()
        s.start(["t"])
        assert [e.what for e in s.watch()] == ["running"]
        smaller = [msgspec.structs.replace(g, cores=1, memory_bytes=g.memory_bytes // 2) for g in parts(4, 2)]
        s.resize("t", smaller)
        assert s.audit("t") == tuple(msgspec.structs.replace(g, gpus=tuple(f"?{k}" for k in range(len(g.gpus)))) for g in smaller)
        (tmp_path / "old").touch()
        with pytest.raises(RunError, match="could not find"):
            s.resize("t", parts(4, 2))
        end(tmp_path, code)
        (event,) = s.watch()
        assert (event.what, event.code) == ("ended", code)
        for act in (s.engine.suspend, s.engine.resume):
            with pytest.raises(Unsupported):
                act(s.jobs["t"].work)
        assert s.engine.down() == set()
    found = audit(tmp_path / "run")
    assert found.failed == (("t",) if code else ())
    assert not found.verdict.findings and found.attempts[0].started_s


@pytest.mark.real
def test_rounds_preempt_and_move_pods_that_keep_their_state(tmp_path, kubectl):
    (tmp_path / "real").touch()
    with Session(Kubernetes(Pods(image="i", claim="state"), kubectl=str(kubectl)), tmp_path / "run") as s:
        gives_way(s, s.discover(), tmp_path)
    assert json.loads((tmp_path / "pods.json").read_text()) == [] or all(
        p["status"]["phase"] == "Succeeded" for p in json.loads((tmp_path / "pods.json").read_text())
    )


@pytest.mark.real
def test_what_is_asked_to_leave_and_had_ended_has_ended(tmp_path, kubectl):
    """A gang that ended, one of which a part had ended, one that was never let go, and one of Kueue's."""
    for queue in ("", "kueue"):
        pods = tmp_path / "pods.json"
        with Session(Kubernetes(Pods(image="i", queue=queue), kubectl=str(kubectl)), tmp_path / f"run{queue}") as s:
            for n, name in enumerate(("ended", "half", "held")):
                s.submit(name, ["x"], number=n)
                s.place(name, [msgspec.structs.replace(g, job=name) for g in parts(1, 1)])
            s.start(["ended", "half"])
            s.watch()
            state = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:09Z"}
            there = json.loads(pods.read_text())
            for p in [p for p in there if p["metadata"]["name"][:-2] == s.jobs["ended"].work.key] + [
                next(p for p in there if p["metadata"]["name"] == f"{s.jobs['half'].work.key}-0")
            ]:
                p["status"] = {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": state}}]}
            pods.write_text(json.dumps(there))
            for name in ("ended", "half", "held"):
                s.preempt(name)
                s.preempt(name)
            assert {e.job: e.what for e in s.watch()} == {"ended": "ended", "half": "preempted", "held": "preempted"}
            assert {p["metadata"]["labels"][KEY] for p in json.loads(pods.read_text())} == {s.jobs["ended"].work.key}
        pods.unlink()


@pytest.mark.real
def test_cancelled_pods_are_deleted_and_missing_ones_made_again(tmp_path, kubectl):
    with Session(Kubernetes(Pods(image="i"), kubectl=str(kubectl)), tmp_path / "run") as s:
        s.submit("t", ["x"], number=0)
        s.place("t", parts(1))
        (tmp_path / "pods.json").write_text("[]")
        assert s.watch() == [] and len(json.loads((tmp_path / "pods.json").read_text())) == 1
        (tmp_path / "pods.json").write_text("[]")
        with pytest.raises(EngineAway, match="0 of 1 pods"):
            s.start(["t"])
        s.cancel("t")
        assert json.loads((tmp_path / "pods.json").read_text()) == []
        with pytest.raises(RunError, match="unknown"):
            s.engine._ask("no-such-word")
    (tmp_path / "old").touch()
    with pytest.raises(Unsupported, match=r"Kubernetes 1\.20 is older than 1\.27"):
        Kubernetes(Pods(image="i"), kubectl=str(kubectl))
    with pytest.raises(UsageError, match="no Kubernetes here"):
        Kubernetes(Pods(image="i"), kubectl="no-such-kubectl")


def ask(port, path, body, headers=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body, headers=headers or {}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.real
def test_the_extender_lets_through_what_was_decided():
    pod = {"metadata": {"name": "p", "labels": {KEY: "k"}}}
    nodes = {"items": [{"metadata": {"name": n}} for n in ("a", "b")]}
    decided = {"k": ("b",)}
    with Extender(decided) as e:
        by_name = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": ["a", "b"]}).encode()
        status, said = ask(e.port, "/filter", by_name)
        assert status == 200 and said["NodeNames"] == ["b"] and set(said["FailedNodes"]) == {"a"} and said["Error"] == ""
        assert ask(e.port, "/filter", json.dumps({"Pod": pod, "Nodes": nodes}).encode())[1]["Nodes"]["items"] == [{"metadata": {"name": "b"}}]
        assert ask(e.port, "/prioritize", by_name)[1] == [{"Host": "a", "Score": 0}, {"Host": "b", "Score": 10}]
        assert ask(e.port, "/filter", json.dumps({"Pod": {}, "NodeNames": ["a"]}).encode())[1]["NodeNames"] == ["a"]
        decided["k"] = ()
        assert "not decided yet" in ask(e.port, "/filter", by_name)[1]["FailedNodes"]["b"]
        assert ask(e.port, "/bind", by_name)[0] == 404 and ask(e.port, "/filter", b"[]")[0] == 400
        assert ask(e.port, "/filter", b"", {"Content-Length": str(1 << 40)})[0] == 413
        with pytest.raises(PortInUse):
            Extender({}, port=e.port)
