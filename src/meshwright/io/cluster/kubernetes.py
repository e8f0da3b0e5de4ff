"""What `kubectl get nodes|pods -o json` and `kubectl version -o json` print, and what kube-scheduler asks a scheduler extender. Only the fields that
engines need are read.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import NamedTuple

import msgspec

from ...errors import FormatError
from ..kubernetes_nodes import KubernetesNode as NodeRecord
from ..kubernetes_nodes import Metadata, NodeList
from ..limits import MaxBytes
from ..strict_json import decode
from .manifests import KEY

__all__ = ["Asked", "KubernetesNode", "Pod", "parse_asked", "parse_nodes", "parse_pods", "parse_version", "quantity"]

MAX_ITEMS = 100_000
_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)(?:([eE][+-]?\d{1,2})|(n|u|m|k|[MGTPE]i?|Ki))?\Z", re.ASCII)
_SCALE = {None: Decimal(1)} | {unit: Decimal(1000) ** (k - 3) for k, unit in enumerate("num kMGTPE")} | {
    f"{unit}i": Decimal(1024) ** k for k, unit in enumerate("KMGTPE", start=1)}  # fmt: skip


class KubernetesNode(NamedTuple):
    """`up`: ready and not cordoned. `gpus`: of the resource that was asked for."""

    name: str
    gpus: int
    cores: int
    memory_bytes: int
    up: bool


class Pod(NamedTuple):
    """`key`: of the job's objects. `gates`: names of scheduling gates that hold it. Cores and memory are what it really has, where Kubernetes says
    so, else its limits. Times in seconds since 1970, 0: not yet. `code`: -1: not ended. `leaving`: it was told to end."""

    name: str
    key: str
    node: str
    phase: str
    gates: tuple[str, ...]
    cores: int
    memory_bytes: int
    gpus: int
    started_s: float
    ended_s: float
    code: int
    why: str
    leaving: bool


class Asked(NamedTuple):
    """What the extender is asked: the key of the pod's job ("": not ours), and names of nodes. `named`: the answer is names, else whole nodes."""

    key: str
    nodes: tuple[str, ...]
    named: bool


def quantity(text: str, where: str = "quantity") -> int:
    """Kubernetes' `95500m`, `4Gi`, `1.5G`, `2e3`: whole units, rounded down. Raises: FormatError."""
    match = _QUANTITY.match(text)
    if not match:
        raise FormatError(f"{text[:32]!r} is no quantity", where=where)
    return int(Decimal(match[1] + (match[2] or "")) * _SCALE[match[3]])


class _Resources(msgspec.Struct):
    limits: dict[str, str] = {}


class _Container(msgspec.Struct):
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _Gate(msgspec.Struct):
    name: str = ""


class _PodSpec(msgspec.Struct):
    containers: list[_Container] = []
    nodeName: str = ""
    schedulingGates: list[_Gate] = []


class _Running(msgspec.Struct):
    startedAt: str = ""


class _Terminated(msgspec.Struct):
    startedAt: str = ""
    finishedAt: str = ""
    exitCode: int = 0
    reason: str = ""


class _ContainerState(msgspec.Struct):
    running: _Running | None = None
    terminated: _Terminated | None = None


class _ContainerStatus(msgspec.Struct):
    state: _ContainerState = msgspec.field(default_factory=_ContainerState)
    resources: _Resources | None = None


class _PodStatus(msgspec.Struct):
    phase: str = ""
    reason: str = ""
    containerStatuses: list[_ContainerStatus] = []


class _PodMetadata(Metadata):
    deletionTimestamp: str = ""


class _Pod(msgspec.Struct):
    metadata: _PodMetadata = msgspec.field(default_factory=_PodMetadata)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _Pods(msgspec.Struct):
    items: list[_Pod]


class _Names(msgspec.Struct):
    items: list[NodeRecord] = []


class _Version(msgspec.Struct):
    gitVersion: str


class _Versions(msgspec.Struct):
    serverVersion: _Version


class _Asked(msgspec.Struct):
    Pod: _Pod
    Nodes: _Names | None = None
    NodeNames: list[str] | None = None


def _seconds(text: str, where: str) -> float:
    if not text:
        return 0.0
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise FormatError(f"{text[:32]!r} is no time", where=where) from None


def parse_version(data: bytes, where: str = "kubectl version") -> tuple[int, int]:
    """Of the server: `v1.27.3-gke.100` -> (1, 27); its `major` and `minor` are empty where it was built from a package. Raises: FormatError."""
    text = decode(data, msgspec.json.Decoder(_Versions), where).serverVersion.gitVersion
    match = re.match(r"v(\d{1,4})\.(\d{1,4})", text, re.ASCII)
    if not match:
        raise FormatError(f"{text[:32]!r} is no version", where=where)
    return int(match[1]), int(match[2])


def parse_nodes(data: bytes, *, resource: str = "nvidia.com/gpu", where: str = "kubectl get nodes") -> list[KubernetesNode]:
    """Raises: FormatError with the field."""
    found = []
    for n, item in enumerate(decode(data, msgspec.json.Decoder(NodeList), where).items):
        here, has = f"{where}: items[{n}].status.allocatable", item.status.allocatable
        gpus, cores, memory_bytes = (quantity(has.get(name, "0"), f"{here}.{name}") for name in (resource, "cpu", "memory"))
        found.append(KubernetesNode(item.metadata.name, gpus, cores, memory_bytes, item.ready))
    return found


def parse_pods(data: bytes, *, resource: str = "nvidia.com/gpu", where: str = "kubectl get pods") -> list[Pod]:
    """Raises: FormatError with the field."""
    found = []
    for n, p in enumerate(decode(data, msgspec.json.Decoder(_Pods), where).items):
        here = f"{where}: items[{n}]"
        status = p.status.containerStatuses[0] if p.status.containerStatuses else _ContainerStatus()
        limits = (p.spec.containers[0].resources.limits if p.spec.containers else {}) | (status.resources.limits if status.resources else {})
        state = status.state
        ended = state.terminated
        began = state.running.startedAt if state.running else ended.startedAt if ended else ""
        cores, memory_bytes, gpus = (quantity(limits.get(name, "0"), f"{here}.limits.{name}") for name in ("cpu", "memory", resource))
        found.append(Pod(
            p.metadata.name, p.metadata.labels.get(KEY, ""), p.spec.nodeName, p.status.phase, tuple(g.name for g in p.spec.schedulingGates), cores,
                memory_bytes, gpus,
            _seconds(began, here), _seconds(ended.finishedAt if ended else "", here), ended.exitCode if ended else -1,
            (ended.reason if ended else "") or p.status.reason, bool(p.metadata.deletionTimestamp),
        ))  # fmt: skip
    return found


def parse_asked(data: bytes, where: str = "extender") -> Asked:
    """A body of kube-scheduler's ExtenderArgs. Raises: FormatError."""
    if len(data) > MaxBytes.EXTENDER_BODY:
        raise FormatError(f"larger than {MaxBytes.EXTENDER_BODY} bytes", where=where)
    asked = decode(data, msgspec.json.Decoder(_Asked), where)
    nodes = asked.NodeNames if asked.NodeNames is not None else [x.metadata.name for x in (asked.Nodes.items if asked.Nodes else [])]
    return Asked(asked.Pod.metadata.labels.get(KEY, ""), tuple(nodes[:MAX_ITEMS]), asked.NodeNames is not None)
