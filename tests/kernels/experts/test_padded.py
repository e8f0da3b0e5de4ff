"""Expert layers as operators of fixed shapes, against sums over tokens one by one, with what each operator's gradient must be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from meshwright.errors import NotFinite  # noqa: E402
from meshwright.kernels.experts.padded import ACTIVATIONS, expert_counts, expert_mlp, expert_rows, expert_sums, mlp_flops  # noqa: E402

T, H, F, E, K = 7, 4, 3, 4, 2


def given(seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(T, H, generator=g, dtype=torch.float64), torch.rand(T, K, generator=g, dtype=torch.float64)
    index = torch.rand(T, E, generator=g).topk(K).indices
    up, down = torch.randn(E, 2 * F, H, generator=g, dtype=torch.float64), torch.randn(E, H, F, generator=g, dtype=torch.float64)
    return tuple(t.requires_grad_() if t.is_floating_point() else t for t in (x, w, index, up, down))


def layer(x, w, index, up, down, capacity: int, activation: str = "silu"):  # type: ignore[no-untyped-def]
    rows, counts = expert_rows(x, index, None, E, capacity), expert_counts(index, E, capacity)
    return expert_sums(expert_mlp(rows, counts, up, down, activation, T * K), index, w)


def plain(x, w, index, up, down, capacity: int, activation: str = "silu"):  # type: ignore[no-untyped-def]
    act, out, taken = ACTIVATIONS[activation][0], [torch.zeros(H, dtype=torch.float64) for _ in range(T)], [0] * E
    for j in range(K):
        for t in range(T):
            e = int(index[t, j])
            taken[e] += 1
            if taken[e] <= capacity:
                g, u = (up[e] @ x[t]).chunk(2)
                out[t] = out[t] + w[t, j] * (down[e] @ (act(g) * u))
    return torch.stack(out)


@pytest.mark.parametrize(("capacity", "activation"), [(T, "silu"), (2, "silu"), (T, "gelu"), (3, "gelu-tanh"), (T, "relu")])
def test_equal_to_sums_token_by_token_with_gradients(capacity: int, activation: str) -> None:
    values = given()
    ours, theirs = (f(*values, capacity, activation) for f in (layer, plain))
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, T * H, dtype=torch.float64).view(T, H)
    wanted = [v for v in values if v.requires_grad]
    found, expected = (torch.autograd.grad((y * weights).sum(), wanted) for y in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_blocks_of_several_ranks_are_those_of_one() -> None:
    """Two ranks' buffers, exchanged in equal blocks, through halves of the experts, and exchanged back."""
    one, two = given(0), given(1)
    up, down = one[3].detach(), one[4].detach()
    expected = [layer(x.detach(), w.detach(), i, up, down, T) for x, w, i, _, _ in (one, two)]
    rows = [expert_rows(x.detach(), i, None, E, T).unflatten(0, (2, -1)) for x, _, i, _, _ in (one, two)]
    counts = [expert_counts(i, E, T).unflatten(0, (2, -1)) for _, _, i, _, _ in (one, two)]
    done = [
        expert_mlp(
            torch.cat([rows[0][r], rows[1][r]]), torch.cat([counts[0][r], counts[1][r]]), up.chunk(2)[r], down.chunk(2)[r], "silu", T
        ).unflatten(0, (2, -1))
        for r in range(2)
    ]  # fmt: skip
    for r, (_, w, i, _, _) in enumerate((one, two)):
        back = torch.cat([done[0][r], done[1][r]])
        assert torch.allclose(expert_sums(back, i, w.detach()), expected[r], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("capacity", [T, 2])
def test_ranks_with_the_same_tokens_each_add_what_their_experts_give(capacity: int) -> None:
    """Three ranks with one, none and three of the experts, in an order of their own: sums of results and of gradients are those of one."""
    values = given()
    x, w, index, up, down = values
    weights = torch.linspace(-1, 1, T * H, dtype=torch.float64).view(T, H)
    wanted = [v for v in values if v.requires_grad]
    total, gradients = torch.zeros(T, H, dtype=torch.float64), [torch.zeros_like(v) for v in wanted]
    for places in ([-1, 0, -1, -1], [-1] * E, [2, -1, 0, 1]):
        own = sorted((e for e in range(E) if places[e] >= 0), key=places.__getitem__)
        rows, counts = expert_rows(x, index, None, E, capacity, places), expert_counts(index, E, capacity, places)
        assert rows.shape == (len(own), capacity, H) and counts.tolist() == [min(capacity, int((index == e).sum())) for e in own]
        y = expert_sums(expert_mlp(rows, counts, up[own], down[own], "silu", T * K), index, w, places)
        total += y.detach()
        found = torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True)
        gradients = [a if b is None else a + b for a, b in zip(gradients, found, strict=True)]
    y = plain(*values, capacity)
    assert torch.allclose(total, y.detach(), rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients, torch.autograd.grad((y * weights).sum(), wanted), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_weights_that_are_not_finite_are_refused_and_their_tokens_counted() -> None:
    x, w, index, up, down = given()
    bad = w.detach().clone()
    bad[2, 1], bad[5, 0] = float("nan"), float("inf")
    with pytest.raises(NotFinite, match=r"weights of 2 of 7 tokens"):
        layer(x, bad, index, up, down, T)


def test_rows_and_sums_are_adjoint() -> None:
    x, w, index, _, _ = given()
    rows = torch.randn(E, 2, H, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, v: expert_sums(r, index, v), (rows, w))
    assert torch.autograd.gradcheck(lambda a, v: expert_rows(a, index, v, E, 2), (x, w))
    with torch.no_grad():
        assert torch.allclose((expert_rows(x, index, w, E, 2) * rows).sum(), (x * expert_sums(rows, index, w)).sum())


def test_traced_shapes_are_the_real_ones() -> None:
    x, w, index, up, down = given()
    rows, counts = expert_rows(x, index, None, E, 3), expert_counts(index, E, 3)
    for operator, args in (
        (expert_rows, (x, index, None, E, 3)), (expert_sums, (rows.detach().requires_grad_(), index, w)), (expert_counts, (index, E, 3)),
        (expert_rows, (x, index, w, E, 3, [0, -1, -1, 1])), (expert_sums, (rows[:2].detach().requires_grad_(), index, w, [0, -1, -1, 1])),
        (expert_mlp, (rows.detach().requires_grad_(), counts, up, down, "silu", T)),
    ):  # fmt: skip
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    assert mlp_flops(up.shape, 10, 1) == 2 * 10 * (2 * F * H + F * H)
