"""What each traced call does to a sharded dimension: the rules of tensor parallelism, one per operator family.

A rule gets a call whose operands are partly sharded, gives the state of its result and may change its arguments (sizes divided, a bias left out). It
raises `Unsupported`, naming the node, when the call cannot run on shards without communication. See `sharding` for how they are applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from ..errors import Unsupported
from ..graph_vocabulary import MAX, SUMS
from ..plan_shards import local_extent, part_ranges
from .forward_graph import ForwardNode, resolve

__all__ = ["PARTIAL", "Call", "Member", "Partial", "Shard", "Shape", "State", "States", "apply_rule", "local_shape", "member_of"]


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
    d = state.dim
    queries, held = member.extent(shape[d] * shape[d + 1], Shard(d)), member.extent(shape[d], state)
    if queries % held:
        raise Unsupported(f"a rank with {queries} query heads of {held} key-value heads has not as many of each", hint="choose other shares")
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
        return self._states.get(_name(self.args[position])) if position < len(self.args) and _name(self.args[position]) else None

    def shape(self, position: int) -> Shape:
        return self._shapes[_name(self.args[position])]

    @property
    def out_shape(self) -> Shape:
        info = self.node.outputs[0]
        if info is None:
            raise self.fail("its result is no tensor")
        return info.shape

    def dim(self, value: Any, rank: int) -> int:
        return int(value) % rank if rank else 0

    def argument(self, position: int, key: str, default: Any) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(key, default)


def _name(value: Any) -> str:
    return str(value["value"]) if isinstance(value, dict) and "value" in value else ""


def apply_rule(call: Call) -> Any:
    incoming = [call._states.get(n) for n in call.node.inputs]
    base = call.node.target.rsplit(".", 1)[0]
    if all(s is None for s in incoming):
        if call.node.many:
            return (None,) * len(call.node.outputs)
        return None
    if call.node.target.startswith("aten._assert_tensor_metadata"):
        call.args[1:3] = [None] * len(call.args[1:3])  # a part has another size
        call.kwargs.pop("size", None)
        call.kwargs.pop("stride", None)
        return None
    if any(isinstance(s, Partial) for s in incoming) and base not in _LINEAR_ORDER and base not in ("aten.clone", "aten.contiguous"):
        raise call.fail("it takes a partial sum; the all-reduce must come first")
    rule = _RULES.get(base)
    if rule is not None:
        return rule(call)
    if call.node.target == "getitem":
        return incoming[0][call.args[1]] if isinstance(incoming[0], tuple) else incoming[0]
    if torch.Tag.pointwise in getattr(resolve(call.node.target), "tags", ()):
        return _pointwise(call)
    raise call.fail(f"no rule for a sharded operand ({incoming})")


def _broadcast(call: Call, positions: Iterable[str], out_rank: int) -> Any:
    """Common state of broadcast operands, as a dimension of the result."""
    found: Shard | None = None
    for name in positions:
        state, shape = call._states.get(name), call._shapes[name]
        if isinstance(state, Shard):
            moved = replace(state, dim=state.dim + out_rank - len(shape))
            if found is not None and moved != found:
                raise call.fail(f"operands are sharded differently ({found} and {moved})")
            found = moved
    if found is None:
        return None
    for name in positions:
        shape = call._shapes[name]
        at = found.dim - (out_rank - len(shape))
        if call._states.get(name) is None and at >= 0 and shape[at] != 1:
            raise call.fail(f"{name!r} is whole where the other operand is sharded")
    return found


def _pointwise(call: Call) -> Any:
    return _broadcast(call, call.node.inputs, len(call.out_shape))


def _linear(call: Call) -> Any:
    x, w = call.state(0), call.state(1)
    rank = len(call.shape(0))
    if isinstance(w, Shard) and w.dim == 0 and x is None and not w.repeated:
        bias = call.argument(2, "bias", None)
        if bias is not None and call._states.get(_name(bias)) != w:
            raise call.fail("a column-parallel weight needs its bias split alike")
        return replace(w, dim=rank - 1)
    if isinstance(w, Shard) and w.dim == 1 and isinstance(x, Shard) and x == replace(w, dim=rank - 1) and not x.groups:
        call.args[2:] = []  # the bias is added once, after the sum
        call.kwargs.pop("bias", None)
        return PARTIAL
    if w is None and isinstance(x, Shard) and x.dim != rank - 1:
        return x
    raise call.fail(f"input {x}, weight {w}")


def _product(call: Call, left: int, right: int) -> Any:
    """Matrix product with broadcast batch dimensions."""
    x, y, xs, ys = call.state(left), call.state(right), call.shape(left), call.shape(right)
    rank, xr, yr = len(call.out_shape), len(xs), len(ys)
    if xr < 2 or yr < 2:
        raise call.fail("a vector operand")
    if isinstance(x, Shard) and x.dim == xr - 1:
        if isinstance(y, Shard) and y == replace(x, dim=yr - 2) and not x.groups:
            return PARTIAL
        raise call.fail(f"left {x}, right {y}")
    if isinstance(y, Shard) and y.dim == yr - 1 and x is None:
        return replace(y, dim=rank - 1)
    if isinstance(x, Shard) and x.dim == xr - 2 and y is None:
        return replace(x, dim=rank - 2)
    batch = [(s, shape) for s, shape in ((x, xs), (y, ys))]
    found = {replace(s, dim=s.dim + rank - len(shape)) for s, shape in batch if isinstance(s, Shard) and s.dim < len(shape) - 2 and not s.repeated}
    if len(found) != 1 or any(isinstance(s, Shard) and s.dim >= len(shape) - 2 for s, shape in batch):
        raise call.fail(f"left {x}, right {y}")
    (state,) = found
    for s, shape in batch:
        at = state.dim - rank + len(shape)
        if s is None and at >= 0 and shape[at] != 1:
            raise call.fail("one operand is whole where the other is sharded")
    return state


def _addmm(call: Call) -> Any:
    out = _product(call, 1, 2)
    if out is PARTIAL:
        call.node = msgspec.structs.replace(call.node, target="aten.mm.default")
        call.args[:] = call.args[1:3]
        call.kwargs.clear()
        return out
    bias = call.state(0)
    if isinstance(out, Shard) and out.dim == 1 and bias != replace(out, dim=len(call.shape(0)) - 1):
        raise call.fail("a column-parallel weight needs its bias split alike")
    return out


def _view(call: Call) -> Any:
    state = call.state(0)
    if state is PARTIAL:
        return PARTIAL
    shape, out, member = call.shape(0), call.out_shape, call.member
    d = state.dim
    if state.repeated:  # key-value heads x copies become query heads
        if tuple(out) != (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]):
            raise call.fail("only query heads can be made of repeated key-value heads")
        new = Shard(d)
        _resize(call, local_shape(out, new, member))
        return new
    if state.mixed:
        if d != len(shape) - 1 or out[-1] != shape[-1]:
            raise call.fail("it cuts across unequal blocks")
        new = replace(state, dim=len(out) - 1)
        _resize(call, local_shape(out, new, member))
        return new
    block = math.prod(shape[d + 1 :]) * (shape[d] // state.blocks)  # consecutive elements, of which this rank has a run
    unit = state.groups or sum(member.shares)
    inner = math.prod(out)
    for dim, size in enumerate(out):
        inner //= max(size, 1)
        if block % inner == 0 and (inner * size) % block == 0 and (block // inner) % unit == 0:
            new = Shard(dim, inner * size // block, state.groups)
            _resize(call, local_shape(out, new, member))
            return new
    raise call.fail(f"{shape} to {out} cuts across the shards of dimension {d} ({state.blocks} blocks, {member.parts} parts)")


def _resize(call: Call, shape: Shape) -> None:
    base = call.node.target.rsplit(".", 1)[0]
    if base == "aten.unflatten":
        dim = call.dim(call.args[1], len(call.shape(0)))
        call.args[2] = list(shape[dim : dim + len(call.args[2])])
    elif base in ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.expand"):
        call.args[1] = list(shape)


def _expand(call: Call) -> Any:
    state, shape, out = call.state(0), call.shape(0), call.out_shape
    new = replace(state, dim=state.dim + len(out) - len(shape))
    if out[new.dim] != shape[state.dim] or state.repeated:
        raise call.fail("it repeats the sharded dimension")
    behind = state.dim + 1
    if state.groups and len(out) == len(shape) and behind < len(shape) and shape[behind] == 1 < out[behind]:
        if state.groups != shape[state.dim] or state.blocks != 1:
            raise call.fail("it repeats parts of key-value heads")
        new = replace(new, repeated=True)
    _resize(call, local_shape(out, new, call.member))
    return new


def _repeat_interleave(call: Call) -> Any:
    state, shape = call.state(0), call.shape(0)
    dim = call.dim(call.argument(2, "dim", 0), len(shape))
    if dim != state.dim:
        return state
    if state.blocks != 1 or state.mixed or state.repeated or (state.groups and state.groups != shape[dim]):
        raise call.fail("it repeats parts of the sharded dimension")
    ratio = int(call.args[1])
    if state.groups:
        call.args[1] = copies((*shape[:dim], shape[dim], ratio, *shape[dim + 1 :]), replace(state, repeated=True), call.member)
    return Shard(dim)


def _same(call: Call) -> Any:
    return call.state(0)


def _transpose(call: Call) -> Any:
    _unrepeated(call)
    state, rank = call.state(0), len(call.shape(0))
    a, b = (0, 1) if call.node.target.startswith("aten.t.") else (call.dim(call.args[1], rank), call.dim(call.args[2], rank))
    return replace(state, dim={a: b, b: a}.get(state.dim, state.dim))


def _unrepeated(call: Call) -> None:
    if call.state(0).repeated:
        raise call.fail("only a reshape may follow the repetition of key-value heads")


def _permute(call: Call) -> Any:
    _unrepeated(call)
    state, rank = call.state(0), len(call.shape(0))
    return replace(state, dim=[call.dim(d, rank) for d in call.args[1]].index(state.dim))


def _piece(call: Call, state: Shard, low: int, high: int) -> Shard:
    """State of the range [low, high) of the sharded dimension; it must consist of whole blocks."""
    extent = call.shape(0)[state.dim]
    at, kept = 0, list[tuple[int, int]]()
    for size, groups in state.mixed or ((extent // state.blocks, state.groups),) * state.blocks:
        if low <= at and at + size <= high:
            kept.append((size, groups))
        elif at < high and at + size > low:
            raise call.fail(f"the piece [{low}:{high}] does not consist of whole blocks of {size}")
        at += size
    if not kept:
        raise call.fail("an empty piece does not consist of whole blocks")
    if len(set(kept)) == 1:
        return Shard(state.dim, len(kept), kept[0][1])
    return Shard(state.dim, mixed=tuple(kept))


def _split(call: Call) -> Any:
    state, shape = call.state(0), call.shape(0)
    dim = call.dim(call.argument(2, "dim", 0), len(shape))
    if dim != state.dim:
        return (state,) * len(call.node.outputs)
    sizes = [info.shape[dim] if info else 0 for info in call.node.outputs]
    out, at = [], 0
    for size in sizes:
        out.append(_piece(call, state, at, at + size))
        at += size
    own = [call.member.extent(size, piece) for size, piece in zip(sizes, out, strict=True)]
    if call.node.target.startswith("aten.split_with_sizes") or isinstance(call.args[1], list):
        call.args[1] = own
    elif call.node.target.startswith("aten.split"):
        call.args[1] = own[0]
    return tuple(out)


def _unbind(call: Call) -> Any:
    state = call.state(0)
    dim = call.dim(call.argument(1, "dim", 0), len(call.shape(0)))
    if dim == state.dim:
        raise call.fail("it takes the sharded dimension apart")
    return (replace(state, dim=state.dim - (dim < state.dim)),) * len(call.node.outputs)


def _select(call: Call) -> Any:
    state = call.state(0)
    dim = call.dim(call.args[1], len(call.shape(0)))
    if dim == state.dim:
        raise call.fail("it picks one entry of the sharded dimension")
    return replace(state, dim=state.dim - (dim < state.dim))


def _slice(call: Call) -> Any:
    state, shape = call.state(0), call.shape(0)
    dim = call.dim(call.argument(1, "dim", 0), len(shape))
    if dim != state.dim:
        return state
    size = shape[dim]
    start, end, step = call.argument(2, "start", None), call.argument(3, "end", None), call.argument(4, "step", 1)
    lo, hi, stride = slice(start, end, step).indices(size)
    if stride != 1 or hi <= lo:
        raise call.fail(f"the slice [{start}:{end}:{step}] does not consist of whole blocks")
    new = _piece(call, state, lo, hi)
    before = call.member.extent(lo, _piece(call, state, 0, lo)) if lo else 0
    call.args[1:] = [dim, before, before + call.member.extent(hi - lo, new)]
    call.kwargs.clear()
    return new


def _cat(call: Call) -> Any:
    names = [_name(v) for v in call.args[0]]
    states = {call._states.get(n) for n in names}
    rank = len(call.out_shape)
    dim = call.dim(call.argument(1, "dim", 0), rank)
    if len(states) == 1 and isinstance(only := next(iter(states)), Shard) and only.dim != dim:
        return only
    found: list[tuple[int, int]] = []
    for name in names:
        s = call._states.get(name)
        if not isinstance(s, Shard) or s.dim != dim or s.repeated:
            raise call.fail("operands are sharded differently")
        found += s.mixed or ((call._shapes[name][dim] // s.blocks, s.groups),) * s.blocks
    if len(set(found)) == 1:
        return Shard(dim, len(found), found[0][1])
    return Shard(dim, mixed=tuple(found))


def _normalize(call: Call) -> Any:
    state = call.state(0)
    if not isinstance(state, Shard) or state.dim >= len(call.shape(0)) - len(call.args[1]):
        raise call.fail("it normalises over the sharded dimension")
    return state


def _softmax(call: Call) -> Any:
    state, rank = call.state(0), len(call.shape(0))
    if call.dim(call.args[1], rank) == state.dim:
        raise call.fail("it runs over the sharded dimension")
    return state


def _attention(call: Call) -> Any:
    q, k, v = (call.state(i) for i in range(3))
    rank = len(call.shape(0))
    kv_heads = call.shape(1)[q.dim] if isinstance(q, Shard) and q.dim < len(call.shape(1)) else 0
    grouped = bool(call.kwargs.get("enable_gqa")) and isinstance(q, Shard) and kv_heads != call.shape(0)[q.dim]
    alike = isinstance(q, Shard) and k == v and k == (replace(q, groups=k.groups) if grouped and isinstance(k, Shard) else q)
    if not alike or not isinstance(q, Shard) or q.dim >= rank - 2 or q.repeated or (grouped and (q.groups or q.mixed)):
        raise call.fail(f"query, key and value must be split alike by heads, got {[call.state(i) for i in range(3)]}")
    if grouped:
        if isinstance(k, Shard) and not k.groups and kv_heads % sum(call.member.shares):
            raise call.fail("its key-value heads do not divide")
        ratio = call.shape(0)[q.dim] // kv_heads
        copies((*call.shape(1)[: q.dim], kv_heads, ratio), replace(k, repeated=True) if isinstance(k, Shard) else q, call.member)
    mask = _name(call.argument(3, "attn_mask", None))
    if mask:
        _broadcast(call, (mask, _name(call.args[0])), rank) if len(call._shapes[mask]) > rank - 1 - q.dim else None
    return q


def _embedding(call: Call) -> Any:
    w = call.state(0)
    if call.state(1) is None and isinstance(w, Shard) and w.dim == 1:
        return replace(w, dim=len(call.out_shape) - 1)
    if call.state(1) is None and w == Shard(0):  # rows of the table: what others have is zero here, and the ranks' results add up
        rows = call.shape(0)[0]
        ((start, stop),) = call.member.ranges(rows, w)
        padding = int(call.argument(2, "padding_idx", -1))
        call.node = msgspec.structs.replace(call.node, target="meshwright.vocabulary_embedding.default")
        call.args[2:] = [start, stop, rows, padding]
        call.kwargs.clear()
        return PARTIAL
    raise call.fail(f"table {w}, indices {call.state(1)}")


def _vocabulary(call: Call) -> Any:
    """The parts of a split cross-entropy: they learn which classes this rank has."""
    logits, shape = call.state(0), call.shape(0)
    classes = 1 if len(shape) > 1 else 0
    if logits != Shard(classes) or any(isinstance(s, Shard) for s in (call.state(i) for i in range(1, len(call.args)))):
        raise call.fail(f"logits {logits}")
    ((start, stop),) = call.member.ranges(shape[classes], logits)
    if call.node.target == SUMS:
        call.kwargs |= {"start": start, "stop": stop}
    return PARTIAL


_LINEAR_ORDER = frozenset(
    f"aten.{n}" for n in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
)
_RULES: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(_LINEAR_ORDER, _view),
    **{
        f"aten.{n}": _same
        for n in ("clone", "contiguous", "dropout", "detach", "alias", "to", "_to_copy", "native_dropout", "zeros_like", "ones_like")
    },
    "aten.linear": _linear,
    "aten.matmul": lambda c: _product(c, 0, 1),
    "aten.mm": lambda c: _product(c, 0, 1),
    "aten.bmm": lambda c: _product(c, 0, 1),
    "aten.addmm": _addmm,
    "aten.expand": _expand,
    "aten.transpose": _transpose,
    "aten.t": _transpose,
    "aten.permute": _permute,
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.chunk": _split,
    "aten.unbind": _unbind,
    "aten.select": _select,
    "aten.slice": _slice,
    "aten.cat": _cat,
    "aten.layer_norm": _normalize,
    "aten.rms_norm": _normalize,
    "aten.softmax": _softmax,
    "aten._softmax": _softmax,
    "aten.log_softmax": _softmax,
    "aten.scaled_dot_product_attention": _attention,
    "aten.embedding": _embedding,
    "aten.repeat_interleave": _repeat_interleave,
    MAX.rsplit(".", 1)[0]: _vocabulary,
    SUMS.rsplit(".", 1)[0]: _vocabulary,
}
