"""The joint graph: forward and backward in one list of ATen calls, each naming the forward node that caused it.

Forward calls carry the name of the exported node they were traced from. Backward calls carry autograd's sequence number, which the
forward call that created their autograd node carries too. Sums of gradients that meet (a value or a parameter used several times)
carry neither: they belong to the node that the sum is handed to next, or for a parameter to the last of its users that ran.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from meshwright.graph.graph import JointNode, Storage, Work

from .diagnose import quiet
from .flops import is_causal, lacks_formula
from .forward import OPAQUE, TracedForward, module_path
from .nodes import StorageTable, target_name, value_of
from .regions import REGION, REGION_BACKWARD, region_work
from .torch_private import joint_graph, make_fx_graph, register_constants
from .work import tensors_in, work_of

__all__ = ["Joint", "joint_by_aot", "joint_by_make_fx"]


@dataclass(frozen=True, kw_only=True)
class Joint:
    """`gradients` maps a parameter to the joint value that is its gradient; `direct_share`: calls whose path torch itself gave."""

    nodes: tuple[JointNode, ...]
    storages: tuple[Storage, ...]
    gradients: dict[str, str]
    direct_share: float
    without_formula: tuple[str, ...]


def joint_by_aot(traced: TracedForward) -> Joint:
    """AOTAutograd on the exported program, or on the objective itself if it is opaque (then every call belongs to one node)."""
    with quiet():
        module: nn.Module = traced.exported.module() if traced.method == "export" else traced.objective
    register_constants(module, traced.mode)
    with quiet(), traced.mode, joint_graph(module, traced.inputs) as joint:
        graph = joint.graph_module.graph
        names, gradients = _described_values(graph, traced)
        return _joint(graph, names, gradients, traced)


def joint_by_make_fx(traced: TracedForward) -> Joint:
    """make_fx over loss and gradients as one function: no module paths; phases are told apart by where the loss is made."""
    parameters = dict(traced.parameters)
    trainable = [n for n, p in parameters.items() if p.requires_grad]

    def step(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(traced.placeholders, values, strict=True))
        loss = traced.graph_module(*values)[0]
        wanted = [given[f"param:{n}"] for n in trainable]
        return loss, *torch.autograd.grad(loss, wanted, allow_unused=True)

    with quiet(), traced.mode:
        graph = make_fx_graph(step, [traced.value(v) for v in traced.placeholders])
    names = dict(zip((n for n in graph.nodes if n.op == "placeholder"), traced.placeholders, strict=True))
    output = next(n for n in graph.nodes if n.op == "output").args[0]
    gradients = {name: node.name for name, node in zip(trainable, output[1:], strict=True) if node is not None}
    forward = _ancestors(output[0])
    for n in graph.nodes:
        n.meta["partitioner_tag"] = "is_forward" if n in forward else "is_backward"
    return _joint(graph, names, gradients, traced)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen, stack = set(), [node]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return seen


def _described_values(graph: fx.Graph, traced: TracedForward) -> tuple[dict[fx.Node, str], dict[str, str]]:
    """Value names of the joint graph's placeholders, and the gradients among its outputs, from AOTAutograd's descriptors."""
    first = {name: name for name in traced.parameters}
    for name, others in traced.aliases.items():
        first |= dict.fromkeys(others, name)
    names: dict[fx.Node, str] = {}
    for n in graph.nodes:
        if n.op != "placeholder":
            continue
        desc = n.meta["desc"]
        target, index = getattr(desc, "target", None), getattr(desc, "idx", None)
        if target is not None:
            plain = target.removeprefix("model.")
            names[n] = f"param:{first[plain]}" if plain in first else f"buffer:{plain}"
        elif index is not None:
            names[n] = f"input:{index}"
        else:
            names[n] = "tangent"
    output = next(n for n in graph.nodes if n.op == "output")
    gradients = {}
    for value, desc in zip(output.args[0], output.meta["desc"], strict=True):
        of = getattr(getattr(desc, "grad_of", None), "target", None)
        if of is not None and value is not None:
            gradients[first[of.removeprefix("model.")]] = value.name
    return names, gradients


def _joint(graph: fx.Graph, names: Mapping[fx.Node, str], gradients: dict[str, str], traced: TracedForward) -> Joint:
    table = StorageTable()
    for n, name in names.items():
        table.add(n.meta["val"], name)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    causes = _causes(calls, traced)
    nodes, direct, counted, missing = [], 0, 0, set()
    for n in calls:
        args, kwargs, result = _values(n.args), _values(n.kwargs), n.meta.get("val")
        cause = causes.get(n, "")
        path = module_path(n.meta) if has_path(n.meta) else traced.module_paths.get(cause, "")
        if n.target is not operator.getitem:
            counted += 1
            direct += has_path(n.meta)
            if lacks_formula(n.target) and target_name(n.target) not in (REGION, REGION_BACKWARD):
                missing.add(target_name(n.target))
        found: list[str] = []
        fx.node.map_arg((n.args, n.kwargs), lambda x, found=found: found.append(names.get(x, x.name)))
        nodes.append(
            JointNode(
                name=n.name,
                target=target_name(n.target),
                phase="backward" if is_backward(n) else "forward",
                node=cause,
                module=path,
                inputs=tuple(found),
                outputs=tuple(value_of(x, n.name, table) for x in tensors_in(result)),
                work=_work(n.target, args, kwargs, result),
                causal=is_causal(n.target, args, kwargs),
            )
        )
        table.correct(n.target, args, result)
    share = direct / counted if counted else 0.0
    return Joint(
        nodes=tuple(nodes), storages=tuple(table.storages), gradients=gradients, direct_share=share, without_formula=tuple(sorted(missing))
    )


def _work(target: Any, args: Any, kwargs: Any, result: Any) -> Work:
    name = target_name(target)
    if name in (REGION, REGION_BACKWARD):
        return region_work(args[0], args[1], backward=name == REGION_BACKWARD)
    return work_of(target, args, kwargs, result)


def has_path(meta: Mapping[str, Any]) -> bool:
    return bool(meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack"))


def is_backward(n: fx.Node) -> bool:
    return bool(n.meta.get("partitioner_tag") == "is_backward")


def _values(tree: Any) -> Any:
    return fx.node.map_arg(tree, lambda x: x.meta.get("val"))


def _causes(calls: list[fx.Node], traced: TracedForward) -> dict[fx.Node, str]:
    """Forward node of every call."""
    if traced.method != "export":
        return dict.fromkeys(calls, OPAQUE)
    known = set(traced.nodes)
    causes: dict[fx.Node, str] = {}
    by_sequence: dict[int, str] = {}
    for n in calls:
        if not is_backward(n):
            cause = _origin(n)
            if cause in known:
                causes[n] = cause
                by_sequence.setdefault(n.meta.get("seq_nr", -1), cause)
    for n in calls:
        if is_backward(n) and has_path(n.meta) and n.meta.get("seq_nr") in by_sequence:
            causes[n] = by_sequence[n.meta["seq_nr"]]
    for n in reversed(calls):
        if n not in causes:
            users = [causes[u] for u in n.users if u in causes]
            operands = [causes[i] for i in n.all_input_nodes if i in causes and is_backward(i)]
            if users or operands:
                causes[n] = users[0] if users else operands[-1]
    for n in calls:  # what is left hangs on operands only
        if n not in causes:
            operands = [causes[i] for i in n.all_input_nodes if i in causes]
            if operands:
                causes[n] = operands[-1]
    return causes


def _origin(n: fx.Node) -> str:
    """Name in the exported program of the node a call was traced from."""
    sources = n.meta.get("from_node") or []
    name = ""
    while sources:
        source = sources[-1]
        name = source.name
        if "ExportedProgram.module" in source.pass_name:
            return str(name)
        sources = source.from_node
    return str(name)
