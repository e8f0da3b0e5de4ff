"""Kubernetes as the engine, through `kubectl`: pods are pinned to their nodes by affinity and held by a scheduling gate, which `start` removes in
the order of the decisions. Which GPUs of a node a pod gets, its device plug-in picks. Objects of a job have its key as label; times are those of the
pods' status. A job that is to leave is suspended: its pods get SIGTERM and their grace, what had ended stays ended, and its objects are deleted when
they have gone. Cores and memory change in place by the `resize` subresource of its pods (Kubernetes 1.33).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...cluster.allocation import Given
from ...cluster.servers import Server, Servers
from ...errors import EngineAway, RunError, Unsupported, UsageError
from ...io.cluster.kubernetes import Pod, parse_nodes, parse_pods, parse_version
from ...io.cluster.manifests import CONTAINER, GATE, KEY, Pods, manifest_text, manifests
from ..resize.actuators import kubernetes_resize
from .interface import UNKNOWN, Commands, Seen, Work

__all__ = ["Kubernetes"]

WHERE = "KUBECONFIG, or a context of `kubectl config`, names the cluster"  # said where it cannot be asked at all
AWAY = (
    "connection refused", "was refused - did you", "connect: ", "Unable to connect", "i/o timeout", "TLS handshake timeout", "connection lost", "EOF",
    "etcdserver: ", "too many requests", "(ServiceUnavailable)", "unable to handle the request", "(Timeout)",
)  # fmt: skip
MIN_VERSION = (1, 27)  # whose servers know scheduling gates unless they are told not to; older ones drop them, and jobs would start unordered
STOP = {"job": {"suspend": True}, "jobset": {"suspend": True}, "leaderworkerset": {"replicas": 0}}  # what ends the pods of a kind, and keeps it


@dataclass
class Kubernetes:
    """`pods`: image and names. `kind`: what a job becomes. `servers`: default all nodes with GPUs that are ready. Raises: UsageError without
    `kubectl`; Unsupported where Kubernetes is too old; EngineAway."""

    pods: Pods
    kind: Literal["job", "jobset", "leaderworkerset"] = "job"
    servers: Servers | None = None
    dry: bool = False
    kubectl: str = "kubectl"
    notes: list[str] = field(default_factory=list)
    name: ClassVar[str] = "kubernetes"
    picks_gpus: ClassVar[bool] = False
    resizes: ClassVar[bool] = True
    launches: ClassVar[bool] = False
    _leaving: set[str] = field(default_factory=set)
    _given: dict[str, tuple[Given, ...]] = field(default_factory=dict)  # what jobs had last, for those whose pods have gone

    def __post_init__(self) -> None:
        self.commands = Commands(dry=self.dry, away=AWAY)
        self.said = self.commands.said
        self.commands.require(self.kubectl, engine="Kubernetes", hint="install kubectl, or --dry-run writes the manifests")
        version = MIN_VERSION if self.dry else parse_version(self._ask("version", "-o", "json", hint=WHERE).encode())
        if version < MIN_VERSION:
            said = f"Kubernetes {version[0]}.{version[1]} is older than {MIN_VERSION[0]}.{MIN_VERSION[1]}"
            raise Unsupported(said, where="--engine kubernetes", hint="update it: older ones start pods that should be held",
                              data={"version": list(version)})  # fmt: skip

    def _ask(self, *words: str, text: str = "", hint: str = "") -> str:
        return self.commands.call([self.kubectl, "--namespace", self.pods.namespace, *words], text, hint=hint)

    def discover(self) -> Servers:
        if self.servers is None:
            found = []
            for n in parse_nodes(self._ask("get", "nodes", "-o", "json").encode(), resource=self.pods.resource):
                if n.gpus and n.cores and n.memory_bytes and n.up:
                    gpus = tuple(f"{n.name}g{k}" for k in range(n.gpus))
                    found.append(Server(name=n.name, gpus=gpus, cores=n.cores, memory_bytes=n.memory_bytes))
            if not found:
                raise UsageError(f"no node that is ready has {self.pods.resource}", where="--engine kubernetes", hint="--resource names the GPUs")
            self.servers = Servers(servers=tuple(found), fabric="kubernetes")
        return self.servers

    def addresses(self, servers: Sequence[str]) -> Mapping[str, str]:
        return {}

    def down(self) -> set[str]:
        up = {n.name for n in parse_nodes(self._ask("get", "nodes", "-o", "json").encode(), resource=self.pods.resource) if n.up}
        return {s.name for s in self.discover().servers} - up

    def remember(self, ids: Sequence[str]) -> None:
        """Names are never used again here."""

    def hold(self, work: Work) -> tuple[str, ...]:
        plan = (work.plan, (work.folder / work.plan).read_text(encoding="utf-8")) if work.plan and not self.dry else ("", "")
        launcher = "# the text of run/engines/node.py\n" if self.dry else work.node.read_text(encoding="utf-8")
        run = work.key.rsplit("-", 2)[0]
        made = manifests(work.placed, key=work.key, run=run, command=work.command, launcher=launcher, pods=self.pods, kind=self.kind, plan=plan,
                         grace_s=work.grace_s)  # fmt: skip
        self._ask("apply", "-f", "-", text=manifest_text(made))  # the same objects again change nothing
        return tuple(f"{d['kind'].lower()}/{d['metadata']['name']}" for d in made)

    def _pods(self, works: Sequence[Work]) -> dict[str, list[Pod]]:
        found: dict[str, list[Pod]] = {w.key: [] for w in works}
        for pod in parse_pods(self._ask("get", "pods", "-l", KEY, "-o", "json").encode(), resource=self.pods.resource):
            if pod.key in found:
                found[pod.key].append(pod)
        return found

    def start(self, works: Sequence[Work]) -> None:
        if self.dry:
            for work in works:
                self.said.append(f"# for every pod of {work.key}: {self.kubectl} patch pod POD --type=json -p '{_OPEN}'")
            return
        of = self._pods(works)
        for work in works:
            if len(of[work.key]) < len(work.placed.given):
                raise EngineAway(f"{len(of[work.key])} of {len(work.placed.given)} pods are made so far", where=f"job {work.placed.job}")
        for work in works:
            for pod in of[work.key]:
                if GATE in pod.gates:
                    self._ask("patch", "pod", pod.name, "--type=json", "-p", _OPEN)

    def look(self, works: Sequence[Work]) -> list[Seen]:
        of = self._pods(works)
        return [self._seen(work, of[work.key]) for work in works]

    def _seen(self, work: Work, pods: Sequence[Pod]) -> Seen:
        if not pods:
            return self._gone(work)
        now = {
            p.node: Given(job=work.placed.job, server=p.node, gpus=tuple(f"{UNKNOWN}{k}" for k in range(p.gpus)), cores=p.cores,
                          memory_bytes=p.memory_bytes)
            for p in pods if p.node
        }  # fmt: skip
        # Pods that leave go one by one: where those that have gone were stays known.
        before = {g.server: g for g in self._given.get(work.key, ())} if work.key in self._leaving else {}
        given = self._given[work.key] = tuple({**before, **now}.values())
        if work.key in self._leaving:
            if any(p.leaving or p.phase not in ("Succeeded", "Failed") for p in pods):
                return Seen("running", given)
            if len(pods) < len(work.placed.given):  # a part had ended, the others were ended
                return self._gone(work)
        failed = [p for p in pods if p.phase == "Failed"]
        starts = [p.started_s for p in pods if p.started_s]
        started_s = min(starts, default=0.0) if len(starts) == len(pods) else 0.0
        if failed:
            code = max(p.code for p in failed)
            ended_s = max(p.ended_s for p in failed) if code > 0 else 0.0  # evicted: no exit code
            return Seen("failed", given, max(code, 0), "; ".join(sorted({p.why for p in failed})), started_s, ended_s)
        if all(p.phase == "Succeeded" for p in pods) and len(pods) >= len(work.placed.given):
            return Seen("done", given, 0, "", started_s, max(p.ended_s for p in pods))
        if any(GATE in p.gates for p in pods):
            return Seen("held", given)
        return Seen("running" if any(p.phase in ("Running", "Succeeded") for p in pods) else "waiting", given, 0, "", started_s)

    def _gone(self, work: Work) -> Seen:
        """Times of pods are whole seconds, so this is one, too."""
        return Seen("gone", self._given.get(work.key, ()), ended_s=float(int(time.time())))

    def cancel(self, work: Work) -> None:
        kinds = ",".join(dict.fromkeys(x.partition("/")[0] for x in work.ids)) or "job,service,configmap"
        self._ask("delete", kinds, "-l", f"{KEY}={work.key}", "--wait=false", "--ignore-not-found")

    def leave(self, work: Work) -> None:
        """Kueue would start a suspended job again: one of its queues is deleted, unless all its pods have ended."""
        if self.pods.queue:
            if any(p.phase not in ("Succeeded", "Failed") for p in self._pods([work])[work.key]):
                self.cancel(work)
            return
        self._leaving.add(work.key)
        for kind, _, name in (x.partition("/") for x in work.ids):
            if kind in STOP:
                try:
                    self._ask("patch", kind, name, "--type=merge", "-p", json.dumps({"spec": STOP[kind]}))
                except RunError as error:
                    if "NotFound" not in error.message:
                        raise

    def suspend(self, work: Work) -> None:
        raise Unsupported("Kubernetes ends the pods of a job that is suspended", where=f"job {work.placed.job}", hint="cancel it and place it again")

    def resume(self, work: Work) -> None:
        raise Unsupported("Kubernetes ends the pods of a job that is suspended", where=f"job {work.placed.job}", hint="place it again")

    def resize(self, work: Work, given: tuple[Given, ...]) -> None:
        """Raises: RunError where Kubernetes is older than 1.33, or the node has no room."""
        wanted = {g.server: g for g in given}
        for pod in self._pods([work])[work.key]:
            if pod.node in wanted:
                g = wanted[pod.node]
                patch, _ = kubernetes_resize(self.pods.namespace, pod.name, CONTAINER, cores=g.cores, memory_bytes=g.memory_bytes)
                self._ask("patch", "pod", pod.name, "--subresource", "resize", "--type=strategic", "-p", patch)

    def close(self) -> None:
        """Nothing is held open; jobs go on."""


_OPEN = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
