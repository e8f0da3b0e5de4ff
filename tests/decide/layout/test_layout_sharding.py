"""A split dimension through a reshape, against numpy: cutting then reshaping must equal reshaping then cutting."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.decide.layout.sharding import propagate, short_name
from meshwright.decide.layout.split import Needs, Refused, Split, reshape_split
from meshwright.graph.graph import GraphValue, OpNode


def cut(x: np.ndarray, split: Split, parts: int, part: int) -> np.ndarray:
    """Part `part` of `parts`: of every block of the split dimension the part-th share."""
    n = x.shape[split.dim]
    unit = n // split.blocks
    keep = [b * unit + i for b in range(split.blocks) for i in range(part * unit // parts, (part + 1) * unit // parts)]
    return np.take(x, keep, axis=split.dim)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Split, int]:
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))

    def grouped() -> tuple[int, ...]:
        dims, at = [], 0
        while at < len(factors):
            width = draw(st.integers(1, len(factors) - at))
            dims.append(prod(factors[at : at + width]))
            at += width
        for _ in range(draw(st.integers(0, 1))):
            dims.insert(draw(st.integers(0, len(dims))), 1)
        return tuple(dims)

    old, new = grouped(), grouped()
    dim = draw(st.integers(0, len(old) - 1))
    blocks = draw(st.sampled_from([b for b in (1, 2, 3, 4) if old[dim] % b == 0]))
    parts = draw(st.sampled_from([2, 3, 4]))
    return old, new, Split(dim, blocks), parts


@given(reshapes())
def test_a_split_found_through_a_reshape_is_the_same_cut(case: tuple[tuple[int, ...], tuple[int, ...], Split, int]) -> None:
    old, new, split, parts = case
    assume((old[split.dim] // split.blocks) % parts == 0)
    try:
        found = reshape_split(old, new, split)
    except Refused:
        return
    assume(new[found.dim] % found.blocks == 0 and (new[found.dim] // found.blocks) % parts == 0)  # the region's `units` ask for this
    x = np.arange(prod(old)).reshape(old)
    local = list(new)
    local[found.dim] //= parts
    for part in range(parts):
        np.testing.assert_array_equal(cut(x, split, parts, part).reshape(local), cut(x.reshape(new), found, parts, part))


@pytest.mark.parametrize(
    ("old", "new", "split", "expected"),
    [
        ((2, 8, 12), (2, 8, 3, 4), Split(2, 3), Split(3, 1)),  # packed q, k, v unpacked
        ((2, 8, 3, 4), (2, 8, 12), Split(3, 1), Split(2, 3)),
        ((2, 8, 4, 3), (2, 8, 12), Split(2, 1), Split(2, 1)),  # heads merged
        ((2, 8, 12), (16, 12), Split(2, 1), Split(1, 1)),  # rows flattened
    ],
)
def test_known_reshapes(old: tuple[int, ...], new: tuple[int, ...], split: Split, expected: Split) -> None:
    assert reshape_split(old, new, split) == expected


Shapes = dict[str, tuple[int, ...]]


def node(target: str, shapes: Shapes, out: tuple[int, ...], *args: object, pieces: int = 1) -> tuple[OpNode, Shapes]:
    values = tuple(GraphValue(shape=out, dtype="float32", storage=0) for _ in range(pieces))
    operands = [{"value": v} for v in shapes] + list(args)
    made = OpNode(name="y", target=f"aten.{target}", module="", inputs=tuple(shapes), args=operands, outputs=values)
    return made, {**shapes, "y": out}


@pytest.mark.parametrize(
    ("target", "shapes", "out", "args", "split", "expected"),
    [
        ("gelu.default", {"x": (2, 8)}, (2, 8), (), Split(1, 1), Split(1, 1)),
        ("transpose.int", {"x": (2, 8, 4)}, (2, 4, 8), (1, 2), Split(1, 1), Split(2, 1)),
        ("permute.default", {"x": (2, 8, 4)}, (4, 2, 8), ([2, 0, 1],), Split(1, 1), Split(2, 1)),
        ("unbind.int", {"x": (3, 2, 8)}, (2, 8), (0,), Split(2, 1), Split(1, 1)),
        ("split.Tensor", {"x": (2, 12)}, (2, 4), (4, -1), Split(1, 3), Split(1, 1)),
        ("chunk.default", {"x": (2, 12)}, (2, 6), (2, -1), Split(1, 2), Split(1, 1)),
        ("split_with_sizes.default", {"x": (2, 12)}, (2, 6), ([6, 6], 1), Split(1, 2), Split(1, 1)),
        ("unsqueeze.default", {"x": (2, 8)}, (1, 2, 8), (0,), Split(1, 1), Split(2, 1)),
        ("softmax.int", {"x": (2, 4, 8)}, (2, 4, 8), (-1,), Split(1, 1), Split(1, 1)),
        ("expand.default", {"x": (4, 1)}, (2, 4, 8), ([2, 4, 8],), Split(0, 1), Split(1, 1)),
        ("t.default", {"x": (2, 8)}, (8, 2), (), Split(1, 1), Split(0, 1)),
        ("max.dim", {"x": (2, 4, 8)}, (2, 4), (-1,), Split(1, 1), Split(1, 1)),
        ("min.dim", {"x": (2, 4, 8)}, (2, 8), (1,), Split(2, 1), Split(1, 1)),
        ("new_empty.default", {"x": (2, 4, 8)}, (2, 4, 12), ([2, 4, 12],), Split(1, 1), Split(1, 1)),
    ],
)
def test_rules(target: str, shapes: dict, out: tuple, args: tuple, split: Split, expected: Split) -> None:
    made, all_shapes = node(target, shapes, out, *args)
    assert propagate(made, {"x": split}, all_shapes) == expected


@pytest.mark.parametrize(
    ("target", "shapes", "out", "args", "split"),
    [
        ("softmax.int", {"x": (2, 8)}, (2, 8), (-1,), Split(1, 1)),  # over the split dimension
        ("unbind.int", {"x": (4, 8)}, (8,), (0,), Split(0, 1)),
        ("split.Tensor", {"x": (2, 12)}, (2, 4), (4, -1), Split(1, 1)),  # a packed dimension that was cut whole
        ("split_with_sizes.default", {"x": (2, 12)}, (2, 8), ([8, 4], 1), Split(1, 1)),
        ("layer_norm.default", {"x": (2, 8)}, (2, 8), ([8],), Split(1, 1)),  # no rule
        ("max.dim", {"x": (2, 8)}, (2,), (-1,), Split(1, 1)),
        ("max.default", {"x": (2, 8)}, (), (), Split(1, 1)),
        ("new_zeros.default", {"x": (2, 8)}, (2, 12), ([2, 12],), Split(1, 1)),  # of another length
        ("view.default", {"x": (2, 8)}, (16,), ([16],), Split(1, 1), ),
    ],
)  # fmt: skip
def test_what_cannot_run_on_shards_is_refused(target: str, shapes: dict, out: tuple, args: tuple, split: Split) -> None:
    made, all_shapes = node(target, shapes, out, *args)
    if target.startswith("view"):  # rows merged with a split dimension become blocks: allowed, one block per row
        assert propagate(made, {"x": split}, all_shapes) == Split(0, 2)
        return
    with pytest.raises(Refused):
        propagate(made, {"x": split}, all_shapes)


def test_attention_needs_all_three_split_over_heads() -> None:
    shapes = {"q": (2, 4, 8, 16), "k": (2, 4, 8, 16), "v": (2, 4, 8, 16)}
    made, all_shapes = node("scaled_dot_product_attention.default", shapes, (2, 4, 8, 16))
    heads = Split(1, 1)
    assert propagate(made, {"q": heads, "k": heads, "v": heads}, all_shapes) == heads
    with pytest.raises(Needs) as need:
        propagate(made, {"q": heads, "k": None, "v": heads}, all_shapes)
    assert need.value.value == "k"
    with pytest.raises(Refused, match="over heads only"):
        propagate(made, {"q": Split(3, 1), "k": Split(3, 1), "v": Split(3, 1)}, all_shapes)
    with pytest.raises(Refused, match="differently"):
        propagate(made, {"q": heads, "k": Split(0, 1), "v": heads}, all_shapes)
    masked, mask_shapes = node("scaled_dot_product_attention.default", {**shapes, "m": (4, 8, 8)}, (2, 4, 8, 16))
    with pytest.raises(Needs) as need:
        propagate(masked, {"q": heads, "k": heads, "v": heads}, mask_shapes)
    assert (need.value.value, need.value.split) == ("m", Split(0))
    assert propagate(masked, {"q": heads, "k": heads, "v": heads, "m": Split(0)}, mask_shapes) == heads
    with pytest.raises(Refused, match="mask is split differently"):
        propagate(masked, {"q": heads, "k": heads, "v": heads, "m": Split(1)}, mask_shapes)


def test_pointwise_operands_must_agree_or_broadcast() -> None:
    made, shapes = node("add.Tensor", {"a": (2, 8), "b": (8,)}, (2, 8))
    assert propagate(made, {"a": Split(1, 1), "b": Split(0, 1)}, shapes) == Split(1, 1)
    with pytest.raises(Needs):
        propagate(made, {"a": Split(1, 1)}, shapes)
    with pytest.raises(Refused, match="differently"):
        propagate(made, {"a": Split(1, 1), "b": Split(0, 2)}, shapes)
    scaled, shapes = node("mul.Tensor", {"a": (2, 8), "b": (1,)}, (2, 8))
    assert propagate(scaled, {"a": Split(1, 1)}, shapes) == Split(1, 1)


def test_batched_products_split_over_the_batch_only() -> None:
    made, shapes = node("matmul.default", {"a": (2, 4, 8, 16), "b": (2, 4, 16, 8)}, (2, 4, 8, 8))
    heads = Split(1, 1)
    assert propagate(made, {"a": heads, "b": heads}, shapes) == heads
    with pytest.raises(Needs):
        propagate(made, {"a": heads}, shapes)
    with pytest.raises(Refused):
        propagate(made, {"a": Split(3, 1), "b": heads}, shapes)


def test_nothing_split_stays_whole_and_names_are_short() -> None:
    made, shapes = node("layer_norm.default", {"x": (2, 8)}, (2, 8))
    assert propagate(made, {}, shapes) is None
    assert short_name("aten._softmax.default") == "_softmax"
    assert short_name("operator.getitem") == "getitem"
    assert short_name("aten.add_.Tensor") == "add"
