"""What `kubectl get nodes -o json` says of a node, as far as anybody here reads it."""

from __future__ import annotations

import msgspec

__all__ = ["Kind", "KubernetesNode", "Metadata", "NodeList"]


class Metadata(msgspec.Struct):
    name: str = ""
    labels: dict[str, str] = {}


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _Status(msgspec.Struct):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    conditions: list[_Condition] = []


class _Spec(msgspec.Struct):
    unschedulable: bool = False


class KubernetesNode(msgspec.Struct):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    status: _Status = msgspec.field(default_factory=_Status)
    spec: _Spec = msgspec.field(default_factory=_Spec)

    @property
    def ready(self) -> bool:
        """Takes pods."""
        return not self.spec.unschedulable and any(c.type == "Ready" and c.status == "True" for c in self.status.conditions)


class NodeList(msgspec.Struct):
    items: list[KubernetesNode]


class Kind(msgspec.Struct):
    """Which of the two a document is: `kubectl get node NAME` prints a node that is in no list."""

    kind: str = ""
