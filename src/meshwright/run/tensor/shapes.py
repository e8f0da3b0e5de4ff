"""Rules for calls that cut, join, repeat or reshape a sharded dimension, and for attention over sharded heads. See `sharding_rules`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .state import Call, Shape, Shard, copies, local_shape, value_name

__all__ = [
    "attention_rule", "broadcast", "cat_rule", "expand_rule", "repeat_interleave_rule", "resize", "slice_rule", "split_rule",
    "stack_rule", "unrepeated",
]  # fmt: skip


def broadcast(call: Call, positions: Iterable[str], out_rank: int) -> Any:
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


def resize(call: Call, shape: Shape) -> None:
    base = call.node.target.rsplit(".", 1)[0]
    if base == "aten.unflatten":
        dim = call.dim(call.args[1], len(call.shape(0)))
        call.args[2] = list(shape[dim : dim + len(call.args[2])])
    elif base in ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.expand"):
        call.args[1] = list(shape)


def expand_rule(call: Call) -> Any:
    state, shape, out = call.state(0), call.shape(0), call.out_shape
    new = replace(state, dim=state.dim + len(out) - len(shape))
    if out[new.dim] != shape[state.dim] or state.repeated:
        raise call.fail("it repeats the sharded dimension")
    behind = state.dim + 1
    if state.groups and len(out) == len(shape) and behind < len(shape) and shape[behind] == 1 < out[behind]:
        if state.groups != shape[state.dim] or state.blocks != 1:
            raise call.fail("it repeats parts of key-value heads")
        new = replace(new, repeated=True)
    resize(call, local_shape(out, new, call.member))
    return new


def repeat_interleave_rule(call: Call) -> Any:
    state, shape = call.state(0), call.shape(0)
    if (along := call.argument("dim")) is None:
        raise call.fail("it repeats entries of the flattened tensor")
    dim = call.dim(along, len(shape))
    if dim != state.dim:
        return state
    if state.blocks != 1 or state.mixed or state.repeated or (state.groups and state.groups != shape[dim]):
        raise call.fail("it repeats parts of the sharded dimension")
    ratio = int(call.args[1])
    if state.groups:
        call.args[1] = copies((*shape[:dim], shape[dim], ratio, *shape[dim + 1 :]), replace(state, repeated=True), call.member)
    return Shard(dim)


def unrepeated(call: Call) -> None:
    if call.state(0).repeated:
        raise call.fail("only a reshape may follow the repetition of key-value heads")


def piece_rule(call: Call, state: Shard, low: int, high: int) -> Shard:
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


def split_rule(call: Call) -> Any:
    state, shape = call.state(0), call.shape(0)
    dim = call.dim(call.argument("dim"), len(shape))
    if dim != state.dim:
        return (state,) * len(call.node.outputs)
    sizes = [info.shape[dim] if info else 0 for info in call.node.outputs]
    out, at = [], 0
    for size in sizes:
        out.append(piece_rule(call, state, at, at + size))
        at += size
    own = [call.member.extent(size, piece) for size, piece in zip(sizes, out, strict=True)]
    if call.node.target.startswith("aten.split_with_sizes") or isinstance(call.args[1], list):
        call.args[1] = own
    elif call.node.target.startswith("aten.split"):
        call.args[1] = own[0]
    return tuple(out)


def slice_rule(call: Call) -> Any:
    state, shape = call.state(0), call.shape(0)
    dim = call.dim(call.argument("dim"), len(shape))
    if dim != state.dim:
        return state
    size = shape[dim]
    start, end, step = call.argument("start"), call.argument("end"), call.argument("step")
    lo, hi, stride = slice(start, end, step).indices(size)
    if stride != 1 or hi <= lo:
        raise call.fail(f"the slice [{start}:{end}:{step}] does not consist of whole blocks")
    new = piece_rule(call, state, lo, hi)
    before = call.member.extent(lo, piece_rule(call, state, 0, lo)) if lo else 0
    call.args[1:] = [dim, before, before + call.member.extent(hi - lo, new)]
    call.kwargs.clear()
    return new


def cat_rule(call: Call) -> Any:
    names = [value_name(v) for v in call.args[0]]
    states = {call._states.get(n) for n in names}
    rank = len(call.out_shape)
    dim = call.dim(call.argument("dim"), rank)
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


def stack_rule(call: Call) -> Any:
    states = {call._states.get(value_name(v)) for v in call.args[0]}
    if len(states) != 1:
        raise call.fail("operands are sharded differently")
    (state,) = states
    if not isinstance(state, Shard) or state.repeated:
        raise call.fail("operands are sharded differently")
    return replace(state, dim=state.dim + (call.dim(call.argument("dim"), len(call.out_shape)) <= state.dim))


def attention_rule(call: Call) -> Any:
    q, k, v = (call.state(i) for i in range(3))
    rank = len(call.shape(0))
    kv_heads = call.shape(1)[q.dim] if isinstance(q, Shard) and q.dim < len(call.shape(1)) else 0
    grouped = bool(call.kwargs.get("enable_gqa")) and isinstance(q, Shard) and kv_heads != call.shape(0)[q.dim]
    plain = isinstance(q, Shard) and q.dim < rank - 2 and not (q.groups or q.mixed or q.repeated)
    if grouped and kv_heads == 1 and k is None and v is None and plain:
        return q  # every rank has the one key-value head that all query heads read
    alike = isinstance(q, Shard) and k == v and k == (replace(q, groups=k.groups) if grouped and isinstance(k, Shard) else q)
    if not alike or not isinstance(q, Shard) or q.dim >= rank - 2 or q.repeated or (grouped and (q.groups or q.mixed)):
        raise call.fail(f"query, key and value must be split alike by heads, got {[call.state(i) for i in range(3)]}")
    if grouped:
        if isinstance(k, Shard) and not k.groups and kv_heads % sum(call.member.shares):
            raise call.fail("its key-value heads do not divide")
        ratio = call.shape(0)[q.dim] // kv_heads
        copies((*call.shape(1)[: q.dim], kv_heads, ratio), replace(k, repeated=True) if isinstance(k, Shard) else q, call.member)
    mask = value_name(call.argument("attn_mask"))
    if mask:
        broadcast(call, (mask, value_name(call.args[0])), rank) if len(call._shapes[mask]) > rank - 1 - q.dim else None
    return q
