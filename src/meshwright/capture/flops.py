"""Floating-point operations of an ATen call, from the shapes of its operands; a multiply-add counts as two.

Source of most formulas: `torch.utils.flop_counter`. Added here: the processor's attention operators, which that registry lacks, and
embedding bags (one addition per element of a touched row, whatever the table's size). Convention: attention is counted in full, also
under a causal mask (the call carries a `causal` flag), and its backward includes the recomputed scores. Elementwise operators,
norms, reductions and softmax count as zero, as in the registry: their time is that of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

import meshwright.kernels.bags  # noqa: F401  registers its operators
from meshwright.kernels.experts.padded import mlp_flops
from meshwright.plan.packing import packing_of

__all__ = ["flops_of", "is_causal", "lacks_formula", "lookup_elements"]

aten = torch.ops.aten


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Forward attention: scores and their product with the values. Shapes (..., heads, sequence, head width)."""
    batch, rows, columns, width, value_width = _attention_dims(query, key, value)
    return 2 * batch * rows * columns * (width + value_width)


def attention_backward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Backward attention: scores again, then the gradients of scores, values, queries and keys."""
    batch, rows, columns, width, value_width = _attention_dims(query, key, value)
    return 2 * batch * rows * columns * (3 * width + 2 * value_width)


def _attention_dims(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> tuple[int, int, int, int, int]:
    batch = 1
    for dim in query[:-2]:
        batch *= int(dim)
    return batch, int(query[-2]), int(key[-2]), int(query[-1]), int(value[-1])


def _cpu_attention(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return attention_flops(args[0].shape, args[1].shape, args[2].shape)


def _cpu_attention_backward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return attention_backward_flops(args[1].shape, args[2].shape, args[3].shape)


def _embedding_bag(weight: Any, indices: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(indices.numel()) * int(weight.shape[-1])


def _embedding_bag_backward(grad: Any, indices: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(indices.numel()) * int(grad.shape[-1])


def _placed_tables(ids: Any, pack: Any, numbers: Any, out_val: Any = None) -> int:
    return lookup_elements(ids.shape, numbers)


def _placed_tables_backward(grad: Any, ids: Any, numbers: Any, *args: Any, out_val: Any = None) -> int:
    return lookup_elements(ids.shape, numbers)


def lookup_elements(ids: Sequence[int], numbers: Sequence[int]) -> int:
    """Elements of rows that all holders of a pack look up for ids [parts, samples, ...]."""
    packing = packing_of(numbers)
    return int(ids[1]) * sum(packing.elements_of(part) for part in range(packing.parts))


def _no_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 0


def _experts(rows: Any, counts: Any, gate_up: Any, *args: Any, out_val: Any = None) -> int:
    return mlp_flops(gate_up.shape, args[-1], 1)


def _experts_backward(grad: Any, rows: Any, counts: Any, gate_up: Any, *args: Any, out_val: Any = None) -> int:
    return int(mlp_flops(gate_up.shape, args[-1], 2) + args[-1] * 2 * int(gate_up.shape[1]) * int(gate_up.shape[2]))  # what the activation got, again


_OWN: dict[Any, Callable[..., int]] = {
    torch.ops.meshwright.expert_mlp: _experts,
    torch.ops.meshwright.expert_mlp_backward: _experts_backward,
    torch.ops.meshwright.table_rows: _placed_tables,
    torch.ops.meshwright.table_rows_backward: _placed_tables_backward,
    **dict.fromkeys((getattr(torch.ops.meshwright, f"table_{name}") for name in ("lookups", "ids", "sums", "gives")), _no_flops),
    torch.ops.meshwright.bag_ids: _no_flops,
    **dict.fromkeys((getattr(torch.ops.meshwright, f"expert_{name}") for name in ("rows", "sums", "dots", "counts")), _no_flops),
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    aten._embedding_bag: _embedding_bag,
    aten._embedding_bag_forward_only: _embedding_bag,
    aten._embedding_bag_backward: _embedding_bag_backward,
    aten._embedding_bag_dense_backward: _embedding_bag_backward,
    aten._embedding_bag_sparse_backward: _embedding_bag_backward,
}

# Arithmetic proportional to the bytes they move: counting them as zero loses nothing that a roofline sees.
_LIGHT_WORDS = (
    "norm", "softmax", "sum", "mean", "max", "min", "var", "std", "loss", "embedding", "pool", "dropout", "copy", "clone", "cat",
    "stack", "fill", "zero", "ones", "empty", "full", "arange", "rand", "bernoulli", "index", "scatter", "gather", "select", "slice",
    "pad", "constant", "where", "masked", "tri", "any", "all", "arg", "upsample", "expand", "repeat", "detach", "view", "to",
    "sigmoid", "tanh", "glu", "relu", "silu", "elu", "cumsum", "topk", "sort", "one_hot", "eq", "lift_fresh", "eye", "flip", "roll",
    "new_zeros", "new_ones", "cross_entropy", "cross_entropy_backward", "equal", "scalar", "bincount", "nonzero", "unique", "local_scalar", "item",
)  # fmt: skip


def flops_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of one call; 0 where there is no formula. Operands are tensors (fake ones do)."""
    packet = getattr(target, "overloadpacket", None)
    own = _OWN.get(packet)
    if own is not None:
        return own(*args, **kwargs, out_val=result)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def lacks_formula(target: Any) -> bool:
    """Whether the call does arithmetic beyond its bytes that no formula covers: such operators are named in the graph's notes."""
    packet = getattr(target, "overloadpacket", None)
    if packet is None or packet in _OWN or packet in flop_registry or torch.Tag.pointwise in target.tags:
        return False
    if target.namespace in ("prim", "prims"):
        return False
    name = target._schema.name.partition("::")[2].strip("_")
    if target.namespace != "aten":
        return True
    return not target.is_view and not any(word in name.split("_") or name.startswith(word) or name.endswith(word) for word in _LIGHT_WORDS)


def is_causal(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an attention call masks the future."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    for i, argument in enumerate(schema.arguments):
        if argument.name == "is_causal":
            return bool(args[i] if i < len(args) else kwargs.get("is_causal", False))
    return False
