"""A cluster from its scheduler's list of nodes: `kubectl get nodes -o json`, `scontrol show node` (text or `--json`).

Such a list says how many accelerators of which make a node has, and on clouds its instance type; nothing of links. A node is built as the preset of
its instance type, else as the machine that is nearest by device and count; the provenance says which, and on what ground. All nodes hang on one
non-blocking network, ports at their preset's rates. Nodes that cannot run jobs on all their accelerators are left out; the provenance says why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from ...errors import FormatError, UsageError
from ...fabric.fabric import Device, Fabric, Link, Provenance, Switch
from ...fabric.machines import GPUS, MACHINES
from ...fabric.near import device_called, near_machines
from ...fabric.presets import ALIASES, MAX_DEVICES, PRESETS
from ..gres import gpus_in
from ..kubernetes_nodes import Kind, KubernetesNode, NodeList
from ..text import text_of
from .name import load_fabric

__all__ = ["LEFT_OUT", "Node", "nodes_fabric", "parse_kubernetes_nodes", "parse_slurm_nodes"]

T = TypeVar("T")

MAX_NODES = 16_384
LEFT_OUT = "left out: "
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "aws.amazon.com/neurondevice")
# Names of resources that are no whole GPUs -> what a node with them has.
_OTHERS = (("google.com/tpu", "TPUs (a slice is a preset: `meshwright fabric list`)"), ("nvidia.com/mig-", "GPUs in MIG parts"))
_PRODUCT_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "amd.com/gpu.product-name")
_TYPE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_DOWN = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "UNKNOWN")


@dataclass(frozen=True)
class Node:
    """machine: the provider's instance type, or ""; product: the accelerator's name as the scheduler has it, or ""; lacks: why no job runs on it, or
    ""."""

    name: str
    count: int
    product: str = ""
    machine: str = ""
    lacks: str = ""

    @property
    def left_out(self) -> str:
        """Why it is no part of a fabric, or nothing."""
        return self.lacks or ("" if self.count else "without accelerators")


# ---- kubectl get nodes -o json -----------------------------------------------------------------------------------------
def parse_kubernetes_nodes(data: bytes, where: str = "nodes.json") -> list[Node]:
    """Raises: FormatError with file and field."""
    nodes, what = [], "`kubectl get nodes -o json`"
    one = _decoded(data, Kind, where, what).kind == "Node"
    for number, item in enumerate([_decoded(data, KubernetesNode, where, what)] if one else _decoded(data, NodeList, where, what).items):
        here, labels = f"{where}: items[{number}]", item.metadata.labels
        found = {r: n for r in _RESOURCES if (n := _count(item.status.capacity.get(r, "0"), f"{here}.status.capacity"))}
        product = next((labels[key] for key in _PRODUCT_LABELS if labels.get(key)), "")
        machine = next((labels[key] for key in _TYPE_LABELS if labels.get(key)), "")
        allocatable = {r: _count(item.status.allocatable.get(r, str(n)), f"{here}.status.allocatable") for r, n in found.items()}
        nodes.append(Node(
            _checked(item.metadata.name, f"{here}.metadata.name"), sum(found.values()), product, machine, _lacks(item, found, allocatable),
        ))  # fmt: skip
    return nodes


def _lacks(node: KubernetesNode, found: Mapping[str, int], allocatable: Mapping[str, int]) -> str:
    if not node.ready:
        return "not ready"
    if found:
        few, all_of_them = sum(allocatable.values()), sum(found.values())
        return f"where jobs get {few} of {all_of_them} accelerators" if few < all_of_them else ""
    return next((f"with {what}" for name, what in _OTHERS if any(r.startswith(name) and n != "0" for r, n in node.status.capacity.items())), "")


# ---- scontrol show node ------------------------------------------------------------------------------------------------
class _SlurmNode(msgspec.Struct):
    name: str = ""
    gres: str | None = ""
    state: list[str] | str = ""
    instance_type: str | None = ""


class _SlurmNodes(msgspec.Struct):
    nodes: list[_SlurmNode]


def parse_slurm_nodes(data: bytes, where: str = "nodes.txt") -> list[Node]:
    """The text of `scontrol show node`, or its `--json`. Raises: FormatError with file and line or field."""
    if data.lstrip()[:1] == b"{":
        listed = _decoded(data, _SlurmNodes, where, "`scontrol show node --json`").nodes
        return [
            _slurm(x.name, x.gres or "", x.state if isinstance(x.state, str) else "+".join(x.state), x.instance_type or "", f"{where}: {i}")
            for i, x in enumerate(listed)
        ]
    text = text_of(data, where)
    starts = [m.start() for m in re.finditer(r"^NodeName=", text, re.MULTILINE)]
    if not starts or len(starts) > MAX_NODES:
        raise FormatError(f"{len(starts)} lines begin with NodeName=", where=where, hint=f"`scontrol show node`, 1 to {MAX_NODES} nodes")
    nodes = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True)):
        said = dict(re.findall(r"(?:^|\s)(NodeName|Gres|State|InstanceType)=(\S{0,4096})", text[start:end]))
        gres, state, machine = (said.get(key, "") for key in ("Gres", "State", "InstanceType"))
        nodes.append(_slurm(said["NodeName"], gres, state, machine, f"{where}: node {number}"))
    return nodes


def _slurm(name: str, gres: str, state: str, machine: str, where: str) -> Node:
    found = gpus_in(gres)
    ready = "*" not in state and not any(word in re.split(r"[+~#!%$@^-]", state.upper()) for word in _DOWN)
    product = " and ".join(dict.fromkeys(x.type for x in found if x.type and x.gpus))
    machine, lacks = machine if machine != "(null)" else "", "" if ready else "not ready"
    return Node(_checked(name, f"{where}.name"), sum(x.gpus for x in found), product, machine, lacks)


def _decoded(data: bytes, kind: type[T], where: str, what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error)[:200], where=where, hint=f"the output of {what}") from None


def _checked(name: str, where: str) -> str:
    if not _NAME.match(name):
        raise FormatError(f"not a node's name: {name[:64]!r}", where=where)
    return name


def _count(text: str, where: str) -> int:
    if not re.match(r"\d{1,4}\Z", text):
        raise FormatError(f"not a number of devices: {text[:32]!r}", where=where)
    return int(text)


# ---- the fabric --------------------------------------------------------------------------------------------------------
def nodes_fabric(nodes: Sequence[Node], name: str, where: str, gpu: str | None = None) -> Fabric:
    """The fabric of these nodes, servers by their names; `gpu` for nodes whose list does not say the make.

    Raises: UsageError where no node can be built, or a node's accelerators are unknown; FormatError for a name that is there twice.
    """
    if len({n.name for n in nodes}) < len(nodes) or len(nodes) > MAX_NODES:
        twice = [n for n, count in Counter(n.name for n in nodes).items() if count > 1][:4]
        said = f"nodes that are there twice: {', '.join(twice)}" if twice else f"{len(nodes)} nodes"
        raise FormatError(said, where=where, hint=f"at most {MAX_NODES}, each once")
    usable = [n for n in nodes if not n.left_out]
    if not usable:
        said = f"no node to plan for, of {len(nodes)}: {left_out(nodes)}" if nodes else "the list has no nodes"
        raise UsageError(said, where=where, hint="`meshwright fabric here` on one of them, or a preset")
    built = [(node, *_built_as(node, gpu, where)) for node in usable]
    if sum(node.count for node in usable) > MAX_DEVICES:
        raise UsageError(f"{sum(node.count for node in usable)} devices", where=where, hint=f"at most {MAX_DEVICES}")
    devices: list[Device] = []
    switches: list[Switch] = []
    links: list[Link] = []
    patterns: dict[str, Fabric] = {}
    for node, preset, _ in built:
        if preset not in patterns:
            patterns[preset] = load_fabric(f"{preset}:2?net=switch")
        pattern = patterns[preset]
        own = {d.name for d in pattern.devices if d.group == "box0"} | {s.name for s in pattern.switches if s.group == "box0"}

        def moved(actor: str, to: str = node.name) -> str:
            return actor.replace("box0", to, 1)

        devices += [replace(d, name=moved(d.name), group=node.name) for d in pattern.devices if d.name in own]
        switches += [replace(s, name=moved(s.name), group=node.name) for s in pattern.switches if s.name in own]
        links += [replace(x, src=moved(x.src), dst=moved(x.dst)) for x in pattern.links if {x.src, x.dst} <= own | {"ib"}]
    notes = [Provenance(what=f"inside of {count} nodes", source=why) for why, count in Counter(why for _, _, why in built).items()]
    notes += [note for preset in patterns for note in patterns[preset].provenance if note.what not in ("wiring between boxes",)]
    notes.append(Provenance(what="nodes", source=f"{where}: {len(usable)}" + (f"; {LEFT_OUT}{left_out(nodes)}" if len(usable) < len(nodes) else "")))
    notes.append(Provenance(what="wiring between boxes", source="assumed: one non-blocking switch; a list of nodes says nothing of it"))
    switches.append(Switch(name="ib"))
    kept = list({(n.what, n.source): n for n in notes}.values())
    return Fabric(name=name, devices=tuple(devices), switches=tuple(switches), links=tuple(links), provenance=tuple(kept))


def left_out(nodes: Sequence[Node]) -> str:
    """`2 not ready (a, b), 1 without accelerators (c)`."""
    named: dict[str, list[str]] = {}
    for n in nodes:
        if n.left_out:
            named.setdefault(n.left_out, []).append(n.name)
    return ", ".join(f"{len(names)} {why} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" for why, names in named.items())


def _built_as(node: Node, gpu: str | None, where: str) -> tuple[str, str]:
    """(preset with options, why) for one node."""
    alias = ALIASES.get(node.machine.casefold(), "")
    if alias and alias in MACHINES and node.count == PRESETS[alias].devices_per_unit:
        return alias, f"as {alias}: the instance type is {node.machine}"
    device = device_called(node.product) or (gpu or "")
    if not device:
        said = f"{node.product!r} is not a device we know" if node.product else "the list does not say which accelerators it has"
        raise UsageError(f"node {node.name}: {said}", where=where, hint="--gpu h100, say; or `meshwright fabric here` on the node")
    if device not in GPUS:
        raise UsageError(f"no GPU make {device!r}", where="--gpu", hint=f"one of: {', '.join(GPUS)}")
    fitting = [m for m in near_machines(device, most=len(MACHINES)) if MACHINES[m].devices == node.count and MACHINES[m].device == device]
    if not fitting:
        near = ", ".join(f"{m} has {MACHINES[m].devices}" for m in near_machines(device))
        hint = f"{f'{near}; ' if near else ''}run `meshwright fabric here` on the node, or import its `nvidia-smi topo -m`"
        raise UsageError(f"node {node.name} has {node.count} {device}, and no preset is like it", where=where, hint=hint)
    return fitting[0], f"as {fitting[0]}, assumed: {node.count} x {device}, no instance type that we know"
