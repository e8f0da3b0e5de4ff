"""The forward nodes of an `OpGraph`: the traced graph run node by node, watching what autograd saves.

On fake tensors this costs no memory and gives exactly the storages that a real run saves, because both run the same operators under
the same autograd formulas. A storage counts once, at the first node that saves it; parameters do not count.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshwright.errors import CaptureError, MeshwrightError
from meshwright.graph.graph import GraphValue, OpNode, Storage

from .diagnose import quiet
from .forward import TracedForward
from .recurrent import KEPT, is_recurrent, kept_bytes
from .regions import REGION, region_saved_bytes
from .resolve import user_location
from .torch_private import DispatchRecorder, storage_key
from .work import tensor_bytes, tensors_in

__all__ = ["StorageTable", "forward_nodes", "value_of"]


@dataclass
class StorageTable:
    """Numbers storages in order of appearance. Tensors are kept alive, so that a storage's address names one storage only."""

    storages: list[Storage] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    alive: list[torch.Tensor] = field(default_factory=list)

    def add(self, x: torch.Tensor, owner: str) -> int:
        """Index of the tensor's storage; a sparse tensor has one of its own."""
        self.alive.append(x)
        if x.layout != torch.strided:
            key, size = -id(x), tensor_bytes(x)
        else:
            key, size = storage_key(x), int(x.untyped_storage().nbytes())
        if key not in self.index:
            self.index[key] = len(self.storages)
            self.storages.append(Storage(size_bytes=size, owner=owner))
        return self.index[key]

    def correct(self, target: Any, args: Any, result: Any) -> None:
        """Where torch's fake kernel of the call gives a result too few bytes and the table has that result: its true size."""
        if is_recurrent(target) and (at := self.index.get(storage_key(result[KEPT]))) is not None:
            self.storages[at] = Storage(size_bytes=kept_bytes(args), owner=self.storages[at].owner)


def value_of(x: torch.Tensor, owner: str, table: StorageTable) -> GraphValue:
    return GraphValue(shape=tuple(int(d) for d in x.shape), dtype=str(x.dtype).removeprefix("torch."), storage=table.add(x, owner))


def forward_nodes(traced: TracedForward, table: StorageTable) -> tuple[OpNode, ...]:
    """One `OpNode` per call of the traced graph, without its work. Fills `table`: parameters, buffers, inputs, results, saved.

    Runs the graph once on the tensors of `traced` (fake or real). Raises CaptureError naming the operator and its module if one fails.
    """
    values = [traced.value(name) for name in traced.placeholders]
    parameters = set()
    for name, x in traced.parameters.items():
        parameters.add(table.add(x, f"param:{name}"))
    for name, x in zip(traced.placeholders, values, strict=True):
        table.add(x, name)
    recorder = _Recorder(traced, table, parameters)
    recurrent: list[tuple[Any, Any, Any]] = []
    watched = DispatchRecorder(lambda target, args, _, result: recurrent.append((target, args, result)) if is_recurrent(target) else None)
    with quiet(), traced.mode or contextlib.nullcontext(), torch.enable_grad(), recorder.hooks(), watched:
        recorder.run(*values)
    for call in recurrent:
        table.correct(*call)
    return tuple(recorder.nodes)


class _Recorder(fx.Interpreter):  # type: ignore[misc]
    def __init__(self, traced: TracedForward, table: StorageTable, parameters: set[int]) -> None:
        super().__init__(traced.graph_module, garbage_collect_values=False)
        self.traced, self.table, self.parameters = traced, table, parameters
        self.nodes: list[OpNode] = []
        self.current = ""
        self.saved: list[int] = []
        self.counted: set[int] = set()

    def hooks(self) -> Any:
        def pack(x: torch.Tensor) -> torch.Tensor:
            storage = self.table.add(x, self.current)
            if storage not in self.parameters and storage not in self.counted:
                self.counted.add(storage)
                self.saved.append(storage)
            return x

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        self.current, self.saved = n.name, []
        try:
            result = super().run_node(n)
        except MeshwrightError:
            raise
        except Exception as error:
            path = self.traced.module_paths[n.name]
            where = user_location(error, self.traced.model.rpartition(":")[0]) or self.traced.model
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            message = f"operator {target_name(n.target)} (node {n.name}, module {path!r}) fails: {type(error).__name__}: {reason}"
            raise CaptureError(message, where=where, hint="the module fails on its own example inputs", data={"operator": n.name}) from error
        if target_name(n.target) == REGION:
            values = torch.fx.node.map_arg(n.args, self.env.__getitem__)
            self.saved.append(len(self.table.storages))
            self.table.storages.append(Storage(size_bytes=region_saved_bytes(values[0], values[1]), owner=n.name))
        self.nodes.append(
            OpNode(
                name=n.name,
                target=target_name(n.target),
                module=self.traced.module_paths[n.name],
                inputs=operands(n),
                args=[json_argument(a) for a in n.args],
                kwargs={k: json_argument(v) for k, v in n.kwargs.items()},
                outputs=tuple(value_of(x, n.name, self.table) for x in tensors_in(result)),
                saved=tuple(self.saved),
                random=draws_random_numbers(n),
            )
        )
        return result


def operands(n: fx.Node) -> tuple[str, ...]:
    """Tensor operands in argument order, by value name; an operand used twice appears twice."""
    found: list[str] = []
    fx.node.map_arg((n.args, n.kwargs), lambda x: found.append(value_name(x)))
    return tuple(found)


def value_name(n: fx.Node) -> str:
    return str(n.meta["value"]) if n.op == "placeholder" else n.name


def target_name(target: Any) -> str:
    if target is operator.getitem:
        return "operator.getitem"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def json_argument(x: Any) -> Any:
    """An argument as JSON: nodes as {"value": name}; dtypes, devices and the like as {"torch": text}; odd floats as {"float": text}."""
    if isinstance(x, fx.Node):
        return {"value": value_name(x)}
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"float": str(x)}
    if isinstance(x, (list, tuple)):
        return [json_argument(i) for i in x]
    if isinstance(x, Mapping):
        return {str(k): json_argument(v) for k, v in x.items()}
    if isinstance(x, slice):
        return {"slice": [json_argument(x.start), json_argument(x.stop), json_argument(x.step)]}
    return {"torch": str(x).removeprefix("torch.")}


def draws_random_numbers(n: fx.Node) -> bool:
    """Whether the call's result depends on the random state: dropout with p > 0 in training, random factories, ..."""
    tags = getattr(n.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return target_name(n.target) == REGION  # nobody knows
    for i, argument in enumerate(n.target._schema.arguments):
        value = n.args[i] if i < len(n.args) else n.kwargs.get(argument.name, argument.default_value)
        if argument.name in ("p", "dropout_p", "dropout") and value == 0.0:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True
