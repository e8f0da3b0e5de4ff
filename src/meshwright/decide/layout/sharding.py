"""How a split dimension travels through the operators of a forward graph.

`propagate` gives an operator's result from its operands, `Refused` if the operator cannot run on shards without communication, `Needs` if
it could, were another operand split as well, and `Grouped` if it could, were an operand split by key-value heads. What a split is: `split`.

Left out on purpose: operators that would need communication inside (softmax over the split dimension, normalisation over it);
they end the search, they are never approximated.
"""

from __future__ import annotations

from ...graph.graph import OpNode
from .operator_rules import OPERATORS, REDUCTIONS, Result, Shapes, Splits, broadcast, reshape, short_name
from .split import Pieces, Refused, Split

__all__ = ["POINTWISE", "POINTWISE_UNARY", "REDUCTIONS", "RESHAPES", "propagate", "short_name"]

# One operand decides; the others are numbers.
POINTWISE_UNARY = frozenset({
    "gelu", "relu", "silu", "tanh", "sigmoid", "neg", "exp", "sqrt", "rsqrt", "pow", "dropout", "native_dropout", "contiguous", "clone", "to",
    "_to_copy", "type_as", "float", "double", "half", "bfloat16", "alias", "detach", "hardtanh", "leaky_relu", "elu", "softplus", "square", "abs",
    "relu6", "hardswish", "mish", "cos", "sin", "log", "log1p", "expm1", "erf", "clamp", "clamp_min", "clamp_max", "reciprocal", "logical_not",
    "bitwise_not", "round", "floor", "ceil", "sign", "logsigmoid", "log_sigmoid", "hardsigmoid", "selu", "celu", "zeros_like", "ones_like",
    "nan_to_num", "isnan", "isinf", "conj", "resolve_conj",
})  # fmt: skip
# Operands are broadcast against each other.
POINTWISE = frozenset({
    "add", "sub", "mul", "div", "maximum", "minimum", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "bitwise_and", "bitwise_or", "remainder", "fmod", "addcmul", "addcdiv", "lerp", "atan2", "rsub",
})  # fmt: skip
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "view_as", "reshape_as"})


def propagate(node: OpNode, splits: Splits, shapes: Shapes) -> Result:
    """The split of `node`'s result. `splits` has every operand, `shapes` every operand and the node itself (first output)."""
    if all(splits.get(v) is None for v in node.inputs):
        return None
    name = short_name(node.target)
    if name == "_assert_tensor_metadata":
        return None
    if name == "getitem":
        return _picked(node, splits)
    if any(isinstance(splits.get(v), Pieces) for v in node.inputs):
        raise Refused(f"{node.name}: takes several results at once")
    if name in POINTWISE_UNARY:
        return splits[node.inputs[0]]
    if name in POINTWISE:
        return broadcast(node, splits, shapes)
    if name in RESHAPES:
        return reshape(node, splits, shapes)
    rule = OPERATORS.get(name)
    if rule is None:
        raise Refused(f"{node.name}: no rule for {node.target} on shards")
    return rule(node, splits, shapes)


def _picked(node: OpNode, splits: Splits) -> Split | None:
    found = splits.get(node.inputs[0])
    return found[int(node.args[1])] if isinstance(found, Pieces) else found
