"""Masks by counter: slices of the serial mask, whoever draws them; statistics; recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import forward_of
from torch.utils.checkpoint import checkpoint

from meshwright.errors import Unsupported
from meshwright.run.steps.forward_graph import ForwardNode, TensorInfo, resolve
from meshwright.run.train.dropout import Draws, PlacesUnknown, RandomPlace, SerialDraws, draw_function, keep_mask, random_places

CPU = torch.device("cpu")
PLACE = RandomPlace(0, True)


def whole(shape):
    return [[(0, d)] for d in shape]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_any_part_is_the_slice_of_the_whole(shape, data):
    draws = Draws(seed=1, step=2, first=10, samples=data.draw(st.sampled_from([d for d in range(1, shape[0] + 1) if shape[0] % d == 0])))
    mask = keep_mask(draws, PLACE, 0.6, shape, whole(shape), CPU)
    dim = data.draw(st.integers(0, len(shape) - 1))
    a = data.draw(st.integers(0, shape[dim] - 1))
    b = data.draw(st.integers(a + 1, shape[dim]))
    ranges = [[(a, b)] if i == dim else [(0, d)] for i, d in enumerate(shape)]
    assert torch.equal(keep_mask(draws, PLACE, 0.6, shape, ranges, CPU), mask.narrow(dim, a, b - a))


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_micro_batches_are_slices_of_the_batch(rows):
    shape = (6, 4, 5)
    mask = keep_mask(Draws(1, 0, 0, 6), PLACE, 0.5, shape, whole(shape), CPU)
    parts = [keep_mask(Draws(1, 0, i, rows), PLACE, 0.5, (rows, 4, 5), whole((rows, 4, 5)), CPU) for i in range(0, 6, rows)]
    assert torch.equal(torch.cat(parts), mask)
    flat = [keep_mask(Draws(1, 0, i, rows), PLACE, 0.5, (rows * 4, 5), whole((rows * 4, 5)), CPU) for i in range(0, 6, rows)]
    assert torch.equal(torch.cat(flat).view(shape), mask)  # rows of samples merged with a dimension behind


def test_what_does_not_depend_on_the_input_is_drawn_once_per_step():
    place = RandomPlace(0, False)
    first, second = (keep_mask(Draws(1, 3, i, 2), place, 0.5, (4, 64), whole((4, 64)), CPU) for i in (0, 2))
    later = keep_mask(Draws(1, 4, 0, 2), place, 0.5, (4, 64), whole((4, 64)), CPU)
    assert torch.equal(first, second) and not torch.equal(first, later)


def test_bits_look_random():
    """Means, and correlation between neighbours, samples, calls, seeds and steps, within five standard deviations."""
    shape, keep = (2, 300, 300), 0.7
    n = 2 * 300 * 300
    base = keep_mask(Draws(0, 0, 0, 2), PLACE, keep, shape, whole(shape), CPU).double()
    others = {
        "sample": keep_mask(Draws(0, 0, 2, 2), PLACE, keep, shape, whole(shape), CPU),
        "seed": keep_mask(Draws(1, 0, 0, 2), PLACE, keep, shape, whole(shape), CPU),
        "call": keep_mask(Draws(0, 0, 0, 2), RandomPlace(1, True), keep, shape, whole(shape), CPU),
    }  # fmt: skip
    sigma = (keep * (1 - keep)) ** 0.5
    assert abs(float(base.mean()) - keep) < 5 * sigma / n**0.5
    shifted = {"column": base.roll(1, 2), "row": base.roll(1, 1), "batch": base.roll(1, 0)}
    for name, other in {**shifted, **{k: v.double() for k, v in others.items()}}.items():
        correlation = float(((base - keep) * (other - keep)).mean()) / sigma**2
        assert abs(correlation) < 5 / n**0.5, name
    assert float(base.mean((0, 1)).std()) < 2 * sigma / 600**0.5 and float(base.mean((0, 2)).std()) < 2 * sigma / 600**0.5
    edge = keep_mask(Draws(0, 0, 0, 2), PLACE, 1.0, shape, whole(shape), CPU), keep_mask(Draws(0, 0, 0, 2), PLACE, 0.0, shape, whole(shape), CPU)
    assert bool(edge[0].all()) and not bool(edge[1].any())


def node(target, args, shape):
    return ForwardNode("d", target, args, {}, (TensorInfo(shape, "float64"),))


def test_every_form_of_dropout_agrees_with_eager_and_replays():
    """In a graph, in eager code under SerialDraws, and again under recomputation: the same mask."""
    draws = Draws(seed=5, step=1, first=4, samples=2)
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    shape = tuple(x.shape)
    forms = {
        "aten.dropout.default": ((0.3, True), lambda y: F.dropout(y, 0.3)),
        "aten.feature_dropout.default": ((0.3, True), lambda y: F.dropout2d(y, 0.3)),
        "aten.alpha_dropout.default": ((0.3, True), lambda y: F.alpha_dropout(y, 0.3, True)),
        "aten.native_dropout.default": ((0.3, True), lambda y: torch.native_dropout(y, 0.3, True)[0]),
    }
    for target, (args, eager) in forms.items():
        call = draw_function(node(target, [{"value": "x"}, *args], shape), resolve(target), PLACE, draws, shape, whole)

        def run(y, call=call, args=args):
            out = call(y, *args)
            return out[0] if isinstance(out, tuple) else out

        planned = run(x)
        with SerialDraws(draws, [PLACE]):
            serial = eager(x)
        assert torch.equal(planned, serial), target
        assert bool((planned == planned.flatten()[0]).all()) is False
        (plain,) = torch.autograd.grad(run(x).square().sum(), x)
        (again,) = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).square().sum(), x)
        assert torch.equal(plain, again), target


def test_eager_checkpoints_draw_the_same_again_in_backward():
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    places = [PLACE, replace(PLACE, number=PLACE.number + 1)]

    def run(segment):
        with SerialDraws(Draws(seed=5, step=1, first=4, samples=2), places):
            y = segment(F.dropout, segment(F.dropout, x * x))
            return y, *torch.autograd.grad(y.square().sum(), x)

    plain, again = run(lambda f, y: f(y, 0.4)), run(lambda f, y: checkpoint(f, y, 0.4, use_reentrant=False))
    assert all(map(torch.equal, plain, again)) and bool((plain[0] == 0).any()) and bool(plain[0].any())


@pytest.mark.parametrize("options", [{"is_causal": True}, {"mask": True}, {"scale": 0.2}, {"bias": True}, {"gqa": True}])
def test_attention_with_dropout_is_eagers(options):
    draws = Draws(seed=5, step=1, first=4, samples=2)
    q, k, v = (torch.randn(2, h, 5, 8, dtype=torch.float64) for h in ((4, 2, 2) if options.get("gqa") else (4, 4, 4)))
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if options.get("mask") else None
    mask = torch.randn(5, 5, dtype=torch.float64) if options.get("bias") else mask
    given = {"scale": options.get("scale"), "enable_gqa": bool(options.get("gqa"))}
    target = "aten.scaled_dot_product_attention.default"
    args = (mask, 0.25, bool(options.get("is_causal")))
    values = [{"value": n} for n in "qkv"]
    call = draw_function(node(target, [*values, *args], tuple(q.shape)), resolve(target), PLACE, draws, tuple(q.shape), whole)
    planned = call(q, k, v, *args, **given)
    with SerialDraws(draws, [PLACE]):
        serial = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.25, is_causal=args[2], **given)
    torch.testing.assert_close(planned, serial, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(planned, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=args[2], **given))


def test_places_number_the_calls_of_a_model():
    graph = forward_of("tests/run/tensor_models.py:odd_tied", 2)
    places = random_places(graph)
    assert [p.number for p in places.values()] == list(range(7)) and all(p.batched for p in places.values())


def test_unknown_draws_are_told():
    x = torch.ones(2, 3)
    with pytest.raises(PlacesUnknown), SerialDraws(Draws(samples=2), None):
        F.dropout(x, 0.5)
    with pytest.raises(Unsupported, match="traced calls do not"), SerialDraws(Draws(samples=2), []):
        F.dropout(x, 0.5)
