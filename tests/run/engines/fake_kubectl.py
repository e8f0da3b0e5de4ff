"""A `kubectl` whose cluster is a folder: `python fake_kubectl.py FOLDER WORDS...`. Pods keep Kubernetes' rules as far as engines use them.

Where FOLDER holds a file `real`, pods run their command, the launcher, as processes: SIGTERM and grace are real, /tmp is the pod's own, and a claimed
volume stays. Else a test says when pods end.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

store, words = pathlib.Path(sys.argv[1]), sys.argv[4:]  # behind --namespace NAME
path, volumes = store / "pods.json", store / "volumes.json"
pods = json.loads(path.read_text()) if path.exists() else []
real = (store / "real").exists()


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def name_of(pod):
    return pod["metadata"]["name"]


def place_of(pod):
    return store / "run" / name_of(pod)


def begin(pod):
    """On the node that its affinity names."""
    spec, place = pod["spec"], place_of(pod)
    rule = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]["matchExpressions"][0]
    spec["nodeName"] = rule["values"][0]
    if real:
        place.mkdir(parents=True)
        config = json.loads(volumes.read_text())[spec["volumes"][0]["configMap"]["name"]]
        for name, text in config.items():
            (place / name).write_text(text)
        keep = [store / "claim" / m["subPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "state"]
        environment = dict(os.environ, MESHWRIGHT_NODE=spec["nodeName"], MESHWRIGHT_OUT=str(place))
        for folder in keep:
            folder.mkdir(parents=True, exist_ok=True)
            environment["MESHWRIGHT_KEEP"] = str(folder)
        command = [sys.executable, "-S", "-E", str(place / "node.py"), str(place), spec["containers"][0]["command"][-1]]
        script = 'cd "$0"; "$@" & echo $! > pid; wait $!; echo $? > code.new; mv code.new code'
        subprocess.Popen(["sh", "-c", script, str(place), *command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        while not (place / "pid").exists():
            time.sleep(0.005)
    pod["status"] = {"phase": "Running", "containerStatuses": [{"state": {"running": {"startedAt": now()}}}]}


def stop(pod):
    """As a node does: SIGTERM to the pod's first process; it is there until that has ended."""
    if pod["status"]["phase"] == "Running" and real:
        pod["metadata"].setdefault("deletionTimestamp", now())
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((place_of(pod) / "pid").read_text()), signal.SIGTERM)
        return pod
    return None


def settled(pod):
    """With what its processes have done since; None where it was deleted and has ended."""
    code = place_of(pod) / "code"
    if real and pod["status"]["phase"] == "Running" and code.exists():
        if "deletionTimestamp" in pod["metadata"]:
            return None
        began = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
        ended = {"startedAt": began, "finishedAt": now(), "exitCode": int(code.read_text()), "reason": "Ended"}
        pod["status"] = {"phase": "Failed" if ended["exitCode"] else "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]}
    return pod


pods = [p for p in map(settled, pods) if p is not None]
if (store / "away").exists():
    sys.exit("The connection to the server 127.0.0.1:6443 was refused - did you specify the right host or port?")
if words[0] == "version":
    sys.stdout.write(json.dumps({"serverVersion": {"gitVersion": "v1.20.2" if (store / "old").exists() else "v1.33.1"}}))
elif words[:2] == ["get", "nodes"]:
    status = {"allocatable": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}, "conditions": [{"type": "Ready", "status": "True"}]}
    sys.stdout.write(json.dumps({"items": [{"metadata": {"name": n}, "status": status} for n in ("n1", "n2")]}))
elif words[0] == "apply":
    for d in (json.loads(x) for x in sys.stdin.read().split("---\n")[1:]):
        if d["kind"] == "ConfigMap":
            held = json.loads(volumes.read_text()) if volumes.exists() else {}
            volumes.write_text(json.dumps(held | {d["metadata"]["name"]: d["data"]}))
        if d["kind"] == "Job" and d["metadata"]["name"] not in map(name_of, pods):
            t = d["spec"]["template"]
            metadata = {"name": d["metadata"]["name"], "labels": t["metadata"]["labels"]}
            pods.append({"metadata": metadata, "spec": t["spec"], "status": {"phase": "Pending"}})
elif words[:2] == ["patch", "job"]:
    assert json.loads(words[-1]) == {"spec": {"suspend": True}}
    if words[2] not in map(name_of, pods):
        sys.exit(f'Error from server (NotFound): jobs.batch "{words[2]}" not found')
    pods = [q for q in ((p if name_of(p) != words[2] or p["status"]["phase"] in ("Succeeded", "Failed") else stop(p)) for p in pods) if q]
elif words[:2] == ["patch", "pod"]:
    p, patch = next(p for p in pods if name_of(p) == words[2]), json.loads(words[-1])
    if "--subresource" in words:
        wanted = patch["spec"]["containers"][0]["resources"]
        if (store / "old").exists():
            sys.exit("Error from server (NotFound): the server could not find the requested resource")
        p["spec"]["containers"][0]["resources"]["limits"] |= wanted["limits"]
        p["status"]["containerStatuses"][0]["resources"] = {"limits": p["spec"]["containers"][0]["resources"]["limits"]}
    else:
        assert patch == [{"op": "remove", "path": "/spec/schedulingGates"}]
        del p["spec"]["schedulingGates"]
        begin(p)
elif words[0] == "delete":
    key, _, value = words[3].partition("=")
    pods = [q for q in ((p if p["metadata"]["labels"][key] != value else stop(p)) for p in pods) if q]
elif words[:2] == ["get", "pods"]:
    sys.stdout.write(json.dumps({"items": pods}))
else:
    sys.exit("unknown " + " ".join(words))
path.write_text(json.dumps(pods))
