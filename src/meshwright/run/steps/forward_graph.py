"""The forward graph in a form that needs no tracing to run: ATen calls with JSON arguments.

Tracing a model costs seconds of CPU time in every process. So one process traces (`capture.trace_forward`), and the ranks read this.
Names are those of `meshwright.graph`: a node's result by the node's name, a parameter or buffer by `param:<fqn>` / `buffer:<fqn>`, an example
input by `input:<i>`, a small constant tensor by `constant:<name>`. Arguments are JSON; what JSON lacks is a one-key object: `{"value": name}`
for a tensor, `{"dtype": ...}`, `{"device": ...}`, `{"layout": ...}`, `{"memory_format": ...}`, `{"float": "inf"}`, `{"complex": [0.0, 1.0]}`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch

from ...capture.modules import module_tree
from ...errors import FormatError, MeshwrightError, Unsupported
from ...trace.module_tree import ModuleNode

__all__ = [
    "OPAQUE", "Constant", "ForwardGraph", "ForwardNode", "TensorInfo", "argument_of", "decode_argument", "from_traced", "operator_of", "resolve",
]  # fmt: skip

MAX_CONSTANT_NUMEL = 1 << 16  # elements of a constant that is written into the graph's JSON; a graph with a larger one is not portable
OPAQUE = "opaque"  # target of the one node of a model that could not be traced


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Logical shape at the traced batch size, and dtype name without `torch.`."""

    shape: tuple[int, ...]
    dtype: str


class ForwardNode(msgspec.Struct, frozen=True, array_like=True):
    """One call. `outputs`: its result, or the entries of the tuple that it returns (`many`); None where an entry is no tensor."""

    name: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: tuple[TensorInfo | None, ...]
    many: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it takes, in argument order, keyword arguments last."""
        return tuple(_values_in([self.args, self.kwargs]))


class Constant(msgspec.Struct, frozen=True, array_like=True):
    """`data`: its elements as JSON has them, in the forms of arguments."""

    shape: tuple[int, ...]
    dtype: str
    data: list[Any]

    def tensor(self, device: torch.device | None = None) -> torch.Tensor:
        values = [_number(x) if isinstance(x, dict) else x for x in self.data]
        return torch.tensor(values, dtype=getattr(torch, self.dtype), device=device).reshape(self.shape)


class ForwardGraph(msgspec.Struct, frozen=True, dict=True):
    """`outputs[0]` is the loss. `modules`: path of the innermost module of each node, "" at the root, "loss" for the loss.
    `tree`: the model's modules. `checks`: calls that come to what the owner checks of a micro-batch, beside those of the graph. `whole`: the calls at
    the whole batch, and `whole_inputs`, where data replicas share it (`plan.whole_batch`)."""

    nodes: tuple[ForwardNode, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Constant] = {}
    modules: dict[str, str] = {}
    tree: tuple[ModuleNode, ...] = ()
    whole: tuple[ForwardNode, ...] = ()
    whole_inputs: tuple[TensorInfo, ...] = ()
    checks: tuple[ForwardNode, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, ForwardNode]:
        return {n.name: n for n in self.nodes}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> ForwardGraph:
        try:
            return msgspec.json.decode(data, type=ForwardGraph)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(str(error), where="forward graph") from None


def resolve(target: str) -> Callable[..., Any]:
    """The callable named `namespace.operator.overload`. Only registered ATen-style operators and tuple indexing can be named."""
    if target == "getitem":
        return operator.getitem
    if target == OPAQUE:
        raise Unsupported("the model could not be traced, so it cannot be split", hint="use data parallelism only")
    parts = target.split(".")
    if parts[0] == "meshwright":
        from ...kernels import bags  # noqa: F401  registers its operators, as the next line
        from ...kernels.experts import padded  # noqa: F401
    if len(parts) != 3 or not all(p.isidentifier() for p in parts):
        raise FormatError(f"{target!r} is not an operator name", where="forward graph")
    try:
        found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except AttributeError:
        raise Unsupported(f"this torch has no operator {target!r}", hint="import the package that registers it in the model's file") from None
    operator_found: Callable[..., Any] = found
    return operator_found


def operator_of(node: ForwardNode) -> Any:
    """None for what is no operator of torch's: a module that is run as it is."""
    try:
        return resolve(node.target)
    except MeshwrightError:
        return None


def argument_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """An argument of a call by its name in the operator's schema, or the schema's own default; `default` where it has no such argument or value."""
    if name in kwargs:
        return kwargs[name]
    arguments = list(getattr(getattr(operator, "_schema", None), "arguments", ()))
    at = next((i for i, a in enumerate(arguments) if a.name == name), -1)
    if 0 <= at < len(args):
        return args[at]
    return arguments[at].default_value if at >= 0 and arguments[at].has_default_value() else default


def from_traced(traced: Any) -> ForwardGraph:
    """Convert a `meshwright.capture.TracedForward`. Constant tensors that export found are kept here; they must be real and small.

    Raises: Unsupported naming the node when it calls something that is not a registered operator, or a constant has no data.
    """
    constants: dict[str, Constant] = {}
    nodes, outputs = _calls(traced, traced.graph_module.graph, constants)
    checks, _ = _calls(traced, traced.checks, constants) if traced.checks is not None else ([], ())
    inputs = tuple(TensorInfo(tuple(x.shape), _dtype_name(x.dtype)) for x in traced.inputs)
    return ForwardGraph(
        tuple(nodes), inputs, outputs, constants, dict(traced.module_paths), module_tree(traced.objective.model).modules, checks=tuple(checks)
    )  # fmt: skip


def _calls(traced: Any, graph: Any, constants: dict[str, Constant]) -> tuple[list[ForwardNode], tuple[str, ...]]:
    """(calls, names of what they give) of a graph whose placeholders carry value names; the constants that it reads are added."""
    names: dict[Any, str] = {}
    nodes: list[ForwardNode] = []
    outputs: tuple[str, ...] = ()
    own = {name.removeprefix("model.") for name, _ in traced.objective.named_buffers(remove_duplicate=False)}
    for node in graph.nodes:
        if node.op == "placeholder":
            value = str(node.meta["value"])
            kind, _, rest = value.partition(":")
            if kind == "buffer" and rest not in own:
                value = f"constant:{rest}"
                constants[rest] = _constant(rest, traced.buffers[rest])
            names[node] = value
        elif node.op == "call_function":
            names[node] = node.name
            nodes.append(_node(node, names, opaque=traced.method == "opaque"))
        elif node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            outputs = tuple(names[x] for x in flat if x in names)
        else:
            raise Unsupported(f"node {node.name!r} is a {node.op} of {node.target}", hint="control flow cannot be cut into segments")
    return nodes, outputs


def _constant(name: str, value: torch.Tensor) -> Constant:
    if value.numel() > MAX_CONSTANT_NUMEL or not _has_data(value):
        raise Unsupported(f"the model holds a constant tensor {name!r} that is not a registered buffer", hint="use register_buffer for it")
    plain = value.detach().cpu()
    return Constant(tuple(plain.shape), _dtype_name(plain.dtype), [_encode(x, {}, name) for x in plain.flatten().tolist()])


def _has_data(value: torch.Tensor) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"


def _node(node: Any, names: Mapping[Any, str], *, opaque: bool) -> ForwardNode:
    target = "getitem" if node.target is operator.getitem else OPAQUE if opaque else str(node.target)
    if target not in ("getitem", OPAQUE) and len(target.split(".")) != 3:
        raise Unsupported(f"node {node.name!r} calls {node.target}, which is not an operator", hint="control flow and custom calls cannot be cut")
    val = torch.empty(()) if opaque else node.meta.get("val")  # an opaque model returns its loss
    many = isinstance(val, (tuple, list))
    return ForwardNode(
        node.name,
        target,
        [_encode(a, names, node.name) for a in node.args],
        {k: _encode(v, names, node.name) for k, v in node.kwargs.items()},
        tuple(_info(v) for v in val) if many else (_info(val),),
        many,
    )


def _encode(value: Any, names: Mapping[Any, str], where: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_encode(value.real, names, where), _encode(value.imag, names, where)]}
    if isinstance(value, (tuple, list)):
        return [_encode(v, names, where) for v in value]
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.layout, torch.memory_format)):
        return {"layout" if isinstance(value, torch.layout) else "memory_format": str(value).removeprefix("torch.")}
    if value in names:
        return {"value": names[value]}
    raise Unsupported(f"node {where!r} has an argument of type {type(value).__name__}, which has no JSON form")


def decode_argument(value: Any, tensor: Callable[[str], Any], device: torch.device) -> Any:
    """The Python argument that `value` stands for; `tensor(name)` gives the tensors, `device` replaces the traced one."""
    if isinstance(value, list):
        return [decode_argument(v, tensor, device) for v in value]
    if not isinstance(value, dict):
        return value
    (kind, what), *_ = value.items()
    if kind == "value":
        return tensor(what)
    if kind == "device":
        return device
    if kind in ("float", "complex"):
        return _number(value)
    found = getattr(torch, str(what), None)
    if kind not in ("dtype", "layout", "memory_format") or not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise FormatError(f"unknown argument {value!r}", where="forward graph")
    return found


def _number(value: Mapping[str, Any]) -> float | complex:
    """A number that JSON has no form for."""
    if "float" in value:
        return float(value["float"])
    real, imaginary = (_number(x) if isinstance(x, dict) else x for x in value["complex"])
    return complex(real, imaginary)


def _values_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(value.get("value"), str):
            yield value["value"]
        else:
            for v in value.values():
                yield from _values_in(v)
    elif isinstance(value, list):
        for v in value:
            yield from _values_in(v)


def _info(value: Any) -> TensorInfo | None:
    if not isinstance(value, torch.Tensor):
        return None
    return TensorInfo(tuple(int(d) for d in value.shape), _dtype_name(value.dtype))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
