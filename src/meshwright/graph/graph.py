"""The operator graph of a job: what a model computes, captured from a real PyTorch module without its memory.

An `OpGraph` has two levels that point at each other:
- `nodes`: the forward graph that is executed (one entry per exported ATen call, loss included), in execution order;
- `joint`: the forward-and-backward graph (AOTAutograd), one entry per ATen call, each naming the forward node that caused it.

Values are named: a node's result by the node's name, a parameter or buffer by `param:<fqn>` / `buffer:<fqn>`, an example
input by `input:<i>` (the training target is the last input). Everything is JSON; torch is not needed to read one.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from ..notebook_repr import repr_html

__all__ = ["GraphValue", "JointNode", "OpGraph", "OpNode", "Parameter", "Scaling", "Storage", "Work", "captured_whole", "operator_name"]

SCHEMA = "meshwright.graph"
VERSION = 1
CONSTANT = ("detach", "zeros_like", "ones_like", "full_like", "empty_like")  # no gradient flows back
MUTATING = ("add_", "batch_norm", "copy_", "mul_", "sub_")


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Work(_Record, frozen=True, kw_only=True):
    """What a call costs in hardware terms: multiply-adds count as two flops; bytes are those of distinct operands."""

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    calls: int = 0  # kernels launched, for per-call overhead

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            calls=self.calls + other.calls,
        )

    def share(self, part: int, whole: int) -> Work:
        """What a rank does of it that has `part` of `whole`; kernels are launched by each."""
        flops, read, written = (x * part // whole for x in (self.flops, self.bytes_read, self.bytes_written))
        return Work(flops=flops, bytes_read=read, bytes_written=written, calls=self.calls)


class GraphValue(_Record, frozen=True, kw_only=True):
    """One tensor: logical shape, dtype name without `torch.` (`"float32"`), and the storage it lives in."""

    shape: tuple[int, ...]
    dtype: str
    storage: int  # index into OpGraph.storages; -1 when it has none (scalars)


class Storage(_Record, frozen=True, kw_only=True):
    """One allocation. `owner` is the value name that created it; views share it."""

    size_bytes: int
    owner: str


class Parameter(_Record, frozen=True, kw_only=True):
    name: str  # fully qualified name; tied parameters appear once, under their first name
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    trainable: bool = True
    aliases: tuple[str, ...] = ()  # other names of the same tensor


class OpNode(_Record, frozen=True, kw_only=True):
    """One call of the forward graph. `args` is the call's argument list as JSON; a tensor argument is `{"value": name}`."""

    name: str
    target: str  # e.g. "aten.linear.default"
    module: str  # module path, "" at the root, "loss" for the loss
    inputs: tuple[str, ...]  # tensor operands in argument order, by value name
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    outputs: tuple[GraphValue, ...] = ()
    forward: Work = Work()
    backward: Work = Work()  # every backward call this node causes
    saved: tuple[int, ...] = ()  # storages autograd keeps for its backward, parameters excluded, each counted at its first saver
    random: bool = False  # draws random numbers (dropout)

    @property
    def passes_gradient(self) -> bool:
        """Whether its result has a gradient where an operand has one."""
        return bool(self.outputs) and self.outputs[0].dtype.startswith(("float", "bfloat")) and operator_name(self.target) not in CONSTANT

    @property
    def mutates_buffers(self) -> bool:
        """Whether buffers of the module among its operands are overwritten."""
        return self.target.count(".") > 0 and self.target.split(".")[1] in MUTATING


class JointNode(_Record, frozen=True, kw_only=True):
    name: str
    target: str
    phase: Literal["forward", "backward"]
    node: str  # name of the forward OpNode that caused it; "" if unknown
    module: str
    inputs: tuple[str, ...]
    outputs: tuple[GraphValue, ...] = ()
    work: Work = Work()
    causal: bool = False  # attention with a causal mask; its flops are counted in full


class Scaling(_Record, frozen=True, kw_only=True):
    """How the graph's sizes change with the batch: integer number `index[i]` of its document grows by `slope[i]` per row, and by `square[i]` times
    the number of rows squared (left out where all are 0).

    Integers are numbered in the order of the JSON document without its `scaling` (booleans are not integers); there are `integers`
    of them. Made from captures at two batch sizes; `meshwright.graph.scale.at_batch` applies it.
    """

    integers: int
    index: tuple[int, ...]
    slope: tuple[int, ...]
    square: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class OpGraph(_Record, frozen=True, kw_only=True):
    schema: str = SCHEMA
    version: int = VERSION
    model: str  # how the module was named, e.g. "examples/gpt.py:small"
    method: Literal["export", "aot", "make_fx", "opaque"]
    batch_size: int  # leading dimension of the example inputs
    loss: str  # name of the loss function
    inputs: tuple[GraphValue, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...] = ()
    nodes: tuple[OpNode, ...]
    joint: tuple[JointNode, ...] = ()
    storages: tuple[Storage, ...] = ()
    joint_storages: tuple[Storage, ...] = ()
    outputs: tuple[str, ...] = ()  # value names; the first is the loss
    gradients: dict[str, str] = {}  # parameter -> name of the joint value that is its gradient
    scaling: Scaling | None = None  # for other batch sizes; None: capture again
    notes: tuple[str, ...] = ()  # why a fallback was taken, operators without a flop formula, ...
    _repr_html_ = repr_html

    @property
    def parameter_count(self) -> int:
        total = 0
        for p in self.parameters:
            size = 1
            for dim in p.shape:
                size *= dim
            total += size
        return total

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for backward, by storage, parameters excluded, at `batch_size`."""
        return sum(self.storages[s].size_bytes for s in {s for n in self.nodes for s in n.saved})

    def node(self, name: str) -> OpNode:
        for n in self.nodes:
            if n.name == name:
                return n
        raise KeyError(name)

    def outline(self) -> list[str]:
        """What `fingerprint` is made of, in words: a line per call, then one per parameter. Two outlines show where two graphs part."""
        calls = [f"{n.name} = {n.target}({', '.join(n.inputs)})" for n in self.nodes]
        return calls + [f"parameter {p.name}: {p.dtype}{list(p.shape)}" for p in self.parameters]

    def fingerprint(self) -> str:
        """Identifies the executed graph (names, targets, operands, parameter shapes), whatever its batch size and costs."""
        parts: list[list[Any]] = [[n.name, n.target, n.inputs] for n in self.nodes]
        parts.append([[p.name, list(p.shape), p.dtype] for p in self.parameters])
        return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:16]


def operator_name(target: str) -> str:
    """`aten.linear.default` -> `linear`; in-place forms keep their underscore off: they are run out of place."""
    name = target.split(".")[1] if target.count(".") else target
    return name.rstrip("_") or name


def captured_whole(graph: OpGraph) -> list[str]:
    """What the capture says of functions, modules, or of the whole model, that it could not look into: plans go around them."""
    return [n for n in graph.notes if n.startswith(("calls of ", "kept whole", "torch.export refused", "captured as one opaque"))]
