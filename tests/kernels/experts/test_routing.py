"""Routing, capacity, losses, encode and decode against GShard's one-hot products, written out."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from effort import few  # noqa: E402
from meshwright.errors import UsageError  # noqa: E402
from meshwright.kernels.experts import capacity_of, decode, encode, load_balance_loss, load_importance_loss, route, slots_of  # noqa: E402


def scores_of(seed: int, tokens: int, experts: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(2 * torch.randn(tokens, experts, generator=g, dtype=torch.float64), 1)


def plain_places(scores: torch.Tensor, k: int, *, prioritised: bool) -> tuple[list[list[int]], list[list[int]]]:
    """(experts, places) token by token: every first choice before any second one."""
    rows = scores.tolist()
    order = sorted(range(len(rows)), key=lambda t: -max(rows[t])) if prioritised else list(range(len(rows)))
    chosen = [sorted(range(len(row)), key=lambda e: -row[e])[:k] for row in rows]
    taken = [0] * scores.shape[1]
    places = [[0] * k for _ in rows]
    for j in range(k):
        for t in order:
            places[t][j] = taken[chosen[t][j]]
            taken[chosen[t][j]] += 1
    return chosen, places


def one_hot(chosen: list[list[int]], places: list[list[int]], experts: int, capacity: int, weights: torch.Tensor | None) -> torch.Tensor:
    """GShard's [T, E, C]: where each token goes, times its gates."""
    out = torch.zeros(len(chosen), experts, capacity, dtype=torch.float64)
    for t, row in enumerate(chosen):
        for j, e in enumerate(row):
            if places[t][j] < capacity:
                out[t, e, places[t][j]] = 1 if weights is None else weights[t, j]
    return out


@pytest.mark.parametrize("seed", range(few(6)))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("prioritised", [False, True])
def test_places_and_products_are_those_of_the_one_hot_form(seed: int, k: int, prioritised: bool) -> None:
    tokens, experts, capacity = 3 + 4 * seed, 5, 1 + seed
    scores = scores_of(seed, tokens, experts).requires_grad_()
    found = route(scores, k, prioritised=prioritised)
    chosen, places = plain_places(scores.detach(), k, prioritised=prioritised)
    assert found.experts.tolist() == chosen and found.locations.tolist() == places
    assert found.counts.tolist() == [sum(e in row for row in chosen) for e in range(experts)]
    total = found.gates.sum(1)
    assert k == 1 or torch.allclose(total, torch.ones_like(total))
    x = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    slots = slots_of(found.experts, found.locations, capacity)
    where = one_hot(chosen, places, experts, capacity, None)
    buffer = encode(x, slots, experts * capacity)
    assert torch.equal(buffer.view(experts, capacity, 4), torch.einsum("tec,th->ech", where, x))
    out = decode(buffer, slots, found.gates)
    weighted = one_hot(chosen, places, experts, capacity, found.gates.detach())
    assert torch.allclose(out, torch.einsum("tec,ech->th", weighted, buffer.view(experts, capacity, 4)))


@pytest.mark.parametrize("before", [False, True])
def test_gradients_are_exact(before: bool) -> None:
    """By finite differences, with gates on either side and some tokens dropped."""
    found = route(scores_of(3, 7, 3), 2)
    slots = slots_of(found.experts, found.locations, 3)
    assert (slots < 0).any() and (slots >= 0).any()

    def run(x: torch.Tensor, gates: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return decode(torch.tanh(encode(x, slots, 9, gates if before else None) * w), slots, None if before else gates)

    x, gates = torch.randn(7, 4, dtype=torch.float64, requires_grad=True), found.gates.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, gates, torch.randn(9, 4, dtype=torch.float64, requires_grad=True)))


def test_no_tokens() -> None:
    found = route(torch.zeros(0, 4), 2)
    assert found.counts.tolist() == [0] * 4 and found.locations.shape == (0, 2)
    assert decode(encode(torch.zeros(0, 3), slots_of(found.experts, found.locations, 0), 0), found.locations).shape == (0, 3)


@pytest.mark.parametrize(("k", "where"), [(0, "route"), (5, "route")])
def test_more_choices_than_experts_are_refused(k: int, where: str) -> None:
    with pytest.raises(UsageError, match=r"k must be 1\.\.4") as error:
        route(torch.rand(3, 4), k)
    assert error.value.where == where and error.value.hint in ("k=1", "k=4")
    with pytest.raises(UsageError, match=r"must be \[tokens, experts\]"):
        route(torch.rand(3), 1)


def test_capacity() -> None:
    """Tutel's arithmetic: int() after ceil(), then the alignment; a wide one is rounded itself."""
    many = {"tokens": 1000, "experts": 7, "k": 2, "demand": 500}  # ceil(1000 / 7) = 143
    assert capacity_of(1.0, **many) == 286 and capacity_of(0.5, **many) == 142 and capacity_of(0.999, **many) == 284
    assert capacity_of(0, **many) == 500 and capacity_of(-1.0, **many) == 286 and capacity_of(-4, **many) == 500
    assert capacity_of(1.0, **many, alignment=8) == 288 and capacity_of(0, **many, alignment=300) == 768
    assert capacity_of(1.0, tokens=0, experts=7, k=2, demand=0) == 0
    for factor, hint in ((0.001, "0.00699301 or more"), (-0.001, "-0.00699301 or more")):
        with pytest.raises(UsageError, match="rounds to a capacity of zero") as error:
            capacity_of(factor, **many)
        assert hint in error.value.hint
    with pytest.raises(UsageError, match="must be a number"):
        capacity_of(math.nan, **many)


def test_losses() -> None:
    """Balanced scores give 1; otherwise the formulas, written out."""
    even = torch.full((8, 4), 0.25)
    assert load_balance_loss(even, torch.arange(8) % 4).item() == pytest.approx(1)
    scores = scores_of(1, 9, 4)
    first = scores.argmax(1)
    expected = sum(float(scores[:, e].sum()) * int((first == e).sum()) for e in range(4)) * 4 / 81
    assert load_balance_loss(scores, first).item() == pytest.approx(expected)
    assert load_balance_loss(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)).item() == 0
    clean, noisy = scores.float(), torch.randn(9, 2)
    load = torch.distributions.Normal(0.0, 0.5 / 4).cdf(clean - noisy[:, -1:]).sum(0)
    wanted = [x.var() / (x.mean() ** 2 + 1e-10) for x in (clean.sum(0), load)]
    assert load_importance_loss(clean, noisy, 0.5).item() == pytest.approx(float(sum(wanted)) / 2, rel=1e-5)
    with pytest.raises(UsageError, match="needs noise above 0"):
        load_importance_loss(clean, noisy, 0.0)
    assert load_importance_loss(torch.zeros(0, 4), torch.zeros(0, 2), 0.5).item() == 0
