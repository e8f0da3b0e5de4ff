"""Prices of sparse all-reduces: every op of every program has one, and a vector too large to make is priced in proportion."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost import Cost
from meshwright.decide.collective.sparse import NAMES, SparseProblem, strategy
from meshwright.io.fabric.name import load_fabric
from meshwright.probe.traffic import sparse_prices as module
from meshwright.probe.traffic.sparse_prices import priced_here, sparse_prices


@pytest.mark.parametrize(("elements", "k", "ranks"), [(20_000, 200, 4), (9, 9, 3), (1, 1, 2)])
def test_every_op_has_a_price(elements: int, k: int, ranks: int) -> None:
    fabric = load_fabric(f"star:{ranks}?link=12.5MB/s")
    problem = SparseProblem(fabric=fabric, ranks=tuple(d.name for d in fabric.devices), elements=elements, k=k)
    prices = sparse_prices(elements, k, ranks)
    assert set(prices) == {key for name in NAMES for key in strategy(name)().plan(problem).works}
    assert all(np.isfinite(s) and s >= 0 for s in prices.values()) and prices["local|select"] > 0


def test_larger_vectors_are_priced_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ELEMENTS", 5_000)
    asked = []

    def fixed(elements: int, k: int, ranks: int) -> dict[str, float]:
        asked.append((elements, k, ranks))
        return {"local|select": 0.25}

    monkeypatch.setattr(module, "sparse_prices", fixed)
    large, small = priced_here(Cost(), 20_000, 200, 4, share=0.5), priced_here(Cost(), 5_000, 50, 4)
    assert asked == [(5_000, 50, 4)] * 2
    assert (large.table["local|select"].time_s, large.table["local|select"].evidence) == (2.0, "interpolated")
    assert (small.table["local|select"].time_s, small.table["local|select"].evidence) == (0.25, "measured")
