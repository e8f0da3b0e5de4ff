"""What each traced call does to a sharded dimension: the rules of tensor parallelism, one per operator family.

A rule gets a call whose operands are partly sharded, gives the state of its result and may change its arguments (sizes divided, a bias left out). It
raises `Unsupported`, naming the node, when the call cannot run on shards without communication. See `sharding` for how they are applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch

from ...plan.experts import COUNTS, MLP, ROWS, TOKENS
from ...plan.vocabulary import MAX, SUMS
from ..steps.forward_graph import resolve
from .cuts import OWN_PART, einsum_terms, own_part_rule
from .experts import experts_rule
from .shapes import (  # fmt: skip
    attention_rule,
    broadcast,
    cat_rule,
    expand_rule,
    repeat_interleave_rule,
    resize,
    slice_rule,
    split_rule,
    stack_rule,
    unrepeated,
)
from .state import PARTIAL, Call, Partial, Shard, copies, local_shape, value_name

__all__ = ["apply_rule"]


def apply_rule(call: Call) -> Any:
    incoming = [call._states.get(n) for n in call.node.inputs]
    base = call.node.target.rsplit(".", 1)[0]
    if all(s is None for s in incoming) and base not in _TAKING:
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


def _pointwise(call: Call) -> Any:
    return broadcast(call, call.node.inputs, len(call.out_shape))


def _linear(call: Call) -> Any:
    x, w = call.state(0), call.state(1)
    rank = len(call.shape(0))
    if isinstance(w, Shard) and w.dim == 0 and x is None and not w.repeated:
        bias = call.argument("bias")
        if bias is not None and call._states.get(value_name(bias)) != w:
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


def _baddbmm(call: Call) -> Any:
    out = _product(call, 1, 2)
    if not isinstance(out, Shard):
        raise call.fail("what it adds to would be added by every rank")
    found = broadcast(call, (value_name(call.args[0]),), len(call.out_shape))
    if found not in (None, out):
        raise call.fail(f"it adds {found} to {out}")
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
        resize(call, local_shape(out, new, member))
        return new
    if state.mixed:
        if d != len(shape) - 1 or out[-1] != shape[-1]:
            raise call.fail("it cuts across unequal blocks")
        new = replace(state, dim=len(out) - 1)
        resize(call, local_shape(out, new, member))
        return new
    block = math.prod(shape[d + 1 :]) * (shape[d] // state.blocks)  # consecutive elements, of which this rank has a run
    unit = state.groups or sum(member.shares)
    inner = math.prod(out)
    for dim, size in enumerate(out):
        inner //= max(size, 1)
        if block % inner == 0 and (inner * size) % block == 0 and (block // inner) % unit == 0:
            new = Shard(dim, inner * size // block, state.groups)
            resize(call, local_shape(out, new, member))
            return new
    raise call.fail(f"{shape} to {out} cuts across the shards of dimension {d} ({state.blocks} blocks, {member.parts} parts)")


def _same(call: Call) -> Any:
    return call.state(0)


def _transpose(call: Call) -> Any:
    unrepeated(call)
    state, rank = call.state(0), len(call.shape(0))
    whole = call.node.target.startswith(("aten.t.", "aten.numpy_T.", "aten.mT."))
    a, b = (rank - 2, rank - 1) if whole else (call.dim(call.args[1], rank), call.dim(call.args[2], rank))
    return replace(state, dim={a: b, b: a}.get(state.dim, state.dim))


def _permute(call: Call) -> Any:
    unrepeated(call)
    state, rank = call.state(0), len(call.shape(0))
    return replace(state, dim=[call.dim(d, rank) for d in call.args[1]].index(state.dim))


def _unbind(call: Call) -> Any:
    state = call.state(0)
    dim = call.dim(call.argument("dim"), len(call.shape(0)))
    if dim == state.dim:
        raise call.fail("it takes the sharded dimension apart")
    return (replace(state, dim=state.dim - (dim < state.dim)),) * len(call.node.outputs)


def _select(call: Call) -> Any:
    state = call.state(0)
    dim = call.dim(call.args[1], len(call.shape(0)))
    if dim == state.dim:
        raise call.fail("it picks one entry of the sharded dimension")
    return replace(state, dim=state.dim - (dim < state.dim))


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


def _each(call: Call) -> Any:
    """What routers do with every token's scores, along a dimension that is not split: operands are split alike."""
    state, rank, name = call.state(0), len(call.shape(0)), call.node.target.split(".")[1]
    if not isinstance(state, Shard) or any(call._states.get(v) != state for v in call.node.inputs):
        raise call.fail("its operands are not split alike")
    if name in ("one_hot", "expand_as"):
        return state
    over = call.argument("dim")
    if over is None or call.dim(over, rank) == state.dim:
        raise call.fail("it runs over the sharded dimension")
    if name == "argmax" and len(call.out_shape) < rank:
        return replace(state, dim=state.dim - (call.dim(over, rank) < state.dim))
    return (state,) * len(call.node.outputs) if call.node.many else state


def _reduce(call: Call) -> Any:
    state, rank = call.state(0), len(call.shape(0))
    over = call.argument("dim")
    dims = {call.dim(d, rank) for d in (over if isinstance(over, list) else [over])} if over is not None else set()
    if not dims or state.dim in dims:
        raise call.fail("it runs over the sharded dimension")
    out = call.node.outputs[0]
    kept = out is not None and len(out.shape) == rank
    found = state if kept else replace(state, dim=state.dim - sum(d < state.dim for d in dims))
    return (found,) * len(call.node.outputs) if call.node.many else found


def _new(call: Call) -> Any:
    """A new value, alike everywhere or yet to be written: each rank's part of it."""
    unrepeated(call)
    state, shape, out = call.state(0), call.shape(0), call.out_shape
    if len(shape) != len(out) or shape[state.dim] != out[state.dim]:
        raise call.fail("it has another size along the sharded dimension")
    call.args[1] = list(local_shape(out, state, call.member))
    return state


def _slice_scatter(call: Call) -> Any:
    state = call.state(0)
    if not isinstance(state, Shard) or call.state(1) != state or call.dim(call.argument("dim"), len(call.out_shape)) == state.dim:
        raise call.fail(f"writes {call.state(1)} into {state}")
    return state


def _einsum(call: Call) -> Any:
    """Along one letter that the result keeps, which every operand that has it is split along."""
    terms, result = einsum_terms(call.node), str(call.args[0]).replace(" ", "").partition("->")[2]
    states = {v: call._states.get(v) for v in terms}
    letters = {t[s.dim] for v, t in terms.items() if isinstance(s := states[v], Shard)}
    letter = next(iter(letters))
    kinds = {replace(s, dim=0) for s in states.values() if isinstance(s, Shard)}
    plain = letter in result and "." not in result and len(terms) == len(call.node.args[1]) and all(len({*t}) == len(t) for t in terms.values())
    if len(letters) != 1 or len(kinds) != 1 or not plain or any((letter in t) != isinstance(states[v], Shard) for v, t in terms.items()):
        raise call.fail(f"operands {list(states.values())} of {call.args[0]}")
    return replace(next(iter(kinds)), dim=result.index(letter))


def _complex(call: Call) -> Any:
    unrepeated(call)
    state = call.state(0)
    if call.node.target.startswith("aten.view_as_complex") and state.dim == len(call.shape(0)) - 1:
        raise call.fail("it pairs the sharded dimension")
    return state


def _embedding(call: Call) -> Any:
    w = call.state(0)
    if call.state(1) is None and isinstance(w, Shard) and w.dim == 1:
        return replace(w, dim=len(call.out_shape) - 1)
    if call.state(1) is None and w == Shard(0):  # rows of the table: what others have is zero here, and the ranks' results add up
        rows = call.shape(0)[0]
        ((start, stop),) = call.member.ranges(rows, w)
        padding = int(call.argument("padding_idx"))
        call.node = msgspec.structs.replace(call.node, target="meshwright.vocabulary_embedding.default")
        call.args[2:] = [start, stop, rows, padding]
        call.kwargs.clear()
        return PARTIAL
    raise call.fail(f"table {w}, indices {call.state(1)}")


def _context_join(call: Call) -> Any:
    k, v = call.state(0), call.state(1)
    if not isinstance(k, Shard) or k != v or k.dim != 1 or k.repeated:
        raise call.fail(f"keys {k}, values {v}")
    return k


def _ring_round(call: Call) -> Any:
    """`call`: queries, block, what is handed on, mask, numbers."""
    q, kv, before = call.state(0), call.state(1), call.state(2)
    heads, groups = call.shape(0)[1], call.shape(1)[1]
    alike = q == Shard(1) and kv in (q, Shard(1, groups=groups)) and before in (None, q) and value_name(call.args[3]) == ""
    if not alike or (before is None) != (value_name(call.args[2]) == ""):
        raise call.fail(f"queries {q}, block {kv}, before {before}")
    if groups != heads:
        if kv == q and groups % sum(call.member.shares):
            raise call.fail("its key-value heads do not divide")
        copies((*call.shape(1)[:1], groups, heads // groups), replace(kv, repeated=True), call.member)
    return q


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


_TAKING = frozenset(x.rsplit(".", 1)[0] for x in (OWN_PART, ROWS, COUNTS))  # what makes parts of whole operands
_LINEAR_ORDER = frozenset(
    f"aten.{n}" for n in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
)
_RULES: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(_LINEAR_ORDER, _view),
    **{
        f"aten.{n}": _same
        for n in ("clone", "contiguous", "dropout", "detach", "alias", "to", "_to_copy", "type_as", "native_dropout", "zeros_like", "ones_like")
    },
    "aten.linear": _linear,
    "aten.matmul": lambda c: _product(c, 0, 1),
    "aten.mm": lambda c: _product(c, 0, 1),
    "aten.bmm": lambda c: _product(c, 0, 1),
    "aten.addmm": _addmm,
    "aten.baddbmm": _baddbmm,
    "aten.expand": expand_rule,
    "aten.transpose": _transpose,
    "aten.t": _transpose,
    "aten.numpy_T": _transpose,
    "aten.mT": _transpose,
    "aten.permute": _permute,
    "aten.split": split_rule,
    "aten.split_with_sizes": split_rule,
    "aten.chunk": split_rule,
    "aten.unbind": _unbind,
    "aten.select": _select,
    "aten.slice": slice_rule,
    "aten.cat": cat_rule,
    "aten.stack": stack_rule,
    "aten.einsum": _einsum,
    "aten.view_as_complex": _complex,
    "aten.view_as_real": _complex,
    "aten.layer_norm": _normalize,
    "aten.rms_norm": _normalize,
    "aten.softmax": _softmax,
    "aten._softmax": _softmax,
    "aten.log_softmax": _softmax,
    "aten.scaled_dot_product_attention": attention_rule,
    "aten.embedding": _embedding,
    "aten.repeat_interleave": repeat_interleave_rule,
    **{f"aten.{n}": _reduce for n in ("mean", "sum", "amax", "amin", "var", "std", "var_mean", "logsumexp", "linalg_vector_norm")},
    **{f"aten.{n}": lambda c: _pointwise(c) if len(c.node.inputs) > 1 else _reduce(c) for n in ("max", "min")},
    **{f"aten.{n}": _new for n in ("new_empty", "new_zeros", "new_ones", "new_full")},
    "aten.slice_scatter": _slice_scatter,
    **{f"aten.{n}": _each for n in ("topk", "gather", "scatter", "scatter_", "argmax", "one_hot", "expand_as")},
    OWN_PART.rsplit(".", 1)[0]: own_part_rule,
    "meshwright.context_join": _context_join,
    "meshwright.ring_block": _ring_round,
    "meshwright.ring_end": _ring_round,
    **{x.rsplit(".", 1)[0]: experts_rule for x in (ROWS, COUNTS, MLP, TOKENS)},
    MAX.rsplit(".", 1)[0]: _vocabulary,
    SUMS.rsplit(".", 1)[0]: _vocabulary,
}
