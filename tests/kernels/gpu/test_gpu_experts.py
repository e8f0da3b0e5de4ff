"""Triton kernels of expert layers in the interpreter against the CPU kernels. Needs `triton` beside torch; skipped without it."""

from __future__ import annotations

import os

import pytest

if "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="triton is not installed: GPU kernels unchecked (pip install triton)")
torch = pytest.importorskip("torch")

from meshwright.kernels.experts import block_sparse, dispatch, route, slots_of  # noqa: E402
from meshwright.kernels.experts.dropless import sparse_mlp  # noqa: E402
from meshwright.kernels.gpu import experts as gpu  # noqa: E402


@pytest.mark.parametrize(("tokens", "k", "capacity", "width"), [(0, 1, 1, 8), (7, 1, 2, 8), (20, 3, 5, 1030), (9, 2, 9, 33)])
@pytest.mark.parametrize("gated", [False, True])
def test_encode_and_decode(tokens: int, k: int, capacity: int, width: int, gated: bool) -> None:
    torch.manual_seed(tokens)
    found = route(torch.softmax(torch.randn(tokens, 4), 1), k)
    slots = slots_of(found.experts, found.locations, capacity)
    gates = found.gates if gated else None
    x = torch.randn(tokens, width)
    ours = gpu.put(4 * capacity, x, slots, gates)
    assert torch.equal(ours, dispatch._put(4 * capacity, x, slots, gates))
    assert torch.allclose(gpu.take(ours, slots, gates), dispatch._take(ours, slots, gates), atol=1e-6)


@pytest.mark.parametrize(("block", "tall", "wide", "inner"), [(16, 3, 2, 40), (32, 2, 4, 64), (128, 4, 2, 512)])
def test_products(block: int, tall: int, wide: int, inner: int) -> None:
    """With every transpose; some rows and columns have no block."""
    torch.manual_seed(block)
    mask = torch.rand(tall, wide) < 0.6
    mask[0], mask[:, 0] = False, False
    t = block_sparse.topology_of(mask, block)
    a, b = torch.randn(tall * block, inner), torch.randn(inner, wide * block)
    plain = block_sparse.sdd(a, b, t)
    assert torch.allclose(gpu.sdd(a, b, t.rows, t.columns, block, t.walk), plain.values, atol=1e-3)
    assert torch.allclose(gpu.sdd(a.t().contiguous().t(), b.t().contiguous().t(), t.rows, t.columns, block, t.walk), plain.values, atol=1e-3)
    right, left = torch.randn(wide * block, 70), torch.randn(tall * block, 70)
    scale = inner**0.5
    assert torch.allclose(gpu.dsd(plain.values, *t.walks[0], right), block_sparse.dsd(plain, right), atol=1e-4 * scale * block)
    turned = gpu.dsd(plain.values, *t.walks[1], left, transposed=True)
    assert torch.allclose(turned, block_sparse.dsd(plain, left, transposed=True), atol=1e-4 * scale * block)


def test_products_of_experts_in_full_tiles() -> None:
    """The walk in bands of block rows, and the tiles that a GPU's bfloat16 takes; an expert without rows."""
    torch.manual_seed(0)
    t, _ = block_sparse.expert_topology(torch.tensor([150, 0, 300, 20, 600]), 256, 128)
    assert sorted(t.walk.tolist()) == list(range(len(t.rows))) and t.walk.tolist() != sorted(t.walk.tolist())
    a, b = torch.randn(t.shape[0], 64), torch.randn(64, t.shape[1])
    plain = block_sparse.sdd(a, b, t)
    assert torch.allclose(gpu.sdd(a, b, t.rows, t.columns, 128, t.walk, gpu.SDD_TILE), plain.values, atol=1e-3)
    right, left = torch.randn(t.shape[1], 128), torch.randn(t.shape[0], 128)
    assert torch.allclose(gpu.dsd(plain.values, *t.walks[0], right, tile=gpu.DSD_TILE), block_sparse.dsd(plain, right), atol=2e-2)
    turned = gpu.dsd(plain.values, *t.walks[1], left, transposed=True, tile=gpu.DSD_TILE)
    assert torch.allclose(turned, block_sparse.dsd(plain, left, transposed=True), atol=2e-2)


def test_what_the_products_take() -> None:
    assert gpu.applies(torch.bfloat16, 128) and gpu.applies(torch.float32, 16)
    assert not gpu.applies(torch.float64, 64) and not gpu.applies(torch.float32, 8) and not gpu.applies(torch.float32, 48)


def test_the_layer_takes_the_kernels_for_what_lies_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if processors' tensors lay on one: results and gradients of a dropless layer, encode and decode; float64 stays with torch."""
    torch.manual_seed(0)
    counts = torch.tensor([20, 0, 37, 5])
    given = [t.requires_grad_() for t in (torch.randn(62, 16), torch.randn(4, 32, 16), torch.randn(4, 32, 16), torch.randn(4, 32, 24))]
    found = route(torch.softmax(torch.randn(62, 4), 1), 2)
    slots = slots_of(found.experts, found.locations, 30)

    def results() -> list[torch.Tensor]:
        out = sparse_mlp(given[0], counts, given[1], given[2], given[3], torch.nn.functional.silu, 16)
        back = dispatch.decode(dispatch.encode(given[0], slots, 120), slots, found.gates)
        return [out, back, *torch.autograd.grad(out.square().sum() + back.square().sum(), given)]

    plain, called = results(), []
    for module in (block_sparse, dispatch):
        monkeypatch.setattr(module, "usable", lambda x: called.append(x) or True)
    for ours, expected in zip(results(), plain, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)
    assert len(called) > 10
    assert block_sparse._on_gpu(torch.randn(2).double(), 16) is None and not dispatch._on_gpu(torch.randn(2).double())
