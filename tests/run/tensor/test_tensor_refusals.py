"""What the rewriting of calls for grouped heads, unequal blocks and split vocabularies refuses, and what a wrong layout is told."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tensor_rig import plan_case

from meshwright.check.training.step import check_training
from meshwright.decide.layout.sharding import propagate as decide
from meshwright.decide.layout.split import Grouped, Pieces, Refused, Split
from meshwright.errors import Unsupported
from meshwright.graph.graph import GraphValue, OpNode
from meshwright.plan.vocabulary import MAX, SUMS
from meshwright.run.steps.forward_graph import ForwardGraph, ForwardNode, TensorInfo
from meshwright.run.tensor.sharding import PARTIAL, Member, Shard, local_shape, propagate
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import gradient_bytes

KV = Shard(1, groups=2)  # (batch, key-value heads, ...)
COPIES = Shard(1, groups=2, repeated=True)
PACKED = Shard(1, mixed=((4, 0), (2, 0)))


def node(target, args, shape, **kwargs):
    return ForwardNode("y", target, args, kwargs, (TensorInfo(tuple(shape), "float32"),))


X = {"value": "x"}


@pytest.mark.parametrize(
    ("call", "state", "shape", "why"),
    [
        (node("aten.view.default", [X, [1, 2, 8]], (1, 2, 8)), COPIES, (1, 2, 4, 2), "only query heads"),
        (node("aten.transpose.int", [X, 1, 2], (1, 4, 2)), COPIES, (1, 2, 4), "only a reshape may follow"),
        (node("aten.permute.default", [X, [0, 2, 1]], (1, 4, 2)), COPIES, (1, 2, 4), "only a reshape may follow"),
        (node("aten.expand.default", [X, [1, 2, 4, 3]], (1, 2, 4, 3)), COPIES, (1, 2, 4, 1), "repeats the sharded dimension"),
        (node("aten.expand.default", [X, [1, 4, 3]], (1, 4, 3)), KV, (1, 4, 1), "repeats parts of key-value heads"),
        (node("aten.repeat_interleave.self_int", [X, 2, 1], (1, 8)), KV, (1, 4), "repeats parts of the sharded dimension"),
        (node("aten.repeat_interleave.self_int", [X, 2], (8,)), KV, (1, 4), "entries of the flattened tensor"),
        (node("aten.view.default", [X, [3, 2]], (3, 2)), PACKED, (1, 6), "cuts across unequal blocks"),
        (node("aten.split_with_sizes.default", [X, [3, 3], 1], (1, 3)), PACKED, (1, 6), "whole blocks"),
        (node(MAX, [X], (1,)), Shard(0), (2, 6), "logits"),
        (node("aten.cat.default", [[X, X], 1], (1, 4)), COPIES, (1, 2), "sharded differently"),
    ],
)  # fmt: skip
def test_rewriting_refuses(call, state, shape, why):
    if call.target.startswith("aten.split"):
        call = msgspec.structs.replace(call, outputs=call.outputs * 2, many=True)
    with pytest.raises(Unsupported, match=why) as caught:
        propagate([call], {"x": state}, {"x": shape}, 2)
    assert caught.value.where == "node y"


def test_uneven_members_get_their_own_sizes():
    member = Member(1, (3, 2))
    assert local_shape((2, 10), Shard(1), member) == (2, 4)
    (view,), states = propagate([node("aten.view.default", [X, [2, 5, 4]], (2, 5, 4))], {"x": Shard(1)}, {"x": (2, 20)}, member)
    assert states["y"] == Shard(1) and view.args[1] == [2, 2, 4]
    (cut,), states = propagate([node("aten.slice.Tensor", [X, 1, 10, 20], (2, 10))], {"x": Shard(1, 2)}, {"x": (2, 20)}, member)
    assert cut.args[1:] == [1, 4, 8] and states["y"] == Shard(1)
    (table,), states = propagate([node("aten.embedding.default", [X, {"value": "i"}], (3, 4))], {"x": Shard(0)}, {"x": (5, 4), "i": (3,)}, member)
    assert states["y"] is PARTIAL and table.args[2:] == [3, 5, 5, -1]
    sums = node(SUMS, [X, {"value": "t"}, {"value": "m"}], (2, 3))
    (call,), _ = propagate([sums], {"x": Shard(1)}, {"x": (3, 5), "t": (3,), "m": (3,)}, member)
    assert (call.kwargs["start"], call.kwargs["stop"]) == (3, 5)


def test_a_rank_with_unequal_copies_is_refused():
    with pytest.raises(Unsupported, match="neither whole groups nor a part of one"):
        local_shape((1, 2, 3, 4), COPIES, Member(0, (4, 2)))


def op(target, inputs, args, shape, pieces=1):
    value = GraphValue(shape=tuple(shape), dtype="float32", storage=0)
    return OpNode(name="y", target=f"aten.{target}", module="", inputs=inputs, args=args, outputs=(value,) * pieces)


@pytest.mark.parametrize(
    ("call", "split", "shape", "why"),
    [
        (op("view.default", ("x",), [X, [1, 2, 8]], (1, 2, 8)), Split(1, groups=2, repeated=True), (1, 2, 4, 2), "repeated heads"),
        (op("transpose.int", ("x",), [X, 1, 2], (1, 4, 2)), Split(1, groups=2, repeated=True), (1, 2, 4), "only a reshape may follow"),
        (op("view.default", ("x",), [X, [3, 2]], (3, 2)), Split(1, mixed=((4, 0), (2, 0))), (1, 6), "unequal blocks"),
        (op("expand.default", ("x",), [X, [1, 6, 3]], (1, 6, 3)), Split(1, 3), (1, 6, 1), "repeats blocks"),
        (op("expand.default", ("x",), [X, [4, 3]], (4, 3)), Split(0), (1, 3), "repeats the split dimension"),
        (op("repeat_interleave.self_int", ("x",), [X, 2, 1], (1, 12)), Split(1, 3), (1, 6), "repeats blocks"),
        (op("repeat_interleave.self_int", ("x",), [X, 2, 1], (1, 8)), Split(1, groups=2), (1, 4), "elements of key-value heads"),
        (op("slice.Tensor", ("x",), [X, 1, 0, 6, 2], (1, 3)), Split(1), (1, 6), "every 2th"),
        (op("slice.Tensor", ("x",), [X, 1, 0, 4], (1, 4)), Split(1), (1, 6), "whole blocks"),
        (op("cat.default", ("x", "x"), [[X, X], 1], (1, 12)), Split(1), (1, 6), "along the split dimension"),
        (op("add.Tensor", ("x", "x"), [X, X], (1, 6)), Pieces([Split(1), Split(1, 2)]), (1, 6), "several results"),
    ],
)  # fmt: skip
def test_the_search_refuses(call, split, shape, why):
    with pytest.raises(Refused, match=why):
        decide(call, {"x": split}, {"x": shape, "y": call.outputs[0].shape})


def test_repeated_heads_ask_for_groups_and_unequal_pieces_differ():
    for call, shape in (
        (op("expand.default", ("x",), [X, [1, 2, 4, 3]], (1, 2, 4, 3)), (1, 2, 1, 3)),
        (op("repeat_interleave.self_int", ("x",), [X, 4, 1], (1, 8)), (1, 2)),
    ):
        with pytest.raises(Grouped) as need:
            decide(call, {"x": Split(1)}, {"x": shape, "y": call.outputs[0].shape})
        assert (need.value.value, need.value.groups) == ("x", 2)
    pieces = op("split_with_sizes.default", ("x",), [X, [4, 2], 1], (1, 4), pieces=2)
    found = decide(pieces, {"x": Split(1, mixed=((4, 0), (2, 2)))}, {"x": (1, 6), "y": (1, 4)})
    assert isinstance(found, Pieces) and list(found) == [Split(1), Split(1, groups=2)]
    pick = op("getitem", ("x",), [X, 1], (1, 2))
    assert decide(pick, {"x": found}, {"x": (1, 4), "y": (1, 2)}) == Split(1, groups=2)


# ---- layouts that are wrong ----------------------------------------------------------------------------------------
def rank_of(case, layout, parameters=None):
    whole = {n: torch.nn.Parameter(p) for n, p in (parameters or case.parameters).items()}
    graph = ForwardGraph.from_json(case.graph)
    return build_rank_module(graph, layout, 0, whole, case.buffers, device=torch.device("cpu"), gradient_bytes=gradient_bytes(case.program, 0))


def test_a_value_that_is_not_what_the_layout_says_is_refused():
    case = plan_case("even", (1, 2, 1))
    values = tuple(msgspec.structs.replace(v, split=None) for v in case.layout.values)
    with pytest.raises(Unsupported, match="the layout says otherwise"):
        rank_of(case, msgspec.structs.replace(case.layout, values=values))


def test_parameters_of_two_dtypes_or_a_narrow_one_are_refused():
    case = plan_case("even", (1, 2, 1))
    name = next(iter(case.parameters))
    with pytest.raises(Unsupported, match=r"gradients of .*float32.*float64"):
        rank_of(case, case.layout, {**case.parameters, name: case.parameters[name].float()})
    with pytest.raises(Unsupported, match="only float32, float64 and bfloat16"):
        rank_of(case, case.layout, {**case.parameters, name: case.parameters[name].half()})


def test_the_checker_misses_no_sum_over_copies():
    """A layout that needs a sum over the ranks that share a key-value head, and a program without it."""
    case = plan_case("grouped_expand", (1, 4, 1))
    assert not check_training(case.program, case.layout)
    plain = plan_case("grouped_expand", (1, 2, 1))
    partial = case.layout.partial_gradients[0]
    wrong = msgspec.structs.replace(plain.layout, partial_gradients=(msgspec.structs.replace(partial, groups=((0, 1),)),))
    found = check_training(plain.program, wrong)
    assert any("partial sum that nothing completes" in f.message for f in found)


def test_the_checker_follows_split_values_apart():
    """Logits are each rank's own: a layout that calls them whole is a different claim, and both parts are still followed."""
    case = plan_case("even", (1, 2, 1))
    assert any(v.split is not None for v in case.layout.values) and any(v.reduce == "max" for v in case.layout.values)
    broken = msgspec.structs.replace(
        case.layout, segments=tuple(msgspec.structs.replace(s, sum_writes=()) if "/max" in "".join(s.sum_writes) else s for s in case.layout.segments)
    )
    assert check_training(case.program, broken)
