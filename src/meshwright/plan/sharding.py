"""A sharding plan: SBP states for every tensor and operator on a mesh, the redistributions between them, and what they are predicted to cost."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..errors import UsageError

__all__ = ["BYTES", "OPTIMIZERS", "BucketRecord", "Bytes", "MoveRecord", "Optimizer", "ShardingPlan", "ValueState", "item_bytes"]

Optimizer = Literal["sgd", "adamw"]
# (copies kept beside weight and gradient, words moved per parameter in the update)
OPTIMIZERS: dict[str, tuple[int, int]] = {"sgd": (0, 3), "adamw": (2, 7)}

BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes per element. Raises: UsageError for a dtype that is not known here."""
    if dtype not in BYTES:
        raise UsageError(f"tensors of dtype {dtype!r} cannot be split", hint=f"known: {', '.join(BYTES)}")
    return BYTES[dtype]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ValueState(_Record, frozen=True, kw_only=True):
    """How one operator runs: states of its operands (in `OpNode.inputs` order) and of its result, and what its signatures are called."""

    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]
    names: tuple[str, ...] = ()


class MoveRecord(_Record, frozen=True, kw_only=True):
    """A redistribution as it is carried out: `source` (a value, or `hub:<value>`) for operand `slot` of `reader` (a node, or `hub:<value>`).

    `forward` and `backward` are steps (axis, type) in order: that axis goes to that type. `bucket`: the axes over which the gradient is summed
    together with others at the end of the backward."""

    source: str
    reader: str
    slot: int
    forward: tuple[tuple[int, str], ...] = ()
    backward: tuple[tuple[int, str], ...] = ()
    bucket: tuple[int, ...] = ()


class BucketRecord(_Record, frozen=True, kw_only=True):
    """How the flat bucket of gradients with `item` bytes per element is summed over `axes`."""

    axes: tuple[int, ...]
    item: int
    steps: tuple[tuple[int, str], ...]


class Bytes(_Record, frozen=True, kw_only=True):
    """Bytes that one rank sends in a step, by reason."""

    activations: int = 0
    gradients: int = 0  # of parameters
    parameters: int = 0  # gathered before use
    inside: int = 0  # exchanges inside operators
    loader: int = 0  # inputs redistributed after loading

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.parameters + self.inside + self.loader


class ShardingPlan(_Record, frozen=True, kw_only=True):
    """SBP states for every parameter, buffer, input and operator on a mesh, and what they are predicted to cost.

    `mesh`: sizes; rank = row-major coordinates; rank r runs on `devices[r]`. `sources`: states in which parameters, buffers (`param:`, `buffer:`)
    and inputs (`input:`) are kept or loaded. `hubs`: the state to which a value with several readers is brought once. `ops`: per node.
    """

    schema: str = "meshwright.layout"
    version: int = 1
    strategy: str
    options: dict[str, Any] = {}
    model: str
    loss: str
    batch: int
    optimizer: str
    fabric: str
    fingerprint: str
    item_bytes: int = 0
    mesh: tuple[int, ...]
    devices: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    hubs: dict[str, tuple[str, ...]]
    ops: dict[str, ValueState]
    moves: tuple[MoveRecord, ...] = ()
    buckets: tuple[BucketRecord, ...] = ()
    time_s: float
    parts_s: dict[str, float]
    bytes_sent: tuple[Bytes, ...]  # per rank
    memory_bytes: int  # of the fullest device
    bound_time_s: float
    bound_bytes: int  # least mean bytes received per rank of a plan without redundant work; 0 where nothing is known
    whole: tuple[str, ...] = ()  # operators without a known split: "node (target)"
    notes: tuple[str, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()
    cite: str = ""
    exact: bool = False  # the search proved that no plan of its space is faster in its model
    seed: int = 0
