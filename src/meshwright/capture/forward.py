"""The forward graph of a model with its loss, as torch.export (non-strict) records it: one call per ATen operator before dispatch.

The graph is the contract between planning and running: its node names are the `OpNode` names of a captured `OpGraph`, they do not
depend on the batch size or the device, and every operand has a value name: a node's result the node's name, a parameter
`param:<fqn>`, a buffer (or a constant tensor) `buffer:<fqn>`, an example input `input:<i>`. Multi-output operators are followed by
`operator.getitem` nodes, which name the single tensors.

A module that export refuses is one operator in the graph (`exporting`). If that is the model itself, the graph is one opaque node `model`, which runs
the module as it is: it can be trained data-parallel, but not be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from meshwright.errors import CaptureError

from .diagnose import Refusal
from .exporting import exported_program, module_path
from .live import LIVE
from .losses import Objective
from .resolve import ModelSource, build_model
from .torch_private import fake_attributes, fake_like, fake_mode, without_hooks_where_refused
from .user_gradients import refuse_parameter_hooks

__all__ = ["MAX_REAL_BYTES", "OPAQUE", "TracedForward", "build_objective", "built_and_traced", "module_path", "trace_forward", "trace_objective"]

OPAQUE = "model"  # name of the single node of an opaque graph
MAX_REAL_BYTES = 2 * 1024**3  # of parameters of a module that is built or run for real where that cannot be avoided


@dataclass(frozen=True, kw_only=True)
class TracedForward:
    """A forward graph and the tensors it reads.

    `graph_module(*values)` takes the values of `placeholders`, in that order, and returns `(loss,)`. Every placeholder node carries its
    value name as `node.meta["value"]` too. `nodes` are the call nodes in execution order. Tied parameters appear once, under their
    first name; `aliases` maps that name to the others. Names carry no prefix: they are those of the user's module.
    """

    graph_module: fx.GraphModule
    placeholders: tuple[str, ...]
    nodes: tuple[str, ...]
    module_paths: Mapping[str, str]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    aliases: Mapping[str, tuple[str, ...]]
    objective: nn.Module
    model: str
    loss: str
    batch_size: int
    method: str = "export"  # or "opaque"
    notes: tuple[str, ...] = ()
    mode: Any = field(default=None, repr=False)  # the fake mode its tensors live in; None if they are real
    refusal: Refusal | None = None  # why export did not work
    exported: Any = field(default=None, repr=False)  # torch.export.ExportedProgram
    checks: fx.Graph | None = field(default=None, repr=False)  # of the owner's, of inputs and constants (`checks`)

    def value(self, name: str) -> torch.Tensor:
        """The tensor of a parameter, buffer or input by value name."""
        kind, _, rest = name.partition(":")
        if kind == "input":
            return self.inputs[int(rest)]
        return self.parameters[rest] if kind == "param" else self.buffers[rest]


def trace_forward(
    model: str,
    *,
    loss: str = "cross-entropy",
    batch_size: int | None = None,
    seed: int = 0,
    device: str = "fake",
    opaque: bool = False,
    evaluation: bool = False,
    sizes: Sequence[Sequence[int]] = (),
    dtype: str = "float32",
) -> TracedForward:
    """Builds the model named `model` and traces it with its loss.

    `device="fake"` needs no memory for weights; any torch device name (`cpu`, `cuda:0`) builds the real module there after
    `torch.manual_seed(seed)`. Example inputs are brought to `batch_size` rows (repeated or cut), and to `sizes`. `opaque=True` skips export.
    `evaluation`: as the module computes after `eval()`, under a name of its own, so that modules kept whole are not those that are trained.

    Raises UsageError, UnknownName (wrong name, contract, loss) and CaptureError (user code fails; names file and line).
    """
    built = partial(build_objective, model, loss=loss, batch_size=batch_size, seed=seed, device=device, sizes=sizes, dtype=dtype)
    return built_and_traced(built, loss=loss, opaque=opaque, evaluation=evaluation)[-1]


def built_and_traced(
    build: Callable[..., tuple[Objective, ModelSource, Any]], *, loss: str, opaque: bool = False, evaluation: bool = False
) -> tuple[Objective, ModelSource, Any, TracedForward]:
    """What `build` gives and its trace. Where it cannot be traced and the meta device made another module than real memory does, the latter's."""

    def traced(objective: Objective, source: ModelSource, mode: Any) -> tuple[Objective, ModelSource, Any, TracedForward]:
        if evaluation:
            objective.eval()
            source = replace(source, name=f"{source.name} in evaluation mode")
        return objective, source, mode, trace_objective(objective, source, loss=loss, mode=mode, opaque=opaque)

    first = traced(*build())
    objective, source, mode, found = first
    size = sum(int(p.numel()) * p.element_size() for p in found.parameters.values())
    # A module that lives in this process was made really; on the meta device stands its copy.
    if found.refusal is None or mode is None or source.real or source.name.startswith(LIVE) or size > MAX_REAL_BYTES:
        return first
    again = build(real=True)
    return traced(*again) if _outline(again[0]) != _outline(objective) else first


def _outline(module: nn.Module) -> dict[str, Any]:
    """The tensors of a module by name, with those that it has a name for only."""
    named = ((f"{path}.{n}", x) for path, m in module.named_modules() for n, x in (*m._parameters.items(), *m._buffers.items()))
    return {n: None if x is None else (tuple(x.shape), x.dtype) for n, x in named}


def build_objective(
    model: str, *, loss: str, batch_size: int | None, seed: int, device: str, channels_last: bool = False, sizes: Sequence[Sequence[int]] = (),
    real: bool = False, dtype: str = "float32",
) -> tuple[Objective, ModelSource, Any]:  # fmt: skip
    """(model with loss, its source, fake mode or None): on `fake`, built on meta (`real`: with memory) and replaced by fakes on the processor."""
    if device != "fake":
        source = build_model(model, device=device, seed=seed, batch_size=batch_size, sizes=sizes, dtype=dtype)
        refuse_parameter_hooks(source.module, model)
        return Objective(source.module, loss, channels_last=channels_last, calling=source.calling), source, None
    notes: tuple[str, ...] = ("built with real memory: construction on the meta device makes another module",) if real else ()
    try:
        source = build_model(model, device="cpu" if real else "meta", seed=seed, batch_size=batch_size, sizes=sizes, dtype=dtype)
    except CaptureError as error:
        if real:
            raise
        # Construction that reads values (`x.item()`) cannot be described on meta: build it really, once.
        source, real = build_model(model, device="cpu", seed=seed, batch_size=batch_size, sizes=sizes, dtype=dtype), True
        notes = (f"built with real memory: construction on the meta device failed at {error.where}: {error.message}",)
    mode = fake_mode()
    module = source.module
    refuse_parameter_hooks(module, model)
    fake_attributes(module, lambda x: fake_like(mode, x))
    inputs = tuple(fake_like(mode, x) for x in source.inputs)
    objective = Objective(module, loss, channels_last=channels_last, calling=source.calling)
    return objective, ModelSource(name=model, module=module, inputs=inputs, notes=notes, calling=source.calling, real=real), mode


def trace_objective(objective: Objective, source: ModelSource, *, loss: str, mode: Any, opaque: bool = False) -> TracedForward:
    """Traces a built objective; falls back to one opaque node, with a note that says which operator export refused and where."""
    parameters, aliases = _named(objective.model)
    common: dict[str, Any] = {
        "parameters": parameters, "aliases": aliases, "inputs": source.inputs, "objective": objective, "model": source.name, "loss": loss,
        "batch_size": source.batch_size, "mode": mode,
    }  # fmt: skip
    if opaque:
        return _opaque(objective, common, source.notes)
    found = exported_program(objective, source, mode)
    if isinstance(found, Refusal):
        return _opaque(objective, common, (*source.notes, f"torch.export refused the module: {found}"), found)
    exported, notes = found
    graph, names, buffers = _with_value_names(exported, objective)
    graph_module = fx.GraphModule(objective, graph, "Forward")
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return TracedForward(
        graph_module=graph_module, placeholders=names, nodes=tuple(n.name for n in calls), buffers=buffers, notes=(*source.notes, *notes),
        exported=exported, checks=exported.checks, module_paths={n.name: module_path(n.meta) for n in calls}, **common,
    )  # fmt: skip


def _named(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, ...]]]:
    first: dict[int, str] = {}
    parameters: dict[str, torch.Tensor] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            aliases[first[id(p)]] = (*aliases.get(first[id(p)], ()), name)
        else:
            first[id(p)] = name
            parameters[name] = p
    return parameters, aliases


def _with_value_names(exported: Any, objective: Objective) -> tuple[fx.Graph, tuple[str, ...], dict[str, torch.Tensor]]:
    """The exported graph with one placeholder per distinct tensor, each carrying its value name."""
    tensors: dict[str, torch.Tensor] = dict(objective.named_parameters(remove_duplicate=False))
    kept = dict(objective.named_buffers(remove_duplicate=False))
    first = {id(p): name for name, p in reversed(list(objective.named_parameters(remove_duplicate=False)))}
    first |= {id(b): name for name, b in reversed(list(kept.items()))}
    buffers: dict[str, torch.Tensor] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(exported.graph, {}))
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    seen: dict[str, fx.Node] = {}
    user = 0
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        kind, target = spec.kind.name, spec.target
        if kind == "USER_INPUT":
            value, user = f"input:{user}", user + 1
        elif kind == "PARAMETER":
            value = f"param:{_strip(first[id(tensors[target])])}"
        else:
            tensor = kept[target] if target in kept else exported.constants[target]
            name = _strip(first.get(id(tensor), target))
            buffers[name] = tensor
            value = f"buffer:{name}"
        if value in seen:
            node.replace_all_uses_with(seen[value])
            graph.erase_node(node)
            continue
        seen[value] = node
        node.meta["value"] = value
    graph.eliminate_dead_code()  # a mean over heads that nobody reads would keep them together
    graph.lint()
    return graph, tuple(seen), buffers


def _strip(name: str) -> str:
    return name.removeprefix("model.")


def _opaque(objective: Objective, common: dict[str, Any], notes: tuple[str, ...], refusal: Refusal | None = None) -> TracedForward:
    """One node that runs the objective with the given parameters, buffers and inputs."""
    parameters: Mapping[str, torch.Tensor] = common["parameters"]
    buffers = {_strip(n): b for n, b in objective.named_buffers()}
    values = [*(f"param:{n}" for n in parameters), *(f"buffer:{n}" for n in buffers), *(f"input:{i}" for i in range(len(common["inputs"])))]
    graph = fx.Graph()
    nodes = []
    for i, value in enumerate(values):
        node = graph.placeholder(f"v{i}")
        node.meta["value"] = value
        nodes.append(node)
    call = graph.create_node("call_function", _opaque_call(objective, values), tuple(nodes), name=OPAQUE)
    graph.output((call,))
    return TracedForward(
        graph_module=fx.GraphModule({}, graph, "Opaque"), placeholders=tuple(values), nodes=(OPAQUE,), module_paths={OPAQUE: ""},
        buffers=buffers, method="opaque", notes=notes, refusal=refusal, **common,
    )  # fmt: skip


def _opaque_call(objective: Objective, values: list[str]) -> Callable[..., torch.Tensor]:
    def model(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(values, tensors, strict=True))
        state = {f"model.{v.partition(':')[2]}": t for v, t in given.items() if not v.startswith("input:")}
        inputs = tuple(t for v, t in given.items() if v.startswith("input:"))
        return without_hooks_where_refused(model, lambda: torch.func.functional_call(objective, state, inputs, tie_weights=True))

    return model


