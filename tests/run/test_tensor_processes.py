"""Tensor parallelism on real processes: loss, every gradient and every byte, against plain eager training and the plan."""

from __future__ import annotations

import pytest
import torch
from processes import RankPool
from tensor_rig import compare, plan_case, run_case, serial_step

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def pool():
    torch.set_num_threads(1)
    made = RankPool(4)
    yield made
    made.close()


def agree(pool, name, degrees, **options):
    case = plan_case(name, degrees, **options)
    outcomes = pool.run(run_case, case.layout.ranks, case)
    compare(case, outcomes, serial_step(case, name))
    return case, outcomes


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("even", (1, 2, 1)), ("even", (1, 4, 1)), ("odd_tied", (1, 2, 1)), ("odd_tied", (1, 3, 1)), ("odd_tied", (1, 4, 1)), ("odd_tied", (1, 2, 2)),
        ("odd_tied", (2, 2, 1)), ("odd_tied", (2, 1, 2)), ("grouped_expand", (1, 2, 1)), ("grouped_expand", (1, 4, 1)), ("grouped_expand", (1, 3, 1)),
        ("grouped_repeat", (1, 2, 1)), ("grouped_repeat", (1, 4, 1)), ("grouped_packed", (1, 2, 1)), ("grouped_packed", (1, 4, 1)),
        ("grouped_native", (1, 4, 1)), ("grouped_native", (1, 2, 1)), ("scanned", (1, 2, 1)),
    ],
)  # fmt: skip
def test_loss_gradients_and_bytes(pool, name, degrees):
    agree(pool, name, degrees, loss="mse" if name == "scanned" else "cross-entropy")
