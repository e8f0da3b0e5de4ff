"""A byte-level decoder of four expert layers: dropless, padded to the demand, and captured forms are the same function in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from experts import ExpertGPT  # noqa: E402

from meshwright.nn import Spread  # noqa: E402

pytestmark = pytest.mark.real
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def trained(factor: float, spread: Spread, steps: int = 3) -> tuple[list[float], list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = ExpertGPT(width=16, heads=2, experts=4, inner=16, sequence=16, factor=factor, spread=spread).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, dropped = [], 0
    for step in range(steps):
        rows = TEXT[step * 34 : step * 34 + 34].view(2, 17)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        dropped += sum(b.experts.dropped for b in model.blocks)
    return losses, [p.detach() for p in model.parameters()], dropped


@pytest.mark.parametrize("way", ["loop", "padded", "sparse"])
def test_dropless_is_padded_with_factor_0(way: str) -> None:
    padded, weights, dropped = trained(0.0, Spread(choice=(1, 1, "linear")))
    losses, ours, none = trained(0.0, Spread(dropless=way))
    assert dropped == none == 0
    assert losses == pytest.approx(padded, rel=1e-12, abs=0)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, weights, strict=True))


def test_factor_1_drops_and_differs() -> None:
    losses, _, dropped = trained(1.0, Spread(choice=(1, 1, "linear")))
    assert dropped > 0 and losses[0] != pytest.approx(trained(0.0, Spread(dropless="loop"), 1)[0][0], rel=1e-6)
