"""Tensor-parallel rewriting: the shards of a block, run apart and summed, give the whole block's output and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.errors import FormatError, Unsupported
from meshwright.plan.shards import part_ranges
from meshwright.run.steps.forward_graph import Constant, ForwardGraph, ForwardNode, TensorInfo, resolve
from meshwright.run.tensor.sharding import PARTIAL, Shard, check_gradients, local_shape, propagate, take_part


def node(name, target, args, shape, **kwargs):
    return ForwardNode(name, target, args, kwargs, (TensorInfo(tuple(shape), "float32"),))


def v(name):
    return {"value": name}


class Blocks:
    """Equal parts of every one of `blocks` equal blocks."""

    def __init__(self, blocks):
        self.blocks, self.groups, self.shares, self.mixed = blocks, 0, (), ()


def take_shard(tensor, axis, blocks, part, parts):
    return take_part(tensor, axis, Blocks(blocks), part, parts)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1))
def test_shards_put_together_are_the_whole(blocks, parts, unit, axis):
    size = blocks * parts * unit
    whole = torch.arange(3.0 * size).reshape((size, 3) if axis == 0 else (3, size))
    again = torch.full_like(whole, -1)
    for part in range(parts):
        shard = take_shard(whole, axis, blocks, part, parts)
        assert shard.is_contiguous() and shard.shape[axis] * parts == size
        for (low, high), rows in zip(part_ranges(size, Blocks(blocks), part, parts), shard.split(unit, axis), strict=True):
            again.narrow(axis, low, high - low).copy_(rows)
    assert torch.equal(again, whole)


def test_a_shard_that_does_not_divide_is_refused():
    with pytest.raises(Unsupported, match="does not divide into 3 blocks of 2 parts"):
        take_shard(torch.zeros(9, 2), 0, 3, 0, 2)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_a_view_of_shards_is_the_shard_of_the_view(shape, tail, data):
    """Either the rewritten view gives exactly this rank's part of the whole view, or it is refused."""
    parts = data.draw(st.sampled_from([2, 3]))
    dim = data.draw(st.integers(0, len(shape) - 1))
    blocks = data.draw(st.sampled_from([1, 2, 3]))
    shape = [d * parts * blocks if i == dim else d for i, d in enumerate(shape)]
    numel = 1
    for d in shape:
        numel *= d
    left, out = numel, []
    for d in tail:
        if left % d == 0:
            out.append(d)
            left //= d
    out.append(left)
    whole = torch.arange(float(numel)).reshape(shape)
    try:
        (rewritten,), states = propagate([node("y", "aten.view.default", [v("x"), out], out)], {"x": Shard(dim, blocks)}, {"x": tuple(shape)}, parts)
    except Unsupported as error:
        assert "node y" in error.where
        return
    state = states["y"]
    for part in range(parts):
        local = take_shard(whole, dim, blocks, part, parts).view(rewritten.args[1])
        assert tuple(local.shape) == local_shape(out, state, parts)
        assert torch.equal(local, take_shard(whole.view(out), state.dim, state.blocks, part, parts))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, style: str) -> None:
        super().__init__()
        self.heads, self.style = heads, style
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        h, d = self.heads, w // self.heads
        y = self.qkv(x)
        if self.style == "split":
            q, k, u = (t.view(b, s, h, d).transpose(1, 2) for t in y.split(w, dim=2))
        elif self.style == "chunk":
            q, k, u = (t.unflatten(-1, (h, d)).permute(0, 2, 1, 3) for t in y.chunk(3, dim=-1))
        elif self.style == "slice":
            q, k, u = (t.reshape(b, s, h, d).transpose(1, 2) for t in (y[..., :w], y[..., w : 2 * w], y[..., 2 * w :]))
        else:
            q, k, u = y.view(b, s, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)
        if self.style == "unbind":
            mask = torch.ones(s, s, dtype=torch.bool).tril()
            scores = (q @ k.transpose(-2, -1) / d**0.5).masked_fill(~mask, float("-inf"))
            z = F.softmax(scores, dim=-1) @ u
        elif self.style == "written":  # keys put together in a new value, scores less the largest
            empty = k.new_empty(*k.shape[:-1], d)
            k = torch.slice_scatter(torch.slice_scatter(empty, k[..., :1], 3, 0, 1), k[..., 1:], 3, 1, d)
            scores = q @ k.transpose(-2, -1)
            scores = torch.max(scores - scores.max(dim=-1, keepdim=True).values, scores.new_zeros(b, h, s, s) - 9)
            z = F.softmax(scores, dim=-1) @ u
        else:
            z = F.scaled_dot_product_attention(q, k, u, is_causal=True)
        return self.out(z.transpose(1, 2).reshape(b, s, w))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def sharded_run(module, blocks, x, parts):
    """(sum of the parts' outputs without the row bias, sum of the parts' input gradients) by propagation on the exported graph."""
    exported = torch.export.export(module, (x,), strict=False).module()
    names = {n: f"param:{n.target}" if n.op == "get_attr" else n.name for n in exported.graph.nodes}
    from meshwright.run.steps import forward_graph

    nodes, result = [], None
    for n in exported.graph.nodes:
        if n.op == "call_function":
            nodes.append(forward_graph._node(n, names, opaque=False))
        elif n.op == "output":
            result = n.args[0][0].name
    shards = {name: (0, b) if axis == 0 else (1, b) for name, (axis, b) in blocks.items()}
    params = dict(module.named_parameters())
    states = {f"param:{n}": Shard(*s) for n, s in shards.items()}
    shapes = {f"param:{n}": tuple(p.shape) for n, p in params.items()} | {"x": tuple(x.shape)}
    for n in exported.graph.nodes:
        if n.op in ("call_function", "get_attr") and isinstance(n.meta.get("val"), torch.Tensor):
            shapes[names[n]] = tuple(n.meta["val"].shape)
    rewritten, found = propagate(nodes, states, shapes, parts)
    assert found[result] is PARTIAL
    whole = [f"param:{n}" for n in params if n not in shards and not n.endswith(("out.bias", "down.bias"))]
    check_gradients(rewritten, found, ["x"], whole, [result], ["x"])
    with pytest.raises(Unsupported, match="partial sum"):
        check_gradients(rewritten, found, ["x"], whole, [result], [])
    total, gradient = 0, 0
    for part in range(parts):
        leaf = x.clone().requires_grad_()
        known = {"x": leaf}
        for n, p in params.items():
            known[f"param:{n}"] = take_shard(p.detach(), *shards[n], part, parts) if n in shards else p.detach()
        for n in rewritten:
            args = [forward_graph.decode_argument(a, known.__getitem__, torch.device("cpu")) for a in n.args]
            kwargs = {k: forward_graph.decode_argument(a, known.__getitem__, torch.device("cpu")) for k, a in n.kwargs.items()}
            known[n.name] = resolve(n.target)(*args, **kwargs)
        known[result].sum().backward()
        total, gradient = total + known[result].detach(), gradient + leaf.grad
    return total, gradient


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("style", ["split", "chunk", "slice", "unbind", "view", "written"])
def test_attention_in_parts_is_attention(style, parts):
    torch.manual_seed(0)
    module, x = Attention(16, 4, style).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    total, gradient = sharded_run(module, {"qkv.weight": (0, 3), "qkv.bias": (0, 3), "out.weight": (1, 1)}, x, parts)
    leaf = x.clone().requires_grad_()
    expected = module(leaf)
    expected.sum().backward()
    torch.testing.assert_close(total + module.out.bias, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


def test_a_gated_block_in_parts_is_the_block():
    torch.manual_seed(0)
    module, x = Gated(8, 12).double(), torch.randn(3, 8, dtype=torch.float64)
    blocks = {"gate.weight": (0, 1), "gate.bias": (0, 1), "up.weight": (0, 1), "down.weight": (1, 1)}
    total, gradient = sharded_run(module, blocks, x, 3)
    leaf = x.clone().requires_grad_()
    expected = module(leaf)
    expected.sum().backward()
    torch.testing.assert_close(total + module.down.bias, expected)
    torch.testing.assert_close(gradient, leaf.grad)


X = {"x": Shard(1, 1)}


@pytest.mark.parametrize(
    ("call", "states", "shapes", "why"),
    [
        (node("y", "aten.softmax.int", [v("x"), -1], (4, 6)), X, {"x": (4, 6)}, "runs over the sharded dimension"),
        (node("y", "aten.layer_norm.default", [v("x"), [6]], (4, 6)), X, {"x": (4, 6)}, "normalises over"),
        (node("y", "aten.einsum.default", ["ab,ac->bc", [v("x"), v("z")]], (6, 6)), {"x": Shard(0)}, {"x": (4, 6), "z": (4, 6)}, "of ab,ac->bc"),
        (node("y", "aten.view_as_complex.default", [v("x")], (2,)), X, {"x": (2, 2)}, "pairs the sharded dimension"),
        (node("y", "aten.stack.default", [[v("x"), v("z")], 1], (4, 2, 6)), {**X, "z": Shard(0)}, {"x": (4, 6), "z": (4, 6)}, "differently"),
        (node("y", "aten.add.Tensor", [v("x"), v("z")], (4, 6)), {"x": PARTIAL}, {"x": (4, 6), "z": (4, 6)}, "all-reduce must come first"),
        (node("y", "aten.cumsum.default", [v("x"), 1], (4, 6)), X, {"x": (4, 6)}, "no rule"),
        (node("y", "aten.select.int", [v("x"), 1, 0], (4,)), X, {"x": (4, 6)}, "picks one entry"),
        (node("y", "aten.slice.Tensor", [v("x"), 1, 0, 4], (4, 4)), {"x": Shard(1, 2)}, {"x": (4, 6)}, "whole blocks"),
        (node("y", "aten.linear.default", [v("x"), v("w")], (4, 3)), X, {"x": (4, 6), "w": (3, 6)}, "input"),
        (
            node("y", "aten.linear.default", [v("z"), v("w"), v("b")], (4, 6)),
            {"w": Shard(0, 1)},
            {"z": (4, 6), "w": (6, 6), "b": (6,)},
            "bias split alike",
        ),
        (node("y", "aten.matmul.default", [v("x"), v("z")], (4, 3)), X, {"x": (4, 6), "z": (6, 3)}, "left"),
        (node("y", "aten.new_zeros.default", [v("x"), [4, 12]], (4, 12)), X, {"x": (4, 6)}, "another size"),
        (node("y", "aten.slice_scatter.default", [v("x"), v("z"), 1, 0, 2], (4, 6)), X, {"x": (4, 6), "z": (4, 2)}, "writes None into"),
        (node("y", "aten.max.dim", [v("x"), 1], (4,)), X, {"x": (4, 6)}, "runs over the sharded dimension"),
        (node("y", "aten.cat.default", [[v("x"), v("z")], 1], (4, 12)), X, {"x": (4, 6), "z": (4, 6)}, "sharded differently"),
    ],
)
def test_what_cannot_be_split_names_the_node(call, states, shapes, why):
    with pytest.raises(Unsupported, match=why) as caught:
        propagate([call], states, shapes, 2)
    assert caught.value.where == "node y"


@pytest.mark.parametrize("call", [("slice_scatter.default", 0, 0, 2), ("max.other",), ("cat.default",)])
def test_a_whole_operand_is_cut_first(call):
    """Keys that all heads share, written into each head's or joined with them: each rank takes its own part of them."""
    name, *rest = call
    operands = [[v("x"), v("z")], 0] if name == "cat.default" else [v("x"), v("z"), *rest]
    made = node("y", f"aten.{name}", operands, (8, 6) if name == "cat.default" else (4, 6))
    rewritten, states = propagate([made], X, {"x": (4, 6), "z": (2, 6) if rest else (4, 6)}, 2)
    assert [n.target.split(".")[1] for n in rewritten] == ["own_part", name.split(".")[0]] and states["y"] == Shard(1)


def test_mixed_gradients_are_refused():
    nodes = [
        node("a", "aten.linear.default", [v("x"), v("w")], (4, 6)),
        node("b", "aten.relu.default", [v("x")], (4, 6)),
    ]
    rewritten, states = propagate(nodes, {"w": Shard(0, 1)}, {"x": (4, 6), "w": (6, 6)}, 2)
    with pytest.raises(Unsupported, match="partial sum along one path and whole along another"):
        check_gradients(rewritten, states, ["x"], [], ["b"], ["x"])
    with pytest.raises(Unsupported, match="summing it would multiply"):
        check_gradients([nodes[1]], {}, ["x"], [], ["b"], ["x"])


def test_forward_graphs_are_read_strictly():
    graph = ForwardGraph(
        (node("y", "aten.add.Tensor", [v("input:0"), {"float": "inf"}], (2,)),),
        (TensorInfo((2,), "float32"),),
        ("y",),
        {"c": Constant((1,), "int64", [3])},
    )
    assert ForwardGraph.from_json(graph.to_json()) == graph
    for bad in (b"{}", b"[" * 100_000, b'{"nodes": 3}'):
        with pytest.raises(FormatError):
            ForwardGraph.from_json(bad)
    with pytest.raises(FormatError, match="not an operator name"):
        resolve("os.system")
    with pytest.raises(Unsupported, match="no operator"):
        resolve("aten.nonsense.default")
