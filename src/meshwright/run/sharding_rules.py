"""What each traced call does to a sharded dimension: the rules of tensor parallelism, one per operator family.

A rule gets a call whose operands are partly sharded, gives the state of its result and may change its arguments (sizes divided, a bias left out). It
raises `Unsupported`, naming the node, when the call cannot run on shards without communication. See `sharding` for how they are applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ..errors import Unsupported
from .forward_graph import ForwardNode, resolve

__all__ = ["PARTIAL", "Call", "Partial", "Shard", "Shape", "State", "States", "apply_rule", "local_shape"]


@dataclass(frozen=True)
class Shard:
    dim: int
    blocks: int = 1


class Partial:
    def __repr__(self) -> str:
        return "PARTIAL"


PARTIAL = Partial()
State = Shard | Partial | None
States = dict[str, State | tuple[State, ...]]
Shape = tuple[int, ...]


def local_shape(shape: Sequence[int], state: Any, parts: int) -> Shape:
    if not isinstance(state, Shard):
        return tuple(shape)
    return tuple(d // parts if i == state.dim else d for i, d in enumerate(shape))


class Call:
    """A call being rewritten: `args` and `kwargs` may be replaced by a rule."""

    def __init__(self, node: ForwardNode, states: Mapping[str, Any], shapes: Mapping[str, Shape], parts: int) -> None:
        self.node, self.parts = node, parts
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
            moved = Shard(state.dim + out_rank - len(shape), state.blocks)
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
    if isinstance(w, Shard) and w.dim == 0 and x is None:
        bias = call.argument(2, "bias", None)
        if bias is not None and call._states.get(_name(bias)) != Shard(0, w.blocks):
            raise call.fail("a column-parallel weight needs its bias split alike")
        return Shard(rank - 1, w.blocks)
    if isinstance(w, Shard) and w.dim == 1 and isinstance(x, Shard) and x == Shard(rank - 1, w.blocks):
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
        if isinstance(y, Shard) and y == Shard(yr - 2, x.blocks):
            return PARTIAL
        raise call.fail(f"left {x}, right {y}")
    if isinstance(y, Shard) and y.dim == yr - 1 and x is None:
        return Shard(rank - 1, y.blocks)
    if isinstance(x, Shard) and x.dim == xr - 2 and y is None:
        return Shard(rank - 2, x.blocks)
    batch = [(s, shape) for s, shape in ((x, xs), (y, ys))]
    found = {Shard(s.dim + rank - len(shape), s.blocks) for s, shape in batch if isinstance(s, Shard) and s.dim < len(shape) - 2}
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
    if isinstance(out, Shard) and out.dim == 1 and bias != Shard(len(call.shape(0)) - 1, out.blocks):
        raise call.fail("a column-parallel weight needs its bias split alike")
    return out


def _view(call: Call) -> Any:
    state = call.state(0)
    if state is PARTIAL:
        return PARTIAL
    shape, out, t = call.shape(0), call.out_shape, call.parts
    stride = math.prod(shape[state.dim + 1 :]) * (shape[state.dim] // state.blocks // t)
    inner = math.prod(out)
    for dim, size in enumerate(out):
        inner //= max(size, 1)
        if stride % inner == 0 and (inner * size) % (stride * t) == 0:
            new = Shard(dim, inner * size // (stride * t))
            _resize(call, local_shape(out, new, t))
            return new
    raise call.fail(f"{shape} to {out} cuts across the shards of dimension {state.dim} ({state.blocks} blocks, {t} parts)")


def _resize(call: Call, shape: Shape) -> None:
    base = call.node.target.rsplit(".", 1)[0]
    if base == "aten.unflatten":
        dim = call.dim(call.args[1], len(call.shape(0)))
        call.args[2] = list(shape[dim : dim + len(call.args[2])])
    elif base in ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.expand"):
        call.args[1] = list(shape)


def _expand(call: Call) -> Any:
    state, shape, out = call.state(0), call.shape(0), call.out_shape
    new = Shard(state.dim + len(out) - len(shape), state.blocks)
    if out[new.dim] != shape[state.dim]:
        raise call.fail("it repeats the sharded dimension")
    _resize(call, local_shape(out, new, call.parts))
    return new


def _same(call: Call) -> Any:
    return call.state(0)


def _transpose(call: Call) -> Any:
    state, rank = call.state(0), len(call.shape(0))
    a, b = (0, 1) if call.node.target.startswith("aten.t.") else (call.dim(call.args[1], rank), call.dim(call.args[2], rank))
    return Shard({a: b, b: a}.get(state.dim, state.dim), state.blocks)


def _permute(call: Call) -> Any:
    state, rank = call.state(0), len(call.shape(0))
    return Shard([call.dim(d, rank) for d in call.args[1]].index(state.dim), state.blocks)


def _pieces(call: Call, state: Shard, sizes: Sequence[int]) -> tuple[State, ...]:
    """States of consecutive pieces of the sharded dimension; each must consist of whole blocks."""
    block = call.shape(0)[state.dim] // state.blocks
    if any(s % block or not s for s in sizes):
        raise call.fail(f"pieces {list(sizes)} do not consist of whole blocks of {block}")
    return tuple(Shard(state.dim, s // block) for s in sizes)


def _split(call: Call) -> Any:
    state, shape = call.state(0), call.shape(0)
    dim = call.dim(call.argument(2, "dim", 0), len(shape))
    if dim != state.dim:
        return (state,) * len(call.node.outputs)
    sizes = [info.shape[dim] if info else 0 for info in call.node.outputs]
    out = _pieces(call, state, sizes)
    if call.node.target.startswith("aten.split_with_sizes") or isinstance(call.args[1], list):
        call.args[1] = [s // call.parts for s in sizes]
    elif call.node.target.startswith("aten.split"):
        call.args[1] = int(call.args[1]) // call.parts
    return out


def _unbind(call: Call) -> Any:
    state = call.state(0)
    dim = call.dim(call.argument(1, "dim", 0), len(call.shape(0)))
    if dim == state.dim:
        raise call.fail("it takes the sharded dimension apart")
    return (Shard(state.dim - (dim < state.dim), state.blocks),) * len(call.node.outputs)


def _select(call: Call) -> Any:
    state = call.state(0)
    dim = call.dim(call.args[1], len(call.shape(0)))
    if dim == state.dim:
        raise call.fail("it picks one entry of the sharded dimension")
    return Shard(state.dim - (dim < state.dim), state.blocks)


def _slice(call: Call) -> Any:
    state, shape = call.state(0), call.shape(0)
    dim = call.dim(call.argument(1, "dim", 0), len(shape))
    if dim != state.dim:
        return state
    size = shape[dim]
    start, end, step = call.argument(2, "start", None), call.argument(3, "end", None), call.argument(4, "step", 1)
    lo, hi, stride = slice(start, end, step).indices(size)
    block = size // state.blocks
    if stride != 1 or lo % block or hi % block or hi <= lo:
        raise call.fail(f"the slice [{start}:{end}:{step}] does not consist of whole blocks of {block}")
    call.args[1:] = [dim, lo // call.parts, hi // call.parts]
    call.kwargs.clear()
    return Shard(dim, (hi - lo) // block)


def _cat(call: Call) -> Any:
    names = [_name(v) for v in call.args[0]]
    states = {call._states.get(n) for n in names}
    rank = len(call.out_shape)
    dim = call.dim(call.argument(1, "dim", 0), rank)
    if len(states) == 1 and isinstance(only := next(iter(states)), Shard) and only.dim != dim:
        return only
    blocks = [(s.blocks, call._shapes[n][dim] // s.blocks) for n in names if isinstance(s := call._states.get(n), Shard) and s.dim == dim]
    if len(blocks) != len(names) or len({size for _, size in blocks}) != 1:
        raise call.fail("operands are sharded differently")
    return Shard(dim, sum(count for count, _ in blocks))


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
    states = {call.state(i) for i in range(3)}
    state = next(iter(states))
    rank = len(call.shape(0))
    if len(states) != 1 or not isinstance(state, Shard) or state.dim >= rank - 2:
        raise call.fail(f"query, key and value must be split alike by heads, got {[call.state(i) for i in range(3)]}")
    mask = _name(call.argument(3, "attn_mask", None))
    if mask:
        _broadcast(call, (mask, _name(call.args[0])), rank) if len(call._shapes[mask]) > rank - 1 - state.dim else None
    return state


def _embedding(call: Call) -> Any:
    w = call.state(0)
    if call.state(1) is None and isinstance(w, Shard) and w.dim == 1:
        return Shard(len(call.out_shape) - 1, w.blocks)
    raise call.fail(f"table {w}, indices {call.state(1)}")


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
}
