"""The operators that a split region is made of: adjoint to each other, and their derivatives right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_rig import plan_case

from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.plan.plan import ParamShard
from meshwright.plan.shards import part_ranges
from meshwright.run.steps.forward_graph import ForwardGraph
from meshwright.run.tensor.vocabulary import vocabulary_embedding, vocabulary_loss, vocabulary_max, vocabulary_sums
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import gradient_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tensor", "speeds"), [(2, ()), (3, ()), (2, (3.0, 1.0))])
def test_a_region_and_its_backward_are_adjoint(tensor, speeds):
    """<F x, y> = <x, F* y> for F = copy to the region, column-parallel, row-parallel, sum: the inner products are over all ranks' data."""
    case = plan_case("linears", (1, tensor, 1), loss="mse", options=TensorOptions(speeds=speeds))
    key = next(s.key for s in case.layout.segments if s.split)
    segment = next(s for s in case.layout.segments if s.key == key)
    x, y = torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    forward, backward = torch.zeros_like(y), torch.zeros_like(x)
    for rank in range(tensor):
        whole = {n: torch.nn.Parameter(p) for n, p in case.parameters.items()}
        sizes = gradient_bytes(case.program, rank)
        module = build_rank_module(
            ForwardGraph.from_json(case.graph), case.layout, rank, whole, case.buffers, device=CPU, gradient_bytes=sizes
        ).segments[key]
        (out,) = module.forward(0, [x], [])
        (gradient,) = module.backward(0, [y]).values()
        forward += out  # what the all-reduce after the region adds up; its own backward is the identity
        backward += gradient  # what the all-reduce behind the region adds up
    assert segment.sum_writes and segment.sum_grads
    assert float((forward * y).sum()) == pytest.approx(float((x * backward).sum()), rel=1e-12)
    assert torch.allclose(forward, x @ case.parameters["up.weight"].T @ case.parameters["down.weight"].T)


def cuts(classes, parts):
    shares = tuple(classes // parts + (i < classes % parts) for i in range(parts))
    return [part_ranges(classes, ParamShard(param="w", axis=0, shares=shares), i, parts)[0] for i in range(parts)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4), st.integers(4, 11), st.sampled_from([(), (3,), (2, 2)]), st.sampled_from([0, 1, 2]), st.sampled_from([0.0, 0.1, 1.0]),
    st.booleans(), st.booleans(), st.integers(0, 10_000),
)  # fmt: skip
def test_split_cross_entropy_is_torchs(parts, classes, extra, reduction, smoothing, weighted, large, seed):
    """Any reduction, smoothing, weights, ignored targets and shape of the targets, on logits that would overflow without the maximum."""
    generator = torch.Generator().manual_seed(seed)
    shape = (5, classes, *extra)
    logits = torch.randn(shape, dtype=torch.float64, generator=generator) * (400 if large else 1)
    target = torch.randint(classes, (5, *extra), generator=generator)
    target.view(-1)[0] = -100
    weight = 0.1 + torch.rand(classes, dtype=torch.float64, generator=generator) if weighted else None
    reference = logits.clone().requires_grad_()
    name = ("none", "mean", "sum")[reduction]
    expected = F.cross_entropy(reference, target, weight=weight, reduction=name, label_smoothing=smoothing)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(upstream)
    pieces = [logits[:, a:b].clone().requires_grad_() for a, b in cuts(classes, parts)]
    largest = torch.stack([vocabulary_max(x) for x in pieces]).amax(0)
    options = {"weight": weight, "ignore_index": -100, "label_smoothing": smoothing}
    sums = sum(vocabulary_sums(x, target, largest, start=a, stop=b, **options) for x, (a, b) in zip(pieces, cuts(classes, parts), strict=True))
    loss = vocabulary_loss(sums, target, reduction=reduction, smoothing="torch", classes=classes, dtype=torch.float64, **options)
    loss.backward(upstream)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([x.grad for x in pieces], 1), reference.grad, rtol=1e-9, atol=1e-12)


def test_derivatives_by_finite_differences():
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 6, -100, 3])
    options = {"weight": torch.rand(7, dtype=torch.float64), "ignore_index": -100, "label_smoothing": 0.2}

    def loss(x):
        largest = x.detach().amax(1)
        sums = sum(vocabulary_sums(x[:, a:b], target, largest, start=a, stop=b, **options) for a, b in ((0, 3), (3, 7)))
        return vocabulary_loss(sums, target, reduction=1, smoothing="megatron", classes=7, dtype=torch.float64, **options)

    assert torch.autograd.gradcheck(loss, (logits,))
    table = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 4], [2, 5]])
    assert torch.autograd.gradcheck(lambda w: vocabulary_embedding(w, ids, 2, 5, 6, -1), (table,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_summed_wide(dtype):
    logits = torch.randn(6, 50).to(dtype).requires_grad_()
    target = torch.randint(50, (6,))
    options = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0}
    sums = vocabulary_sums(logits, target, vocabulary_max(logits), **options)
    loss = vocabulary_loss(sums, target, reduction=1, smoothing="torch", classes=50, dtype=dtype, **options)
    loss.backward()
    assert sums.dtype == torch.float32 and loss.dtype == dtype and logits.grad.dtype == dtype
    torch.testing.assert_close(loss.float(), F.cross_entropy(logits.detach().float(), target), rtol=1e-2, atol=1e-2)


def test_padding_rows_and_indices_out_of_range():
    whole = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 4, 4, 8])
    expected = F.embedding(ids, whole, padding_idx=4)
    upstream = torch.randn_like(expected)
    (reference,) = torch.autograd.grad(expected, whole, upstream)
    total, gradients = torch.zeros_like(expected), []
    for a, b in cuts(9, 4):
        part = whole.detach()[a:b].requires_grad_()
        out = vocabulary_embedding(part, ids, a, b, 9, 4)
        total = total + out.detach()
        gradients += torch.autograd.grad(out, part, upstream)
    assert torch.equal(total, expected.detach()) and torch.equal(torch.cat(gradients), reference)
    for bad in (-1, 9):
        with pytest.raises(RuntimeError, match=r"not in \[0, 9\)"):
            vocabulary_embedding(whole, torch.tensor([bad]), 0, 9, 9, -1)
