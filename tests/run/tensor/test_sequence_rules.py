"""Each operator on a rank's positions: the planner's rule, the executor's rule and torch itself agree, or planner and executor refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.layout.sequence_rules import Along, carried
from meshwright.decide.layout.split import Refused, Split
from meshwright.graph.graph import GraphValue, OpNode
from meshwright.plan.shards import part_ranges
from meshwright.run.steps.forward_graph import ForwardNode, TensorInfo, decode_argument
from meshwright.run.tensor.sharding import Member, Shard, propagate, take_part
from meshwright.run.tensor.vocabulary import function_of

X, Y, TABLE, NORM, ROW = ({"value": v} for v in ("x", "y", "table", "norm", "row"))
KEPT = {
    "gelu": ("aten.gelu.default", [X], {}),
    "residual": ("aten.add.Tensor", [X, Y], {}),
    "table of positions": ("aten.add.Tensor", [X, TABLE], {}),
    "table first": ("aten.sub.Tensor", [TABLE, X], {}),
    "one row for all": ("aten.mul.Tensor", [X, ROW], {}),
    "where": ("aten.where.self", [{"value": "mask"}, X, Y], {}),
    "layer norm": ("aten.layer_norm.default", [X, [4], NORM, NORM], {}),
    "mean of features": ("aten.mean.dim", [X, [-1], True], {}),
    "sum of features": ("aten.sum.dim_IntList", [X, [2]], {}),
    "sum of samples": ("aten.sum.dim_IntList", [X, [0]], {}),
    "largest feature": ("aten.amax.default", [X, [-1]], {}),
    "variance": ("aten.var.correction", [X, [-1]], {"correction": 0, "keepdim": True}),
    "softmax of features": ("aten.softmax.int", [X, -1], {}),
    "log-softmax of features": ("aten.log_softmax.int", [X, 2], {}),
    "linear": ("aten.linear.default", [X, {"value": "square"}], {}),
    "product": ("aten.matmul.default", [X, {"value": "square"}], {}),
    "heads": ("aten.view.default", [X, [2, 6, 2, 2]], {}),
    "flattened": ("aten.reshape.default", [X, [12, 4]], {}),
    "joined with features": ("aten.view.default", [X, [2, 24]], {}),
    "transposed": ("aten.transpose.int", [X, 0, 1], {}),
    "permuted": ("aten.permute.default", [X, [2, 0, 1]], {}),
    "inserted": ("aten.unsqueeze.default", [X, 1], {}),
    "one feature": ("aten.select.int", [X, 2, 1], {}),
    "some features": ("aten.slice.Tensor", [X, 2, 1, 3], {}),
    "all positions": ("aten.slice.Tensor", [X, 1, 0, 6], {}),
    "joined features": ("aten.cat.default", [[X, Y], -1], {}),
}
REFUSED = {
    "mean of positions": ("aten.mean.dim", [X, [1]], {}),
    "mean of all": ("aten.mean.default", [X], {}),
    "softmax of positions": ("aten.softmax.int", [X, 1], {}),
    "norm over positions": ("aten.layer_norm.default", [X, [6, 4]], {}),
    "one position": ("aten.select.int", [X, 1, 0], {}),
    "half of the positions": ("aten.slice.Tensor", [X, 1, 0, 3], {}),
    "joined positions": ("aten.cat.default", [[X, Y], 1], {}),
    "joined with a whole one": ("aten.cat.default", [[X, {"value": "other"}], -1], {}),
    "scan": ("aten.cumsum.default", [X, 1], {}),
}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {"x": (2, 6, 4), "y": (2, 6, 4), "table": (6, 4), "norm": (4,), "row": (1, 4), "square": (4, 4), "other": (2, 6, 4)}
    made = {name: torch.randn(shape, dtype=torch.float64) for name, shape in found.items()}
    return made | {"mask": torch.rand(2, 6, 1) > 0.5}


def nodes(case) -> tuple[OpNode, ForwardNode, torch.Tensor, dict[str, torch.Tensor]]:
    target, args, kwargs = case
    given_ = tensors()
    whole = run(target, args, kwargs, given_)
    inputs = ForwardNode("out", target, args, kwargs, ()).inputs
    shape = tuple(whole.shape)
    op = OpNode(
        name="out", target=target, module="", inputs=inputs, args=args, kwargs=kwargs, outputs=(GraphValue(shape=shape, dtype="float64", storage=-1),)
    )
    return op, ForwardNode("out", target, args, kwargs, (TensorInfo(shape, "float64"),)), whole, given_


def run(target, args, kwargs, given_):
    def decode(value):
        return decode_argument(value, given_.__getitem__, torch.device("cpu"))

    return function_of(target)(*[decode(a) for a in args], **{k: decode(v) for k, v in kwargs.items()})


def states(op: OpNode) -> dict[str, Split]:
    return {v: Split(1) for v in op.inputs if v in ("x", "y")}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("shares", [(1, 1, 1), (2, 1, 3)])
def test_positions_are_kept_apart(name, shares):
    op, node, whole, given_ = nodes(KEPT[name])
    shapes = {n: tuple(t.shape) for n, t in given_.items()} | {"out": tuple(whole.shape)}
    found = carried(op, {v: Along(s, 6) for v, s in states(op).items()}, shapes)
    assert found is not None and found.extent == 6
    shard = Shard(found.split.dim, found.split.blocks)
    for rank in range(3):
        member = Member(rank, shares)
        calls, result = propagate([node], {v: Shard(1) for v in states(op)}, shapes, member)
        assert result["out"] == shard
        cut = _Cut(1, shares)
        local = {n: take_part(t, 1, cut, rank, 3) if n in states(op) else t for n, t in given_.items()}
        for call in calls:
            local[call.name] = run(call.target, call.args, call.kwargs, local)
        expected = take_part(whole, shard.dim, _Cut(shard.blocks, shares), rank, 3)
        assert torch.equal(local["out"], expected) or torch.allclose(local["out"], expected, rtol=1e-12, atol=1e-12)


class _Cut:
    def __init__(self, blocks, shares):
        self.blocks, self.shares, self.groups, self.mixed = blocks, shares, 0, ()


@pytest.mark.parametrize("name", REFUSED)
def test_where_positions_meet_the_planner_refuses(name):
    op, _, whole, given_ = nodes(REFUSED[name])
    shapes = {n: tuple(t.shape) for n, t in given_.items()} | {"out": tuple(whole.shape)}
    with pytest.raises(Refused, match="out: "):
        carried(op, {v: Along(s, 6) for v, s in states(op).items()}, shapes)


def test_a_whole_value_that_takes_anothers_type_stays_whole():
    """The planner took the positions with the type; the executor did not, and found a gradient whole that was to be summed."""
    op, node, whole, given_ = nodes(("aten.type_as.default", [{"value": "other"}, X], {}))
    shapes = {n: tuple(t.shape) for n, t in given_.items()} | {"out": tuple(whole.shape)}
    assert carried(op, {"x": Along(Split(1), 6)}, shapes) is None
    _, result = propagate([node], {"x": Shard(1)}, shapes, Member(0, (1, 1)))
    assert result["out"] is None


def test_sequences_of_different_lengths_do_not_mix():
    op, _, _, given_ = nodes(KEPT["residual"])
    shapes = {n: tuple(t.shape) for n, t in given_.items()} | {"out": (2, 6, 4)}
    with pytest.raises(Refused, match="sequences of 6 and 7 positions meet"):
        carried(op, {"x": Along(Split(1), 6), "y": Along(Split(1), 7)}, shapes)


@settings(max_examples=60, deadline=None)
@given(extent=st.integers(2, 9), parts=st.integers(2, 4), blocks=st.integers(1, 3))
def test_parts_tile_the_positions(extent, parts, blocks):
    from meshwright.decide.layout.tensor_shares import choose_shares

    shares = choose_shares(extent, (), parts)
    if extent < parts:
        assert shares is None
        return
    held = [part_ranges(extent * blocks, _Cut(blocks, shares), t, parts) for t in range(parts)]
    positions = sorted(i for ranges in held for a, b in ranges for i in range(a, b))
    assert positions == list(range(extent * blocks))
    counts = [sum(b - a for a, b in ranges) for ranges in held]
    assert max(counts) - min(counts) <= blocks
