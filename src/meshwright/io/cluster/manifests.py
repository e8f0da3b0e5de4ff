"""Decisions as Kubernetes objects: Job, JobSet, LeaderWorkerSet, and both queued by Kueue. Dictionaries; `manifest_text` writes them as YAML
documents (each is JSON, which YAML reads).

A pod per server, pinned to it by node affinity and held by a scheduling gate until its turn. Ranks, launcher and plan travel in a ConfigMap; a
headless Service gives rank 0 its name. Checked against the schemas of Kubernetes 1.37 and
the CRDs of JobSet 08dfbdf and LeaderWorkerSet 060ab4d (2026-08). Left out: the GPUs' numbers on a node, which its device plug-in picks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...cluster.allocation import Given
from ...cluster.placed import Placed
from ...errors import Unsupported, UsageError
from .job_folder import GRACE_S, ranks_document

__all__ = ["CONTAINER", "GATE", "KEY", "RUN", "Pods", "manifest_text", "manifests"]

Kind = Literal["job", "jobset", "leaderworkerset"]
GATE, KEY, RUN = "meshwright.dev/decided", "meshwright.dev/key", "meshwright.dev/run"
JOB = "meshwright.dev/job"  # annotation: the job's own name
HOST = "kubernetes.io/hostname"
CONTAINER = "job"
STATE = "/state"
LATE_S = 5  # that a launcher has to write its note after it killed what did not end
MAX_CONFIG_BYTES = 1 << 20  # of a ConfigMap
PORT = 29500
_DNS = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?\Z")


@dataclass(frozen=True, kw_only=True)
class Pods:
    """What decisions do not say: `image` with the job's program and Python 3.8 or later; Kubernetes' name of the GPUs; Kueue's local queue, "":
    none; a PersistentVolumeClaim that all nodes can mount, where jobs that move keep their state, "": none."""

    image: str
    resource: str = "nvidia.com/gpu"
    namespace: str = "default"
    queue: str = ""
    gated: bool = True
    claim: str = ""


def manifests(
    placed: Placed, *, key: str, run: str, command: Sequence[str], launcher: str, pods: Pods, kind: Kind = "job", plan: tuple[str, str] = ("", ""),
    grace_s: float = GRACE_S,
) -> list[dict[str, Any]]:
    """`key`: name of the objects; `launcher`: text of `run/engines/node.py`; `plan`: name and text of a plan that travels along.

    Raises: UsageError for names that Kubernetes does not take and a plan that no ConfigMap holds; Unsupported: workers with unlike parts in a
    LeaderWorkerSet."""
    if not _DNS.match(key):
        raise UsageError(f"{key[:64]!r} is no name for Kubernetes", where="key", hint="small letters, digits, dashes, up to 42")
    first = placed.ranks[0].server
    servers = [first, *dict.fromkeys(r.server for r in placed.ranks if r.server != first)]
    number = {s: n for n, s in enumerate(servers)}
    address = {
        "job": f"{key}-0.{key}", "jobset": f"{key}-s0-0-0.{key}", "leaderworkerset": f"{key}-0.{key}.{pods.namespace}",
    }[kind]  # fmt: skip
    document = ranks_document(placed, command, plan=plan[0], addresses={first: address}, port=PORT, grace_s=grace_s)
    data = {"node.py": launcher, f"ranks-{placed.attempt}.json": json.dumps(document, sort_keys=True)} | ({plan[0]: plan[1]} if plan[0] else {})
    size = sum(len(k.encode()) + len(v.encode()) for k, v in data.items())
    if size > MAX_CONFIG_BYTES:
        raise UsageError(f"job {placed.job[:64]} and its plan take {size} bytes, a ConfigMap holds {MAX_CONFIG_BYTES}", where="plan",
                         hint="put the plan into the image or a volume, and name it in the command")  # fmt: skip
    labels = {KEY: key, RUN: run}
    common: dict[str, Any] = {"namespace": pods.namespace, "labels": labels, "annotations": {JOB: placed.job}}
    given = {g.server: g for g in placed.given}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": key, **common}, "data": data}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": key, **common},
               "spec": {"clusterIP": "None", "selector": {KEY: key}, "publishNotReadyAddresses": True}}  # fmt: skip
    templates = {s: _template([s], given[s], key, placed, labels, pods, grace_s) for s in servers}
    if kind == "leaderworkerset":
        return [config, _leader_worker_set(key, common, servers, given, templates, labels, pods, placed, grace_s)]
    specs = {s: {"parallelism": 1, "completions": 1, "completionMode": "Indexed", "backoffLimit": 0, "template": templates[s]} for s in servers}
    queued = {**common, "labels": {**labels, **({"kueue.x-k8s.io/queue-name": pods.queue} if pods.queue else {})}}
    suspended = {"suspend": True} if pods.queue else {}
    if kind == "jobset":
        jobs = [{"name": f"s{number[s]}", "replicas": 1, "template": {"metadata": {"labels": labels}, "spec": specs[s]}} for s in servers]
        spec = {**suspended, "network": {"enableDNSHostnames": True, "subdomain": key}, "failurePolicy": {"maxRestarts": 0}, "replicatedJobs": jobs}
        return [config, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": key, **queued}, "spec": spec}]
    for s in servers:
        specs[s]["template"]["spec"] |= {"hostname": f"{key}-{number[s]}", "subdomain": key}  # type: ignore[index]
    jobs = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{key}-{number[s]}", **queued}, "spec": {**suspended, **specs[s]}}
            for s in servers]  # fmt: skip
    return [config, service, *jobs]


def _template(
    servers: Sequence[str], given: Given, key: str, placed: Placed, labels: Mapping[str, str], pods: Pods, grace_s: float
) -> dict[str, Any]:  # fmt: skip
    """A pod on one of these servers, one pod of the job on each."""
    amounts = {"cpu": str(given.cores), "memory": str(given.memory_bytes), pods.resource: str(len(given.gpus))}
    affinity: dict[str, Any] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": HOST, "operator": "In", "values": list(servers)}]}
    ]}}}  # fmt: skip
    affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {KEY: key}}, "topologyKey": HOST}
    ]}  # fmt: skip
    container: dict[str, Any] = {
        "name": CONTAINER, "image": pods.image, "command": ["python3", "-S", "-E", "/meshwright/node.py", "/meshwright", str(placed.attempt)],
        "env": [
            {"name": "MESHWRIGHT_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}, {"name": "MESHWRIGHT_OUT", "value": "/tmp"},
        ],
        "resources": {"limits": amounts, "requests": amounts}, "volumeMounts": [{"name": "meshwright", "mountPath": "/meshwright", "readOnly": True}],
    }  # fmt: skip
    spec: dict[str, Any] = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": math.ceil(grace_s) + LATE_S, "affinity": affinity, "containers": [container],
        "volumes": [{"name": "meshwright", "configMap": {"name": key}}],
    }  # fmt: skip
    if pods.claim:  # a folder for each job of a run, the same for all its attempts
        container["env"].append({"name": "MESHWRIGHT_KEEP", "value": STATE})
        container["volumeMounts"].append({"name": "state", "mountPath": STATE, "subPath": key.rpartition("-")[0]})
        spec["volumes"].append({"name": "state", "persistentVolumeClaim": {"claimName": pods.claim}})
    if pods.gated:
        spec["schedulingGates"] = [{"name": GATE}]
    return {"metadata": {"labels": dict(labels), "annotations": {JOB: placed.job}}, "spec": spec}


def _leader_worker_set(
    key: str, common: Mapping[str, Any], servers: Sequence[str], given: Mapping[str, Given], templates: Mapping[str, dict[str, Any]],
    labels: Mapping[str, str], pods: Pods, placed: Placed, grace_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Rank 0's server leads. Its pods are served for as long as they are wanted, so they are started again where a Job's would end."""
    others = servers[1:]
    if len({(len(given[s].gpus), given[s].cores, given[s].memory_bytes) for s in others}) > 1:
        raise Unsupported("workers of a LeaderWorkerSet have equal parts", where=f"job {placed.job[:64]}", hint="write it as jobset or job")
    worker = _template(others or servers, given[(others or servers)[0]], key, placed, labels, pods, grace_s)
    leader = templates[servers[0]]
    for template in (worker, leader):
        template["spec"]["restartPolicy"] = "Always"
    spec = {"replicas": 1, "leaderWorkerTemplate": {"size": len(servers), "restartPolicy": "RecreateGroupOnPodRestart", "leaderTemplate": leader,
                                                    "workerTemplate": worker}}  # fmt: skip
    queue = {"kueue.x-k8s.io/queue-name": pods.queue} if pods.queue else {}
    metadata = {"name": key, **common, "labels": {**common["labels"], **queue}}
    return {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": metadata, "spec": spec}


def manifest_text(documents: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"---\n{json.dumps(d, indent=1)}\n" for d in documents)
