"""What a value is on a tensor-parallel rank, and a call that is being rewritten for one. See `sharding` and `sharding_rules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Unsupported
from ...plan.shards import local_extent, part_ranges
from ..steps.forward_graph import ForwardNode, argument_of, operator_of

__all__ = ["PARTIAL", "Call", "Member", "Partial", "Shape", "Shard", "State", "States", "copies", "local_shape", "member_of", "value_name"]


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is split; blocks, groups and mixed as in `plan.ParamShard`. `repeated`: the dimension behind holds, on each rank, as many
    copies of each of its key-value heads as it has query heads for it."""

    dim: int
    blocks: int = 1
    groups: int = 0
    mixed: tuple[tuple[int, int], ...] = ()
    repeated: bool = False


@dataclass(frozen=True)
class Member:
    """Rank `index` of those that share a segment; shares as in `plan.ParamShard`."""

    index: int
    shares: tuple[int, ...]

    @property
    def parts(self) -> int:
        return len(self.shares)

    def extent(self, size: int, shard: Shard) -> int:
        return local_extent(size, _Cut(shard, self.shares), self.index, self.parts)

    def ranges(self, size: int, shard: Shard) -> tuple[tuple[int, int], ...]:
        return part_ranges(size, _Cut(shard, self.shares), self.index, self.parts)


class _Cut:
    def __init__(self, shard: Shard, shares: tuple[int, ...]) -> None:
        self.blocks, self.groups, self.mixed = shard.blocks, shard.groups, shard.mixed
        self.shares = shares


def member_of(parts: int | Member) -> Member:
    """An even part, where only the number of parts is given."""
    return parts if isinstance(parts, Member) else Member(0, (1,) * parts)


class Partial:
    def __repr__(self) -> str:
        return "PARTIAL"


PARTIAL = Partial()
State = Shard | Partial | None
States = dict[str, State | tuple[State, ...]]
Shape = tuple[int, ...]


def local_shape(shape: Sequence[int], state: Any, parts: int | Member) -> Shape:
    if not isinstance(state, Shard):
        return tuple(shape)
    member = member_of(parts)
    local = [member.extent(d, state) if i == state.dim else d for i, d in enumerate(shape)]
    if state.repeated:
        local[state.dim + 1] = copies(shape, state, member)
    return tuple(local)


def copies(shape: Sequence[int], state: Shard, member: Member) -> int:
    """Query heads of each key-value head that a rank has; `shape` is (..., key-value heads, query heads of each, ...)."""
    d, ratio = state.dim, shape[state.dim + 1]
    ((low, high),) = member.ranges(shape[d] * ratio, Shard(d))
    queries, held = high - low, member.extent(shape[d], state)
    whole_heads = low % ratio == 0 and high % ratio == 0
    if queries % held or not (whole_heads or low // ratio == (high - 1) // ratio):
        raise Unsupported(
            f"a rank with query heads {low} to {high - 1} of {ratio} per key-value head has neither whole groups nor a part of one",
            hint="choose other shares",
        )
    return queries // held


class Call:
    """A call being rewritten: `args` and `kwargs` may be replaced by a rule."""

    def __init__(self, node: ForwardNode, states: Mapping[str, Any], shapes: Mapping[str, Shape], parts: int | Member) -> None:
        self.node, self.member = node, member_of(parts)
        self.args, self.kwargs = list(node.args), dict(node.kwargs)
        self._states, self._shapes = states, shapes

    def fail(self, why: str) -> Unsupported:
        return Unsupported(
            f"cannot split call {self.node.target}: {why}", where=f"node {self.node.name}", hint="use a layout without tensor parallelism"
        )

    def state(self, position: int) -> Any:
        return self._states.get(value_name(self.args[position])) if position < len(self.args) and value_name(self.args[position]) else None

    def shape(self, position: int) -> Shape:
        return self._shapes[value_name(self.args[position])]

    @property
    def out_shape(self) -> Shape:
        info = self.node.outputs[0]
        if info is None:
            raise self.fail("its result is no tensor")
        return info.shape

    def dim(self, value: Any, rank: int) -> int:
        return int(value) % rank if rank else 0

    def argument(self, name: str) -> Any:
        return argument_of(operator_of(self.node), self.args, self.kwargs, name)


def value_name(value: Any) -> str:
    return str(value["value"]) if isinstance(value, dict) and "value" in value else ""
