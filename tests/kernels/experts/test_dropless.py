"""Block-sparse products against dense ones with zeros, and every way of multiplying against a loop over the experts."""

from __future__ import annotations

import pytest

from effort import few

torch = pytest.importorskip("torch")

from meshwright.errors import Unsupported, UsageError  # noqa: E402
from meshwright.kernels.experts.block_sparse import MAX_INDEX, BlockMatrix, dds, dsd, expert_topology, sdd, topology_of  # noqa: E402
from meshwright.kernels.experts.dropless import multiply  # noqa: E402
from meshwright.nn import FeedForward, GatedFeedForward, ModuleExpert  # noqa: E402

H, F = 8, 16
COUNTS = [[5, 0, 3, 9], [0, 0, 17, 0], [4, 4, 4, 4], [0, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("seed", range(few(8)))
def test_products_are_those_of_dense_matrices(seed: int) -> None:
    """Every product with every transpose, for random topologies, rows and columns without blocks among them."""
    g = torch.Generator().manual_seed(seed)
    b, tall, wide, k = 2 + seed, 4, 3, 5
    mask = torch.rand(tall, wide, generator=g) < 0.5
    topology = topology_of(mask, b)
    x, y = torch.randn(tall * b, k, generator=g, dtype=torch.float64), torch.randn(k, wide * b, generator=g, dtype=torch.float64)
    holes = mask.repeat_interleave(b, 0).repeat_interleave(b, 1)
    a = sdd(x, y, topology)
    turned_inputs = sdd(x.t().contiguous().t(), y.t().contiguous().t(), topology)
    assert torch.allclose(a.dense(), (x @ y) * holes) and torch.allclose(turned_inputs.dense(), a.dense())
    assert torch.allclose(dsd(a, y.t()), a.dense() @ y.t()) and torch.allclose(dsd(a, x, transposed=True), a.dense().t() @ x)
    assert torch.allclose(dds(x.t(), a), x.t() @ a.dense()) and torch.allclose(dds(y, a, transposed=True), y @ a.dense().t())
    order, offsets = topology.transposed
    turned = topology_of(mask.t(), b)
    assert torch.equal(topology.rows[order], turned.columns) and torch.equal(offsets.int(), turned.offsets)
    assert torch.equal(BlockMatrix(a.values[order].transpose(1, 2), turned).dense(), a.dense().t())


@pytest.mark.parametrize("counts", COUNTS)
def test_topology_of_experts(counts: list[int]) -> None:
    topology, first = expert_topology(torch.tensor(counts), F, 4)
    rows = [e for e, n in enumerate(counts) for _ in range(-(-n // 4))]
    mask = torch.zeros(len(rows), 4 * 4, dtype=torch.bool)
    for r, e in enumerate(rows):
        mask[r, 4 * e : 4 * e + 4] = True
    wanted = topology_of(mask, 4)
    for name in ("rows", "columns", "offsets"):
        assert torch.equal(getattr(topology, name), getattr(wanted, name)), name
    assert topology.shape == wanted.shape
    assert first.tolist() == [4 * sum(-(-m // 4) for m in counts[:e]) for e in range(4)]


def gradients(form: object, x: torch.Tensor, counts: torch.Tensor, params: dict[str, torch.Tensor], way: str) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_(), *(p.clone().requires_grad_() for p in params.values())]
    y = form.run_rows(leaves[0], counts, dict(zip(params, leaves[1:], strict=True)), way, 4)  # type: ignore[attr-defined]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("form", [FeedForward(H, F), FeedForward(H, F, bias=False), GatedFeedForward(H, F, output=4)])
def test_every_way_gives_the_same(form: object, counts: list[int]) -> None:
    torch.manual_seed(1)
    each = [form.initial(None) for _ in counts]  # type: ignore[attr-defined]
    params = {n: torch.stack([e[n] for e in each]) for n in each[0]}
    x, sizes = torch.randn(sum(counts), H), torch.tensor(counts)
    plain = torch.cat([form.run(x[:0].unsqueeze(0), {n: p[:1] for n, p in params.items()}, 1.0)[0]] + [  # type: ignore[attr-defined]
        form.run(rows.unsqueeze(0), {n: p[e : e + 1] for n, p in params.items()}, 1.0)[0] for e, rows in enumerate(x.split(counts))  # type: ignore[attr-defined]
    ])  # fmt: skip
    wanted = gradients(form, x, sizes, params, "loop")
    assert torch.allclose(wanted[0], plain, atol=1e-6)
    for way in ("padded", "grouped", "sparse"):
        if way == "sparse" and getattr(form, "bias", False):
            with pytest.raises(Unsupported, match="biases inside"):
                gradients(form, x, sizes, params, way)
            continue
        for ours, theirs in zip(gradients(form, x, sizes, params, way), wanted, strict=True):
            assert torch.allclose(ours, theirs, atol=2e-5), way
    if not getattr(form, "bias", False):
        wide = {n: p.double() for n, p in params.items()}
        for ours, theirs in zip(gradients(form, x.double(), sizes, wide, "sparse"), gradients(form, x.double(), sizes, wide, "loop"), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-10)


def test_refusals() -> None:
    x, w = torch.randn(3, 4), torch.randn(2, 4, 6)
    for counts in ([1, 1], [3]):
        with pytest.raises(UsageError, match="rows for"):
            multiply(x, w, counts, "loop")
    with pytest.raises(UsageError, match="no way 'magic'"):
        multiply(x, w, [1, 2], "magic")
    with pytest.raises(Unsupported, match="grouped_mm does not take"):
        multiply(x, w[:, :, :5], [1, 2], "grouped")
    with pytest.raises(UsageError, match="do not divide") as error:
        expert_topology(torch.tensor([1]), 24, 16)
    assert error.value.hint == "block=8"
    with pytest.raises(UsageError, match="more than"):
        expert_topology(torch.tensor([MAX_INDEX]), 4, 2)
    topology, _ = expert_topology(torch.tensor([2]), 4, 2)
    with pytest.raises(UsageError, match="does not fit"):
        sdd(torch.zeros(3, 2), torch.zeros(2, 4), topology)
    with pytest.raises(UsageError, match="does not fit"):
        dsd(BlockMatrix(torch.zeros(2, 2, 2), topology), torch.zeros(3, 4))
    form = ModuleExpert(lambda: torch.nn.Linear(4, 4), 4)
    params = {n: p[None] for n, p in form.initial(None).items()}
    assert form.run_rows(x, torch.tensor([3]), params, "loop", 4).shape == (3, 4)
    with pytest.raises(Unsupported, match="one after the other"):
        form.run_rows(x, torch.tensor([3]), params, "padded", 4)
