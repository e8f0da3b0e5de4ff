"""A real API server and a real kube-scheduler: are our objects accepted, do jobs land where they were decided, does the extender bind the others?

    KUBECONFIG=... python benchmarks/kubernetes_server.py --scheduler PATH_OF_KUBE_SCHEDULER [--objects 16]

Needs an empty cluster of kube-apiserver and etcd without nodes; everything in its namespace `default` is deleted. Debian's source package
`kubernetes` (1.20.2) builds both programs with its golang 1.19, reflect2 1.0.2 in place of the vendored one and openapi-gen run before; etcd is
`etcd-server`. That server is older than scheduling gates: the engine refuses it, which is one of the rows, and then is told to go on. Where the CRDs
of JobSet and LeaderWorkerSet are installed, those are applied, too. Nodes, the job controller and the kubelet are stand-ins of this script: four
nodes of four GPUs, one pod for each Job, three seconds for each pod.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import machine

import meshwright.run.engines.kubernetes as engine_module
from meshwright.cluster import Queue, QueuedJob
from meshwright.cluster.allocation import Given
from meshwright.cluster.generate import UNPROFILED
from meshwright.cluster.placed import placed
from meshwright.cluster.servers import Server, Servers
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import given_of
from meshwright.drive.cluster_kept import Kept
from meshwright.errors import Unsupported
from meshwright.io.cluster.manifests import KEY, Pods, manifest_text, manifests
from meshwright.run.engines import Driver, Session
from meshwright.run.engines.audited import audit
from meshwright.run.engines.extender import Extender
from meshwright.run.engines.kubernetes import Kubernetes
from meshwright.run.engines.session import LAUNCHER

POD_S = 3.0
SIZES = {"cpu": "7910m", "memory": "64Gi", "nvidia.com/gpu": "4", "pods": "110"}
KINDS = {"job": "jobs.batch", "jobset": "jobsets.jobset.x-k8s.io", "leaderworkerset": "leaderworkersets.leaderworkerset.x-k8s.io"}


def kubectl(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], input=text, capture_output=True, text=True, check=False)


def items(kind: str) -> list[Any]:
    return json.loads(kubectl("get", kind, "-o", "json").stdout)["items"]


def status(kind: str, name: str, document: object) -> None:
    kubectl("patch", kind, name, "--subresource=status", "--type=strategic", "-p", json.dumps({"status": document}))


def nodes(count: int) -> None:
    for n in range(1, count + 1):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n{n}", "labels": {"kubernetes.io/hostname": f"n{n}"}}}
        kubectl("apply", "-f", "-", text=json.dumps(node))
        status("node", f"n{n}", {"capacity": SIZES, "allocatable": SIZES, "conditions": [{"type": "Ready", "status": "True"}]})


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def played(stop: threading.Event) -> None:
    """Pods for Jobs; bound pods run, end well and are deleted when they should be."""
    began: dict[str, tuple[float, str]] = {}
    while not stop.wait(0.2):
        pods = items("pods")
        there = {p["metadata"]["name"] for p in pods}
        for job in items("jobs"):
            name, template = f"{job['metadata']['name']}-x", job["spec"]["template"]
            if name not in there:
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": name}, "spec": template["spec"]}
                kubectl("create", "--validate=false", "-f", "-", text=json.dumps(pod))
        for pod in pods:
            name, phase = pod["metadata"]["name"], pod["status"]["phase"]
            container = {"name": pod["spec"]["containers"][0]["name"], "image": "i", "imageID": "i", "ready": False, "restartCount": 0}
            if pod["metadata"].get("deletionTimestamp"):
                kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")
            elif pod["spec"].get("nodeName") and phase == "Pending":
                began[name] = (time.monotonic(), now())
                running = {"running": {"startedAt": began[name][1]}}
                status("pod", name, {"phase": "Running", "containerStatuses": [{**container, "state": running}]})
            elif phase == "Running" and time.monotonic() - began[name][0] > POD_S:
                ended = {"exitCode": 0, "reason": "Completed", "startedAt": began[name][1], "finishedAt": now()}
                status("pod", name, {"phase": "Succeeded", "containerStatuses": [{**container, "state": {"terminated": ended, "running": None}}]})


@contextlib.contextmanager
def scheduled(program: Path, folder: Path, port: int, *, names: bool) -> Iterator[None]:
    """A kube-scheduler that asks the extender; `names`: names of nodes are enough for it."""


    text = {"apiVersion": "kubescheduler.config.k8s.io/v1beta1", "kind": "KubeSchedulerConfiguration", "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": os.environ["KUBECONFIG"]}, "extenders": [{"urlPrefix": f"http://127.0.0.1:{port}",
            "filterVerb": "filter", "prioritizeVerb": "prioritize", "weight": 1, "nodeCacheCapable": names, "enableHTTPS": False}]}  # fmt: skip
    (folder / "scheduler.json").write_text(json.dumps(text))
    with (folder / "scheduler.log").open("wb") as log:
        process = subprocess.Popen([program, "--config", folder / "scheduler.json", "--secure-port=0", "--port=0"], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def objects(kind: str, count: int) -> dict[str, Any]:
    """Random jobs as objects: dry runs by the server, then for real."""
    if kubectl("get", KINDS[kind]).returncode:
        return {"what": f"{kind}: not installed", "value": 0, "unit": "objects"}
    rng, refused = random.Random(5), []
    servers = Servers(servers=tuple(Server(name=f"n{n}", gpus=tuple(f"n{n}g{k}" for k in range(8)), cores=64, memory_bytes=1 << 40)
                                    for n in range(1, 7)))  # fmt: skip
    for t in range(count):
        name, alike = rng.choice(["train", "Ünïcode job / 7", "a" * 200, "x\ny", "tr:ue"]), rng.randint(1, 8)
        given = [
            Given(job=name, server=f"n{n}", gpus=tuple(f"n{n}g{k}" for k in range(alike if kind == "leaderworkerset" else rng.randint(1, 8))),
                  cores=5 if kind == "leaderworkerset" else rng.randint(1, 64), memory_bytes=1 << rng.choice([20, 33] if kind == "job" else [33]))
            for n in rng.sample(range(1, 7), rng.randint(1, 5))
        ]  # fmt: skip
        made = manifests(
            placed(servers, name, given, number=t, attempt=1), key=f"mw-{kind[:3]}{kind[-1]}-{t}-1", run="mw-ab",
            command=["python", "-c", "é\n", "$(Y)"],
            launcher=LAUNCHER.read_text(), pods=Pods(image="reg.io/a/b:1", queue=rng.choice(["", "q"]), claim=rng.choice(["", "pvc"])), kind=kind,  # type: ignore[arg-type]
            plan=rng.choice([("", ""), ("plan.json", "{}")]),
        )  # fmt: skip
        for dry in ("server", "none"):
            done = kubectl("apply", "--validate=false", f"--dry-run={dry}", "-f", "-", text=manifest_text(made))
            refused += [done.stderr[:500]] * bool(done.returncode)
    kubectl("delete", "job,configmap,service,pod", "-l", KEY, "--wait=false")
    return {"what": f"{kind}: objects of random jobs that the server refuses, of {2 * count} applies", "value": len(refused), "unit": "applies",
        "asked": 0, "said": refused[:3]}  # fmt: skip


def jobs(folder: Path, program: Path, count: int) -> list[dict[str, Any]]:
    """Decided, applied, bound by the real scheduler beside the extender, audited."""
    rng = random.Random(1)
    queue = Queue(name="q", profiles=(UNPROFILED,), jobs=tuple(
        QueuedJob(name=f"j{n}", gpus=rng.choice([1, 2, 4, 8]), profile=UNPROFILED.name, arrival_s=n * 1.0, duration_s=POD_S, command=("true",))
        for n in range(count)))  # fmt: skip
    rows: list[dict[str, Any]] = []
    try:
        Kubernetes(Pods(image="i"))
    except Unsupported as error:
        rows.append({"what": f"refused: {error.message}", "value": 1, "unit": "servers"})
        engine_module.MIN_VERSION = (1, 0)
    script = folder / "kubectl"  # kubectl's own check refuses fields that this old server does not know; the server drops them
    script.write_text('#!/bin/sh\nn=$1 m=$2 v=$3; shift 3\n[ "$v" = apply ] && set -- --validate=false "$@"\nexec kubectl "$n" "$m" "$v" "$@"\n')
    script.chmod(0o755)
    engine = Kubernetes(Pods(image="i"), kubectl=str(script))
    servers, decided = engine.discover(), dict[str, Sequence[str]]()
    hold = engine.hold

    def held(work: Any) -> tuple[str, ...]:
        decided[work.key] = [g.server for g in work.placed.given]
        return hold(work)

    engine.hold = held  # type: ignore[method-assign]
    stop = threading.Event()
    with Extender(decided) as extender, scheduled(program, folder, extender.port, names=True), Session(engine, folder / "run") as session:
        player = threading.Thread(target=played, args=(stop,))
        player.start()
        try:
            policy = Kept(servers=servers, queue=queue, order=order("fifo")(), allocation=allocation("proportional")(), seed=0, most_passed=1)
            driver = Driver(session=session, servers=servers, queue=queue, policy=policy, limit_s=600, poll_s=0.3,
                            given=lambda job, parts: tuple(given_of(servers, queue, job, parts)))  # fmt: skip
            ran = driver.run()
        finally:
            stop.set()
            player.join()
    found = audit(folder / "run")
    rows.append({"what": f"{count} jobs: differences between decisions and the API server's books", "value": len(found.verdict.findings),
        "unit": "differences", "asked": 0, "ended_well": sum(r.code == 0 for r in ran),
        "findings": [str(f) for f in found.verdict.findings[:5]]})  # fmt: skip
    return rows


def bound(folder: Path, program: Path, *, names: bool) -> dict[str, Any]:
    """Pods without affinity: one decided on n4, one on n2 or n3, one that is not decided, one that is not ours."""
    keys = {"p1": "k1", "p2": "k2", "p3": "k9", "p4": ""}
    with Extender({"k1": ("n4",), "k2": ("n2", "n3")}) as extender, scheduled(program, folder, extender.port, names=names):
        for name, key in keys.items():
            limits = {"limits": {"nvidia.com/gpu": "1"}}
            kubectl("create", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "labels": {KEY: key} if key else {}},
                "spec": {"containers": [{"name": "c", "image": "i", "resources": limits}]}}))  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            on = {p["metadata"]["name"]: p["spec"].get("nodeName", "") for p in items("pods") if p["metadata"]["name"] in keys}
            if all(on.get(p) for p in ("p1", "p2", "p4")):
                break
            time.sleep(0.5)
    kubectl("delete", "pod", *keys, "--force", "--grace-period=0")
    good = on["p1"] == "n4" and on["p2"] in ("n2", "n3") and not on["p3"] and bool(on["p4"])
    return {"what": f"extender, {'names' if names else 'whole nodes'}: pods bound or held as decided", "value": 4 if good else 0, "unit": "pods",
        "asked": 4, "nodes": on}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", type=Path, required=True)
    parser.add_argument("--objects", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=20)
    args = parser.parse_args()
    kubectl("delete", "job,pod,configmap", "--all", "--force", "--grace-period=0")
    nodes(4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [objects(kind, args.objects) for kind in KINDS]
        rows += [*jobs(folder, args.scheduler, args.jobs), *(bound(folder, args.scheduler, names=n) for n in (True, False))]
    for row in rows:
        print(row, flush=True)
    version = json.loads(kubectl("version", "-o", "json").stdout)["serverVersion"]["gitVersion"]
    machine.record("kubernetes_server", rows,
        command=f"python benchmarks/kubernetes_server.py --objects {args.objects} --jobs {args.jobs} (server {version})")  # fmt: skip


if __name__ == "__main__":
    main()
