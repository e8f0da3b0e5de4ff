"""Rules of operators that reduce or normalise: sums, softmax, norms, pooling, losses."""

from __future__ import annotations

from typing import Any

from .rules import Call, Exchange, Spec, dims_without, letters

__all__ = ["REDUCE"]


def _dims(call: Call, index: int = 1) -> list[int]:
    count = len(call.shapes[0])
    given: Any = call.argument(index, "dim")
    if given is None or given == [] or isinstance(given, bool):  # the `unbiased` of var and std is no dimension
        return list(range(count))
    return [int(d) % count for d in (given if isinstance(given, list) else [given])]


def _reduced(call: Call, *, summed: bool = False, maximum: bool = False) -> Spec:
    dims = _dims(call)
    names = letters(len(call.shapes[0]))
    keep = len(call.outputs[0]) == len(names)
    result = "".join("." if keep and i in dims else c for i, c in enumerate(names) if keep or i not in dims)
    gone = "".join(names[d] for d in dims)
    linear = (frozenset({0}),) if summed else ()
    return Spec(operands=(names,), result=result, summed=gone if summed else "", maximum=gone if maximum else "", linear=linear)


def summing(call: Call) -> Spec:
    """sum and mean (the executor scales local means)."""
    return _reduced(call, summed=True)


def maximum(call: Call) -> Spec:
    return _reduced(call, maximum=True)


def other_reduction(call: Call) -> Spec:
    """var, std, prod, any, all, argmax, amin, max with indices: along whole dimensions."""
    return _reduced(call)


def softmax(call: Call) -> Spec:
    word = dims_without(call.rank, [int(call.argument(1, "dim"))])
    return Spec(operands=(word,), result=word)


def layer_norm(call: Call) -> Spec:
    """layer_norm, rms_norm: the normalised dimensions stay whole; weight and bias broadcast."""
    count = len(call.argument(1, "normalized_shape"))
    word = dims_without(call.rank, range(call.rank - count, call.rank))
    return Spec(operands=(word, *("." * len(s) for s in call.shapes[1:])), result=word)


def group_norm(call: Call) -> Spec:
    word = "a" + "." * (call.rank - 1)
    return Spec(operands=(word, *("." for _ in call.shapes[1:])), result=word)


def batch_norm(call: Call) -> Spec | None:
    """By channels, and by batch: in training with two all-reduces of the channels' statistics forward and two of their gradients backward."""
    if len(call.shapes) < 2 or not isinstance(call.argument(5, "training"), bool):
        return None
    rest = "." * (call.rank - 2)
    operands = ("ac" + rest, *("c" for _ in call.shapes[1:]))
    channels, item = call.shapes[0][1], call.items[0]
    exchanges = {}
    if call.argument(5, "training"):
        once = (Exchange(channels, item, letters="c"), Exchange(channels, item, True, "c") if call.differentiable[0] else None)
        exchanges["a"] = tuple(x for x in (*once, *once) if x is not None)
    return Spec(operands=operands, result="ac" + rest, exchanges=exchanges, names={"a": "data", "c": "channels"})


def pooling(call: Call) -> Spec:
    """Over positions, which stay whole; average pooling is linear."""
    spatial = 1 if "1d" in call.node.target else 3 if "3d" in call.node.target else 2
    word = dims_without(call.rank, range(call.rank - spatial, call.rank))
    linear = (frozenset({0}),) if "avg" in call.node.target else ()
    return Spec(operands=(word,), result=word, linear=linear)


def padding(call: Call) -> Spec:
    """Dimensions that are padded stay whole; padding with zeros is linear."""
    pads = call.argument(1, "pad", [])
    count = len(call.shapes[0])
    padded = [count - 1 - i // 2 for i, n in enumerate(pads) if n]
    word = dims_without(count, padded)
    zero = call.argument(3, "value", None) in (None, 0, 0.0) and call.argument(2, "mode", "constant") == "constant"
    return Spec(operands=(word,), result=word, linear=(frozenset({0}),) if zero else ())


def cross_entropy(call: Call) -> Spec | None:
    """Rows: the number of targets that count is exchanged. Classes: maxima, then sums and the targets' logits (as Megatron does)."""
    logits, target = call.shapes[0], call.shapes[1]
    reduction = call.argument(3, "reduction", 1)
    if len(call.shapes) != 2 or len(logits) != 2 or reduction not in (1, 2):
        return None
    rows, item = logits[0], call.items[0]
    if len(target) == 2:  # probabilities
        return Spec(operands=("a.", "a."), result="", summed="a", names={"a": "data"})
    smoothing = float(call.argument(5, "label_smoothing", 0.0) or 0.0)
    inside = (Exchange(rows, item, letters="a"), Exchange((3 if smoothing else 2) * rows, item, letters="a"))
    count = (Exchange(1, 8),) if reduction == 1 else ()
    return Spec(
        operands=("av", "a"), result="", summed="a", complete="v", exchanges={"a": count, "v": inside}, names={"a": "data", "v": "vocabulary"}
    )


def mse(call: Call) -> Spec | None:
    reduction = call.argument(2, "reduction", 1)
    if call.shapes[0] != call.shapes[1]:
        return None
    names = letters(len(call.shapes[0]))
    if reduction == 0:
        return Spec(operands=(names, names), result=names)
    return Spec(operands=(names, names), result="", summed=names)


REDUCE = {
    "sum": summing, "mean": summing, "amax": maximum,
    **dict.fromkeys(("var", "std", "amin", "any", "all", "argmax", "argmin", "logsumexp", "prod"), other_reduction),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), softmax), "layer_norm": layer_norm, "rms_norm": layer_norm,
    "group_norm": group_norm, "batch_norm": batch_norm,
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
                     "adaptive_avg_pool3d", "adaptive_max_pool2d"), pooling),
    "pad": padding, "constant_pad_nd": padding, "cross_entropy_loss": cross_entropy, "mse_loss": mse, "l1_loss": mse, "smooth_l1_loss": mse,
    "huber_loss": mse, "binary_cross_entropy_with_logits": mse, "binary_cross_entropy": mse,
}  # fmt: skip
