"""Ring attention and head all-to-all, step by step on real processes' worth of ranks, beside torch's own attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import in_threads

from meshwright.errors import Unsupported
from meshwright.plan.context import came_from, position_ranges, require_positions
from meshwright.run.context.attention import RingSpec, context_heads, context_join, context_out, context_part, context_unite, ring_block, ring_end


class _Exchange(torch.autograd.Function):
    """A value by `came_from` over a gloo group, and its gradient the other way: an oracle for what programs do with messages."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, rank: int, parts: int, group: Any) -> torch.Tensor:
        ctx.given = kind, rank, parts, group
        return _sent(x, kind, rank, parts, group, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _sent(gradient, *ctx.given, back=True), None, None, None, None


def _sent(x: torch.Tensor, kind: str, rank: int, parts: int, group: Any, *, back: bool) -> torch.Tensor:
    everything = [[torch.empty_like(x) for _ in range(parts)]]
    group.allgather(everything, [x.contiguous()]).wait()
    (of,) = everything
    if kind == "shift":
        return of[came_from(kind, rank, parts, 0)[0]] if not back else of[(rank + 1) % parts]
    return torch.stack([of[i][rank] for i in range(parts)])  # its own inverse


def ring(q: Any, k: Any, v: Any, rank: int, parts: int, group: Any, causal: bool, scale: float, mask: Any) -> torch.Tensor:
    kv, state = context_join(k, v), None
    if mask is not None:
        mask = context_part(mask, 2, [[*r] for r in position_ranges(mask.shape[-1], 1, rank, parts)])
    for j in range(parts):
        spec = RingSpec(rank, parts, (rank - j) % parts, k.shape[3], causal, scale)
        if j == parts - 1:
            return ring_end(q, kv, state, spec, mask)
        state = ring_block(q, kv, state, spec, mask)
        kv = _Exchange.apply(kv, "shift", rank, parts, group)
    raise AssertionError


def ulysses(q: Any, k: Any, v: Any, rank: int, parts: int, group: Any, causal: bool, scale: float, mask: Any) -> torch.Tensor:
    batch, heads, s, _ = q.shape
    came = _Exchange.apply(context_out(q, k, v, parts), "all-to-all", rank, parts, group)
    sizes = [heads // parts, max(1, k.shape[1] // parts), k.shape[3], v.shape[3]]
    back = _Exchange.apply(context_heads(came, mask, batch, s, sizes, causal, scale), "all-to-all", rank, parts, group)
    return context_unite(back, batch, s, heads)


def masks(form: str, batch: int, s: int) -> torch.Tensor:
    """[batch or 1, 1, s, s]; every query sees itself."""
    at = torch.arange(s)
    if form == "added":
        return torch.randn(batch, 1, s, s, dtype=torch.float64)
    causal = at[:, None] >= at
    found = {"causal": causal, "window": causal & (at[:, None] - at < 3), "random": (torch.rand(s, s) < 0.3) | torch.eye(s, dtype=torch.bool)}
    return found[form][None, None]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_results_and_gradients_are_those_of_whole_attention(data: Any) -> None:
    parts = data.draw(st.integers(2, 4))
    groups, repeats = data.draw(st.sampled_from([1, 2, parts, 2 * parts])), data.draw(st.integers(1, 3))
    way = data.draw(st.sampled_from([ring, ulysses]))
    if way is ulysses:
        groups = data.draw(st.sampled_from([1, parts, 2 * parts]))
        repeats = parts if groups == 1 else repeats
    batch, s, keys, width = data.draw(st.integers(1, 2)), 2 * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    causal, scale, whole = data.draw(st.booleans()), data.draw(st.sampled_from([0.3, 1.7])), s * parts
    torch.manual_seed(data.draw(st.integers(0, 99)))
    form = data.draw(st.sampled_from(["", "window", "random", "added", "causal"]))
    mask, causal = (None, causal) if not form else (masks(form, batch, whole), False)
    width = keys if data.draw(st.booleans()) else width  # torch's own kernel, or tiles
    shapes = ((groups * repeats, keys), (groups, keys), (groups, width), (groups * repeats, width))
    q, k, v, seed = (torch.randn(batch, h, whole, w, dtype=torch.float64, requires_grad=i < 3) for i, (h, w) in enumerate(shapes))
    expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
    wanted = torch.autograd.grad(expected, (q, k, v), seed)

    def body(rank: int, group: Any) -> list[torch.Tensor]:
        ranges = [[*r] for r in position_ranges(whole, 1, rank, parts)]
        own = [context_part(x.detach(), 2, ranges).requires_grad_() for x in (q, k, v)]
        out = way(*own, rank, parts, group, causal, scale, mask)
        return [out.detach(), *torch.autograd.grad(out, own, context_part(seed.detach(), 2, ranges))]

    for rank, found in enumerate(in_threads(parts, body)):
        ranges = [[*r] for r in position_ranges(whole, 1, rank, parts)]
        for mine, theirs in zip(found, (expected, *wanted), strict=True):
            torch.testing.assert_close(mine, context_part(theirs.detach(), 2, ranges), rtol=1e-9, atol=1e-9)


def test_positions_tile_every_sequence_and_balance_the_causal_pairs() -> None:
    for parts in (2, 3, 4):
        held = [position_ranges(3 * 4 * parts, 3, r, parts) for r in range(parts)]
        assert sorted(i for ranges in held for low, high in ranges for i in range(low, high)) == list(range(3 * 4 * parts))
        pairs = {sum(i + 1 for low, high in position_ranges(4 * parts, 1, r, parts) for i in range(low, high)) for r in range(parts)}
        assert len(pairs) == 1


def test_lengths_that_do_not_divide_are_refused_with_the_nearest() -> None:
    require_positions(24, 3, "x")
    with pytest.raises(Unsupported, match="2 x 3 chunks") as error:
        require_positions(20, 3, "x")
    assert "18 or 24" in str(error.value.hint)


def test_gradients_in_half_precision_are_near() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    spec = [RingSpec(0, 2, source, 4, True, 0.5) for source in (0, 1)]
    near, far = context_join(k[:, :, :8], v), context_join(k.detach(), v.detach())
    out = ring_end(q, far, ring_block(q, near, None, spec[0]), spec[1])
    assert out.dtype == torch.bfloat16
    assert all(g.dtype == torch.bfloat16 and bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_rounds_tile_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    import meshwright.run.context.attention as module

    torch.manual_seed(1)
    q, kv = torch.randn(2, 4, 6, 3, dtype=torch.float64), torch.randn(2, 2, 6, 6, dtype=torch.float64)
    q.requires_grad_(), kv.requires_grad_()
    spec = RingSpec(1, 2, 1, 3, True, 0.7)
    whole = ring_end(q, kv, None, spec)
    wanted = torch.autograd.grad(whole.square().sum(), (q, kv))
    monkeypatch.setattr(module, "TILE_ELEMENTS", 100)
    monkeypatch.setattr(module, "_fused", lambda q, v, piece: False)
    tiled = ring_end(q, kv, None, spec)
    torch.testing.assert_close(tiled, whole)
    torch.testing.assert_close(torch.autograd.grad(tiled.square().sum(), (q, kv)), wanted)
    assert dist.is_available()
