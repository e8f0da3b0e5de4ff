"""Rules of elementwise operators: which are linear, and in what."""

from __future__ import annotations

from .rules import Call, Spec, aligned, letters

__all__ = ["POINTWISE"]

# Linear in their tensor operands taken together; a scalar operand of these is added and breaks it.
ADDING = ("add", "sub", "rsub")
NONLINEAR = (
    "relu", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign",
    "tanh", "sigmoid", "log_sigmoid", "logit", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "sin", "cos", "tan", "atan", "abs",
    "sign", "square", "pow", "reciprocal", "erf", "erfc", "clamp", "clamp_min", "clamp_max", "floor", "ceil", "round", "maximum", "minimum",
    "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "isnan", "isinf",
    "bitwise_and", "bitwise_or", "bitwise_not", "remainder", "fmod", "floor_divide", "atan2", "prelu", "lerp", "addcmul", "addcdiv",
    "nan_to_num", "threshold", "softshrink", "hardshrink", "tanhshrink", "zeros_like", "ones_like", "full_like", "empty_like",
)  # fmt: skip


def pointwise(call: Call) -> Spec:
    return Spec(operands=aligned(call.shapes, call.outputs[0]), result=letters(call.rank))


def prelu(call: Call) -> Spec:
    """The slope has one entry per channel (dimension 1) or a single one."""
    word = letters(call.rank)
    weight = (word[1] if call.shapes[1][0] == call.shapes[0][1] else ".") if len(call.shapes[1]) == 1 and call.rank > 1 else "." * len(call.shapes[1])
    return Spec(operands=(word, weight), result=word)


def adding(call: Call) -> Spec:
    """add, sub: linear in both operands together, if both are tensors of the result's shape or broadcast to it."""
    words = aligned(call.shapes, call.outputs[0])
    together = (frozenset(range(len(words))),) if len(words) == 2 else ()
    return Spec(operands=words, result=letters(call.rank), linear=together)


def together(call: Call) -> Spec:
    """broadcast_tensors: every result has the same state."""
    words = aligned(call.shapes, call.outputs[0])
    return Spec(operands=words, result=letters(call.rank), linear=(frozenset(range(len(words))),))


def multiplying(call: Call) -> Spec:
    """mul: linear in each operand alone."""
    words = aligned(call.shapes, call.outputs[0])
    distinct = len(set(call.node.inputs)) == len(call.node.inputs)
    return Spec(operands=words, result=letters(call.rank), linear=tuple(frozenset({i}) for i in range(len(words))) if distinct else ())


def dividing(call: Call) -> Spec:
    """div: linear in the numerator."""
    words = aligned(call.shapes, call.outputs[0])
    rounded = call.node.kwargs.get("rounding_mode") is not None
    numerator = isinstance(call.node.args[0], dict) and len(set(call.node.inputs)) == len(call.node.inputs)
    return Spec(operands=words, result=letters(call.rank), linear=(frozenset({0}),) if numerator and not rounded else ())


def linear_unary(call: Call) -> Spec:
    """neg and dropout (the executor draws the mask of the whole tensor on every device, so it is the same function of the input everywhere)."""
    return Spec(operands=(letters(call.rank),), result=letters(call.rank), linear=(frozenset({0}),))


POINTWISE = {
    **dict.fromkeys(NONLINEAR, pointwise), **dict.fromkeys(ADDING, adding), "mul": multiplying, "div": dividing, "true_divide": dividing,
    "broadcast_tensors": together, "neg": linear_unary, "dropout": linear_unary, "prelu": prelu,
}  # fmt: skip
