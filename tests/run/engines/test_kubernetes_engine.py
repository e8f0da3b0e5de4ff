"""Kubernetes through a `kubectl` that keeps its objects in a folder; the extender over real HTTP."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request

import pytest

from meshwright.cluster import Given
from meshwright.errors import EngineAway, PortInUse, RunError, Unsupported, UsageError
from meshwright.io.cluster.manifests import GATE, KEY, Pods
from meshwright.run.engines import Session
from meshwright.run.engines.audited import audit
from meshwright.run.engines.extender import Extender
from meshwright.run.engines.kubernetes import Kubernetes

KUBECTL = '''#!{python} -S
import json, pathlib, sys
store = pathlib.Path({store!r})
words, path = sys.argv[3:], store / "pods.json"
pods = json.loads(path.read_text()) if path.exists() else []
if (store / "away").exists():
    sys.exit("The connection to the server was refused: connection refused")
if words[:2] == ["get", "nodes"]:
    status = {{"allocatable": {{"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}}, "conditions": [{{"type": "Ready", "status": "True"}}]}}
    print(json.dumps({{"items": [{{"metadata": {{"name": n}}, "status": status}} for n in ("n1", "n2")]}}))
elif words[0] == "apply":
    for d in (json.loads(x) for x in sys.stdin.read().split("---\\n")[1:]):
        if d["kind"] == "Job" and d["metadata"]["name"] not in [p["metadata"]["name"] for p in pods]:
            t = d["spec"]["template"]
            metadata = {{"name": d["metadata"]["name"], "labels": t["metadata"]["labels"]}}
            pods.append({{"metadata": metadata, "spec": t["spec"], "status": {{"phase": "Pending"}}}})
elif words[0] == "patch":
    p = next(p for p in pods if p["metadata"]["name"] == words[2])
    assert json.loads(words[-1]) == [{{"op": "remove", "path": "/spec/schedulingGates"}}]
    del p["spec"]["schedulingGates"]
    rule = p["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]["matchExpressions"][0]
    p["spec"]["nodeName"] = rule["values"][0]
    p["status"] = {{"phase": "Running", "containerStatuses": [{{"state": {{"running": {{"startedAt": "2026-01-01T00:00:00Z"}}}}}}]}}
elif words[0] == "delete":
    pods = [p for p in pods if p["metadata"]["labels"][words[3].partition("=")[0]] != words[3].partition("=")[2]]
elif words[:2] == ["get", "pods"]:
    print(json.dumps({{"items": pods}}))
else:
    sys.exit("unknown " + " ".join(words))
path.write_text(json.dumps(pods))
'''


@pytest.fixture
def kubectl(tmp_path):
    path = tmp_path / "kubectl"
    path.write_text(KUBECTL.format(python=sys.executable, store=str(tmp_path)))
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
        end(tmp_path, code)
        (event,) = s.watch()
        assert (event.what, event.code) == ("ended", code)
        for act in (s.engine.suspend, s.engine.resume):
            with pytest.raises(Unsupported):
                act(s.jobs["t"].work)
        with pytest.raises(Unsupported):
            s.engine.resize(s.jobs["t"].work, ())
        assert s.engine.down() == set()
    found = audit(tmp_path / "run")
    assert found.failed == (("t",) if code else ())
    assert not found.verdict.findings or not found.attempts[0].started_s


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
