"""Soundness: every operator under every signature, on simulated ranks, forward and backward, against the whole operator in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharding_threads import spread, talk, whole_of
from torch import fx, nn

from meshwright.capture.nodes import draws_random_numbers, target_name
from meshwright.decide.layout.autoddl.network import Value, Vertex, spec_of
from meshwright.decide.layout.autoddl.rules import Call, Signature, expand
from meshwright.decide.layout.autoddl.rules_matrix import MATRIX
from meshwright.decide.layout.autoddl.rules_reduce import REDUCE
from meshwright.graph.graph import GraphValue, OpNode, operator_name
from meshwright.lower.sharding import inside
from meshwright.plan.sbp import coordinates, gradient_of, local_shape, valid
from meshwright.plan.sharding import ValueState
from meshwright.run.dtensor.local import Step, run_local
from meshwright.run.dtensor.pieces import Place
from meshwright.run.dtensor.work import local_call

F64 = torch.float64


def t(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)), dtype=F64)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


ones = partial(torch.ones, dtype=F64)
# name: (function of tensors, its tensors, block counts to try by letter)
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "linear": (F.linear, (t(8, 12), t(16, 12), t(16))),
    "linear, three dimensions": (F.linear, (t(8, 4, 12), t(8, 12), t(8))),
    "linear, uneven": (F.linear, (t(7, 9), t(5, 9), t(5))),
    "addmm": (torch.addmm, (t(8), t(4, 12), t(12, 8))),
    "mm": (torch.mm, (t(8, 12), t(12, 4))),
    "bmm": (torch.bmm, (t(4, 8, 12), t(4, 12, 8))),
    "matmul, broadcast": (torch.matmul, (t(4, 8, 4, 12), t(8, 12, 4))),
    "matmul with a vector": (torch.matmul, (t(4, 8, 12), t(12))),
    "baddbmm": (torch.baddbmm, (t(4, 8, 4), t(4, 8, 12), t(4, 12, 4))),
    "conv2d": (partial(F.conv2d, padding=1), (t(8, 4, 6, 6), t(8, 4, 3, 3), t(8))),
    "conv2d, grouped": (partial(F.conv2d, groups=2), (t(4, 4, 5, 5), t(6, 2, 3, 3), t(6))),
    "conv1d": (partial(F.conv1d, stride=2), (t(4, 8, 9), t(4, 8, 3), t(4))),
    "attention": (F.scaled_dot_product_attention, (t(4, 4, 6, 8), t(4, 4, 5, 8), t(4, 4, 5, 4))),
    "attention, causal": (partial(F.scaled_dot_product_attention, is_causal=True), (t(4, 4, 6, 8), t(4, 4, 6, 8), t(4, 4, 6, 8))),
    "attention, grouped": (partial(F.scaled_dot_product_attention, enable_gqa=True), (t(4, 8, 6, 8), t(4, 4, 6, 8), t(4, 4, 6, 8))),
    "attention, mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), (t(4, 4, 6, 8), t(4, 4, 5, 8), t(4, 4, 5, 4), t(6, 5))),
    "embedding": (lambda w, i: F.embedding(i, w), (t(12, 8), ids(12, 4, 6))),
    "embedding, padding": (lambda w, i: F.embedding(i, w, padding_idx=3), (t(12, 8), ids(12, 4, 6))),
    "relu": (F.relu, (t(8, 5),)), "gelu": (F.gelu, (t(8, 5),)), "neg": (torch.neg, (t(8, 5),)),
    "add": (torch.add, (t(8, 5), t(8, 5))), "add, broadcast": (torch.add, (t(4, 8, 6), t(8, 1))), "add, scalar": (lambda x: x + 1.5, (t(8, 4),)),
    "sub": (torch.sub, (t(8, 5), t(8, 5))), "mul": (torch.mul, (t(8, 6), t(8, 6))), "mul, scalar": (lambda x: x * 3.0, (t(8, 6),)),
    "mul by itself": (lambda x: x * x, (t(8, 6),)),
    "div": (torch.div, (t(8, 6), t(8, 6).abs() + 1)),
    "div, scalar": (lambda x: x / 3.0, (t(8, 6),)),
    "scalar over": (lambda x: 2.0 / x, (t(8, 6).abs() + 1,)), "where": (lambda x, y: torch.where(x > 0, x, y), (t(8, 6), t(8, 6))),
    "sum": (lambda x: x.sum(1), (t(8, 6, 4),)), "sum of all": (lambda x: x.sum(), (t(8, 6),)), "mean": (lambda x: x.mean((0, 2)), (t(8, 6, 4),)),
    "mean, uneven": (lambda x: x.mean(0), (t(7, 5),)), "mean, kept": (lambda x: x.mean(-1, keepdim=True), (t(8, 6),)),
    "amax of counts": (lambda i: i.amax(1), (ids(50, 8, 12),)), "var": (lambda x: x.var(1), (t(8, 6),)), "std": (lambda x: x.std(), (t(8, 6),)),
    "softmax": (lambda x: x.softmax(1), (t(8, 6, 4),)), "log_softmax": (lambda x: x.log_softmax(-1), (t(8, 6),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (t(8, 4, 6), t(6), t(6))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), (t(8, 4, 6), t(6))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (t(8, 4, 5), t(4), t(4))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (t(4, 8, 6, 6),)), "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (t(4, 8, 6, 6),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (t(4, 8, 6, 6),)), "pad": (lambda x: F.pad(x, (1, 1)), (t(4, 8, 6),)),
    "cross_entropy": (F.cross_entropy, (t(8, 12), ids(12, 8))),
    "cross_entropy, some ignored": (F.cross_entropy, (t(8, 12), torch.tensor([1, -100, 3, 11, -100, -100, 0, 5]))),
    "cross_entropy, smooth": (partial(F.cross_entropy, label_smoothing=0.1), (t(8, 12), ids(12, 8))),
    "cross_entropy, sum": (partial(F.cross_entropy, reduction="sum"), (t(7, 9), ids(9, 7))),
    "cross_entropy, probabilities": (F.cross_entropy, (t(8, 6), t(8, 6).softmax(1))),
    "mse": (F.mse_loss, (t(8, 6), t(8, 6))),
    "mse, sum": (partial(F.mse_loss, reduction="sum"), (t(7, 5), t(7, 5))),
    "l1": (F.l1_loss, (t(8, 6), t(8, 6))),
    "bce with logits": (F.binary_cross_entropy_with_logits, (t(8, 4), t(8, 4).sigmoid())),
    "reshape, merge": (lambda x: x.reshape(32, 6), (t(8, 4, 6),)), "reshape, divide": (lambda x: x.reshape(4, 3, 4, 2), (t(4, 24),)),
    "view of heads": (lambda x: x.view(4, 5, 3, 4, 2), (t(4, 5, 24),)), "flatten": (lambda x: x.flatten(1), (t(8, 4, 3, 2),)),
    "flatten heads": (lambda x: x.reshape(4, 5, 24), (t(4, 5, 3, 8),)), "transpose": (lambda x: x.transpose(1, 2), (t(4, 8, 6),)),
    "t": (lambda x: x.t(), (t(8, 4),)),
    "permute": (lambda x: x.permute(2, 0, 1), (t(4, 8, 6),)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (t(8, 4),)),
    "squeeze": (lambda x: x.squeeze(1), (t(8, 1, 4),)),
    "expand": (lambda x: x.expand(4, 8, 6), (t(8, 1),)),
    "select": (lambda x: x.select(1, 2), (t(8, 4, 6),)),
    "slice": (lambda x: x[:, 1:3], (t(8, 4, 6),)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (t(8, 4), t(8, 4))),
    "cat, unlike": (lambda x, y: torch.cat([x, y], 1), (t(8, 4), t(8, 2))),
    "stack": (lambda x, y: torch.stack([x, y], 1), (t(8, 4), t(8, 4))), "clone": (lambda x: x.clone(), (t(8, 4),)),
    "chunk": (lambda x: x.chunk(3, -1)[1], (t(8, 12),)),
    "split": (lambda x: x.split(4, 1)[2], (t(8, 12),)),
    "unbind": (lambda x: x.unbind(1)[1], (t(8, 3, 4),)),
    "flip": (lambda x: x.flip(1), (t(8, 4),)), "cumsum": (lambda x: x.cumsum(0), (t(8, 4),)), "prelu": (F.prelu, (t(4, 8, 3), t(8).abs())),
    "batch_norm": (lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True), (t(8, 4, 3, 3), t(4), t(4), t(4).detach(), ones(4))),
    "batch_norm, evaluation": (lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False), (t(8, 4, 3), t(4), t(4), t(4), ones(4))),
    "dropout, evaluation": (lambda x: F.dropout(x, 0.5, False), (t(8, 4),)),
}  # fmt: skip


class Wrapped(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def graph_of(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> fx.Graph:
    return torch.export.export(Wrapped(function), tensors, strict=False).graph


def grown(x: torch.Tensor, fixed: bool) -> torch.Tensor:
    x = x.clone()
    return x.requires_grad_(True) if x.is_floating_point() and not fixed else x


def call_of(node: fx.Node, whole: dict[fx.Node, Any]) -> tuple[Call, list[fx.Node]]:
    inputs: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), inputs.append)
    value = whole[node]
    outputs = [value] if isinstance(value, torch.Tensor) else list(value)
    op = OpNode(
        name=node.name, target=target_name(node.target), module="", inputs=tuple(n.name for n in inputs),
        args=[json_argument_of(a) for a in node.args],
        kwargs={k: json_argument_of(v) for k, v in node.kwargs.items()}, random=draws_random_numbers(node),
        outputs=tuple(GraphValue(shape=tuple(o.shape), dtype=str(o.dtype).removeprefix("torch."), storage=-1) for o in outputs),
    )  # fmt: skip
    tensors = [whole[n] for n in inputs]
    shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else tuple(value.shape) for x in tensors)
    differentiable = tuple(_gradient(x) and outputs[0].is_floating_point() for x in tensors)
    return Call(
        node=op, shapes=shapes, outputs=tuple(tuple(o.shape) for o in outputs), items=(8,) * len(inputs), differentiable=differentiable
    ), inputs


def _gradient(x: Any) -> bool:
    return bool(x.requires_grad if isinstance(x, torch.Tensor) else x[0].requires_grad)


def json_argument_of(x: Any) -> Any:
    if isinstance(x, fx.Node):
        return {"value": x.name}
    if isinstance(x, (list, tuple)):
        return [json_argument_of(i) for i in x]
    return x if x is None or isinstance(x, (bool, int, float, str)) else {"torch": str(x)}


def combinations(signatures: list[Signature], call: Call, sizes: tuple[int, ...]) -> list[tuple[Signature, ...]]:
    """What `Model` makes of the signatures on a mesh."""
    from meshwright.decide.layout.autoddl.model import Model

    vertex = Vertex("op", Value(name=call.node.name, shape=call.outputs[0], item=8, gradient=call.has_gradient), call=call, signatures=signatures)

    class Meshed:
        class mesh:
            pass

    Meshed.mesh.sizes = sizes  # type: ignore[attr-defined]
    return [c for c in product(signatures, repeat=len(sizes)) if Model._combined(Meshed, vertex, c) is not None]  # type: ignore[arg-type]


def check(node: fx.Node, call: Call, inputs: list[fx.Node], whole: dict[fx.Node, Any], chosen: tuple[Signature, ...], sizes: tuple[int, ...]) -> None:
    states = tuple(tuple(s.inputs[i] for s in chosen) for i in range(len(inputs)))
    output = tuple(s.output for s in chosen)
    names = {n: n.name for n in (*inputs, node)}
    shapes = {n.name: s for n, s in zip(inputs, call.shapes, strict=True)}
    local, _ = local_call(node, names, shapes, ValueState(inputs=states, output=output))
    fixed = operator_name(call.node.target) == "batch_norm"
    full = [whole[n].detach() if isinstance(whole[n], torch.Tensor) else [x.detach() for x in whole[n]] for n in inputs]
    leaves = [[x.clone() for x in f] if isinstance(f, list) else grown(f, fixed and i > 2) for i, f in enumerate(full)]
    wanted = run_whole(node, inputs, leaves)
    cotangent = None
    if call.has_gradient and isinstance(wanted, torch.Tensor) and wanted.requires_grad:
        cotangent = t(*wanted.shape) if wanted.shape else torch.tensor(0.7, dtype=F64)
        wanted.backward(cotangent)
    pieces = [
        [spread(x, s, sizes) for x in f] if isinstance(f, list) else spread(f, s, sizes, seed=i)
        for i, (f, s) in enumerate(zip(full, states, strict=True))
    ]
    seeds = spread(cotangent, gradient_of(output), sizes, seed=99) if cotangent is not None else None
    places = [Place(sizes, at) for at in coordinates(sizes)]
    mine = [
        [[x[r] for x in p] if isinstance(full[i], list) else grown(p[r], fixed and i > 2) for i, p in enumerate(pieces)] for r in range(len(places))
    ]
    dtypes = [str(f.dtype).removeprefix("torch.") if isinstance(f, torch.Tensor) else "float64" for f in full]
    promised = [inside(call.node, call.shapes, states, dtypes, sizes, place.at, call.differentiable[0]) for place in places]
    got = talk(sizes, [run_local(local, m, place, Step(0, 0)) for m, place in zip(mine, places, strict=True)], promised)
    if seeds is not None:
        torch.autograd.backward(got, seeds)
    found = [(g, [x.grad if isinstance(x, torch.Tensor) else None for x in m], m) for g, m in zip(got, mine, strict=True)]
    where = f"{call.node.target} {[s.name for s in chosen]} {states} -> {output} on {sizes}"
    for k, w in enumerate([wanted] if isinstance(wanted, torch.Tensor) else wanted):
        parts = [f[0] if isinstance(f[0], torch.Tensor) else f[0][k] for f in found]
        for back in whole_of([p.detach() for p in parts], tuple(w.shape), output, sizes):
            torch.testing.assert_close(back, w.detach(), rtol=1e-9, atol=1e-9, msg=lambda m, where=where: f"{where}: {m}")
    if seeds is None:
        return
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            back_state = gradient_of(states[i])
            for back in whole_of([f[1][i] for f in found], tuple(leaf.shape), back_state, sizes):
                torch.testing.assert_close(back, leaf.grad, rtol=1e-9, atol=1e-9, msg=lambda m, i=i, where=where: f"gradient {i} of {where}: {m}")
    if fixed:  # running statistics of every copy
        for i in (3, 4):
            for back in whole_of([f[2][i] for f in found], tuple(leaves[i].shape), tuple("B" if k == "B" else k for k in states[i]), sizes):
                torch.testing.assert_close(back, leaves[i], rtol=1e-9, atol=1e-9)


def run_whole(node: fx.Node, inputs: list[fx.Node], leaves: list[Any]) -> Any:
    taken = iter(leaves)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: next(taken))
    return node.target(*args, **kwargs)


@pytest.mark.sample(35)
@pytest.mark.parametrize("case", CASES)
def test_every_signature_is_sound(case: str) -> None:
    function, tensors = CASES[case]
    graph = graph_of(function, tensors)
    whole: dict[fx.Node, Any] = {}
    given = iter(tensors)
    tried = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            whole[node] = grown(next(given), case.startswith("batch_norm") and len(whole) > 2)
        elif node.op == "call_function":
            whole[node] = run_copies(node, whole)
            call, inputs = call_of(node, whole)
            spec = spec_of(call)
            assert spec is not None, f"{call.node.target} has no signature"
            signatures = expand(spec, call, {"x": (2, 3)})
            for sizes in ((2,), (4,), (2, 2)):
                chosen = combinations(signatures, call, sizes)
                assert sizes == (4,) or case == "std" or any(s.divided for c in chosen for s in c), "nothing splits this call"
                for one in chosen[:: max(1, len(chosen) // 10)] if len(sizes) > 1 else chosen:
                    check(node, call, inputs, whole, one, sizes)
                    tried += 1
    assert tried >= 2


def run_copies(node: fx.Node, whole: dict[fx.Node, Any]) -> Any:
    """The node's result on copies of its operands, which in-place operators may overwrite."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: whole[n])
    copies = fx.node.map_aggregate((args, kwargs), lambda x: x.clone() if isinstance(x, torch.Tensor) else x)
    return node.target(*copies[0], **copies[1])


def test_the_rules_name_operators_that_exist() -> None:
    for name in (*MATRIX, *REDUCE):
        assert hasattr(torch.ops.aten, name), name


def test_uneven_and_empty_pieces() -> None:
    assert valid((5,), ("S0",), (2,)) and not valid((5,), ("S0",), (4,))  # torch.chunk makes three pieces of five in fours
    assert local_shape((7,), ("S0",), (2,), (1,)) == (3,)
