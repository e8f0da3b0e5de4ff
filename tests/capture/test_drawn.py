"""Modules made without the memory of their large tensors: every value has the bits that it has where all is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.capture.drawn import made_lazily

SMALL = 64  # bytes from which on making is put off: all but the smallest vectors here


class Own(nn.Module):
    """Parameters made in the ways that people make them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 5) * 0.02)
        self.b = nn.Parameter(torch.ones(40))
        self.c = nn.Parameter(torch.empty(8, 6))
        nn.init.trunc_normal_(self.c, std=0.1)
        self.register_buffer("mask", torch.ones(9, 9).tril())
        self.d = nn.Parameter(torch.empty(5, 7))
        nn.init.orthogonal_(self.d)
        self.e = nn.Embedding(9, 4, padding_idx=2)
        self.tied = nn.Linear(4, 9, bias=False)
        self.tied.weight = self.e.weight
        with torch.no_grad():
            self.a[1:3] *= 2.0
            self.c.copy_(torch.arange(48.0).view(8, 6) + self.c)
            self.a[0].copy_(self.c[:5, 1])


def transformer() -> nn.Module:
    return nn.Transformer(8, 2, 2, 2, 16, batch_first=True)


def converted() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 4, 3), nn.LSTM(6, 5), nn.MultiheadAttention(8, 2)).bfloat16()


def scaled_by_depth() -> nn.Module:
    net = nn.Sequential(*(copy.deepcopy(nn.Linear(6, 6)) for _ in range(3)))
    for depth, layer in enumerate(net, 1):
        layer.weight.data /= depth**0.5
        layer.weight.data = layer.weight.data.clamp(-0.2, 0.2)
    net[0].requires_grad_(False)
    return net


def by_value() -> nn.Module:
    """Its making looks at what was drawn."""
    layer = nn.Linear(6, 6)
    if layer.weight.sum().item() > 0:
        nn.init.zeros_(layer.weight)
    layer.weight.data[0] = layer.weight.norm().item()
    return layer


def with_inputs(make: Callable[[], nn.Module]) -> Callable[[], Any]:
    return lambda: (make(), (torch.randn(4, 8), torch.randint(3, (4,))))


@pytest.mark.parametrize("make", [Own, transformer, converted, scaled_by_depth, by_value])
def test_values_are_those_of_the_whole(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    whole, inputs = with_inputs(make)()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    (module, same), weights = made_lazily(with_inputs(make), min_bytes=SMALL)
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(x, y) for x, y in zip(inputs, same, strict=True))
    assert weights is not None and {n for n, _ in module.named_parameters()} == set(weights.known_as)
    meta = 0
    for (name, p), (also, q) in zip(whole.named_parameters(), module.named_parameters(), strict=True):
        assert (name, p.shape, p.dtype, p.requires_grad) == (also, q.shape, q.dtype, q.requires_grad)
        meta += q.is_meta
        assert torch.equal(weights.part(name, p.dtype), p), name
        if p.dim() > 1:
            assert torch.equal(weights.part(name, p.dtype, 1, [(0, 1), (2, 3)]), torch.cat([p[:, :1], p[:, 2:3]], 1))
    assert meta
    for (name, b), (_, c) in zip(whole.named_buffers(), module.named_buffers(), strict=True):
        assert torch.equal(b, c), name
    assert [id(p) for p in module.parameters()] == [id(p) for p in dict.fromkeys(module.parameters())]


def test_a_part_is_a_tensor_of_its_own() -> None:
    (module, _), weights = made_lazily(with_inputs(lambda: nn.Linear(8, 8)), min_bytes=SMALL)
    assert weights is not None and module.weight.is_meta and not module.bias.is_meta
    first = weights.part("weight", torch.float32)
    weights.part("bias", torch.float32).zero_()
    first.zero_()
    assert module.bias.any() and weights.part("weight", torch.float32).any()
    weights.close()
    assert not weights.values


def test_what_cannot_be_put_off_is_made_whole() -> None:
    def several() -> Any:
        layer = nn.Linear(8, 8)
        torch._foreach_mul_([layer.weight.data], 2.0)
        return layer, ()

    def hidden() -> Any:
        layer = nn.Linear(8, 8)
        try:
            layer.weight.data.view(torch.int32).add_(1)
        except Exception:  # as people write
            nn.init.zeros_(layer.weight)
        return layer, ()

    def drawn_elsewhere() -> Any:
        layer = nn.Linear(8, 8)
        layer.weight.data.normal_(generator=torch.Generator().manual_seed(3))
        return layer, ()

    for make in (several, hidden, drawn_elsewhere):
        torch.manual_seed(1)
        whole, _ = make()
        torch.manual_seed(1)
        (module, _), weights = made_lazily(make, min_bytes=SMALL)
        assert weights is None and torch.equal(whole.weight, module.weight)


def test_what_a_function_raises_is_raised() -> None:
    def wrong() -> Any:
        nn.Linear(8, 8)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        made_lazily(wrong, min_bytes=SMALL)
    assert made_lazily(lambda: "no module", min_bytes=SMALL) == ("no module", None)
    assert made_lazily(lambda: (nn.Linear(8, 8), ()))[1] is None  # nothing is large
