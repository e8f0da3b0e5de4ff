"""Sparse all-reduces on real processes over gloo: the same bits as the twin's, and refusals on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from processes import RankPool
from virtual_reduce import all_ranks, decaying, mean, step

from meshwright.errors import MeshwrightError, UsageError
from meshwright.run.sparse import METHODS, SparseAllReduce

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]
STEPS = 4


def reduce(rank: int, group: Any, elements: int, settings: dict[str, Any]) -> tuple[bytes, bytes, float]:
    reducer = SparseAllReduce(group, elements, timeout_s=30, **settings)
    source = decaying(rank, elements)
    for _ in range(STEPS):
        update = reducer.step(torch.from_numpy(next(source)))
    return mean(update).tobytes(), reducer.residual.tobytes(), reducer.xi(next(source))


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_processes_give_the_twins_bits(pool: RankPool, ranks: int) -> None:
    for number, method in enumerate(sorted(METHODS)):
        settings = {"method": method, "k": 30 if number % 2 else 300, "warmup": number % 2}
        found = pool.run(reduce, ranks, 3001, settings)
        reducers = all_ranks(ranks, 3001, **settings)
        sources = [decaying(r, 3001) for r in range(ranks)]
        for turn in range(STEPS):
            updates, _ = step(reducers, [next(s) for s in sources], turn)
        if method == "dense" or ranks == 1:  # whose sum the backend makes, in its own order
            ours = [np.frombuffer(m, np.float32) for m, _, _ in found]
            assert all(np.allclose(a, mean(u), rtol=1e-5, atol=1e-6) for a, u in zip(ours, updates, strict=True))
        elif not settings["warmup"]:
            assert [m for m, _, _ in found] == [mean(u).tobytes() for u in updates]
            assert [r for _, r, _ in found] == [r.residual.tobytes() for r in reducers]
        assert len({m for m, _, _ in found}) == 1 and len({xi for _, _, xi in found}) == 1


def refuse(rank: int, group: Any) -> list[str]:
    """Codes of what is refused, in turn; the group goes on after each."""
    found = []
    for settings, bad in (({"k": 5}, True), ({"k": 5 + rank}, False), ({"k": 5, "method": ("oktopk", "gtopk", "zen")[rank]}, False)):
        reducer = SparseAllReduce(group, 100, timeout_s=30, **settings)
        gradient = torch.ones(100)
        if bad and rank == 2:
            gradient[3] = float("nan")
        try:
            reducer.step(gradient)
        except MeshwrightError as error:
            found.append(error.code)
        assert not reducer.residual.any()
    return found


def test_what_is_wrong_on_one_rank_is_refused_on_all(pool: RankPool) -> None:
    assert pool.run(refuse, 3) == [["not-finite", "plan-mismatch", "plan-mismatch"]] * 3


def test_a_gradient_elsewhere_is_refused(pool: RankPool) -> None:
    assert pool.run(elsewhere, 1) == ["usage"]


def elsewhere(rank: int, group: Any) -> str:
    try:
        SparseAllReduce(group, 10, k=1).step(torch.ones(10, device="meta"))
    except UsageError as error:
        return error.code
    return ""
