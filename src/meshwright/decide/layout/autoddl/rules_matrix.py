"""Rules of the operators that multiply: linear layers, matrix products, convolutions, attention, embeddings."""

from __future__ import annotations

from .rules import Call, Spec, letters

__all__ = ["MATRIX"]


def linear(call: Call) -> Spec:
    """Y = X W^T + b. Data parallel by any leading dimension, column by W's rows, row by its columns."""
    lead = letters(len(call.shapes[0]) - 1)
    operands = [lead + "y", "xy", "x"][: len(call.shapes)]
    bias = frozenset({2}) if len(operands) == 3 else frozenset[int]()
    names = {c: "data" if i == 0 else f"rows {i}" for i, c in enumerate(lead)} | {"x": "column", "y": "row"}
    return Spec(
        operands=tuple(operands), result=lead + "x", summed="y", added=bias, linear=(frozenset({0}) | bias, frozenset({1}) | bias), names=names
    )


def addmm(call: Call) -> Spec | None:
    """C + A B, both scalars 1."""
    if call.node.kwargs.get("alpha", 1) != 1 or call.node.kwargs.get("beta", 1) != 1:
        return None
    offset = 2 - len(call.shapes[0])
    bias = "".join("ax"[offset + i] if n == call.outputs[0][offset + i] else "." for i, n in enumerate(call.shapes[0]))
    names = {"a": "data", "x": "column", "y": "row"}
    added = frozenset({0})
    return Spec(operands=(bias, "ay", "yx"), result="ax", summed="y", added=added, linear=(added | {1}, added | {2}), names=names)


def matmul(call: Call) -> Spec | None:
    """A B with broadcasting batch dimensions; both of rank 2 or more, or a vector on either side."""
    a, b = call.shapes
    out = call.outputs[0]
    if not a or not b:
        return None
    batch = letters(max(len(a), len(b), 2) - 2)

    def lead(shape: tuple[int, ...]) -> str:
        names = batch[len(batch) - max(0, len(shape) - 2) :]
        sizes = out[len(batch) - len(names) : len(batch)] if names else ()
        return "".join(c if n == m else "." for c, n, m in zip(names, shape, sizes, strict=False))

    left = "y" if len(a) == 1 else lead(a) + "xy"
    right = "y" if len(b) == 1 else lead(b) + "yz"
    result = batch + ("" if len(a) == 1 else "x") + ("" if len(b) == 1 else "z")
    names = dict.fromkeys(batch[:1], "data") | {"x": "rows", "z": "columns", "y": "contraction"}
    return Spec(operands=(left, right), result=result, summed="y", linear=(frozenset({0}), frozenset({1})), names=names)


def baddbmm(call: Call) -> Spec | None:
    if call.node.kwargs.get("alpha", 1) != 1 or call.node.kwargs.get("beta", 1) != 1 or call.shapes[0] != call.outputs[0]:
        return None
    added = frozenset({0})
    return Spec(operands=("axz", "axy", "ayz"), result="axz", summed="y", added=added, linear=(added | {1}, added | {2}))


def convolution(call: Call) -> Spec:
    """Batch, output channels, input channels. Positions stay whole (no halo exchange); grouped convolutions by batch only."""
    spatial = "." * (len(call.shapes[0]) - 2)
    groups = call.shapes[0][1] // max(1, call.shapes[1][1]) if len(call.shapes[1]) > 1 else 1
    transposed = "transpose" in call.node.target
    if groups > 1 or transposed:
        operands = ["a." + spatial, ".." + spatial, "."][: len(call.shapes)]
        return Spec(operands=tuple(operands), result="a." + spatial, names={"a": "data"})
    operands = ["ac" + spatial, "oc" + spatial, "o"][: len(call.shapes)]
    bias = frozenset({2}) if len(operands) == 3 else frozenset[int]()
    linear_in = (frozenset({0}) | bias, frozenset({1}) | bias)
    names = {"a": "data", "o": "out channels", "c": "in channels"}
    return Spec(operands=tuple(operands), result="ao" + spatial, summed="c", added=bias, linear=linear_in, names=names)


def attention(call: Call) -> Spec | None:
    """softmax(Q K^T) V by batch dimensions and heads; by query rows, where every device reads all keys; V's columns.

    Rows of positions are context parallelism by gathered keys ("The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2): under a causal mask
    the executor masks by the rows' own numbers. By heads between splits of positions it is head all-to-all (arXiv:2309.14509).
    """
    query, key = call.shapes[0], call.shapes[1]
    dropout = call.argument(4, "dropout_p", 0.0)
    if dropout or len(query) < 3 or len(key) != len(query) or call.shapes[2][:-2] != key[:-2] or key[:-3] != query[:-3]:
        return None
    lead = letters(len(query) - 2)
    even = {} if key[-3] == query[-3] else {lead[-1]: key[-3]}  # grouped heads: every device has whole groups
    rows = "." if bool(call.argument(5, "is_causal", False)) and query[-2] != key[-2] else "x"
    operands = [lead + rows + ".", lead + "..", lead + ".z"]
    result = lead + rows + "z"
    if len(call.shapes) == 4:  # a mask
        mask, sizes = call.shapes[3], (*query[:-1], key[-2])
        word, offset = "", len(sizes) - len(mask)
        for i, n in enumerate(mask):
            at = offset + i
            word += (lead + rows + ".")[at] if n == sizes[at] else "."
        operands.append(word)
    names = {lead[0]: "data"} | ({lead[1]: "heads"} if len(lead) > 1 else {}) | {"x": "query rows"}
    return Spec(operands=tuple(operands), result=result, linear=(frozenset({2}),), names=names, even=even)


def embedding(call: Call) -> Spec:
    """By rows of indices, by columns of the table, by its rows (vocabulary: partial sums, rows that others hold count as zero)."""
    lead = letters(len(call.shapes[1]))
    if call.argument(3, "scale_grad_by_freq", False):
        return Spec(operands=(".x", "." * len(lead)), result="." * len(lead) + "x")
    names = {c: "data" if i == 0 else f"rows {i}" for i, c in enumerate(lead)} | {"x": "column", "v": "vocabulary"}
    return Spec(operands=("vx", lead), result=lead + "x", summed="v", linear=(frozenset({0}),), names=names)


MATRIX = {
    "linear": linear, "addmm": addmm, "mm": matmul, "bmm": matmul, "matmul": matmul, "baddbmm": baddbmm, "mv": matmul, "dot": matmul,
    "conv1d": convolution, "conv2d": convolution, "conv3d": convolution, "conv_transpose1d": convolution, "conv_transpose2d": convolution,
    "scaled_dot_product_attention": attention, "embedding": embedding,
}  # fmt: skip
