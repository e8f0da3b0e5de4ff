"""A training step as one executable ATen graph, forward and backward, and its `StepGraph`: what every call reads, makes and costs, by storage.

The module with its loss goes through torch.export (for module paths), then AOTAutograd; backward convolutions are split in two
(`split_convolutions`). Storages come from fake tensors, so no memory is needed to plan; views, detaches and transposes lie in the storage of what
they view. Running needs real tensors: `CapturedStep.values` says which one every placeholder wants, `CapturedStep.outputs` what every output is.
Static shapes only: a graph with symbolic sizes is refused, because a plan's bytes would hold for one size only.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from meshwright.errors import CaptureError, MeshwrightError, Unsupported
from meshwright.graph.step_graph import Kind, StepGraph, StepNode, StepStorage

from .diagnose import quiet
from .forward import TracedForward, build_objective, module_path, trace_objective
from .joint import is_backward
from .losses import Objective
from .nodes import draws_random_numbers, target_name
from .resolve import ModelSource
from .split_convolutions import split_convolutions
from .torch_private import joint_graph, storage_key, uncompiled_graphs
from .work import tensors_in

__all__ = ["CapturedStep", "capture_step", "capture_step_of", "step_graph_of"]


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """`graph_module(*tensors)` gives `outputs`; its placeholders want the tensors named `values`, in order.

    `values`: `param:<fqn>`, `buffer:<fqn>`, `input:<i>`, `tangent:0` (the gradient of the loss, one). `outputs`: `loss`, `gradient:<fqn>`,
    `buffer:<fqn>` (its new value), `none`. `constants`: tensors that forward makes from Python values, by buffer name. `channels_last`: images are
    laid out so first. All names are those of the user's module, without prefix.
    """

    graph_module: fx.GraphModule
    step_graph: StepGraph
    values: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    source: ModelSource
    objective: nn.Module = field(repr=False)
    loss: str
    notes: tuple[str, ...] = ()
    channels_last: bool = False


def capture_step(
    module: nn.Module, inputs: Sequence[torch.Tensor], *, loss: str = "cross-entropy", name: str = "", resident_bytes: int = 0,
    channels_last: bool = False,
) -> CapturedStep:  # fmt: skip
    """The step of a real (or fake) module; the last input is the target, as in model functions. Nothing is computed.

    `channels_last`: the step lays images (and volumes) among its inputs out so, and the model computes in that layout: another order of sums.

    Raises: CaptureError when export or AOTAutograd refuses it (names the operator); Unsupported for dynamic shapes; UsageError for a wrong loss.
    """
    source = ModelSource(name=name or type(module).__name__, module=module, inputs=tuple(inputs))
    return _captured(Objective(module, loss, channels_last=channels_last), source, loss, None, resident_bytes)


def capture_step_of(
    model: str, *, loss: str = "cross-entropy", batch_size: int | None = None, seed: int = 0, device: str = "fake", resident_bytes: int = 0,
    channels_last: bool = False,
) -> CapturedStep:  # fmt: skip
    """The step of the model function `FILE.py:function` or `module:function`; `device="fake"` needs no memory and can be planned, not run.

    Raises: as `capture_step`, and UnknownName.
    """
    objective, source, mode = build_objective(
        model, loss=loss, batch_size=batch_size, seed=seed, device=device, channels_last=channels_last
    )  # fmt: skip
    return _captured(objective, source, loss, mode, resident_bytes)


def _captured(objective: Objective, source: ModelSource, loss: str, mode: Any, resident_bytes: int) -> CapturedStep:
    with uncompiled_graphs():
        traced = trace_objective(objective, source, loss=loss, mode=mode)
        if traced.method != "export":
            message = f"the step cannot be captured: {traced.notes[-1]}"
            hint = "plan it at module granularity (memory plan does so by itself), or change the operator named"
            raise CaptureError(message, where=source.name, hint=hint)
        with quiet():
            module: nn.Module = traced.exported.module()
        constants = _constants_as_buffers(module)
        try:
            with quiet(), mode or contextlib.nullcontext(), joint_graph(module, source.inputs) as joint:
                graph_module: fx.GraphModule = joint.graph_module
        except MeshwrightError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            raise CaptureError(f"AOTAutograd refuses the step: {type(error).__name__}: {reason}", where=source.name) from error
    split_convolutions(graph_module.graph)
    values, outputs = _tied(graph_module, *_described(graph_module.graph, traced))
    names = dict(zip(graph_module.graph.find_nodes(op="placeholder"), values, strict=True))
    step = step_graph_of(graph_module, name=source.name, names=names, resident_bytes=resident_bytes)
    return CapturedStep(
        graph_module=graph_module, step_graph=step, values=values, outputs=outputs, constants=constants, source=source, objective=objective,
        loss=loss, notes=source.notes, channels_last=objective.channels_last,
    )  # fmt: skip


def _constants_as_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Constants made in forward come out of export as plain attributes; AOTAutograd takes parameters and buffers only."""
    found: dict[str, torch.Tensor] = {}
    for path, sub in module.named_modules():
        for name, value in list(sub.__dict__.items()):
            if isinstance(value, torch.Tensor):
                del sub.__dict__[name]
                sub.register_buffer(name, value, persistent=False)
                found[_plain(f"{path}.{name}" if path else name)] = value
    return found


def _plain(target: str) -> str:
    return target.removeprefix("model.")


def _described(graph: fx.Graph, traced: TracedForward) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the placeholders want and what the outputs are, from AOTAutograd's descriptors."""
    first = {name: name for name in traced.parameters}
    for name, others in traced.aliases.items():
        first |= dict.fromkeys(others, name)

    def tensor(desc: Any) -> str:
        target, index = getattr(desc, "target", None), getattr(desc, "idx", None)
        if target is not None:
            plain = _plain(target)
            return f"param:{first[plain]}" if plain in first else f"buffer:{plain}"
        return f"input:{index}" if index is not None else "tangent:0"

    values = tuple(tensor(n.meta["desc"]) for n in graph.find_nodes(op="placeholder"))
    output = graph.output_node()
    outputs = []
    for value, desc in zip(output.args[0], output.meta["desc"], strict=True):
        if value is None:
            outputs.append("none")
        elif (mutated := getattr(desc, "mutated_input", None)) is not None:
            outputs.append(tensor(mutated))
        elif (of := getattr(desc, "grad_of", None)) is not None:
            outputs.append(f"gradient:{tensor(of).removeprefix('param:')}")
        else:
            outputs.append("loss")
    return values, tuple(outputs)


def _tied(module: fx.GraphModule, values: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One placeholder per tensor, and one gradient: export parts tied parameters. Gradients are added as soon as both are there, as autograd does."""
    graph = module.graph
    first: dict[str, fx.Node] = {}
    for n, value in zip(graph.find_nodes(op="placeholder"), values, strict=True):
        if value in first:
            n.replace_all_uses_with(first[value])
            graph.erase_node(n)
        first.setdefault(value, n)
    place = {n: i for i, n in enumerate(graph.nodes)}
    results, named = list(graph.output_node().args[0]), list(outputs)
    for name in dict.fromkeys(o for o in outputs if o.startswith("gradient:") and outputs.count(o) > 1):
        at = [i for i, o in enumerate(outputs) if o == name]
        total, *others = sorted((results[i] for i in at), key=place.__getitem__)
        for other in others:
            with graph.inserting_after(other):
                added = graph.call_function(torch.ops.aten.add.Tensor, (total, other))
            added.meta = {**{k: v for k, v in other.meta.items() if k != "desc"}, "val": torch.empty_like(other.meta["val"])}
            total, place[added] = added, place[other]
        for i in at:
            results[i], named[i] = (total, name) if i == at[0] else (None, "none")
    if len(first) < len(values):
        output = graph.output_node()
        output.args = (results, *output.args[1:])
    graph.set_codegen(fx.graph.CodeGen())  # arguments and results flat, as listed
    graph.lint()
    module.recompile()
    return tuple(first), tuple(named)


KINDS: dict[str, Kind] = {"param": "parameter", "buffer": "buffer", "input": "input", "tangent": "tangent"}


def step_graph_of(
    joint: fx.GraphModule, *, name: str = "step", names: Mapping[fx.Node, str] | None = None, forward_outputs: int | None = None,
    static_inputs: Collection[int] = (), resident_bytes: int = 0,
) -> StepGraph:  # fmt: skip
    """The step graph of a joint graph whose nodes carry fake tensors in `meta["val"]` (AOTAutograd's, or what a partitioner hook is given).

    `names`: value names of placeholders (as `CapturedStep.values`); without them `tangents_*` are tangents, `static_inputs` (positions) are
    parameters, the others inputs. `forward_outputs`: so many outputs belong to the forward pass (default: what autograd's tags say). Nodes keep the
    graph's order, except that forward nodes stand before the first backward one; placeholders come first. Times and workspaces are zero.

    Raises: Unsupported for symbolic sizes, naming the node.
    """
    table = _Storages()
    order, backward = _phases(joint.graph, forward_outputs)
    number = {n: i for i, n in enumerate(order)}
    nodes: list[StepNode] = []
    given = 0
    for n in order:
        _refuse_symbolic(n)
        if n.op != "call_function":
            owner, kind = _placeholder(n, names, given in static_inputs)
            given += n.op == "placeholder"
            storages = tuple(dict.fromkeys(table.add(x, owner, kind)[0] for x in tensors_in(n.meta.get("val"))))
            nodes.append(StepNode(name=n.name, target="placeholder", phase="input", module=owner, storages=storages))
            continue
        nodes.append(_call(n, number, table, n in backward))
    boundary = next((i for i, n in enumerate(nodes) if n.phase == "backward"), len(nodes))
    found: list[fx.Node] = []
    fx.node.map_arg(joint.graph.output_node().args, found.append)
    return StepGraph(
        name=name, nodes=tuple(nodes), storages=tuple(table.storages), boundary=boundary, results=tuple(dict.fromkeys(number[n] for n in found)),
        resident_bytes=resident_bytes,
    )  # fmt: skip


class _Storages:
    """Numbers storages in order of appearance; the tensors stay alive, so that an address names one storage only."""

    def __init__(self) -> None:
        self.storages: list[StepStorage] = []
        self.index: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, owner: str, kind: Kind = "made") -> tuple[int, bool]:
        """(number, whether it is new)."""
        key = storage_key(x)
        if key in self.index:
            return self.index[key], False
        self.alive.append(x)
        self.index[key] = len(self.storages)
        self.storages.append(StepStorage(size_bytes=int(x.untyped_storage().nbytes()), owner=owner, kind=kind))
        return self.index[key], True


def _placeholder(n: fx.Node, names: Mapping[fx.Node, str] | None, static: bool) -> tuple[str, Kind]:
    if n.op == "get_attr":
        return f"buffer:{n.target}", "buffer"
    if names is not None:
        return names[n], KINDS[names[n].partition(":")[0]]
    kind: Kind = "tangent" if "tangents" in str(n.target) else "parameter" if static else "input"
    return f"{kind}:{n.name}", kind


def _call(n: fx.Node, number: Mapping[fx.Node, int], table: _Storages, backward: bool) -> StepNode:
    storages: list[int] = []
    makes: list[int] = []
    for x in tensors_in(n.meta.get("val")):
        if x.layout != torch.strided:
            raise Unsupported(f"{n.name} ({target_name(n.target)}) makes a {x.layout} tensor", where=n.name, hint="only dense tensors are counted")
        storage, new = table.add(x, n.name)
        if storage not in storages:
            storages.append(storage)
            if new:
                makes.append(storage)
    return StepNode(
        name=n.name, target=target_name(n.target), phase="backward" if backward else "forward", module=module_path(n.meta),
        inputs=tuple(dict.fromkeys(number[i] for i in n.all_input_nodes)), storages=tuple(storages), makes=tuple(makes),
        writes=_written(n, table), random=n.target is not operator.getitem and draws_random_numbers(n),
    )  # fmt: skip


def _written(n: fx.Node, table: _Storages) -> tuple[int, ...]:
    """Storages of operands that the call changes, as its schema says."""
    schema = getattr(n.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    found: list[int] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = n.args[i] if i < len(n.args) else n.kwargs.get(argument.name)
            tensors = fx.node.map_arg(value, lambda x: x.meta.get("val"))
            found += [table.add(x, n.name)[0] for x in tensors_in(tensors)]
    return tuple(dict.fromkeys(found))


def _phases(graph: fx.Graph, forward_outputs: int | None) -> tuple[list[fx.Node], set[fx.Node]]:
    """Placeholders, forward calls, backward calls, each in the graph's order; and the set of the last."""
    given = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    calls = [n for n in graph.nodes if n.op == "call_function"]
    other = [n for n in graph.nodes if n.op in ("call_module", "call_method")]
    if other:
        raise Unsupported(f"{other[0].name} calls {other[0].target}: only ATen calls are planned", where=other[0].name)
    reached = {n for n in given if "tangents" in str(n.target)}
    for n in calls:
        if any(i in reached for i in n.all_input_nodes):
            reached.add(n)
    backward = {n for n in calls if n in reached or is_backward(n)}
    if forward_outputs is not None:
        wanted: list[fx.Node] = []
        fx.node.map_arg(graph.output_node().args[0][:forward_outputs], wanted.append)
        stack, needed = wanted, set[fx.Node]()
        while stack:
            n = stack.pop()
            if n not in needed:
                needed.add(n)
                stack.extend(n.all_input_nodes)
        backward -= needed - reached
    # A forward call that reads a backward one cannot be forward: a value that only backward makes.
    for n in calls:
        if any(i in backward for i in n.all_input_nodes):
            backward.add(n)
    return [*given, *(n for n in calls if n not in backward), *(n for n in calls if n in backward)], backward


def _refuse_symbolic(n: fx.Node) -> None:
    value = n.meta.get("val")
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    symbolic = symbolic or any(isinstance(d, torch.SymInt) for x in tensors_in(value) for d in x.shape)
    if symbolic:
        raise Unsupported(
            f"{n.name} ({n.target}) has a symbolic size: a plan's bytes hold for one size", where=n.name,
            hint="capture with fixed shapes (torch.compile(dynamic=False), torch._dynamo.mark_static)",
        )  # fmt: skip
